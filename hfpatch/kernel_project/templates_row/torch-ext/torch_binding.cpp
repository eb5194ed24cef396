// torch_binding.cpp: registers every operator of ops.h; a new one does not edit this file.
#include <torch/csrc/stable/library.h>

#include "ops.h"
#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
#define DEFINE(result, name, parameters, schema) ops.def(#name schema);
  KERNEL_OP_TABLE(DEFINE)
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#define IMPLEMENT_CPU(result, name, parameters, schema) ops.impl(#name, TORCH_BOX(&name##_cpu));
  KERNEL_OP_TABLE(IMPLEMENT_CPU)
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#define IMPLEMENT_CUDA(result, name, parameters, schema) ops.impl(#name, TORCH_BOX(&name##_cuda));
  KERNEL_OP_TABLE(IMPLEMENT_CUDA)
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
