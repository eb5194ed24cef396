// activation_backward.cu: dx = grad * act'(x); hfp_gelu_backward and hfp_silu_backward on CUDA.
#include "activations_grad.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// In fp32, rounded once. Inputs: grad, x.
template <int kActivation>
struct ActivationBackward {
  static constexpr int kInputs = 2;
  static const char *name() { return "activation_backward"; }

  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&a)[2][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[0][i] *= activate_slope<kActivation, sizeof(T) == 4>(a[1][i]).slope;
    }
  }
};

}  // namespace

int32_t activation_backward(const ActivationBackwardArgs &a, int device, void *stream) {
  ElementwiseParams<2> p{};
  p.out = a.dx;
  p.in[0] = a.grad;
  p.in[1] = a.x;
  p.rows[0] = a.grad_rows;
  p.rows[1] = a.x_rows;
  return launch_activation<ActivationBackward>(p, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
