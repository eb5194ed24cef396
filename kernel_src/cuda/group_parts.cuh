// group_parts.cuh: groups that are read twice, in three launches: partial moments of parts of each
// group; mean and rstd from them; the result. Groups are up to millions of elements, and too few to
// fill a GPU with one CTA each. In NCHW the second pass goes backwards, so that it begins with what L2
// still holds.
#pragma once

#include "group_common.cuh"

namespace hfp::cuda::group_norms {

// Where element i of a group lies, from its first one.
template <bool kStrided>
__device__ __forceinline__ int64_t group_offset(const Params &p, int64_t i) {
  return kStrided ? i / p.width * p.a.channels + i % p.width : i;
}

__device__ __forceinline__ int64_t group_start(const Params &p, int64_t unit, bool last) {
  if (!last) return unit * p.elements;
  return unit / p.a.groups * p.a.channels * p.a.positions + unit % p.a.groups * p.width;
}

// ---------------------------------------------------------------------------------------------
// Partial moments

// A CTA per part of a group whose elements are consecutive (or, kStrided, at any place).
template <class T, int N, bool kStrided>
__global__ void __launch_bounds__(kThreads)
    group_parts_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  __shared__ Moments shared[kThreads / kWarp];
  for (int64_t work = blockIdx.x; work < p.work; work += gridDim.x) {
    const int64_t unit = work / p.parts, part = work % p.parts;
    const T *x = static_cast<const T *>(p.a.x) + group_start(p, unit, kStrided);
    const int64_t begin = part * p.chunk;
    const int64_t end = begin + p.chunk < p.elements ? begin + p.chunk : p.elements;
    Sums sums;
    int64_t count = 0;
    for (int64_t i = begin + threadIdx.x * N; i < end; i += kThreads * N) {
      Vec<T, N> v;
      float value[N];
      v.template load<Cache::kReadOnly>(x + group_offset<kStrided>(p, i));
      v.get(value);
      if (count == 0) sums.pivot = value[0];
#pragma unroll
      for (int k = 0; k < N; ++k) sums.add(value[k]);
      count += N;
    }
    Moments m = sums.moments(count);
    m.merge_warp();
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = m;
    __syncthreads();
    if (threadIdx.x < kWarp) {
      m = shared[threadIdx.x % (kThreads / kWarp)];
      m.merge_warp<kThreads / kWarp>();
      if (threadIdx.x == 0) {
        float *to = slot(p, unit, part);
        to[0] = m.mean, to[1] = m.m2;
      }
    }
    __syncthreads();
  }
}

// Mean and rstd of each group, from all of its parts. A warp per group.
__global__ void __launch_bounds__(kThreads)
    group_moments_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  const int lane = threadIdx.x % kWarp;
  const int64_t units = p.a.batch * p.a.groups, whole = p.elements;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) +
                      threadIdx.x / kWarp;
       unit < units;
       unit += stride) {
    Moments m;
    for (int64_t part = lane; part < p.parts; part += kWarp) {
      const int64_t left = whole - part * p.chunk;
      const int64_t here = left < 0 ? 0 : left < p.chunk ? left : p.chunk;
      Moments b;
      b.n = static_cast<float>(here);
      const float *from = slot(p, unit, part);
      b.mean = __ldcg(from), b.m2 = __ldcg(from + 1);
      m.merge(b);
    }
    m.merge_warp();
    if (lane == 0) {
      float *to = slot(p, unit, p.a.parts);
      to[0] = m.mean, to[1] = reciprocal_deviation(p, m);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// The result

// A CTA per chunk of the positions of one channel of NCHW, kUnroll vectors a thread, the last chunk
// first: 1 x 128 x 1048576 in bf16 on an H200 205.9 us -> 199.8. Loads and stores that L2 gives up first
// make that 207 to 209, mean and rstd found by each CTA, without the launch before, 248.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kThreads)
    first_result_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  const int64_t step = static_cast<int64_t>(blockDim.x) * N, chunk = step * kUnroll;
  const int64_t chunks = (p.a.positions + chunk - 1) / chunk;
  for (int64_t left = p.work - 1 - blockIdx.x; left >= 0; left -= gridDim.x) {
    const int64_t row = left / chunks, first = (left - row * chunks) * chunk + threadIdx.x * N;
    const T *x = static_cast<const T *>(p.a.x) + row * p.a.positions;
    Vec<T, N> v[kUnroll];  // asked for before the statistics, so that the latencies overlap
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * step;
      if (i < p.a.positions) v[u].template load<Cache::kStream>(x + i);
    }
    const int64_t c = row % p.a.channels;
    const Stats s = merged(p, row / p.width);
    const float factor = s.rstd * parameter(p.a.weight, p.a.weight_type, c, 1.0f);
    const float summand = parameter(p.a.bias, p.a.weight_type, c, 0.0f);
    T *out = static_cast<T *>(p.a.out) + row * p.a.positions;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * step;
      if (i >= p.a.positions) break;
      float y[N];
      v[u].get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = (y[k] - s.mean) * factor + summand;
      store_result<T, N, kSilu>(out + i, y);
    }
  }
}

