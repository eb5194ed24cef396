// activation.cu: out = act(x); hfp_gelu and hfp_silu on CUDA.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// In fp32, rounded once.
template <int kActivation>
struct Activation {
  static constexpr int kInputs = 1, kRows = kOneInputRows;
  static const char *name() { return "activation"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[1]) const {
    float x[N];
    in[0].get(x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = activate<kActivation, sizeof(T) == 4>(x[i]);
    return rounded<T>(x);
  }
};

}  // namespace

int32_t activation(const ActivationArgs &a, int device, void *stream) {
  Elementwise<1> e{};
  e.out = a.out;
  e.in[0] = a.x;
  e.rows[0] = a.x_rows;
  return launch_activation<Activation>(e, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
