// add_activation.cu: out = act(x + bias), the bias the same for all rows; hfp_add_gelu and
// hfp_add_silu on CUDA.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// Inputs: x, bias; the sum is rounded, then all is in fp32 and rounded once.
template <int kActivation>
struct AddActivation {
  static constexpr int kInputs = 2, kStreamed = 1, kRows = kOneInputRows;
  static const char *name() { return "add_activation"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float sum[N];
    add(in[0], in[1]).get(sum);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = activate<kActivation, sizeof(T) == 4>(sum[i]);
    return rounded<T>(sum);
  }
};

}  // namespace

int32_t add_activation(const PointwiseArgs &a, int device, void *stream) {
  const auto e = Elementwise<2>::of(a.out, a.in[0], a.in[1]);
  return launch_activation<AddActivation>(e, a.in[0].type, a.activation, device, stream);
}

}  // namespace hfp::cuda
