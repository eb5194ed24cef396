// cross_entropy.cu: the loss of each row of logits, and its gradient; hfp_cross_entropy and
// hfp_cross_entropy_backward on CUDA.
//
// The forward reads a row once, in waves of eight vectors a lane: each lane finds the maximum of its
// vectors, two elements at once where it can, then their sum of exp(z - maximum); sums are rescaled
// where they meet (Milakov & Gimelshein, arXiv:1805.02867). All in powers of two, z log2(e), which is
// what the hardware computes. A warp has a row of one wave, a CTA a wider one; a cluster of CTAs shares
// it where rows are few (sm_90).
#include "mailbox.cuh"
#include "row_ops.cuh"

namespace hfp::cuda {
namespace {

struct CrossEntropyParams {
  static constexpr bool kStartsEarly = true;
  float *loss, *lse;
  void *dlogits;
  const float *grad, *saved_lse;
  const void *logits;
  const int64_t *target;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;  // per row
  int strands;      // of the forward
  int64_t chunks;   // of the gradient, per row
  int64_t ignore_index;
  float label_smoothing, inverse_cols;
  float softcap, inverse_softcap;  // softcap 0: none
  uint32_t zero;                   // 0; see Vec::stay_packed
};

constexpr float kLog2E = 1.4426950408889634f;
// Their sum is 1 / kLog2E, so that lse of a single logit is that logit.
constexpr float kLn2 = 0.69314718f, kLn2Low = 7.3487e-9f;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// cap tanh(x / cap), and its derivative 4 e / (1 + e)^2 with e = exp(-2 |x| / cap). Near 0, where
// 1 - e cancels, the series of tanh, whose error is of order u^7.
struct Capped {
  float value, slope;
};

__device__ __forceinline__ Capped soft_cap(float x, float cap, float inverse_cap) {
  const float u = fabsf(x) * inverse_cap;
  const float e = fast_exp2(u * (-2.0f * kLog2E));
  const float r = fast_reciprocal(1.0f + e);
  const float square = u * u;
  const float series = u * fmaf(square, fmaf(square, 2.0f / 15, -1.0f / 3), 1.0f);
  const float tanh = u < 0.05f ? series : (1.0f - e) * r;
  return {copysignf(cap * tanh, x), 4.0f * e * r * r};
}

template <bool kCap>
__device__ __forceinline__ float capped(const CrossEntropyParams &p, float x) {
  if constexpr (kCap) return soft_cap(x, p.softcap, p.inverse_softcap).value;
  return x;
}

// ---------------------------------------------------------------------------------------------
// The loss

// What was seen of a row: sum(2^(z log2(e) - most)), and the sum of z. `most` of nothing is -inf,
// and its sum 0.
struct Seen {
  float most = minus_inf(), sum = 0.0f, plain = 0.0f;

  // What is subtracted in exponents: -inf - -inf would be NaN.
  __device__ __forceinline__ static float shift(float most) {
    return most == minus_inf() ? 0.0f : most;
  }

  __device__ __forceinline__ void merge(const Seen &other) {
    const float high = fmaxf(most, other.most), by = shift(high);
    sum = sum * fast_exp2(most - by) + other.sum * fast_exp2(other.most - by);
    most = high, plain += other.plain;
  }

  // Of all lanes, on all lanes.
  __device__ __forceinline__ void merge_lanes() {
    const float high = max_lanes<32>(most);
    sum = Group<32>::sum_lanes(sum * fast_exp2(most - shift(high)));
    most = high, plain = Group<32>::sum_lanes(plain);
  }
};

constexpr int kLaneVectors = 8;
constexpr int kWave = 32 * kLaneVectors;  // vectors of a warp at a time

// A lane's share of the wave that begins at vector `at`: the maximum first, so that an element then
// takes a multiplication with addition, a power of two and an addition. Any number near the maximum
// serves: with a cap, that of the greatest logit.
template <class T, bool kAligned, bool kCap>
__device__ __forceinline__ Seen see_wave(const CrossEntropyParams &p, const T *x, int64_t at) {
  constexpr int N = kVectorOf<T>;
  constexpr bool kCheck = kCap || !kAligned;  // else what lies past the end adds 2^-inf
  Wave<T, kLaneVectors> v;
  load_wave<T, kAligned, kLaneVectors>(v, x, at, p.x_rows.cols);
  const int64_t first = (at + threadIdx.x % 32u) * N;
  const int left = p.x_rows.cols - first < kWave * N
                       ? static_cast<int>(p.x_rows.cols - first)
                       : kWave * N;
  Seen own;
  own.most = greatest<T, false, kLaneVectors>(v);
  own.most = capped<kCap>(p, own.most) * kLog2E;
  const float by = Seen::shift(own.most);
  constexpr int kSums = 4;  // added up side by side
  float sum[kSums] = {};
#pragma unroll
  for (int u = 0; u < kLaneVectors; ++u) {
    float z[N];
    if constexpr (!kHasMaxOfTwos) v[u].stay_packed(p.zero);
    v[u].get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = fast_exp2(fmaf(capped<kCap>(p, z[i]), kLog2E, -by));
      if (!kCheck || 32 * u * N + i < left) sum[i % kSums] += e;
    }
  }
  own.sum = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  if (p.label_smoothing > 0.0f) {
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      float z[N];
      v[u].stay_packed(p.zero);
      v[u].get(z);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (32 * u * N + i < left) own.plain += capped<kCap>(p, z[i]);
      }
    }
  }
  return own;
}

