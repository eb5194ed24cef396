// partial_sums.cu: adds up the rows of `partials`, in an order that their number alone says.
#include "ordered.cuh"
#include "partial_sums.cuh"
#include "rows.cuh"

namespace hfp::cuda {
namespace {

constexpr int kFewRows = 8, kFewThreads = 128;

// Of column `at` of `cols` that store_halves has stored.
__device__ __forceinline__ int64_t column_of_halves(int64_t at, int64_t cols) {
  const int64_t upper = at >= cols / 2, in_half = at - upper * (cols / 2);
  return in_half / 4 * 8 + upper * 4 + in_half % 4;
}

// Where column `at` of sum `sum` belongs.
struct SumPlace {
  int64_t index;
  bool first;
};
__device__ __forceinline__ SumPlace place_of_sum(const SumPartialsParams &p, int64_t sum, int64_t at) {
  const bool first = at < p.first_cols;
  const int64_t cols = first ? p.first_cols : p.cols - p.first_cols;
  int64_t col = first ? at : at - p.first_cols;
  if (p.halves) col = column_of_halves(col, cols);
  return {sum * cols + col, first};
}
__device__ __forceinline__ void put_sum(const SumPartialsParams &p, const SumPlace &to, float total) {
  const float value[1] = {total};
  if (to.first) {
    store_any(p.first, p.first_type, to.index, value);
  } else {
    store_any(p.second, p.second_type, to.index, value);
  }
}

// 32 columns of one sum in a CTA, N in a thread: a warp has N rows at once. All that a thread reads is
// on its way together, up to kMostRows rows. Where it lies, and where its sum belongs, is known before the wait.
template <int kThreads, int kMostRows, int N>
__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  constexpr int kWarps = kThreads / 32, kLanes = 32 / N, kRowsAtOnce = kWarps * N;
  constexpr int kAhead = (kMostRows + kRowsAtOnce - 1) / kRowsAtOnce;
  __shared__ float all[kWarps][32];
  const unsigned chunks = static_cast<unsigned>((p.cols + 31) / 32), sum = blockIdx.x / chunks;
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, rows = static_cast<int>(p.rows);
  const int64_t start = int64_t{blockIdx.x - sum * chunks} * 32, col = start + lane % kLanes * N;
  const bool any = col < p.cols;
  int row = warp * N + lane / kLanes;
  const float *from = p.partials + (sum * p.rows + row) * p.cols + col;
  int64_t step = kRowsAtOnce * p.cols;
  SumPlace to = place_of_sum(p, sum, start + lane);
  settle(from, step, to.index);
  let_next_start();
  wait_for_previous<false>();

  float total[N];
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = 0.0f;
#pragma unroll 1
  for (; row < rows; row += kAhead * kRowsAtOnce) {
    Vec<float, N> v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      v[a].zero();
      if (any && row + a * kRowsAtOnce < rows) v[a].template load<Cache::kStream>(from);
      from += step;
    }
    keep_loads_above(p.zero);  // else the first of them are added up before the last ones are asked for
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
  put_sum(p, to, of_column);
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
  put_sum(p, place_of_sum(p, sum, col), total);
}

template <int kThreads, int kMostRows>
int32_t launch_sums(SumPartialsParams &p, void *stream, const char *op) {
  const bool aligned = p.cols % 4 == 0 && pointer_aligned(p.partials);
  auto *kernel = &sum_partials_kernel<kThreads, kMostRows, 1>;
  if (aligned) kernel = &sum_partials_kernel<kThreads, kMostRows, 4>;
  return launch(kernel, p.sums * ((p.cols + 31) / 32), kThreads, p, stream, op);
}

}  // namespace

int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op) {
  if (p.rows <= kFewRows) {
    return launch(&sum_few_partials_kernel, (p.sums * p.cols + kFewThreads - 1) / kFewThreads,
                  kFewThreads, p, stream, op);
  }
  if (p.rows <= kSumRows / 2) return launch_sums<kSumThreads / 2, kSumRows / 2>(p, stream, op);
  return launch_sums<kSumThreads, kSumRows>(p, stream, op);
}

}  // namespace hfp::cuda
