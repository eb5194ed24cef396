// partial_sums.cu: adds up the rows of `partials`, in an order that their number alone says.
#include "partial_sums.cuh"
#include "rows.cuh"

namespace hfp::cuda {
namespace {

constexpr int kWarps = kSumThreads / 32;
constexpr int kFewRows = 32, kFewThreads = 128;

__device__ __forceinline__ void put_sum(const SumPartialsParams &p, int64_t sum, int64_t col,
                                        float total) {
  const float value[1] = {total};
  const int64_t second = col - p.first_cols;
  if (second < 0) {
    store_any(p.first, p.first_type, sum * p.first_cols + col, value);
  } else {
    store_any(p.second, p.second_type, sum * (p.cols - p.first_cols) + second, value);
  }
}

// 32 columns of one sum in a CTA, N in a thread: a warp has N rows at once. All that a thread reads is
// on its way together, up to kSumRows rows.
template <int N>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  constexpr int kLanes = 32 / N, kRowsAtOnce = kWarps * N;
  constexpr int kAhead = (kSumRows + kRowsAtOnce - 1) / kRowsAtOnce;
  __shared__ float all[kWarps][32];
  const int64_t chunks = (p.cols + 31) / 32, sum = blockIdx.x / chunks;
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const int64_t start = (blockIdx.x - sum * chunks) * 32, col = start + lane % kLanes * N;
  const bool any = col < p.cols;
  int64_t row = warp * N + lane / kLanes;
  const float *from = p.partials + (sum * p.rows + row) * p.cols + col;
  wait_for_previous();

  float total[N];
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = 0.0f;
  for (; row < p.rows; row += kAhead * kRowsAtOnce) {
    Vec<float, N> v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      v[a].zero();
      if (any && row + a * kRowsAtOnce < p.rows) v[a].template load<Cache::kStream>(from);
      from += kRowsAtOnce * p.cols;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      float value[N];
      v[a].get(value);
#pragma unroll
      for (int i = 0; i < N; ++i) total[i] += value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int bit = 16; bit >= kLanes; bit /= 2) total[i] += __shfl_xor_sync(~0u, total[i], bit);
  }
  if (lane < kLanes) {
#pragma unroll
    for (int i = 0; i < N; ++i) all[warp][lane * N + i] = total[i];
  }
  __syncthreads();
  if (warp > 0 || start + lane >= p.cols) return;
  float of_column = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) of_column += all[w][lane];
  put_sum(p, sum, start + lane, of_column);
}

// Few rows: a thread per column.
__global__ void __launch_bounds__(kFewThreads)
    sum_few_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kFewThreads + threadIdx.x;
  if (at >= p.sums * p.cols) return;
  const int64_t sum = p.sums > 1 ? at / p.cols : 0, col = at - sum * p.cols;
  const float *from = p.partials + sum * p.rows * p.cols + col;
  float total = 0.0f;
#pragma unroll 8
  for (int64_t row = 0; row < p.rows; ++row) total += __ldcg(from + row * p.cols);
  put_sum(p, sum, col, total);
}

}  // namespace

int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op) {
  if (p.rows <= kFewRows) {
    return launch(&sum_few_partials_kernel, (p.sums * p.cols + kFewThreads - 1) / kFewThreads,
                  kFewThreads, p, stream, op);
  }
  const int64_t ctas = p.sums * ((p.cols + 31) / 32);
  const bool aligned = p.cols % 4 == 0 && pointer_aligned(p.partials);
  return launch(aligned ? &sum_partials_kernel<4> : &sum_partials_kernel<1>, ctas, kSumThreads, p,
                stream, op);
}

}  // namespace hfp::cuda
