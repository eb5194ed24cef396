// formulas.h: what a row becomes, in fp32, and what is asked of the arguments, for the CPU and the
// GPU alike.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>

#include "ops.h"

#if defined(__CUDACC__)
#define FORMULA __host__ __device__ __forceinline__
#else
#define FORMULA inline
#endif

// 1 / sqrt(mean(x^2) + eps), of the sum of squares of a row.
FORMULA float scale_of(float squares, int64_t width, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
}

// The result is rounded once, to the dtype of x, whatever the weight's is.
FORMULA float normed(float x, float scale, float weight) { return x * scale * weight; }

// Raises where the arguments do not fit each other; returns the width of a row.
inline int64_t checked(const Tensor &x, const Weight &weight) {
  STD_TORCH_CHECK(x.dim() > 0, "expected a tensor of rows, got one without dimensions");
  const int64_t width = x.size(-1);
  if (weight.has_value()) {
    STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == width, "expected a weight of ", width,
                    " elements, as wide as a row");
    STD_TORCH_CHECK(weight->is_cpu() == x.is_cpu() &&
                        weight->get_device_index() == x.get_device_index(),
                    "expected x and weight on one device");
  }
  return width;
}
