// ops.h: the operators, one line each. The declarations below and the registration in
// torch-ext/torch_binding.cpp are made of this table.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

using torch::stable::Tensor;
using Weight = std::optional<Tensor>;

// X(C++ result, name, C++ parameters, schema of the operator). `Tensor?` may be None, and
// `Tensor(a!)` is written to: such an operator returns nothing, since torch.compile takes no result
// that is one of the arguments.
#define KERNEL_OP_TABLE(X)                                                             \
  X(Tensor, rms_norm, (const Tensor &x, const Weight &weight, double eps),             \
    "(Tensor x, Tensor? weight, float eps) -> Tensor")                                 \
  X(void, rms_norm_, (const Tensor &x, const Weight &weight, double eps),              \
    "(Tensor(a!) x, Tensor? weight, float eps) -> ()")

#define DECLARE(result, name, parameters, schema) \
  result name##_cpu parameters;                   \
  result name##_cuda parameters;
KERNEL_OP_TABLE(DECLARE)
#undef DECLARE
