// group_moments.cuh: sums over a group as count, mean and squared deviations, and how they are merged.
#pragma once

#include "common.cuh"

namespace hfp::cuda::group_norms {

inline constexpr int kWarp = 32;

// Count, mean and sum of squared deviations; Chan et al., 1979.
struct Moments {
  float n = 0.0f, mean = 0.0f, m2 = 0.0f;

  // The fast division is good to 2 units in the last place, for counts below 2^126.
  __device__ void merge(const Moments &b) {
    const float total = n + b.n, d = b.mean - mean;
    const float share = total > 0.0f ? __fdividef(b.n, total) : 0.0f;
    mean += d * share;
    m2 += b.m2 + d * d * n * share;
    n = total;
  }

  // Of kLanes neighbouring lanes; the same for each of them.
  template <int kLanes = kWarp>
  __device__ void merge_warp() {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) {
      Moments b;
      b.n = __shfl_xor_sync(~0u, n, lane);
      b.mean = __shfl_xor_sync(~0u, mean, lane);
      b.m2 = __shfl_xor_sync(~0u, m2, lane);
      // Both lanes of a pair must merge in one order to hold the same bits. Selected, and one number
      // at a time: for a branch the halves of the warp would take their turns at the whole merge,
      // and a choice between structures is one between addresses in local memory.
      const bool upper = (threadIdx.x & static_cast<unsigned>(lane)) != 0;
      const Moments other{upper ? n : b.n, upper ? mean : b.mean, upper ? m2 : b.m2};
      n = upper ? b.n : n, mean = upper ? b.mean : mean, m2 = upper ? b.m2 : m2;
      merge(other);
    }
  }
};

// Sums relative to the first element that a thread sees. It is one of the sample, so at most as
// many digits of the variance as log2 of the count can cancel.
struct Sums {
  float pivot = 0.0f, sum = 0.0f, squares = 0.0f;

  __device__ void add(float x) {
    const float d = x - pivot;
    sum += d;
    squares += d * d;
  }
  // `seen`: elements so far.
  template <class T, int N>
  __device__ void add_vector(const Vec<T, N> &v, int &seen) {
    float value[N];
    v.get(value);
    if (seen == 0) pivot = value[0];
#pragma unroll
    for (int k = 0; k < N; ++k) add(value[k]);
    seen += N;
  }
  __device__ Moments moments(int64_t count) const {
    Moments m;
    m.n = static_cast<float>(count);
    if (count > 0) {
      const float mean = __fdividef(sum, m.n);
      m.mean = pivot + mean;
      m.m2 = fmaxf(squares - sum * mean, 0.0f);
      if (squares != squares) m.m2 = squares;  // fmaxf drops NaN
    }
    return m;
  }
};

// The same for all lanes at once: sums relative to a mean near theirs, that of the first of them. At most
// as many digits as log2 of their number can cancel; a step is three additions and no division.
struct Pool {
  float sum = 0.0f, squares = 0.0f;

  __device__ void add(const Moments &m, float pivot) {
    const float d = m.mean - pivot, of_all = m.n * d;
    sum += of_all;
    squares += fmaf(of_all, d, m.m2);
  }
  // n: elements of all lanes, as every caller knows.
  __device__ Moments merge_warp(float pivot, float n) {
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lane);
      squares += __shfl_xor_sync(~0u, squares, lane);
    }
    Moments m;
    m.n = n;
    const float mean = n > 0.0f ? __fdividef(sum, n) : 0.0f;
    m.mean = pivot + mean;
    m.m2 = fmaxf(squares - sum * mean, 0.0f);
    if (squares != squares) m.m2 = squares;  // fmaxf drops NaN
    return m;
  }
};

#if __CUDA_ARCH__ >= 800
// Of the elements that a warp's lanes have added up.
__device__ __forceinline__ Moments merge_lanes(const Sums &sums, int seen) {
  const Moments m = sums.moments(seen);
  const float pivot = __shfl_sync(~0u, m.mean, 0);
  Pool pool;
  pool.add(m, pivot);
  return pool.merge_warp(pivot, static_cast<float>(__reduce_add_sync(~0u, seen)));
}
#endif

}  // namespace hfp::cuda::group_norms
