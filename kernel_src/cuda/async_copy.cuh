// async_copy.cuh: copies of 16 bytes from global to shared memory that a thread waits for later
// (cp.async, sm_80). They go past the registers and L1, so that all of a thread's are on their way at
// once. Waiting is for a thread's own copies: to see those of others takes a barrier as well.
#pragma once

#include "mailbox.cuh"

namespace hfp::cuda {

// Where a warp's copies should begin in shared memory: its 512 bytes are then four lines, not five.
inline constexpr int kLineBytes = 128;

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy_later(uint4 *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// bytes: how many of the 16 are read, 16 or 0; the others become 0.
__device__ __forceinline__ void copy_later(uint4 *to, const void *from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes)
               : "memory");
}

// What is read so L2 gives up before what it holds for other CTAs.
__device__ __forceinline__ uint64_t passing_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_passing(uint4 *to, const void *from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "l"(policy)
               : "memory");
}

// The copies since the last call are a group.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until no more than the newest kGroups are on their way.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
#endif

}  // namespace hfp::cuda
