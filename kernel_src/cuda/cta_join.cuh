// cta_join.cuh: one number out of those of all threads of a CTA.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

struct Sum {
  template <class T>
  __device__ __forceinline__ static T join(T a, T b) { return a + b; }
};

// Over the CTA, of whole warps, to thread 0. Join::join(a, b) joins two; with 0 it changes nothing. Always
// in the same order.
template <class Join, class T>
__device__ __forceinline__ T join_all(T value) {
  __shared__ T parts[32];
#pragma unroll
  for (int across = 16; across > 0; across /= 2) {
    value = Join::join(value, __shfl_xor_sync(~0u, value, across));
  }
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < warps ? parts[lane] : T{0};
#pragma unroll
    for (int across = 16; across > 0; across /= 2) {
      value = Join::join(value, __shfl_xor_sync(~0u, value, across));
    }
  }
  return value;
}

}  // namespace hfp::cuda
