// rope_launch.cuh: the kernel for a call of rope or qk_norm_rope whose norm, if any, is of one head.
#pragma once

#include <utility>

#include "rope_heads.cuh"
#include "rope_joint.cuh"
#include "rope_packed.cuh"
#include "rope_whole.cuh"

namespace hfp::cuda {

template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm>
int32_t launch_heads(const RopeArgs &a, void *stream, const char *op) {
  RopeParams p = rope_params(a, N);
  p.inverse_q = p.inverse_k = static_cast<float>(1.0 / static_cast<double>(a.dim));
  while (p.lanes < p.units && p.lanes < 32) p.lanes *= 2, ++p.lane_bits;
  p.chunks = (p.units + p.lanes - 1) / p.lanes;
  constexpr bool kFast = kFastUnits<T, Tab, N>;
  if constexpr (kFast && kCanBeWide<Tab, N, kInterleaved>) {
    // Without a norm, of one tensor: two heads share its angles.
    if (p.wide && !p.paired && (kNorm || a.k.heads == 0) && whole_fits(a, p)) {
      return launch_whole<T, Tab, N, kInterleaved, kNorm, true>(a, p, stream, op);
    }
  }
  if constexpr (kFast && kNorm) {
    if (whole_fits(a, p)) {
      return launch_whole<T, Tab, N, kInterleaved, true, false>(a, p, stream, op);
    }
  }
  if constexpr (kFast && !kNorm) {
    if (angles_shared(a, p)) {
      if (p.q.heads < p.k.heads) std::swap(p.q, p.k);
      if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
        PackedRopeParams packed;
        if (packed_fits(a, p, packed)) return launch_packed<T>(packed, stream, op);
      }
      return launch_joint<T, Tab, N, kInterleaved>(a, p, stream, op);
    }
  }
  return launch_any_heads<T, Tab, W, N, kInterleaved, kNorm>(a, p, stream, op);
}

// Picks the types and the vector: Launch::run<T, Tab, W, N, kInterleaved>(...). The fast kernels
// have 16-byte vectors, weights of the dtype of x and tables of that or fp32; the general ones
// vectors of 4 elements or 1, and any dtypes.
template <class Launch, class T, class Tab, class W, int N>
int32_t dispatch_style(const RopeArgs &a, void *stream) {
  if constexpr (N > 1) {
    if (a.interleaved) return Launch::template run<T, Tab, W, N, true>(a, stream);
  }
  return Launch::template run<T, Tab, W, N, false>(a, stream);
}

template <class Launch, class T>
int32_t dispatch_vector(const RopeArgs &a, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  if (a.weight_type == a.type && units_fit(a, kWidest)) {
    if constexpr (!std::is_same_v<T, float>) {
      if (a.table_type == a.type) return dispatch_style<Launch, T, T, T, kWidest>(a, stream);
    }
    return dispatch_style<Launch, T, float, T, kWidest>(a, stream);
  }
  if (units_fit(a, 4)) return dispatch_style<Launch, T, AnyType, AnyType, 4>(a, stream);
  return dispatch_style<Launch, T, AnyType, AnyType, 1>(a, stream);
}

template <class Launch>
int32_t dispatch_rope(const RopeArgs &a, int device, void *stream, const char *op) {
  if (a.batch <= 0 || a.seq <= 0 || a.dim <= 0 || a.q.heads + a.k.heads <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), op);
  switch (a.type) {
    case DType::F32: return dispatch_vector<Launch, float>(a, stream);
    case DType::F16: return dispatch_vector<Launch, __half>(a, stream);
    default: return dispatch_vector<Launch, __nv_bfloat16>(a, stream);
  }
}

}  // namespace hfp::cuda
