// rms_norm_backward.cu: hfp_rms_norm_backward on CUDA.
#include "norm_backward.cuh"

namespace hfp::cuda {

int32_t rms_norm_backward(const NormBackwardArgs &a, int device, void *stream) {
  return norm_backward</*kCentred=*/false>(a, device, stream, "rms_norm_backward");
}

}  // namespace hfp::cuda
