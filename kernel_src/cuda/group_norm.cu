// group_norm.cu: group norm with an optional SiLU. Wu & He, arXiv:1803.08494.
//
// In NCHW a group lies in one piece, which stays on chip if it fits there: in a cluster (group_held.cuh), or,
// of a half type and large, in CTAs all over the GPU (group_spread.cuh). Others are read twice: from L2 the
// second time if they fit there (group_overlap.cuh), else in three launches (group_parts.cuh). NHWC is read
// twice (group_last.cuh).
#include "group_held.cuh"
#include "group_last.cuh"
#include "group_overlap.cuh"
#include "group_parts.cuh"
#include "group_spread.cuh"

namespace hfp::cuda {

namespace group_norms {

namespace {

template <class T, bool kSilu>
int32_t launch_group_norm(const GroupNormArgs &args, int device, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t width = args.channels / args.groups;
  const int64_t parts = args.parts < kMostReadParts ? args.parts : kMostReadParts;
  const Params p{args, width, width * args.positions, parts, 0, 0, 0, {}};
  const bool aligned = pointer_aligned(args.x) && pointer_aligned(args.out);
  if (args.channels_last) {
    int32_t status = HFP_OK;
    if (aligned && launch_last<T, kWidest, kSilu>(p, stream, &status)) return status;
    return launch_any<T, kSilu>(p, stream);
  }
  if (aligned && args.positions % kWidest == 0) {
    int32_t status = HFP_OK;
    if constexpr (sizeof(T) == 2) {
      if (p.elements / kWidest > kMostFew && launch_spread<T, kWidest, kSilu>(p, device, stream, &status)) {
        return status;
      }
    }
    if (launch_held<T, kWidest, kSilu>(p, device, stream, &status)) return status;
    if (launch_overlap<T, kWidest, kSilu>(p, device, stream, &status)) return status;
    return launch_first<T, kWidest, kSilu>(p, stream);
  }
  return launch_first<T, 1, kSilu>(p, stream);
}

template <class T>
int32_t launch_group_norm(const GroupNormArgs &args, int device, void *stream) {
  return args.silu ? launch_group_norm<T, true>(args, device, stream)
                   : launch_group_norm<T, false>(args, device, stream);
}

}  // namespace

}  // namespace group_norms

int32_t group_norm(const GroupNormArgs &args, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), group_norms::kName);
  switch (args.type) {
    case DType::F32: return group_norms::launch_group_norm<float>(args, device, stream);
    case DType::F16: return group_norms::launch_group_norm<__half>(args, device, stream);
    default: return group_norms::launch_group_norm<__nv_bfloat16>(args, device, stream);
  }
}

}  // namespace hfp::cuda
