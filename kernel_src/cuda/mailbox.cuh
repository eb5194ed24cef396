// mailbox.cuh: numbers that the warps of a cluster send to each other's shared memory (sm_90). Who
// waits, waits for the numbers themselves: no barrier of the whole cluster is in the way.
#pragma once

#include "cluster.cuh"

namespace hfp::cuda {

// A variable in shared memory, of this CTA or, by its rank, of another.
__device__ __forceinline__ uint32_t shared_address(const void *own) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(own));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void *own, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
  return there;
}
#endif

// In shared memory. Counts the bytes that arrive, in phases: a phase ends when as many have come as
// were announced. They may come before they are announced, not before the phase before has ended.
struct Mailbox {
  uint64_t barrier;

#if __CUDA_ARCH__ >= 900
  // By one thread; a barrier of the cluster has to follow before anyone uses the mailbox. A phase needs
  // `arrivals` of announce() or arrive().
  __device__ __forceinline__ void init(int arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(arrivals)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // init(), and announce() of the first phase, by all threads of a CTA.
  __device__ __forceinline__ void begin(int bytes) {
    if (threadIdx.x == 0) init();
    __syncwarp();  // compute-sanitizer's racecheck takes the two for accesses of two threads
    if (threadIdx.x == 0) announce(bytes);
  }

  // By one thread in each phase.
  __device__ __forceinline__ void announce(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
  }

  // That what this thread has written to this CTA's shared memory can be read.
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
                 : "memory");
  }

  // For the end of the phase of this parity; the first is 0.
  __device__ __forceinline__ void wait(uint32_t parity) {
    uint32_t done;
    do {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(&barrier)), "r"(parity)
          : "memory");
    } while (done == 0);
  }

  // `bytes` of global memory come to `to`, and count here: multiples of 16, from and to addresses that are too.
  __device__ __forceinline__ void fetch(void *to, const void *from, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
  }

  // v goes to CTA `rank`, which has a variable where this CTA has `to`, and counts in its mailbox
  // there. 16-byte aligned where it is that long.
  __device__ __forceinline__ void send(float *to, const float (&v)[1], unsigned rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     shared_address(to, rank)),
                 "r"(__float_as_uint(v[0])), "r"(shared_address(&barrier, rank))
                 : "memory");
  }
  __device__ __forceinline__ void send(float *to, const float (&v)[2], unsigned rank) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            shared_address(to, rank)),
        "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(shared_address(&barrier, rank))
        : "memory");
  }
  __device__ __forceinline__ void send(float *to, const float (&v)[4], unsigned rank) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(shared_address(to, rank)),
        "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])),
        "r"(__float_as_uint(v[3])), "r"(shared_address(&barrier, rank))
        : "memory");
  }
#endif
};

// Whose turn it is in a ring of mailboxes, and the parity of its phase.
struct RingTurn {
  int at = 0;
  uint32_t turn;
  __device__ __forceinline__ explicit RingTurn(uint32_t turn) : turn(turn) {}
  __device__ __forceinline__ void next(int count) {
    if (++at == count) at = 0, turn ^= 1;
  }
};

}  // namespace hfp::cuda
