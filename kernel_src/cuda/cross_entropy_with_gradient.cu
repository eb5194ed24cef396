// cross_entropy_with_gradient.cu: the mean or the sum of the losses of all rows of logits, and its
// gradient, while the logits are read once; hfp_cross_entropy_with_gradient on CUDA.
//
// Each warp keeps a part of a row in its registers: what it has seen of it goes to all warps of the row,
// each of which then writes the gradient of its part. A warp has a row of one part, the warps of one CTA
// a row of up to kHeldParts, those of a cluster of CTAs a wider one (sm_90). Rows that are not aligned,
// or wider still, are read twice, by the kernels of cross_entropy.cu. A part is what is a wave there,
// and the bits of the losses are the same.
#include "cross_entropy.cuh"
#include "cta_join.cuh"
#include "ordered.cuh"
#include "row_cluster.cuh"

HFP_BACKENDS(cross_entropy, CrossEntropyArgs)
HFP_BACKENDS(cross_entropy_backward, CrossEntropyArgs)

namespace hfp::cuda {
namespace {

// What the loss of each row is multiplied by, 1 / divisor: a number, or to be found by share_kernel.
struct ShareParams {
  bool known;
  float value;
};

struct WithGradientParams : CrossEntropyParams {
  ShareParams share;
  int parts, cluster_ctas, held_vectors;  // per row
  int rows_ahead;
};

// A CTA's share of the row further on. It is asked for behind the loads of the CTA's own row, as its target
// comes from DRAM: 8192 x 32000 256.4 -> 255.8 us, 2048 x 128256 258.8 -> 257.9. By one thread, of the
// last warp, which often has less to read.
template <class T>
struct RowAhead {
  const T *first;
  uint32_t vectors;
  bool asks = false;

  __device__ __forceinline__ RowAhead(const WithGradientParams &p, int64_t row, int ctas, unsigned rank)
      : vectors(static_cast<uint32_t>(p.held_vectors) / static_cast<uint32_t>(ctas)) {
    const int64_t other = row + p.rows_ahead;
    first = static_cast<const T *>(p.logits) + row_offset(p.x_rows, other) +
            rank * vectors * kVectorOf<T>;
    if (threadIdx.x + 32 == blockDim.x && other < p.x_rows.rows) {
      asks = __ldg(p.target + other) != p.ignore_index;
    }
  }

  __device__ __forceinline__ void bring() const {
    if (asks) bring_row(first, vectors);
  }
};

// grad (softmax - smooth) of a row, by what was subtracted in the exponents of its sum: what rounding that
// is off by cancels.
struct Share {
  float by, of_sum, smooth, grad;

  __device__ __forceinline__ Share(const CrossEntropyParams &p, const Seen &seen, float grad)
      : by(Seen::shift(seen.most)),
        of_sum(1.0f / seen.sum),
        smooth(p.label_smoothing * p.inverse_cols),
        grad(grad) {}
};

template <class T, bool kCap>
__device__ __forceinline__ void write_vector(const CrossEntropyParams &p,
                                             const Vec<T, kVectorOf<T>> &v, const Share &s,
                                             int col, int64_t target, T *to) {
  constexpr int N = kVectorOf<T>;
  float z[N], y[N];
  v.get(z);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float slope = s.grad;
    if constexpr (kCap) {
      const Capped c = soft_cap(z[i], p.softcap, p.inverse_softcap);
      z[i] = c.value;
      slope *= c.slope;
    }
    y[i] = fast_exp2(fmaf(z[i], kLog2E, -s.by));
    if constexpr (kCap) {
      const float less = col + i == target ? s.smooth + (1.0f - p.label_smoothing) : s.smooth;
      y[i] = fmaf(y[i], s.of_sum, -less) * slope;
    } else {
      y[i] = fmaf(y[i], s.of_sum * s.grad, -s.smooth * s.grad);
    }
  }
  if constexpr (!kCap) {
    if (target >= col && target < col + N) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (col + i == target) y[i] = fmaf(p.label_smoothing - 1.0f, s.grad, y[i]);
      }
    }
  }
  store_as<T>(to, col, y);
}

// A warp's part of a row.
template <class T, bool kCap>
struct HeldPart {
  static constexpr int N = kVectorOf<T>;
  Wave<T, kLaneVectors> v;
  int first;  // vector of the part

  __device__ __forceinline__ explicit HeldPart(int part) : first(part * kWave) {}

  __device__ __forceinline__ void ask_for(const CrossEntropyParams &p, const T *x) {
    load_wave<T, true, kLaneVectors>(v, x, first, p.x_rows.cols);
    keep_loads_above(p.zero);
  }

