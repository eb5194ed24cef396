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
  __device__ __forceinline__ static void apply(float (&a)[2][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[0][i] = activate<kActivation, sizeof(T) == 4>(a[0][i]);
    round_to<T>(a[0]);
#pragma unroll
    for (int i = 0; i < N; ++i) a[0][i] *= a[1][i];
  }
};

}  // namespace

int32_t gated(const GatedArgs &a, int device, void *stream) {
  ElementwiseParams<2> p{};
  p.out = a.out;
  p.in[0] = a.gate;
  p.in[1] = a.up;
  p.rows[0] = a.gate_rows;
  p.rows[1] = a.up_rows;
  return launch_activation<Gated>(p, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
