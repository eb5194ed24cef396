// gate_residual.cu: out = residual + gate * x, the gate broadcast over rows; hfp_gate_residual on
// CUDA.
#include "mul_add.cuh"

namespace hfp::cuda {

int32_t gate_residual(const PointwiseArgs &a, int device, void *stream) {
  const Input &residual = a.in[0], &gate = a.in[1], &x = a.in[2];
  const auto e = Elementwise<3>::of(a.out, x, residual, gate);
  return launch_mul_add<true>(e, x.type, gate.type, a.out_type, a.eager, device, stream);
}

}  // namespace hfp::cuda
