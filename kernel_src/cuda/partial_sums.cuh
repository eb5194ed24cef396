// partial_sums.cuh: the second launch of gradients that are sums over rows: of the norms' weight and
// bias, and of what mul_add, add_gelu and add_silu broadcast.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// partials: fp32 [sums, rows, cols]. Sum s of column c < first_cols is element s * first_cols + c of
// `first`; the other columns are those of `second`.
struct SumPartialsParams {
  static constexpr bool kStartsEarly = true;
  void *first, *second;
  const float *partials;
  int64_t sums, rows, cols, first_cols;
  DType first_type, second_type;
};

int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op);

}  // namespace hfp::cuda
