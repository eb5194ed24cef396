// group_common.cuh: what the kernels of group norm share: parameters, places, the result of a vector.
#pragma once

#include "activations.cuh"
#include "elementwise.cuh"
#include "group_moments.cuh"

namespace hfp::cuda::group_norms {

inline constexpr const char *kName = "group_norm";

struct Params {
  static constexpr bool kStartsEarly = true;
  const GroupNormArgs a;
  int64_t width;     // channels of a group
  int64_t elements;  // of a group
  int64_t parts;     // of a group; at most as many as there are places in a.stats
  int64_t chunk;     // of a part: elements, or positions (group_last.cuh)
  int64_t work;      // CTAs' worth of it
  int lanes;         // group_last.cuh: positions that a CTA looks at at once
  FastDivisor channel_vectors;  // NCHW
};

// The place of part p of group `unit` in stats; p == parts: mean and rstd.
__device__ __forceinline__ float *slot(const Params &p, int64_t unit, int64_t part) {
  return p.a.stats + (unit * (p.a.parts + 1) + part) * 2;
}

struct Stats {
  float mean, rstd;
};

__device__ __forceinline__ float reciprocal_deviation(const Params &p, const Moments &m) {
  return rsqrtf(m.m2 / static_cast<float>(p.elements) + p.a.eps);
}

__device__ __forceinline__ Stats merged(const Params &p, int64_t unit) {
  const float *from = slot(p, unit, p.a.parts);
  return {from[0], from[1]};
}

__device__ __forceinline__ float parameter(const void *from, DType type, int64_t at,
                                           float otherwise) {
  if (from == nullptr) return otherwise;
  float value[1];
  load_any<1>(value, from, type, at);
  return value[0];
}

// y is rounded to T before the activation, as by the two modules. The store is an intrinsic because
// the compiler takes an assignment of 16 bytes apart here, into four stores of words that lie 16 bytes
// from those of the next lane.
// passing: L2 gives the result up before what it holds for other CTAs.
template <class T, int N, bool kSilu>
__device__ __forceinline__ void store_result(T *to, float (&y)[N], bool passing = false) {
  if constexpr (kSilu) {
    round_to<T>(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = activate<HFP_ACT_SILU, std::is_same_v<T, float>>(y[k]);
  }
  Vec<T, N> v;
  v.set(y);
  if constexpr (Vec<T, N>::kBytes == kVectorBytes) {
    const uint4 words = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    if (passing) __stcs(reinterpret_cast<uint4 *>(to), words);
    else __stwb(reinterpret_cast<uint4 *>(to), words);
  } else {
    v.store(to);
  }
}

// One vector, with passing_policy().
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_passing(const T *from, uint64_t policy) {
  static_assert(Vec<T, N>::kBytes == kVectorBytes);
  Vec<T, N> v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from), "l"(policy)
               : "memory");
  return v;
}

inline int64_t up_to_grid(int64_t work) { return work < kMaxGrid ? work : kMaxGrid; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace hfp::cuda::group_norms
