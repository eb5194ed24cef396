// ops.h: the operators, one line each. The declarations below and the registration in
// torch-ext/torch_binding.cpp are made of this table.
#pragma once

#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

// X(name, C++ parameters, schema of the operator). Every operator returns one tensor.
#define KERNEL_OP_TABLE(X)                                                                     \
  X(relu_squared, (const Tensor &x), "(Tensor x) -> Tensor")                                   \
  X(relu_squared_backward, (const Tensor &grad, const Tensor &x),                              \
    "(Tensor grad, Tensor x) -> Tensor")

#define DECLARE(name, parameters, schema) \
  Tensor name##_cpu parameters;           \
  Tensor name##_cuda parameters;
KERNEL_OP_TABLE(DECLARE)
#undef DECLARE
