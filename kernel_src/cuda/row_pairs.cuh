// row_pairs.cuh: rows that the two CTAs of a cluster hold (sm_90), each one half of the columns.
//
// Half as large CTAs begin and end more evenly: those of wide rows load all at once, then compute all at
// once, and the last rows are left to few SMs. The warps of a row send their sums to both CTAs
// (mailbox.cuh), which add them up in the order of one CTA: same bits.
#pragma once

#include "layer_map.cuh"
#include "mailbox.cuh"

namespace hfp::cuda {

// Kernels of pairs are empty where there are no clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kRowPairs = false;
#else
inline constexpr bool kRowPairs = true;
#endif

// The threads of a row, as Group<kCta, kRowThreads, kVectors>: no vector is left over.
template <int kVectors>
struct PairGroup : Group<kCta, kRowThreads, kVectors> {
  using Own = Group<kCta, kRowThreads, kVectors>;
  static constexpr int kSize = 2;
  // Floats of shared memory for a sum: what the warps send, and the mailbox.
  static constexpr int kShared = kTwicePartials + sizeof(Mailbox) / sizeof(float);

  __device__ static unsigned warps() { return kSize * (blockDim.x / 32u); }
  // Read anew each time, rather than kept: layer_norm has no register for it.
  __device__ static unsigned warp() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank * (blockDim.x / 32u) + threadIdx.x / 32u;
  }
  __device__ static int index() { return warp() * (kVectors * 32u) + threadIdx.x % 32u; }

  __device__ static Mailbox &mail(float *partial) {
    return *reinterpret_cast<Mailbox *>(partial + kTwicePartials);
  }

  // By all threads, before any other of these: gets `partial` ready for up to `sums` sums, each with
  // `floats` of every vector of a thread. The other CTA can send from join() on.
  __device__ static void begin(float *partial, int sums, int floats) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int i = 0; i < sums; ++i) {
        mail(partial + i * kShared).init();
        mail(partial + i * kShared).announce(warps() * kVectors * floats * sizeof(float));
      }
    }
#endif
    Team<true>::leave();
  }
  __device__ static void join() { Team<true>::left(); }

  __device__ static void put(float *partial, unsigned at, float v) {
#if __CUDA_ARCH__ >= 900
    const float sent[1] = {v};
#pragma unroll
    for (int rank = 0; rank < kSize; ++rank) mail(partial).send(partial + at, sent, rank);
#endif
  }
  __device__ static void meet(float *partial) {
#if __CUDA_ARCH__ >= 900
    mail(partial).wait(0);
#endif
  }
  __device__ static float *next(float *partial) { return partial + kShared; }

  __device__ static float sum(float (&v)[kVectors], float *partial) {
    const float of_32 = Own::sum_lanes_of_each(v);
    constexpr unsigned kEach = 32 / kVectors;
    const unsigned lane = threadIdx.x % 32u, groups = kVectors * warps();
    if (lane % kEach == 0) put(partial, Own::group(warp(), lane / kEach), of_32);
    meet(partial);
    float all = lane < groups ? partial[lane] : 0.0f;
    if (lane + 32 < groups) all += partial[lane + 32];
    return Own::sum_lanes(all);
  }
};

}  // namespace hfp::cuda
