// cuda.cu: the operators for CUDA tensors.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

#include "formulas.h"
#include "ops.h"

using torch::headeronly::ScalarType;

// torch's header declares it in CUDA builds of torch only.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace {

constexpr int kThreads = 256;

// N elements that are read and written at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
  T value[N];
};

template <class T, int N, class Formula, class... In>
__global__ void __launch_bounds__(kThreads)
    map_kernel(Formula formula, int64_t vectors, T *__restrict__ out, const In *__restrict__... in) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += step) {
    Vec<T, N> result;
    const auto compute = [&](const auto &...loaded) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        result.value[j] = static_cast<T>(formula(static_cast<float>(loaded.value[j])...));
      }
    };
    compute(reinterpret_cast<const Vec<T, N> *>(in)[i]...);
    reinterpret_cast<Vec<T, N> *>(out)[i] = result;
  }
}

template <class T, int N, class Formula, class... In>
void launch(Formula formula, int64_t vectors, cudaStream_t stream, T *out, const In *...in) {
  if (vectors == 0) return;
  const int64_t blocks = std::min<int64_t>((vectors + kThreads - 1) / kThreads, 1 << 20);
  map_kernel<T, N><<<static_cast<int>(blocks), kThreads, 0, stream>>>(formula, vectors, out, in...);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorString(error));
}

// 16 bytes at a time where all pointers allow it, the rest one by one.
template <class T, class Formula, class... In>
void fill(Formula formula, int64_t n, cudaStream_t stream, T *out, const In *...in) {
  constexpr int N = 16 / sizeof(T);
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(out) % 16 == 0) && ... &&
       (reinterpret_cast<uintptr_t>(in) % 16 == 0));
  const int64_t vectors = aligned ? n / N : 0, done = vectors * N;
  launch<T, N>(formula, vectors, stream, out, in...);
  launch<T, 1>(formula, n - done, stream, out + done, (in + done)...);
}

// formula(x[i], rest[i]...) for every i, as a new tensor like x.
template <class Formula, class... Rest>
Tensor map(Formula formula, const Tensor &x, const Rest &...rest) {
  STD_TORCH_CHECK(((rest.sizes().equals(x.sizes()) && rest.scalar_type() == x.scalar_type() &&
                    rest.get_device_index() == x.get_device_index()) && ...),
                  "expected tensors of one shape, dtype and device");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const Tensor first = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(first);
  const auto run = [&](auto type, const auto &...tensors) {
    using T = decltype(type);
    fill<T>(formula, out.numel(), static_cast<cudaStream_t>(stream),
            static_cast<T *>(out.mutable_data_ptr()),
            static_cast<const T *>(tensors.const_data_ptr())...);
  };
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run(float(), first, torch::stable::contiguous(rest)...);
      break;
    case ScalarType::Half:
      run(__half(), first, torch::stable::contiguous(rest)...);
      break;
    case ScalarType::BFloat16:
      run(__nv_bfloat16(), first, torch::stable::contiguous(rest)...);
      break;
    default:
      STD_TORCH_CHECK(false, "expected float32, float16 or bfloat16");
  }
  return out;
}

}  // namespace

Tensor relu_squared_cuda(const Tensor &x) { return map(ReluSquared(), x); }

Tensor relu_squared_backward_cuda(const Tensor &grad, const Tensor &x) {
  return map(ReluSquaredBackward(), grad, x);
}
