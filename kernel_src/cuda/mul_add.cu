// mul_add.cu: out = a * b + c, b and c broadcast over rows; hfp_mul_add on CUDA.
#include "mul_add.cuh"

namespace hfp::cuda {

int32_t mul_add(const MulAddArgs &a, int device, void *stream) {
  Elementwise<3> e{a.out, {a.a, a.b, a.c}, {a.a_rows, a.b_rows, a.c_rows}};
  return launch_mul_add<false>(e, a.type, a.param_type, a.out_type, a.eager, device, stream);
}

}  // namespace hfp::cuda