// A row is cut into waves, and strand i has the waves i, i + kStrands, ... A warp takes a whole
// strand, whichever CTA it is in, and the strands are merged in one order, so that the bits of a row
// do not depend on how many others there are.
constexpr int kStrands = 64;

template <class T, bool kAligned, bool kCap>
__device__ __forceinline__ Seen see_strand(const CrossEntropyParams &p, const T *x, int strand) {
  Seen seen;
  for (int64_t at = strand * int64_t{kWave}; at < p.vectors; at += kStrands * kWave) {
    seen.merge(see_wave<T, kAligned, kCap>(p, x, at));
  }
  seen.merge_lanes();
  return seen;
}

template <class T>
__device__ __forceinline__ float logit_of_target(const CrossEntropyParams &p, const T *x,
                                                 int64_t target) {
  float z[1] = {not_a_number()};
  if (target >= 0 && target < p.x_rows.cols) {
    Vec<T, 1> one;
    one.template load<Cache::kStream>(x + target);
    one.get(z);
  }
  return z[0];
}

// By one warp, from what all its lanes have. logit: the target's, NaN if there is none.
template <bool kCap>
__device__ __forceinline__ void finish(const CrossEntropyParams &p, int64_t row, float logit,
                                       const Seen &all) {
  if (threadIdx.x % 32u != 0) return;
  const float by = Seen::shift(all.most);
  const float lse = fmaf(by, kLn2, fmaf(by, kLn2Low, logf(all.sum)));
  float loss = fmaf(p.label_smoothing - 1.0f, capped<kCap>(p, logit), lse);
  if (p.label_smoothing > 0.0f) loss -= p.label_smoothing * (all.plain * p.inverse_cols);
  p.loss[row] = loss;
  p.lse[row] = lse;
}

// The strands of a row, in their order; on all lanes.
__device__ __forceinline__ Seen merge_strands(const float4 *strands, int count) {
  Seen all;
  for (int i = threadIdx.x % 32u; i < count; i += 32) {
    all.merge({strands[i].x, strands[i].y, strands[i].z});
  }
  all.merge_lanes();
  return all;
}

__device__ __forceinline__ void ignore_row(const CrossEntropyParams &p, int64_t row) {
  p.loss[row] = p.lse[row] = 0.0f;
}

// A warp per row, which has one strand.
template <class T, bool kAligned, bool kCap>
__global__ void __launch_bounds__(kRowThreads)
    cross_entropy_warp_kernel(const __grid_constant__ CrossEntropyParams p) {
  const int64_t row = Group<32>::row(p.first_row);
  const bool live = row < p.x_rows.rows;
  const T *x = static_cast<const T *>(p.logits) + (live ? row_offset(p.x_rows, row) : 0);
  wait_for_previous();
  if (!live) return;
  const int64_t target = __ldg(p.target + row);
  if (target == p.ignore_index) {
    if (threadIdx.x % 32u == 0) ignore_row(p, row);
    return;
  }
  const float logit = logit_of_target(p, x, target);
  finish<kCap>(p, row, logit, see_strand<T, kAligned, kCap>(p, x, 0));
}

// CTAs on an SM: 64 registers a thread where they do.
template <class T, bool kAligned, bool kCap>
inline constexpr int kCrossCtas = !kAligned || kCap || (sizeof(T) == 2 && !kHasMaxOfTwos) ? 2
                                  : sizeof(T) == 2                                        ? 4
                                                                                          : 3;

