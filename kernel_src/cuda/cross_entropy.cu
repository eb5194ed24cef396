// cross_entropy.cu: the loss of each row of logits, and its gradient; hfp_cross_entropy and
// hfp_cross_entropy_backward on CUDA.
//
// The forward reads a row once: each thread keeps the maximum of what it has seen and the sum of
// exp(z - maximum), rescaled when the maximum rises (Milakov & Gimelshein, arXiv:1805.02867). All in
// powers of two, z log2(e), which is what the hardware computes. A cluster of CTAs shares a wide row
// where rows are few (sm_90).
#include "activations.cuh"
#include "cluster.cuh"
#include "rows.cuh"

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
  int64_t ignore_index;
  float label_smoothing, inverse_cols;
  float softcap, inverse_softcap;  // softcap 0: none
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.69314718f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
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
// Kernels

// sum(2^(z - most)) over what was seen. `most` of nothing is -inf, and its sum 0.
struct Online {
  float most = minus_infinity(), sum = 0.0f;

  // What is subtracted in exponents: -inf - -inf would be NaN.
  __device__ __forceinline__ static float shift(float most) {
    return most == minus_infinity() ? 0.0f : most;
  }

  __device__ __forceinline__ void merge(float other_most, float other_sum) {
    const float high = fmaxf(most, other_most), by = shift(high);
    sum = sum * fast_exp2(most - by) + other_sum * fast_exp2(other_most - by);
    most = high;
  }

  template <int N>
  __device__ __forceinline__ void add(const float (&z)[N]) {
    float high = most;
#pragma unroll
    for (int i = 0; i < N; ++i) high = fmaxf(high, z[i]);
    const float by = shift(high);
    float more = 0.0f;  // NaN passes by fmaxf, and stays in here
#pragma unroll
    for (int i = 0; i < N; ++i) more += fast_exp2(z[i] - by);
    sum = fmaf(sum, fast_exp2(most - by), more);
    most = high;
  }
};

template <class T, int N, bool kCap>
__device__ __forceinline__ void add_vector(const CrossEntropyParams &p, const Vec<T, N> &v,
                                           Online &online, float &plain) {
  float z[N];
  v.get(z);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = capped<kCap>(p, z[i]);
    plain += z[i];
    z[i] *= kLog2E;
  }
  online.add(z);
}

// What a warp, or a thread, has seen of a row.
struct Seen {
  Online online;
  float plain = 0.0f;

  __device__ __forceinline__ void merge(float most, float sum, float more) {
    online.merge(most, sum);
    plain += more;
  }

  // Of all lanes, on all lanes.
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int across = 16; across > 0; across /= 2) {
      const float most = __shfl_xor_sync(~0u, online.most, across);
      const float sum = __shfl_xor_sync(~0u, online.sum, across);
      merge(most, sum, __shfl_xor_sync(~0u, plain, across));
    }
  }
};

template <class T, bool kCap>
__device__ __forceinline__ void finish(const CrossEntropyParams &p, const T *x, int64_t row,
                                       int64_t target, const Seen &seen) {
  const float lse = fmaf(Online::shift(seen.online.most), kLn2, logf(seen.online.sum));
  p.lse[row] = lse;
  float loss = not_a_number();
  if (target >= 0 && target < p.x_rows.cols) {
    Vec<T, 1> one;
    one.template load<Cache::kStream>(x + target);
    float z[1];
    one.get(z);
    loss = fmaf(p.label_smoothing - 1.0f, capped<kCap>(p, z[0]), lse);
    if (p.label_smoothing > 0.0f) loss -= p.label_smoothing * (seen.plain * p.inverse_cols);
  }
  p.loss[row] = loss;
}

static_assert(kCrossClusterThreads * kClusterSize == kCrossThreads * kCrossUnroll);

// A row is cut into strands, each of every `strands`-th vector. A CTA holds kCrossUnroll of them in
// each thread; where rows are few, a cluster of CTAs has a thread for each. The strands of a warp,
// and then the warps, are merged in one order in both, so that the bits of a row do not depend on
// how many others there are.
template <class T, int N, bool kCap, bool kCluster>
__global__ void __launch_bounds__(kCluster ? kCrossClusterThreads : kCrossThreads)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p) {
  wait_for_previous();
  using CTAs = Team<kCluster>;
  constexpr int kOwn = kCluster ? 1 : kCrossUnroll;  // strands of a thread
  __shared__ float4 of_warp[kCrossThreads / 32 * kCrossUnroll];
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const unsigned rank = CTAs::rank();
  const int64_t target = __ldg(p.target + row);
  if (target == p.ignore_index) {
    if (rank == 0 && threadIdx.x == 0) p.loss[row] = p.lse[row] = 0.0f;
    return;
  }
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  const int threads = static_cast<int>(blockDim.x), lane = threadIdx.x % 32u;
  const int warp = threadIdx.x / 32u, warps = threads / 32;
  const int64_t strands = static_cast<int64_t>(threads) * (kCluster ? kClusterSize : kOwn);
  const int64_t step = kCluster ? strands : threads;  // between a thread's vectors on their way

  Seen seen[kOwn];
  int64_t at = rank * static_cast<int64_t>(threads) + threadIdx.x;
  for (; at + (kCrossUnroll - 1) * step < p.vectors; at += kCrossUnroll * step) {
    Vec<T, N> v[kCrossUnroll];
#pragma unroll
    for (int u = 0; u < kCrossUnroll; ++u) {
      v[u].template load<Cache::kStream>(x + (at + u * step) * N);
    }
#pragma unroll
    for (int u = 0; u < kCrossUnroll; ++u) {
      Seen &to = seen[u % kOwn];
      add_vector<T, N, kCap>(p, v[u], to.online, to.plain);
    }
  }
#pragma unroll
  for (int u = 0; u < kCrossUnroll; ++u) {
    const int64_t here = at + u * step;
    if (here >= p.vectors) break;
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + here * N);
    Seen &to = seen[u % kOwn];
    add_vector<T, N, kCap>(p, v, to.online, to.plain);
  }

