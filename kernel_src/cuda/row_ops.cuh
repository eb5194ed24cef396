// row_ops.cuh: what softmax, argmax, topk and sample share: vectors of a row of any alignment and
// length, and the plan of rows and parts.
//
// A row is always cut into the same vectors of 16 bytes, also where it is not aligned or ends
// within one; those are then read element by element. So a row's bits do not depend on its alignment.
#pragma once

#include "activations.cuh"
#include "packed.cuh"
#include "rows.cuh"

namespace hfp::cuda {

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

template <class T>
inline constexpr int kVectorOf = kVectorBytes / static_cast<int>(sizeof(T));

// Vector `at` of a row of `cols` elements; what lies past its end is 0.
template <class T, bool kAligned, Cache kCache = Cache::kStream, class Index>
__device__ __forceinline__ void load_vector(Vec<T, kVectorOf<T>> &v, const T *row, Index at,
                                            Index cols) {
  constexpr int N = kVectorOf<T>;
  if constexpr (kAligned) {
    v.template load<kCache>(row + at * N);
  } else {
    v.zero();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Index col = at * N + i;
      if (col >= cols) continue;
      if constexpr (sizeof(T) == 4) {
        v.word[i] = __ldca(reinterpret_cast<const unsigned int *>(row) + col);
      } else {
        const uint32_t half = __ldca(reinterpret_cast<const unsigned short *>(row) + col);
        v.word[i / 2] |= half << (i % 2 * 16);
      }
    }
  }
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_vector(T *row, int64_t at, int64_t cols,
                                             const float (&value)[kVectorOf<T>]) {
  constexpr int N = kVectorOf<T>;
  if constexpr (kAligned) {
    store_as<T>(row, at * N, value);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float one[1] = {value[i]};
      if (at * N + i < cols) store_as<T>(row, at * N + i, one);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Waves: what a warp has on its way of a row, kVectors vectors a lane

template <class T, int kVectors>
using Wave = Vec<T, kVectorOf<T>>[kVectors];

template <class T>
inline constexpr uint32_t kMinusInfinities = std::is_same_v<T, float>    ? 0xff800000u
                                             : std::is_same_v<T, __half> ? 0xfc00fc00u
                                                                         : 0xff80ff80u;

// The wave that begins at vector `at` of a row of `cols` elements; what lies past its end is -inf.
template <class T, bool kAligned, int kVectors>
__device__ __forceinline__ void load_wave(Wave<T, kVectors> &v, const T *row, int64_t at,
                                          int64_t cols) {
  constexpr int N = kVectorOf<T>;
  const int lane = threadIdx.x % 32u;
  const T *from = row + (at + lane) * N;
  const bool whole = (at + 32 * kVectors) * N <= cols;
  if (kAligned && whole) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) v[u].template load<Cache::kStream>(from + 32 * u * N);
    return;
  }
  const int left = whole ? 32 * kVectors * N : static_cast<int>(cols - (at + lane) * N);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) v[u].word[i] = kMinusInfinities<T>;
    if constexpr (kAligned) {
      if (32 * u * N < left) v[u].template load<Cache::kStream>(from + 32 * u * N);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int col = 32 * u * N + i;
        if (col >= left) continue;
        if constexpr (sizeof(T) == 4) {
          v[u].word[i] = __ldca(reinterpret_cast<const unsigned int *>(from) + col);
        } else {
          const uint32_t half = __ldca(reinterpret_cast<const unsigned short *>(from) + col);
          v[u].word[i / 2] = __byte_perm(v[u].word[i / 2], half, i % 2 == 0 ? 0x3254 : 0x5410);
        }
      }
    }
  }
}

// The greatest element of these vectors; a NaN is passed by or, with kNaN, the result.
template <class T, bool kNaN, int kVectors>
__device__ __forceinline__ float greatest(const Vec<T, kVectorOf<T>> *v) {
  constexpr int N = kVectorOf<T>;
  if constexpr (kInTwos<T, N> && kHasMaxOfTwos) {
    uint32_t two = v[0].word[0];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = u == 0 ? 1 : 0; i < N / 2; ++i) two = max_two<T, kNaN>(two, v[u].word[i]);
    }
    return unpack<T>(max_two<T, kNaN>(two, two >> 16)).x;
  } else {
    float high = minus_inf();
    bool nan = false;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      float x[N];
      v[u].get(x);
#pragma unroll
      for (int i = 0; i < N; ++i) high = fmaxf(high, x[i]), nan = nan || x[i] != x[i];
    }
    return kNaN && nan ? __int_as_float(0x7fffffff) : high;
  }
}

// ---------------------------------------------------------------------------------------------

// Whether whole vectors can be loaded and stored throughout.
inline bool rows_of_vectors(const Rows &r, const void *pointer, int element_bytes) {
  const int n = kVectorBytes / element_bytes;
  return narrow_to_pointer(widest_vector(r, element_bytes), pointer, element_bytes) == n;
}

// exp(d). Half types need 2^-11 or 2^-8 only.
template <class T>
__device__ __forceinline__ float exp_of(float d) {
  if constexpr (sizeof(T) == 4) return expf(d);
  else return fast_exp2(d * 1.4426950408889634f);
}

template <int kLanes>
__device__ __forceinline__ float max_lanes(float v) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane));
  return v;
}

__device__ __forceinline__ uint32_t max_over_warp(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int by = 16; by > 0; by /= 2) v = max(v, __shfl_xor_sync(~0u, v, by));
  return v;
#endif
}

__device__ __forceinline__ uint64_t max_over_warp(uint64_t v) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, v, by);
    v = other > v ? other : v;
  }
  return v;
}

// ---------------------------------------------------------------------------------------------
// Parts

// Where a row's parts are: part i has the columns [i * cols, (i + 1) * cols).
struct Parts {
  int64_t cols;
  int count;
  int ctas;  // per row, where the parts are split
};

inline Parts parts_of(int64_t cols) {
  const int count = static_cast<int>(row_parts(cols));
  return {part_cols(cols), count, (count + kSplitThreads / 32 - 1) / (kSplitThreads / 32)};
}


}  // namespace hfp::cuda