template <class T, bool kAligned, bool kCap>
__global__ void __launch_bounds__(kCrossThreads, kCrossCtas<T, kAligned, kCap>)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p) {
  wait_for_previous();
  __shared__ float4 strands[kStrands];
  const int64_t row = p.first_row + blockIdx.x;
  const int64_t target = __ldg(p.target + row);
  if (target == p.ignore_index) {
    if (threadIdx.x == 0) ignore_row(p, row);
    return;
  }
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
  const float logit = warp == 0 ? logit_of_target(p, x, target) : 0.0f;
  for (int i = warp; i < p.strands; i += warps) {
    const Seen seen = see_strand<T, kAligned, kCap>(p, x, i);
    if (lane == 0) strands[i] = make_float4(seen.most, seen.sum, seen.plain, 0.0f);
  }
  __syncthreads();
  if (warp == 0) finish<kCap>(p, row, logit, merge_strands(strands, p.strands));
}

// A cluster per row, where rows are few: a warp for each strand, which sends its result to rank 0.
template <class T, bool kAligned, bool kCap>
__global__ void __launch_bounds__(kCrossClusterThreads)
    cross_entropy_cluster_kernel(const __grid_constant__ CrossEntropyParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ float4 strands[kStrands];
  __shared__ Mailbox mail;
  mail.begin(p.strands * static_cast<int>(sizeof(float4)));
  Team<true>::leave();
  wait_for_previous();
  const int64_t row = p.first_row + blockIdx.x / kClusterSize;
  const int64_t target = __ldg(p.target + row);
  const unsigned rank = Team<true>::rank();
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  if (target == p.ignore_index) {
    if (rank == 0 && threadIdx.x == 0) ignore_row(p, row);
    Team<true>::left();
    return;
  }
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  const bool last = rank == 0 && warp == 0;
  const float logit = last ? logit_of_target(p, x, target) : 0.0f;
  const int strand = warp * kClusterSize + static_cast<int>(rank);
  Seen seen;
  if (strand < p.strands) seen = see_strand<T, kAligned, kCap>(p, x, strand);
  Team<true>::left();  // rank 0 has its mailbox
  if (lane == 0 && strand < p.strands) {
    const float of_strand[4] = {seen.most, seen.sum, seen.plain, 0.0f};
    mail.send(&strands[strand].x, of_strand, 0);
  }
  if (!last) return;
  mail.wait(0);
  finish<kCap>(p, row, logit, merge_strands(strands, p.strands));
#endif
}

// ---------------------------------------------------------------------------------------------
// The gradient

template <class T, int N, bool kCap>
__device__ __forceinline__ void gradient(const CrossEntropyParams &p, const Vec<T, N> &v,
                                         float lse, float grad, int64_t col, int64_t target,
                                         T *to) {
  const float smooth = p.label_smoothing * p.inverse_cols;
  float z[N], slope[N], share[N];
  v.get(z);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    slope[i] = grad;
    if constexpr (kCap) {
      const Capped c = soft_cap(z[i], p.softcap, p.inverse_softcap);
      z[i] = c.value;
      slope[i] *= c.slope;
    }
    share[i] = fast_exp2((z[i] - lse) * kLog2E) - smooth;
  }
  if (target >= col && target < col + N) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (col + i == target) share[i] -= 1.0f - p.label_smoothing;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) share[i] *= slope[i];
  store_as<T>(to, col, share);
}

