// layer_norm_backward.cu: hfp_layer_norm_backward on CUDA.
#include "norm_backward.cuh"

namespace hfp::cuda {

int32_t layer_norm_backward(const NormBackwardArgs &a, int device, void *stream) {
  return norm_backward</*kCentred=*/true>(a, device, stream, "layer_norm_backward");
}

}  // namespace hfp::cuda
