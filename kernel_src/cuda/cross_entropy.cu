// cross_entropy.cu: the loss of each row of logits, and its gradient; hfp_cross_entropy and
// hfp_cross_entropy_backward on CUDA.
//
// The forward reads a row once, in waves of eight vectors a lane. A warp has a row of one wave, a CTA a
// wider one; a cluster of CTAs shares it where rows are few (sm_90).
#include "cross_entropy.cuh"

namespace hfp::cuda {
namespace {

// ---------------------------------------------------------------------------------------------
// The loss

// The wave that begins at vector `at`.
template <class T, bool kAligned, bool kCap>
__device__ __forceinline__ Seen see_wave(const CrossEntropyParams &p, const T *x, int64_t at) {
  Wave<T, kLaneVectors> v;
  load_wave<T, kAligned, kLaneVectors>(v, x, at, p.x_rows.cols);
  return see_vectors<T, kAligned, kCap>(p, v, at);
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
  seen.merge_lanes(p.label_smoothing > 0.0f);
  return seen;
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
  if (warp == 0) finish<kCap>(p, row, logit, merge_strands(p, strands, p.strands));
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
  finish<kCap>(p, row, logit, merge_strands(p, strands, p.strands));
#endif
}

// ---------------------------------------------------------------------------------------------
// The gradient

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
  const float given = __ldg(p.grad + row * p.grad_step), lse = __ldg(p.saved_lse + row);
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
  CrossEntropyParams p = params_of(a);
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
