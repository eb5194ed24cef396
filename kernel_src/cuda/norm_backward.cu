// norm_backward.cu: the second launch of the norms' gradients: dweight, dbias = sum of partials.
#include "norm_backward_row.cuh"

namespace hfp::cuda {
namespace {

constexpr int kSumWarps = kSumThreads / kSumCols;
constexpr int kFewRows = 32, kFewThreads = 128;

__device__ __forceinline__ void put_sum(const SumPartialsParams &p, int64_t col,
                                        const float (&sum)[1]) {
  if (col < p.weight_cols) {
    store_any(p.dweight, p.weight_type, col, sum);
  } else {
    store_any(p.dbias, p.bias_type, col - p.weight_cols, sum);
  }
}

__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  wait_for_previous();
  __shared__ float all[kSumWarps][kSumCols + 1];
  const int lane = threadIdx.x % kSumCols, warp = threadIdx.x / kSumCols;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumCols + lane;
  float sum = 0.0f;
  if (col < p.cols) {
#pragma unroll 4
    for (int64_t row = warp; row < p.rows; row += kSumWarps) {
      sum += __ldcg(p.partials + row * p.cols + col);
    }
  }
  all[warp][lane] = sum;
  __syncthreads();
  // Turned, so that a warp holds the sums of one column and adds them by shuffles.
  sum = Group<32>::sum_lanes(all[lane][warp]);
  const int64_t to = static_cast<int64_t>(blockIdx.x) * kSumCols + warp;
  if (lane == 0 && to < p.cols) {
    const float value[1] = {sum};
    put_sum(p, to, value);
  }
}

// Few rows: a thread per column.
__global__ void __launch_bounds__(kFewThreads)
    sum_few_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  wait_for_previous();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kFewThreads + threadIdx.x;
  if (col >= p.cols) return;
  float sum[1] = {0.0f};
#pragma unroll 8
  for (int64_t row = 0; row < p.rows; ++row) sum[0] += __ldcg(p.partials + row * p.cols + col);
  put_sum(p, col, sum);
}

}  // namespace

int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op) {
  if (p.rows <= kFewRows) {
    return launch(&sum_few_partials_kernel, (p.cols + kFewThreads - 1) / kFewThreads, kFewThreads,
                  p, stream, op);
  }
  return launch(&sum_partials_kernel, (p.cols + kSumCols - 1) / kSumCols, kSumThreads, p, stream,
                op);
}

}  // namespace hfp::cuda