#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    seen[i].merge_warp();
    if (lane == 0) {
      of_warp[i * warps + warp] =
          make_float4(seen[i].online.most, seen[i].online.sum, seen[i].plain, 0.0f);
    }
  }
  CTAs::sync();
  Seen all;
  if (rank == 0 && warp == 0) {
    for (int i = lane; i < strands / 32; i += 32) {
      const float4 *from = of_warp + i;
      if constexpr (kCluster) {
        from = CTAs::at(of_warp + i % warps, static_cast<unsigned>(i / warps));
      }
      const float4 one = *from;
      all.merge(one.x, one.y, one.z);
    }
    all.merge_warp();
  }
  CTAs::leave(), CTAs::left();  // no CTA ends before rank 0 has read what it holds
  if (rank == 0 && threadIdx.x == 0) finish<T, kCap>(p, x, row, target, all);
}

template <class T, int N, bool kCap>
__device__ __forceinline__ void gradient(const CrossEntropyParams &p, const Vec<T, N> &v,
                                         float lse, float grad, int64_t col, int64_t target,
                                         T *to) {
  const float smooth = p.label_smoothing * p.inverse_cols;
  float y[N];
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float slope = grad, z = y[i];
    if constexpr (kCap) {
      const Capped c = soft_cap(z, p.softcap, p.inverse_softcap);
      z = c.value;
      slope *= c.slope;
    }
    float share = fast_exp2((z - lse) * kLog2E) - smooth;
    if (col + i == target) share -= 1.0f - p.label_smoothing;
    y[i] = share * slope;
  }
  store_as<T>(to, col, y);
}

// A CTA per row. dlogits may be logits: an element is written by the thread that has read it.
template <class T, int N, bool kCap>
__global__ void __launch_bounds__(kCrossThreads)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyParams p) {
  wait_for_previous();
  const int64_t row = p.first_row + blockIdx.x;
  const int64_t target = __ldg(p.target + row);
  T *to = static_cast<T *>(p.dlogits) + row * p.x_rows.cols;
  if (target == p.ignore_index) {
    Vec<T, N> v;
    v.zero();
    for (int64_t at = threadIdx.x; at < p.vectors; at += blockDim.x) v.store(to + at * N);
    return;
  }
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  const bool inside = target >= 0 && target < p.x_rows.cols;
  const float grad = inside ? __ldg(p.grad + row) : not_a_number();
  const float lse = __ldg(p.saved_lse + row);

  const int64_t block = static_cast<int64_t>(blockDim.x) * kCrossUnroll;
  int64_t at = threadIdx.x;
  for (; at + (kCrossUnroll - 1) * static_cast<int64_t>(blockDim.x) < p.vectors; at += block) {
    Vec<T, N> v[kCrossUnroll];
#pragma unroll
    for (int u = 0; u < kCrossUnroll; ++u) {
      v[u].template load<Cache::kStream>(x + (at + u * static_cast<int64_t>(blockDim.x)) * N);
    }
#pragma unroll
    for (int u = 0; u < kCrossUnroll; ++u) {
      gradient<T, N, kCap>(p, v[u], lse, grad, (at + u * static_cast<int64_t>(blockDim.x)) * N,
                           target, to);
    }
  }
  for (; at < p.vectors; at += blockDim.x) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    gradient<T, N, kCap>(p, v, lse, grad, at * N, target, to);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class T, int N, bool kCap, bool kBackward>
int32_t launch_vectors(CrossEntropyParams &p, int device, void *stream, const char *op) {
  p.vectors = p.x_rows.cols / N;
  if constexpr (!kBackward) {
    auto *cluster = &cross_entropy_kernel<T, N, kCap, true>;
    if (p.x_rows.rows <= kCrossClusterRows && p.vectors >= kCrossThreads * kCrossUnroll &&
        has_clusters(reinterpret_cast<const void *>(cluster), device)) {
      return launch_clusters(cluster, p.x_rows.rows, kCrossClusterThreads, p, stream, op);
    }
  }
  // Whole rounds of kCrossUnroll vectors for narrow rows too.
  const int64_t wanted = cta_threads(p.vectors < kCrossThreads * kCrossUnroll
                                         ? p.vectors
                                         : kCrossThreads * kCrossUnroll,
                                     kCrossUnroll);
  const RowPlan plan{Shape::kLoop, static_cast<int>(wanted > 32 ? wanted : 32), 1};
  if constexpr (kBackward) {
    return launch_rows(&cross_entropy_backward_kernel<T, N, kCap>, plan, p, stream, op);
  } else {
    return launch_rows(&cross_entropy_kernel<T, N, kCap, false>, plan, p, stream, op);
  }
}

template <class T, bool kBackward>
int32_t launch_typed(CrossEntropyParams &p, int device, void *stream, const char *op) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  int n = widest_vector(p.x_rows, sizeof(T));
  n = narrow_to_pointer(n, p.logits, sizeof(T));
  if (kBackward) n = narrow_to_pointer(n, p.dlogits, sizeof(T));
  const bool cap = p.softcap > 0.0f;
  if (n == kWidest) {
    return cap ? launch_vectors<T, kWidest, true, kBackward>(p, device, stream, op)
               : launch_vectors<T, kWidest, false, kBackward>(p, device, stream, op);
  }
  return cap ? launch_vectors<T, 1, true, kBackward>(p, device, stream, op)
             : launch_vectors<T, 1, false, kBackward>(p, device, stream, op);
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