  // Of the whole part, on all lanes.
  __device__ __forceinline__ Seen see(const CrossEntropyParams &p) {
    Seen seen = see_vectors<T, true, kCap>(p, v, first);
    seen.merge_lanes(p.label_smoothing > 0.0f);
    return seen;
  }

  __device__ __forceinline__ void write(const WithGradientParams &p, int64_t row, const Seen &seen,
                                        float grad, int64_t target) {
    T *to = static_cast<T *>(p.dlogits) + row * p.x_rows.cols;
    const Share share(p, seen, grad);
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      const int at = first + static_cast<int>(threadIdx.x % 32u) + 32 * u;
      v[u].stay_packed(p.zero);
      if (at < p.held_vectors) write_vector<T, kCap>(p, v[u], share, at * N, target, to);
    }
  }

  __device__ __forceinline__ void write_zeros(const WithGradientParams &p, int64_t row) {
    T *to = static_cast<T *>(p.dlogits) + row * p.x_rows.cols;
    Vec<T, N> none;
    none.zero();
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      const int at = first + static_cast<int>(threadIdx.x % 32u) + 32 * u;
      if (at < p.held_vectors) none.store(to + at * N);
    }
  }
};

// The target's logit goes with what the first warp has seen: when another warp has that, it may write
// over the logits.
__device__ __forceinline__ float4 message(const Seen &seen, float logit) {
  return make_float4(seen.most, seen.sum, seen.plain, logit);
}

// By all threads, before anything is read. After share_kernel that is at once: it begins when all before it
// has ended, and only then can this kernel be placed. 8192 x 32000: 267 -> 265.5 us.
__device__ __forceinline__ void wait_to_read(const WithGradientParams &p) {
  if (p.share.known) wait_for_previous();
}

// By all threads, before anything is written: only now is share_kernel waited for.
__device__ __forceinline__ float share_of_row(const WithGradientParams &p) {
  wait_for_previous();
  return p.share.known ? p.share.value : __ldcg(p.grad);
}

// What the gradient of a row's loss is multiplied by.
__device__ __forceinline__ float grad_of(const CrossEntropyParams &p, int64_t target, float given) {
  return target >= 0 && target < p.x_rows.cols ? given : not_a_number();
}

template <class T, bool kCap>
__global__ void __launch_bounds__(kRowThreads)
    with_gradient_warp_kernel(const __grid_constant__ WithGradientParams p) {
  const int64_t row = Group<32>::row(p.first_row);
  if (row >= p.x_rows.rows) return;
  wait_to_read(p);
  const int64_t target = __ldg(p.target + row);
  HeldPart<T, kCap> held(0);
  if (target == p.ignore_index) {
    wait_for_previous();
    if (threadIdx.x % 32u == 0) ignore_row(p, row);
    held.write_zeros(p, row);
    return;
  }
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  const float logit = logit_of_target(p, x, target);
  held.ask_for(p, x);
  const Seen seen = held.see(p);
  const float given = share_of_row(p);
  finish<kCap>(p, row, logit, seen);
  __syncwarp();  // all lanes have the logit
  held.write(p, row, seen, grad_of(p, target, given), target);
}

template <class T, bool kCap>
__global__ void __launch_bounds__(kPartThreads, kCap || (sizeof(T) == 2 && !kHasMaxOfTwos) ? 1 : 2)
    with_gradient_cta_kernel(const __grid_constant__ WithGradientParams p) {
  __shared__ float4 all[kHeldParts];
  const int64_t row = p.first_row + blockIdx.x;
  wait_to_read(p);
  const int64_t target = __ldg(p.target + row);
  const RowAhead<T> ahead(p, row, 1, 0);
  const int part = threadIdx.x / 32u;
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  HeldPart<T, kCap> held(part);
  if (target != p.ignore_index) held.ask_for(p, x);
  ahead.bring();
  if (target == p.ignore_index) {
    wait_for_previous();
    if (threadIdx.x == 0) ignore_row(p, row);
    held.write_zeros(p, row);
    return;
  }
  const float logit = part == 0 ? logit_of_target(p, x, target) : 0.0f;
  const Seen own = held.see(p);
  const float given = share_of_row(p);
  if (threadIdx.x % 32u == 0) all[part] = message(own, logit);
  __syncthreads();
  const Seen seen = merge_strands(p, all, p.parts);
  if (part == 0) finish<kCap>(p, row, logit, seen);
  held.write(p, row, seen, grad_of(p, target, given), target);
}

