// add_bias.cu: out = x + bias + residual, the bias the same for all rows; hfp_add_bias on CUDA.
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// Inputs: x, perhaps the residual, bias.
template <int kCount>
struct AddBias {
  static constexpr int kInputs = kCount, kStreamed = kCount - 1;
  static const char *name() { return "add_bias"; }

  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&a)[kCount][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[0][i] += a[kCount - 1][i];
      if constexpr (kCount == 3) a[0][i] += a[1][i];
    }
  }
};

template <int kCount>
int32_t run(const AddBiasArgs &a, void *stream) {
  ElementwiseParams<kCount> p{};
  p.out = a.out;
  p.in[0] = a.x;
  p.rows[0] = a.x_rows;
  if constexpr (kCount == 3) {
    p.in[1] = a.residual;
    p.rows[1] = a.residual_rows;
  }
  Rows &bias = p.rows[kCount - 1];
  p.in[kCount - 1] = a.bias;
  bias.rows = bias.n2 = a.x_rows.rows;  // stride 0
  bias.cols = a.x_rows.cols;
  switch (a.type) {
    case DType::F32: return launch_elementwise<float, AddBias<kCount>>(p, stream);
    case DType::F16: return launch_elementwise<__half, AddBias<kCount>>(p, stream);
    default: return launch_elementwise<__nv_bfloat16, AddBias<kCount>>(p, stream);
  }
}

}  // namespace

int32_t add_bias(const AddBiasArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "add_bias");
  return a.residual != nullptr ? run<3>(a, stream) : run<2>(a, stream);
}

}  // namespace hfp::cuda
