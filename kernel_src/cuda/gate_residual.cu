// gate_residual.cu: out = residual + gate * x, the gate broadcast over rows; hfp_gate_residual on
// CUDA.
#include "mul_add.cuh"

namespace hfp::cuda {

int32_t gate_residual(const GateResidualArgs &a, int device, void *stream) {
  Elementwise<3> e{a.out, {a.x, a.residual, a.gate}, {a.x_rows, a.residual_rows, a.gate_rows}};
  return launch_mul_add<true>(e, a.type, a.gate_type, a.out_type, a.eager, device, stream);
}

}  // namespace hfp::cuda
