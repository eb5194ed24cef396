// argmax.cu: the first index of the greatest value of each row; hfp_argmax on CUDA.
//
// A value and its index are one integer (row_keys.h), whose maximum does not depend on the order.
// Up to 8 vectors a lane a warp takes a row, beyond that a CTA; few wide rows are shared out among
// CTAs, and a second launch takes the greatest of their results.
#include "../row_keys.h"
#include "row_ops.cuh"

namespace hfp::cuda {
namespace {

struct ArgmaxParams {
  int64_t *out;
  uint64_t *workspace;
  const void *x;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;
  int ctas;        // per row
  int64_t stride;  // vectors that a CTA takes
};

constexpr int kArgmaxThreads = 512;
constexpr int kArgmaxVectors = 4;  // of each thread at a time
constexpr int64_t kWarpVectors = 256;

__device__ __forceinline__ uint64_t max_over_warp(uint64_t best) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, best, lane);
    best = other > best ? other : best;
  }
  return best;
}

// The greatest of the vectors first, first + step, ... below `past`.
template <class T, bool kAligned>
__device__ __forceinline__ uint64_t scan(const T *x, int64_t cols, int64_t first, int64_t step,
                                         int64_t past) {
  constexpr int N = kVectorOf<T>;
  uint32_t best = 0, index = 0;
  for (int64_t at = first; at < past; at += step * kArgmaxVectors) {
    Vec<T, N> v[kArgmaxVectors];
#pragma unroll
    for (int u = 0; u < kArgmaxVectors; ++u) {
      if (at + u * step < past) load_vector<T, kAligned>(v[u], x, at + u * step, cols);
    }
#pragma unroll
    for (int u = 0; u < kArgmaxVectors; ++u) {
      if (at + u * step >= past) continue;
      float value[N];
      v[u].get(value);
      const int64_t col = (at + u * step) * N;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!kAligned && col + i >= cols) continue;
        const uint32_t key = key_of(value[i]);
        if (key > best) best = key, index = static_cast<uint32_t>(col + i);  // the first one stays
      }
    }
  }
  return best == 0 ? 0 : pair_of(best, index);  // no key is 0
}

// A warp per row.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    argmax_warp_kernel(const __grid_constant__ ArgmaxParams p) {
  const int64_t row = Group<32>::row(p.first_row);
  if (row >= p.x_rows.rows) return;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const uint64_t best = max_over_warp(
      scan<T, kAligned>(x, p.x_rows.cols, threadIdx.x % 32u, 32, p.vectors));
  if (threadIdx.x % 32u == 0) p.out[row] = index_of(best);
}

// ctas CTAs per row; the result of each goes to the workspace, unless it is the only one.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const __grid_constant__ ArgmaxParams p) {
  __shared__ uint64_t all[32];
  const int64_t row = p.first_row + blockIdx.x / static_cast<unsigned>(p.ctas);
  const int cta = blockIdx.x % static_cast<unsigned>(p.ctas);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const int64_t first = cta * p.stride;
  const int64_t past = first + p.stride < p.vectors ? first + p.stride : p.vectors;
  uint64_t best = max_over_warp(
      scan<T, kAligned>(x, p.x_rows.cols, first + threadIdx.x, blockDim.x, past));
  const int lane = threadIdx.x % 32u, warps = blockDim.x / 32u;
  if (lane == 0) all[threadIdx.x / 32u] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = max_over_warp(lane < warps ? all[lane] : 0);
  if (lane != 0) return;
  if (p.ctas == 1) {
    p.out[row] = index_of(best);
  } else {
    p.workspace[row * p.ctas + cta] = best;
  }
}

__global__ void __launch_bounds__(32) argmax_merge_kernel(const __grid_constant__ ArgmaxParams p) {
  const int64_t row = blockIdx.x;
  uint64_t best = 0;
  for (int i = threadIdx.x; i < p.ctas; i += 32) {
    const uint64_t other = p.workspace[row * p.ctas + i];
    best = other > best ? other : best;
  }
  best = max_over_warp(best);
  if (threadIdx.x == 0) p.out[row] = index_of(best);
}

template <class T, bool kAligned>
int32_t launch_typed(ArgmaxParams &p, void *stream) {
  constexpr const char *op = "argmax";
  constexpr int N = kVectorOf<T>;
  const int64_t rows = p.x_rows.rows, cols = p.x_rows.cols;
  p.vectors = (cols + N - 1) / N;
  p.ctas = 1;
  p.stride = p.vectors;
  if (p.vectors <= kWarpVectors && rows > 1) {
    return launch_rows(&argmax_warp_kernel<T, kAligned>,
                       {Shape::k32x8, kRowThreads, kRowThreads / 32}, p, stream, op);
  }
  if (split_rows(rows, cols)) {
    // As many CTAs as there are parts fit into the workspace; two waves of an H100 are enough.
    constexpr int64_t kEnough = 264;
    int64_t ctas = (p.vectors + kArgmaxThreads - 1) / kArgmaxThreads;
    const int64_t most = row_parts(cols) < kEnough / rows ? row_parts(cols) : kEnough / rows;
    ctas = ctas < most ? ctas : most;
    if (ctas > 1) {
      p.ctas = static_cast<int>(ctas);
      p.stride = (p.vectors + ctas - 1) / ctas;
      const int32_t status =
          launch(&argmax_kernel<T, kAligned>, rows * ctas, kArgmaxThreads, p, stream, op);
      if (status != HFP_OK) return status;
      return launch(&argmax_merge_kernel, rows, 32, p, stream, op);
    }
  }
  const int64_t wanted = cta_threads(p.vectors, kArgmaxVectors);
  const int threads = static_cast<int>(
      p.vectors >= kArgmaxThreads * kArgmaxVectors ? kArgmaxThreads : wanted);
  return launch_rows(&argmax_kernel<T, kAligned>, {Shape::kLoop, threads, 1}, p, stream, op);
}

template <class T>
int32_t launch_for(ArgmaxParams &p, void *stream) {
  return rows_of_vectors(p.x_rows, p.x, sizeof(T)) ? launch_typed<T, true>(p, stream)
                                                   : launch_typed<T, false>(p, stream);
}

}  // namespace

int32_t argmax(const ArgmaxArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  ArgmaxParams p{};
  p.out = a.out;
  p.workspace = a.workspace;
  p.x = a.x;
  p.x_rows = a.rows;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "argmax");
  switch (a.type) {
    case DType::F32: return launch_for<float>(p, stream);
    case DType::F16: return launch_for<__half>(p, stream);
    default: return launch_for<__nv_bfloat16>(p, stream);
  }
}

}  // namespace hfp::cuda