// NHWC that group_last.cuh does not take: one element at a time.
template <class T, bool kSilu>
__global__ void __launch_bounds__(kThreads) any_result_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  const int64_t all = p.a.batch * p.a.channels * p.a.positions;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < all;
       i += stride) {
    const int64_t c = i % p.a.channels, sample = i / (p.a.channels * p.a.positions);
    const Stats s = merged(p, sample * p.a.groups + c / p.width);
    Vec<T, 1> v;
    float y[1];
    v.template load<Cache::kStream>(static_cast<const T *>(p.a.x) + i);
    v.get(y);
    y[0] = (y[0] - s.mean) * (s.rstd * parameter(p.a.weight, p.a.weight_type, c, 1.0f)) +
           parameter(p.a.bias, p.a.weight_type, c, 0.0f);
    store_result<T, 1, kSilu>(static_cast<T *>(p.a.out) + i, y);
  }
}

// ---------------------------------------------------------------------------------------------
// Launching

inline int32_t launch_moments(Params &p, void *stream) {
  const int64_t grid = ceil_div(p.a.batch * p.a.groups, kThreads / kWarp);
  return launch(&group_moments_kernel, up_to_grid(grid), kThreads, p, stream, kName);
}

template <class T, int N, bool kSilu>
int32_t launch_first(Params p, void *stream) {
  p.chunk = ceil_div(ceil_div(p.elements, p.parts), N) * N;
  p.work = p.a.batch * p.a.groups * p.parts;
  int32_t status = launch(&group_parts_kernel<T, N, false>, up_to_grid(p.work), kThreads, p,
                          stream, kName);
  if (status == HFP_OK) status = launch_moments(p, stream);
  if (status != HFP_OK) return status;
  // As many threads as a short channel has vectors.
  const int64_t vectors = ceil_div(p.a.positions, N);
  const int threads = vectors >= kThreads ? kThreads : static_cast<int>(ceil_div(vectors, 32) * 32);
  p.work = p.a.batch * p.a.channels * ceil_div(p.a.positions, int64_t{kUnroll} * threads * N);
  return launch(&first_result_kernel<T, N, kSilu>, up_to_grid(p.work), threads, p, stream, kName);
}

template <class T, bool kSilu>
int32_t launch_any(Params p, void *stream) {
  p.chunk = ceil_div(p.elements, p.parts);
  p.work = p.a.batch * p.a.groups * p.parts;
  int32_t status = launch(&group_parts_kernel<T, 1, true>, up_to_grid(p.work), kThreads, p,
                          stream, kName);
  if (status == HFP_OK) status = launch_moments(p, stream);
  if (status != HFP_OK) return status;
  const int64_t grid = ceil_div(p.a.batch * p.a.channels * p.a.positions, kThreads);
  return launch(&any_result_kernel<T, kSilu>, up_to_grid(grid), kThreads, p, stream, kName);
}

}  // namespace hfp::cuda::group_norms
