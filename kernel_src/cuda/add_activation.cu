// add_activation.cu: out = act(x + bias), the bias the same for all rows; hfp_add_gelu and
// hfp_add_silu on CUDA.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// Inputs: x, bias; the sum is rounded, then all is in fp32 and rounded once.
template <int kActivation>
struct AddActivation {
  static constexpr int kInputs = 2, kStreamed = 1;
  static const char *name() { return "add_activation"; }

  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&a)[2][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[0][i] = __fadd_rn(a[0][i], a[1][i]);
    round_to<T>(a[0]);
#pragma unroll
    for (int i = 0; i < N; ++i) a[0][i] = activate<kActivation, sizeof(T) == 4>(a[0][i]);
  }
};

}  // namespace

int32_t add_activation(const AddActivationArgs &a, int device, void *stream) {
  ElementwiseParams<2> p{};
  p.out = a.out;
  p.in[0] = a.x;
  p.in[1] = a.bias;
  p.rows[0] = a.x_rows;
  p.rows[1].rows = p.rows[1].n2 = a.x_rows.rows;  // stride 0
  p.rows[1].cols = a.x_rows.cols;
  return launch_activation<AddActivation>(p, a.type, a.activation, device, stream);
}

}  // namespace hfp::cuda
