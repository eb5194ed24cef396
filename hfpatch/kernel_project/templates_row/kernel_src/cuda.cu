// cuda.cu: the operators for CUDA tensors.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "formulas.h"
#include "ops.h"

using torch::headeronly::ScalarType;

// torch's header declares it in CUDA builds of torch only.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The sum over the threads of a block, in all of them.
__device__ float sum_over_block(float value) {
  __shared__ float of_warp[kWarps];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += of_warp[i];
  return sum;
}

// A block takes a row. x and y may be the same memory: a thread writes what it has read itself.
template <class X, class W>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const X *x, const W *w, X *y, int64_t width, float eps) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float v = static_cast<float>(x[start + i]);
    squares += v * v;
  }
  const float scale = scale_of(sum_over_block(squares), width, eps);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float weight = w == nullptr ? 1.0f : static_cast<float>(w[i]);
    y[start + i] = static_cast<X>(normed(static_cast<float>(x[start + i]), scale, weight));
  }
}

template <class F>
void with_type(ScalarType type, const F &run) {
  switch (type) {
    case ScalarType::Float:
      return run(float());
    case ScalarType::Half:
      return run(__half());
    case ScalarType::BFloat16:
      return run(__nv_bfloat16());
    default:
      STD_TORCH_CHECK(false, "expected float32, float16 or bfloat16");
  }
}

// x is contiguous; its dtype and the weight's need not be the same.
void norm(const Tensor &x, const Weight &weight, double eps, const Tensor &out, int64_t width) {
  const int64_t rows = width == 0 ? 0 : x.numel() / width;
  STD_TORCH_CHECK(rows <= INT32_MAX, "expected at most 2147483647 rows");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const Weight dense =
      weight.has_value() ? Weight(torch::stable::contiguous(*weight)) : std::nullopt;
  with_type(x.scalar_type(), [&](auto x_type) {
    using X = decltype(x_type);
    with_type(dense.has_value() ? dense->scalar_type() : ScalarType::Float, [&](auto w_type) {
      using W = decltype(w_type);
      if (rows == 0) return;  // a launch of no blocks is an error
      const void *w = dense.has_value() ? dense->const_data_ptr() : nullptr;
      rms_norm_kernel<<<static_cast<unsigned>(rows), kThreads, 0,
                        static_cast<cudaStream_t>(stream)>>>(
          static_cast<const X *>(x.const_data_ptr()), static_cast<const W *>(w),
          static_cast<X *>(out.mutable_data_ptr()), width, static_cast<float>(eps));
      const cudaError_t error = cudaGetLastError();
      STD_TORCH_CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorString(error));
    });
  });
}

}  // namespace

Tensor rms_norm_cuda(const Tensor &x, const Weight &weight, double eps) {
  const int64_t width = checked(x, weight);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor dense = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(dense);
  norm(dense, weight, eps, out, width);
  return out;
}

void rms_norm__cuda(const Tensor &x, const Weight &weight, double eps) {
  const int64_t width = checked(x, weight);
  STD_TORCH_CHECK(x.is_contiguous(), "expected a contiguous tensor: it is written in place");
  norm(x, weight, eps, x, width);
}
