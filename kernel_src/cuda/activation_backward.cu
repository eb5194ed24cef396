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
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float grad[N], x[N];
    in[0].get(grad);
    in[1].get(x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      grad[i] *= activate_slope<kActivation, sizeof(T) == 4>(x[i]).slope;
    }
    return rounded<T>(grad);
  }
};

}  // namespace

int32_t activation_backward(const ActivationBackwardArgs &a, int device, void *stream) {
  Elementwise<2> e{};
  e.out = a.dx;
  e.in[0] = a.grad;
  e.in[1] = a.x;
  e.rows[0] = a.grad_rows;
  e.rows[1] = a.x_rows;
  return launch_activation<ActivationBackward>(e, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
