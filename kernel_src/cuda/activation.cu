// activation.cu: out = act(x); hfp_gelu and hfp_silu on CUDA.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// In fp32, rounded once.
template <int kActivation>
struct Activation {
  static constexpr int kInputs = 1;
  static const char *name() { return "activation"; }

  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&a)[1][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[0][i] = activate<kActivation, sizeof(T) == 4>(a[0][i]);
  }
};

}  // namespace

int32_t activation(const ActivationArgs &a, int device, void *stream) {
  ElementwiseParams<1> p{};
  p.out = a.out;
  p.in[0] = a.x;
  p.rows[0] = a.x_rows;
  return launch_activation<Activation>(p, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
