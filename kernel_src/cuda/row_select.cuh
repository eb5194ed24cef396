// row_select.cuh: the n-th greatest of a row without a sort, for topk and sample.
//
// Radix select: a histogram of the keys' leading 8 bits (row_keys.h) says in which bin the n-th
// greatest one is; the next digit is counted among that bin's keys only. All sums are of integers,
// so the result does not depend on who adds up what: a row is one CTA's, or, where rows are few and
// wide, that of a cluster of CTAs (sm_90), which add up their histograms through distributed shared
// memory.
#pragma once

#include "../row_keys.h"
#include "cluster.cuh"
#include "row_ops.cuh"

namespace hfp::cuda {

// ---------------------------------------------------------------------------------------------
// Walking a row

// f(value, col) for each vector of the thread's share; some may be past the end unless kAligned.
template <class T, bool kAligned, int kVectors = kSelectVectors, class F>
__device__ __forceinline__ void each_vector(const T *x, uint32_t cols, uint32_t first,
                                            uint32_t step, const F &f) {
  constexpr int N = kVectorOf<T>;
  const uint32_t vectors = (cols + N - 1) / N;  // cols < 2^31: nothing overflows
  for (uint32_t at = first; at < vectors; at += step * kVectors) {
    Vec<T, N> v[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (at + u * step < vectors) {
        load_vector<T, kAligned, Cache::kReadOnly>(v[u], x, at + u * step, cols);
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (at + u * step >= vectors) continue;
      float value[N];
      v[u].get(value);
      f(value, (at + u * step) * N);
    }
  }
}

// f(value, col) for each element.
template <class T, bool kAligned, int kVectors = kSelectVectors, class F>
__device__ __forceinline__ void each_element(const T *x, uint32_t cols, uint32_t first,
                                             uint32_t step, const F &f) {
  constexpr int N = kVectorOf<T>;
  each_vector<T, kAligned, kVectors>(x, cols, first, step, [&](const float (&value)[N],
                                                              uint32_t col) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (kAligned || col + i < cols) f(value[i], col + i);
    }
  });
}

// ---------------------------------------------------------------------------------------------
// Digits

struct Found {
  uint32_t digit;
  uint64_t left;  // what is wanted of the bin
  uint64_t all;   // what is in the bin
};

struct SelectShared {
  uint32_t bins[2][3][256];  // twice: one is read by others while the next is filled
  uint64_t total[256];
  Found found;
  uint64_t of_warp[32], best[2];
};

// By one warp: the digit, from the greatest down, at which the sums reach `wanted`.
__device__ __forceinline__ void find_digit(SelectShared &s, uint64_t wanted, float top_p) {
  const int lane = threadIdx.x % 32u;
  const uint64_t *of_digit = s.total + (255 - 8 * lane);
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) own += of_digit[-i];
  uint64_t upto = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, upto, by);
    if (lane >= by) upto += other;
  }
  asm volatile("" : "+f"(top_p));  // else it is kept as a double from round to round
  if (wanted == 0) wanted = weight_target(top_p, __shfl_sync(~0u, upto, 31));
  const unsigned reached = __ballot_sync(~0u, upto >= wanted);
  if (lane != (reached ? __ffs(reached) - 1 : 31)) return;
  uint64_t left = wanted - (upto - own);
#pragma unroll 1  // seven addresses would be kept in registers
  for (int i = 0; i < 7 && *of_digit < left; ++i) left -= *of_digit--;
  s.found = {static_cast<uint32_t>(of_digit - s.total), left, *of_digit};
}

// One digit: scan(bins) fills this CTA's histogram. wanted 0: weight_target(top_p, the sum of all).
// `round` counts the calls. Weights come in three parts of `bits` bits.
template <bool kCluster, bool kWeighted, class Scan>
__device__ __forceinline__ Found next_digit(SelectShared &s, int round, uint64_t wanted,
                                            float top_p, int bits, const Scan &scan) {
  constexpr int kParts = kWeighted ? 3 : 1;
  uint32_t(&bins)[3][256] = s.bins[round % 2];
  for (int i = threadIdx.x; i < 256 * kParts; i += blockDim.x) bins[i / 256][i % 256] = 0;
  __syncthreads();
  scan(bins);
  Team<kCluster>::sync();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    uint64_t sum = 0;
#pragma unroll
    for (unsigned rank = 0; rank < Team<kCluster>::size(); ++rank) {
      const auto &there = *Team<kCluster>::at(&bins, rank);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        sum += static_cast<uint64_t>(there[part][i]) << (part * bits);
      }
    }
    s.total[i] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) find_digit(s, wanted, top_p);
  __syncthreads();
  return s.found;
}

