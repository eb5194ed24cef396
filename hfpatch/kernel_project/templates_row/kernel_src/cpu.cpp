// cpu.cpp: the operators for CPU tensors.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

#include "formulas.h"
#include "ops.h"

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

namespace {

// A thread of torch's pool gets at least this many elements: about 10 us of work.
constexpr int64_t kGrain = 16384;
// Partial sums that SIMD adds side by side; the compiler may not reorder one.
constexpr int kLanes = 16;

template <class T>
float sum_of_squares(const T *x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float v = static_cast<float>(x[i + j]);
      lanes[j] += v * v;
    }
  }
  float sum = 0.0f;
  for (; i < n; ++i) {
    const float v = static_cast<float>(x[i]);
    sum += v * v;
  }
  for (float lane : lanes) sum += lane;
  return sum;
}

// Rows of x to y, which may be the same memory: each element is read before it is written.
template <class X, class W>
void fill(const X *x, const W *w, X *y, int64_t rows, int64_t width, float eps) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const X *from = x + row * width;
      X *to = y + row * width;
      const float scale = scale_of(sum_of_squares(from, width), width, eps);
      for (int64_t i = 0; i < width; ++i) {
        const float weight = w == nullptr ? 1.0f : static_cast<float>(w[i]);
        to[i] = static_cast<X>(normed(static_cast<float>(from[i]), scale, weight));
      }
    }
  });
}

template <class F>
void with_type(ScalarType type, const F &run) {
  switch (type) {
    case ScalarType::Float:
      return run(float());
    case ScalarType::Half:
      return run(Half());
    case ScalarType::BFloat16:
      return run(BFloat16());
    default:
      STD_TORCH_CHECK(false, "expected float32, float16 or bfloat16");
  }
}

// x is contiguous; its dtype and the weight's need not be the same.
void norm(const Tensor &x, const Weight &weight, double eps, const Tensor &out, int64_t width) {
  const Weight dense =
      weight.has_value() ? Weight(torch::stable::contiguous(*weight)) : std::nullopt;
  const int64_t rows = width == 0 ? 0 : x.numel() / width;
  with_type(x.scalar_type(), [&](auto x_type) {
    using X = decltype(x_type);
    with_type(dense.has_value() ? dense->scalar_type() : ScalarType::Float, [&](auto w_type) {
      using W = decltype(w_type);
      const void *w = dense.has_value() ? dense->const_data_ptr() : nullptr;
      fill(static_cast<const X *>(x.const_data_ptr()), static_cast<const W *>(w),
           static_cast<X *>(out.mutable_data_ptr()), rows, width, static_cast<float>(eps));
    });
  });
}

}  // namespace

Tensor rms_norm_cpu(const Tensor &x, const Weight &weight, double eps) {
  const int64_t width = checked(x, weight);
  const Tensor dense = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(dense);
  norm(dense, weight, eps, out, width);
  return out;
}

void rms_norm__cpu(const Tensor &x, const Weight &weight, double eps) {
  const int64_t width = checked(x, weight);
  STD_TORCH_CHECK(x.is_contiguous(), "expected a contiguous tensor: it is written in place");
  norm(x, weight, eps, x, width);
}
