// gated.cu: out = act(gate) * up; hfp_gated and hfp_gated_packed on CUDA. Shazeer,
// arXiv:2002.05202.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// act(gate) is rounded to the dtype before it is multiplied, as in eager PyTorch.
template <int kActivation>
struct Gated {
  static constexpr int kInputs = 2;
  static const char *name() { return "gated"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float gate[N];
    in[0].get(gate);
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = activate<kActivation, sizeof(T) == 4>(gate[i]);
    return multiply(rounded<T>(gate), in[1]);
  }
};

}  // namespace

int32_t gated(const GatedArgs &a, int device, void *stream) {
  Elementwise<2> e{};
  e.out = a.out;
  e.in[0] = a.gate;
  e.in[1] = a.up;
  e.rows[0] = a.gate_rows;
  e.rows[1] = a.up_rows;
  return launch_activation<Gated>(e, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
