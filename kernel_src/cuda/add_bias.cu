// add_bias.cu: out = x + bias + residual, the bias the same for all rows; hfp_add_bias on CUDA.
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// Inputs: x, perhaps the residual, bias.
template <int kCount>
struct AddBias {
  static constexpr int kInputs = kCount, kStreamed = kCount - 1;
  static constexpr int kRows = kCount == 2 ? kOneInputRows : 1;
  static const char *name() { return "add_bias"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[kCount]) const {
    if constexpr (kCount == 2) return add(in[0], in[1]);
    float sum[N], other[N];
    in[0].get(sum);
#pragma unroll
    for (int k = kCount - 1; k > 0; --k) {
      in[k].get(other);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += other[i];
    }
    return rounded<T>(sum);
  }
};

template <int kCount>
int32_t run(const AddBiasArgs &a, void *stream) {
  Elementwise<kCount> e{};
  e.out = a.out;
  e.in[0] = a.x;
  e.rows[0] = a.x_rows;
  if constexpr (kCount == 3) {
    e.in[1] = a.residual;
    e.rows[1] = a.residual_rows;
  }
  Rows &bias = e.rows[kCount - 1];
  e.in[kCount - 1] = a.bias;
  bias.rows = bias.n2 = a.x_rows.rows;  // stride 0
  bias.cols = a.x_rows.cols;
  switch (a.type) {
    case DType::F32: return launch_elementwise<float>(e, AddBias<kCount>{}, stream);
    case DType::F16: return launch_elementwise<__half>(e, AddBias<kCount>{}, stream);
    default: return launch_elementwise<__nv_bfloat16>(e, AddBias<kCount>{}, stream);
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
