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
int32_t run(const Elementwise<kCount> &e, DType type, void *stream) {
  switch (type) {
    case DType::F32: return launch_elementwise<float>(e, AddBias<kCount>{}, stream);
    case DType::F16: return launch_elementwise<__half>(e, AddBias<kCount>{}, stream);
    default: return launch_elementwise<__nv_bfloat16>(e, AddBias<kCount>{}, stream);
  }
}

}  // namespace

int32_t add_bias(const PointwiseArgs &a, int device, void *stream) {
  const Input &x = a.in[0], &bias = a.in[1], &residual = a.in[2];
  if (x.rows.rows <= 0 || x.rows.cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "add_bias");
  if (residual.data == nullptr) return run(Elementwise<2>::of(a.out, x, bias), x.type, stream);
  return run(Elementwise<3>::of(a.out, x, residual, bias), x.type, stream);
}

}  // namespace hfp::cuda
