// rope.cu: rotary position embedding of x, or of q and k; hfp_rope and hfp_rope_qk on CUDA.
#include "rope_launch.cuh"

namespace hfp::cuda {
namespace {

struct RopeLaunch {
  static constexpr char kOp[] = "rope";

  template <class T, class Tab, class W, int N, bool kInterleaved>
  static int32_t run(const RopeArgs &a, void *stream) {
    return launch_heads<T, Tab, W, N, kInterleaved, false>(a, stream, kOp);
  }
};

}  // namespace

int32_t rope(const RopeArgs &args, int device, void *stream) {
  RopeArgs a = args;
  a.weight_type = a.type;  // there is none
  return dispatch_rope<RopeLaunch>(a, device, stream, RopeLaunch::kOp);
}

}  // namespace hfp::cuda