// chunks CTAs per row, with kUnroll vectors a thread. dlogits may be logits: an element is written by
// the thread that has read it.
template <class T, int N, bool kCap>
__global__ void __launch_bounds__(kCrossGradThreads)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyParams p) {
  constexpr int kUnroll = N == 1 ? kCrossGradElements : kCrossGradVectors;
  const int64_t in_grid = blockIdx.x / static_cast<unsigned>(p.chunks);
  const int64_t chunk = blockIdx.x % static_cast<unsigned>(p.chunks);
  const int64_t row = p.first_row + in_grid, threads = blockDim.x;
  const int64_t first = chunk * threads * kUnroll + threadIdx.x;
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  T *to = static_cast<T *>(p.dlogits) + row * p.x_rows.cols;
  wait_for_previous();
  const int64_t target = __ldg(p.target + row);
  const float given = __ldg(p.grad + row), lse = __ldg(p.saved_lse + row);
  Vec<T, N> v[kUnroll];
  if (target == p.ignore_index) {
    v[0].zero();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = first + u * threads;
      if (at < p.vectors) v[0].store(to + at * N);
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * threads;
    if (at < p.vectors) v[u].template load<Cache::kStream>(x + at * N);
  }
  const bool inside = target >= 0 && target < p.x_rows.cols;
  const float grad = inside ? given : not_a_number();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * threads;
    if (at < p.vectors) gradient<T, N, kCap>(p, v[u], lse, grad, at * N, target, to);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class T, bool kAligned, bool kCap>
int32_t launch_forward(CrossEntropyParams &p, int device, void *stream, const char *op) {
  constexpr int N = kVectorOf<T>;
  p.vectors = (p.x_rows.cols + N - 1) / N;
  const int64_t waves = (p.vectors + kWave - 1) / kWave;
  p.strands = static_cast<int>(waves < kStrands ? waves : kStrands);
  if (p.strands == 1) {
    return launch_rows(&cross_entropy_warp_kernel<T, kAligned, kCap>,
                       {Shape::k32x8, kRowThreads, kRowThreads / 32}, p, stream, op);
  }
  auto *cluster = &cross_entropy_cluster_kernel<T, kAligned, kCap>;
  if (p.x_rows.rows <= kCrossClusterRows && p.strands >= kCrossClusterStrands &&
      has_clusters(reinterpret_cast<const void *>(cluster), device)) {
    return launch_clusters(cluster, p.x_rows.rows, kCrossClusterThreads, p, stream, op);
  }
  const int threads = p.strands < kCrossThreads / 32 ? p.strands * 32 : kCrossThreads;
  return launch_rows(&cross_entropy_kernel<T, kAligned, kCap>, {Shape::kLoop, threads, 1}, p, stream,
                     op);
}

template <class T, int N, bool kCap>
int32_t launch_backward(CrossEntropyParams &p, void *stream, const char *op) {
  constexpr int kUnroll = N == 1 ? kCrossGradElements : kCrossGradVectors;
  p.vectors = p.x_rows.cols / N;
  const int64_t most = kCrossGradThreads * kUnroll;
  const int threads = cta_threads(p.vectors < most ? p.vectors : most, kUnroll);
  p.chunks = (p.vectors + threads * kUnroll - 1) / (threads * kUnroll);
  const int64_t rows = kMaxGrid / p.chunks;  // of a launch
  for (p.first_row = 0; p.first_row < p.x_rows.rows; p.first_row += rows) {
    const int64_t left = p.x_rows.rows - p.first_row;
    const int32_t status = launch(&cross_entropy_backward_kernel<T, N, kCap>,
                                  (left < rows ? left : rows) * p.chunks, threads, p, stream, op);
    if (status != HFP_OK) return status;
  }
  return HFP_OK;
}

template <class T, bool kBackward>
int32_t launch_typed(CrossEntropyParams &p, int device, void *stream, const char *op) {
  constexpr int kWidest = kVectorOf<T>;
  const bool cap = p.softcap > 0.0f;
  bool aligned = rows_of_vectors(p.x_rows, p.logits, sizeof(T));
  if constexpr (kBackward) {
    aligned = aligned && pointer_aligned(p.dlogits);
    if (aligned) {
      return cap ? launch_backward<T, kWidest, true>(p, stream, op)
                 : launch_backward<T, kWidest, false>(p, stream, op);
    }
    return cap ? launch_backward<T, 1, true>(p, stream, op)
               : launch_backward<T, 1, false>(p, stream, op);
  } else if (aligned) {
    return cap ? launch_forward<T, true, true>(p, device, stream, op)
               : launch_forward<T, true, false>(p, device, stream, op);
  } else {
    return cap ? launch_forward<T, false, true>(p, device, stream, op)
               : launch_forward<T, false, false>(p, device, stream, op);
  }
}

template <bool kBackward>
int32_t launch(const CrossEntropyArgs &a, int device, void *stream, const char *op) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  CrossEntropyParams p{};
  p.loss = a.loss;
  p.lse = a.lse;
  p.dlogits = a.dlogits;
  p.grad = a.grad;
  p.saved_lse = a.saved_lse;
  p.logits = a.logits;
  p.target = a.target;
  p.x_rows = a.rows;
  p.ignore_index = a.ignore_index;
  p.label_smoothing = a.label_smoothing;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.rows.cols));
  p.softcap = a.softcap;
  p.inverse_softcap = a.softcap > 0.0f ? 1.0f / a.softcap : 0.0f;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), op);
  switch (a.type) {
    case DType::F32: return launch_typed<float, kBackward>(p, device, stream, op);
    case DType::F16: return launch_typed<__half, kBackward>(p, device, stream, op);
    default: return launch_typed<__nv_bfloat16, kBackward>(p, device, stream, op);
  }
}

}  // namespace

int32_t cross_entropy(const CrossEntropyArgs &a, int device, void *stream) {
  return launch<false>(a, device, stream, "cross_entropy");
}

int32_t cross_entropy_backward(const CrossEntropyArgs &a, int device, void *stream) {
  return launch<true>(a, device, stream, "cross_entropy_backward");
}

}  // namespace hfp::cuda