// kDense: in 48 registers, of up to kDenseThreads a CTA.
template <class T, bool kCap, bool kDense>
__global__ void __launch_bounds__(kDense ? kDenseThreads : kPartThreads,
                                  kCap     ? 1
                                  : kDense ? 3
                                           : 2)
    with_gradient_cluster_kernel(const __grid_constant__ WithGradientParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ PartResults<4> all;
  all.begin(p.parts);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.cluster_ctas);
  const int part = static_cast<int>(Team<true>::rank() * (blockDim.x / 32u) + threadIdx.x / 32u);
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  HeldPart<T, kCap> held(part);
  wait_to_read(p);
  const int64_t target = __ldg(p.target + row);
  const RowAhead<T> ahead(p, row, p.cluster_ctas, Team<true>::rank());
  if (target != p.ignore_index) held.ask_for(p, x);
  ahead.bring();
  if (target == p.ignore_index) {
    wait_for_previous();
    if (part == 0 && threadIdx.x == 0) ignore_row(p, row);
    held.write_zeros(p, row);
    Team<true>::left();
    return;
  }
  const float logit = part == 0 ? logit_of_target(p, x, target) : 0.0f;
  const float4 own = message(held.see(p), logit);
  const float given = share_of_row(p);
  all.exchange({own.x, own.y, own.z, own.w}, part, p.parts, p.cluster_ctas);
  const Seen seen = merge_strands(p, reinterpret_cast<const float4 *>(all.of_part), p.parts);
  if (part == 0) finish<kCap>(p, row, logit, seen);
  held.write(p, row, seen, grad_of(p, target, given), target);
#endif
}

// ---------------------------------------------------------------------------------------------
// All rows, by one CTA, or where there are clusters by one of these, before and after

struct TotalParams {
  static constexpr bool kStartsEarly = true;
  float *total;
  const float *loss;
  const int64_t *target;
  int64_t rows, ignore_index;
  bool counts;  // what to divide by: the rows that are not ignored
  const float *divisor;
  ShareParams share;
};

constexpr int kTotalThreads = 1024;
// Rows that a thread has on their way. Eight in clusters: 16384 x 1000 24.8 -> 25.4 us, 65536 x 4096
// 261.9 -> 261.1.
template <bool kCluster>
constexpr int kTotalUnroll = kCluster ? 4 : 8;

// The sum of f(row) over all rows, in one order, to thread 0 of the first CTA of the team.
template <bool kCluster, class Number, class F>
__device__ __forceinline__ Number sum_rows(int64_t rows, const F &f) {
  using T = Team<kCluster>;
  constexpr int kUnroll = kTotalUnroll<kCluster>;
  __shared__ Number of_cta;
  const int64_t step = int64_t{kTotalThreads} * T::size();
  Number sum = 0;
  for (int64_t i = int64_t{T::rank()} * kTotalThreads + threadIdx.x; i < rows;
       i += step * kUnroll) {
    Number value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) value[u] = i + u * step < rows ? f(i + u * step) : 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += value[u];
  }
  sum = join_all<Sum>(sum);
  if constexpr (kCluster) {
    if (threadIdx.x == 0) of_cta = sum;
    T::sync();
    if (T::rank() == 0 && threadIdx.x == 0) {
      for (unsigned rank = 1; rank < T::size(); ++rank) sum += *T::at(&of_cta, rank);
    }
    T::sync();  // no CTA ends before its sum is read
  }
  return sum;
}

// total = 1 / divisor: what the loss of each row is multiplied by.
template <bool kCluster>
__global__ void __launch_bounds__(kTotalThreads)
    share_kernel(const __grid_constant__ TotalParams p) {
  wait_for_previous();
  float share = p.share.value;
  if (p.counts) {
    const int64_t rows = sum_rows<kCluster, int64_t>(
        p.rows, [&](int64_t i) { return int64_t{__ldg(p.target + i) != p.ignore_index}; });
    share = 1.0f / static_cast<float>(rows);
  } else if (!p.share.known) {
    share = 1.0f / __ldg(p.divisor);
  }
  if (Team<kCluster>::rank() == 0 && threadIdx.x == 0) *p.total = share;
}