// Digits that are known, from the top.
struct Prefix {
  uint32_t bits = 0, mask = 0;
  __device__ __forceinline__ bool has(uint32_t key) const { return ((key ^ bits) & mask) == 0; }
  __device__ __forceinline__ void add(uint32_t digit, int shift) {
    bits |= digit << shift;
    mask |= 255u << shift;
  }
};

// The prefix of the n-th greatest key, of `digits` digits from `shift` down or as many as decide:
// all greater keys and `left` of the `all` that have it make n. keys(f) calls f(key) for this
// thread's share of the keys.
template <bool kCluster, class Keys>
__device__ __forceinline__ Prefix select_prefix(SelectShared &s, int &round, uint64_t n, int digits,
                                                int shift, uint64_t &left, uint64_t &all,
                                                const Keys &keys) {
  Prefix prefix;
  left = n;
  for (int d = 0; d < digits; ++d, shift -= 8) {
    const Found found =
        next_digit<kCluster, false>(s, round++, left, 0.0f, 0, [&](uint32_t(&bins)[3][256]) {
          keys([&](uint32_t key) {
            if (prefix.has(key)) atomicAdd(&bins[0][key >> shift & 255u], 1u);
          });
        });
    prefix.add(found.digit, shift);
    left = found.left;
    all = found.all;
    if (left == all) break;
  }
  return prefix;
}

__device__ __forceinline__ int index_digits(int64_t cols) {
  int digits = 1;
  while (digits < 4 && (cols - 1) >> (8 * digits) != 0) ++digits;
  return digits;
}

// The greatest over the team, on every thread. Each `slot` (0, 1) is used once.
template <bool kCluster>
__device__ __forceinline__ uint64_t max_over_team(SelectShared &s, int slot, uint64_t best) {
  const int lane = threadIdx.x % 32u, warps = blockDim.x / 32u;
  best = max_over_warp(best);
  __syncthreads();  // of_warp may still be read
  if (lane == 0) s.of_warp[threadIdx.x / 32u] = best;
  __syncthreads();
  best = max_over_warp(lane < warps ? s.of_warp[lane] : 0);
  if constexpr (kCluster) {
    if (threadIdx.x == 0) s.best[slot] = best;
    Team<true>::sync();
    best = max_over_warp(
        lane < kClusterSize ? *Team<true>::at(&s.best[slot], static_cast<unsigned>(lane)) : 0);
  }
  return best;
}

// ---------------------------------------------------------------------------------------------
// Sorting

// Descending, `size` a power of two.
__device__ __forceinline__ void bitonic_sort(uint64_t *list, int size) {
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int t = threadIdx.x; t < size / 2; t += blockDim.x) {
        const int i = 2 * t - (t & (apart - 1)), j = i + apart;
        const uint64_t a = list[i], b = list[j];
        if ((a < b) == ((i & run) == 0)) list[i] = b, list[j] = a;
      }
      __syncthreads();
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Launching

// `threads` and `cluster_threads`: of a CTA, the most and as many.
template <class Params>
int32_t launch_team(void (*one)(Params), void (*cluster)(Params), Params &p, int64_t element_bytes,
                    int threads, int cluster_threads, int device, void *stream, const char *op,
                    int64_t cluster_rows = kClusterRows) {
  const int64_t rows = p.x_rows.rows, in_vector = kVectorBytes / element_bytes;
  const int64_t vectors = (p.x_rows.cols + in_vector - 1) / in_vector;
  if (rows <= cluster_rows && vectors >= kClusterVectors &&
      has_clusters(reinterpret_cast<const void *>(cluster), device)) {
    p.first_row = 0;
    return launch_clusters(cluster, rows, cluster_threads, p, stream, op);
  }
  const int wanted = vectors < threads ? cta_threads(vectors, 1) : threads;
  return launch_rows(one, {Shape::kLoop, wanted, 1}, p, stream, op);
}

}  // namespace hfp::cuda
