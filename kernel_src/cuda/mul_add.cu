// mul_add.cu: out = a * b + c, b and c broadcast over rows; hfp_mul_add on CUDA.
#include "mul_add.cuh"

namespace hfp::cuda {

int32_t mul_add(const PointwiseArgs &a, int device, void *stream) {
  const auto e = Elementwise<3>::of(a.out, a.in[0], a.in[1], a.in[2]);
  return launch_mul_add<false>(e, a.in[0].type, a.in[1].type, a.out_type, a.eager, device, stream);
}

}  // namespace hfp::cuda
