// partial_sums.cuh: the second launch of gradients that are sums over rows: of the norms' weight and
// bias, and of what mul_add, add_gelu and add_silu broadcast.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// partials: fp32 [sums, rows, cols]. Sum s of column c < first_cols is element s * first_cols + c of
// `first`; the other columns are those of `second`. halves: as store_halves stores them.
struct SumPartialsParams {
  static constexpr bool kStartsEarly = true;
  void *first, *second;
  const float *partials;
  int64_t sums, rows, cols, first_cols;
  DType first_type, second_type;
  bool halves;
  uint32_t zero;  // 0; see keep_loads_above
};

// Sums of a tensor's columns in vectors of 8, in a row of partials: the first halves of all vectors
// come before the second ones, so that each store of a warp fills whole lines. bf16 on an H200,
// layer_norm's gradient 4096 x 2048 18.0 us -> 17.0, x 4096 30.5 -> 29.7.
__device__ __forceinline__ void store_half(float *row, int64_t vector, bool second, int64_t cols,
                                           const float (&sum)[4]) {
  float4 *const half = reinterpret_cast<float4 *>(row + (second ? cols / 2 : 0));
  __stcg(half + vector, make_float4(sum[0], sum[1], sum[2], sum[3]));
}
__device__ __forceinline__ void store_halves(float *row, int64_t vector, int64_t cols,
                                             const float (&sum)[8]) {
  const float low[4] = {sum[0], sum[1], sum[2], sum[3]};
  const float high[4] = {sum[4], sum[5], sum[6], sum[7]};
  store_half(row, vector, false, cols, low);
  store_half(row, vector, true, cols, high);
}

int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op);

}  // namespace hfp::cuda
