// cpu.cpp: the operators for CPU tensors.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "formulas.h"
#include "ops.h"

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

namespace {

// A thread of torch's pool gets at least this many elements: about 10 us of work.
constexpr int64_t kGrain = 32768;

// A function of its own, so that the compiler sees that nothing overlaps, and uses SIMD.
template <class T, class Formula, class... In>
void loop(Formula formula, int64_t n, T *__restrict__ out, const In *__restrict__... in) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<T>(formula(static_cast<float>(in[i])...));
  }
}

template <class T, class Formula, class... In>
void fill(Formula formula, int64_t n, T *out, const In *...in) {
  torch::stable::parallel_for(0, n, kGrain, [=](int64_t begin, int64_t end) {
    loop(formula, end - begin, out + begin, (in + begin)...);
  });
}

// formula(x[i], rest[i]...) for every i, as a new tensor like x.
template <class Formula, class... Rest>
Tensor map(Formula formula, const Tensor &x, const Rest &...rest) {
  STD_TORCH_CHECK(((rest.sizes().equals(x.sizes()) && rest.scalar_type() == x.scalar_type() &&
                    rest.is_cpu()) && ...),
                  "expected tensors of one shape, dtype and device");
  const Tensor first = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(first);
  const auto run = [&](auto type, const auto &...tensors) {
    using T = decltype(type);
    fill(formula, out.numel(), static_cast<T *>(out.mutable_data_ptr()),
         static_cast<const T *>(tensors.const_data_ptr())...);
  };
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run(float(), first, torch::stable::contiguous(rest)...);
      break;
    case ScalarType::Half:
      run(Half(), first, torch::stable::contiguous(rest)...);
      break;
    case ScalarType::BFloat16:
      run(BFloat16(), first, torch::stable::contiguous(rest)...);
      break;
    default:
      STD_TORCH_CHECK(false, "expected float32, float16 or bfloat16");
  }
  return out;
}

}  // namespace

Tensor relu_squared_cpu(const Tensor &x) { return map(ReluSquared(), x); }

Tensor relu_squared_backward_cpu(const Tensor &grad, const Tensor &x) {
  return map(ReluSquaredBackward(), grad, x);
}