// total = the sum of the losses, multiplied by it. No row at all: 0 / 0 is NaN, as for the mean of none.
template <bool kCluster>
__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(const __grid_constant__ TotalParams p) {
  wait_for_previous();
  // With the losses, not after them.
  const float share = p.share.known ? p.share.value : __ldcg(p.total);
  const double sum = sum_rows<kCluster, double>(
      p.rows, [&](int64_t i) { return static_cast<double>(__ldg(p.loss + i)); });
  if (Team<kCluster>::rank() == 0 && threadIdx.x == 0) {
    *p.total = static_cast<float>(sum * static_cast<double>(share));
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

// False, and nothing is launched, where the warps of a cluster hold no row.
template <class T, bool kCap>
bool launch_held(WithGradientParams &p, int device, void *stream, const char *op, int32_t *status) {
  constexpr int N = kVectorOf<T>;
  p.vectors = p.x_rows.cols / N;
  const int64_t parts = (p.vectors + kWave - 1) / kWave;
  if (parts > kMostClusterParts) return false;
  p.parts = static_cast<int>(parts);
  p.held_vectors = static_cast<int>(p.vectors);
  const int64_t bytes = kVectorBytes * p.vectors;
  p.rows_ahead = static_cast<int>((kCrossAheadBytes + bytes - 1) / bytes);
  if (p.parts == 1) {
    *status = launch_rows(&with_gradient_warp_kernel<T, kCap>,
                          {Shape::k32x8, kRowThreads, kRowThreads / 32}, p, stream, op);
    return true;
  }
  const ClusterPlan plan = plan_cluster(p.parts);
  void (*kernel)(WithGradientParams) = &with_gradient_cluster_kernel<T, kCap, false>;
  if constexpr (!kCap) {
    if (dense_cluster(plan, p.x_rows.rows)) kernel = &with_gradient_cluster_kernel<T, kCap, true>;
  }
  const bool few = split_rows(p.x_rows.rows, p.x_rows.cols);
  if ((p.parts > kHeldParts || few) &&
      launch_row_clusters(kernel, plan, p, device, stream, op, status)) {
    return true;
  }
  if (p.parts > kHeldParts) return false;
  *status = launch_rows(&with_gradient_cta_kernel<T, kCap>, {Shape::kLoop, p.parts * 32, 1}, p,
                        stream, op);
  return true;
}

template <class T>
bool launch_held(WithGradientParams &p, int device, void *stream, const char *op, int32_t *status) {
  if (!rows_of_vectors(p.x_rows, p.logits, sizeof(T)) || !pointer_aligned(p.dlogits)) return false;
  return p.softcap > 0.0f ? launch_held<T, true>(p, device, stream, op, status)
                          : launch_held<T, false>(p, device, stream, op, status);
}

// In a cluster, 65536 rows of 4096 columns take 283 -> 269 us in all. Few rows are faster in one CTA, which
// is on the GPU earlier: 8192 x 32000 257.8 -> 256.9.
int32_t launch_total(void (*cluster)(TotalParams), void (*alone)(TotalParams), TotalParams &p,
                     int device, void *stream, const char *op) {
  if (p.rows > kTotalThreads * kTotalUnroll<false> &&
      has_clusters(reinterpret_cast<const void *>(cluster), device)) {
    return launch_clusters(cluster, 1, kTotalThreads, p, stream, op);
  }
  return launch(alone, 1, kTotalThreads, p, stream, op);
}

// False, and nothing is launched, where rows are not held.
bool launch_held(const CrossEntropyArgs &a, const ShareParams &share, int device, void *stream,
                 const char *op, int32_t *status) {
  WithGradientParams p{};
  static_cast<CrossEntropyParams &>(p) = params_of(a);
  p.share = share;
  return a.type == DType::F32   ? launch_held<float>(p, device, stream, op, status)
         : a.type == DType::F16 ? launch_held<__half>(p, device, stream, op, status)
                                : launch_held<__nv_bfloat16>(p, device, stream, op, status);
}

}  // namespace

int32_t cross_entropy_with_gradient(const CrossEntropyTotalArgs &a, int device, void *stream) {
  constexpr const char *op = "cross_entropy_with_gradient";
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), op);
  TotalParams total{};
  total.total = a.total;
  total.loss = a.rows.loss;
  total.target = a.rows.target;
  total.rows = a.rows.rows.rows;
  total.ignore_index = a.rows.ignore_index;
  total.counts = a.counts;
  total.divisor = a.divisor.pointer;
  if (!a.counts && a.divisor.pointer == nullptr) total.share = {true, 1.0f / a.divisor.value};
  CrossEntropyArgs rows = a.rows;
  rows.grad = a.total;
  rows.one_grad = true;
  rows.saved_lse = rows.lse;
  const auto share = [&] {
    return launch_total(&share_kernel<true>, &share_kernel<false>, total, device, stream, op);
  };
  int32_t status = total.share.known ? HFP_OK : share();
  if (status != HFP_OK) return status;
  const bool none = rows.rows.rows <= 0 || rows.rows.cols <= 0;
  if (!none && !launch_held(rows, total.share, device, stream, op, &status)) {
    if (total.share.known) status = share();
    if (status == HFP_OK) status = cross_entropy(rows, device, stream);
    if (status == HFP_OK) status = cross_entropy_backward(rows, device, stream);
  }
  if (status != HFP_OK) return status;
  return launch_total(&total_kernel<true>, &total_kernel<false>, total, device, stream, op);
}

}  // namespace hfp::cuda
