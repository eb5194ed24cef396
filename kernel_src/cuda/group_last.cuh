// group_last.cuh: channels-last group norm, read twice, in two launches: sums of parts of each group, then
// the result, whose CTAs merge the sums. The second pass goes backwards, so that it begins with what L2
// still holds.
//
// A CTA has a slab of channels, whole groups of at least a line of memory, at a part of the positions of a
// sample: it sums few groups, so that a CTA of the second pass has few sums to merge.
#pragma once

#include <algorithm>

#include "async_copy.cuh"
#include "group_common.cuh"

namespace hfp::cuda::group_norms {

struct LastParams : Params {
  int slab;     // channels
  int vectors;  // of a slab's channels
  int threads;  // lanes * vectors of the CTA's have something to do
  FastDivisor by_slabs, by_parts, by_vectors;
};

// A CTA's channels and positions, and a thread's vector of them. Slabs are what changes first from CTA to
// CTA: those of one place in memory run at one time.
template <int N>
struct LastPart {
  int lane, column, first;  // first: channel
  int part, rows;           // rows: positions
  int64_t sample, begin;    // begin: position

  __device__ explicit LastPart(const LastParams &p) {
    const uint32_t slabs = static_cast<uint32_t>(p.a.channels) / static_cast<uint32_t>(p.slab);
    const uint32_t place = p.by_slabs.divide(blockIdx.x);
    const uint32_t of_sample = p.by_parts.divide(place);
    first = static_cast<int>((blockIdx.x - place * slabs) * static_cast<uint32_t>(p.slab));
    part = static_cast<int>(place - of_sample * static_cast<uint32_t>(p.parts));
    sample = of_sample;
    begin = part * p.chunk;
    const int64_t left = p.a.positions - begin;
    rows = static_cast<int>(left < 0 ? 0 : left < p.chunk ? left : p.chunk);
    lane = static_cast<int>(p.by_vectors.divide(threadIdx.x));
    column = static_cast<int>(threadIdx.x) - lane * p.vectors;
  }
  // Of the thread's vector at the CTA's first position, in the tensor.
  __device__ int64_t offset(const LastParams &p) const {
    return (sample * p.a.positions + begin) * p.a.channels + first + column * N;
  }
};

// Positions of `lane`.
__device__ __forceinline__ int rows_of_lane(const LastParams &p, int rows, int lane) {
  return rows > lane ? (rows - lane - 1) / p.lanes + 1 : 0;
}

template <class T, int N>
__global__ void __launch_bounds__(kLastThreads, kLastResident / kLastThreads)
    last_sums_kernel(const __grid_constant__ LastParams p) {
  extern __shared__ float2 of_channel[];  // [N, vectors, lanes]: mean and squared deviations
  const LastPart<N> at(p);
  wait_for_previous();
  if (static_cast<int>(threadIdx.x) < p.threads) {
    const T *x = static_cast<const T *>(p.a.x) + at.offset(p);
    Sums sums[N];
    for (int row = at.lane; row < at.rows; row += kLastUnroll * p.lanes) {
      Vec<T, N> v[kLastUnroll];
#pragma unroll
      for (int u = 0; u < kLastUnroll; ++u) {
        const int i = row + u * p.lanes;
        if (i < at.rows) v[u].template load<Cache::kReadOnly>(x + i * p.a.channels);
      }
      if (row == at.lane) {
        float value[N];
        v[0].get(value);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k].pivot = value[k];
      }
#pragma unroll
      for (int u = 0; u < kLastUnroll; ++u) {
        if (row + u * p.lanes >= at.rows) break;
        float value[N];
        v[u].get(value);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k].add(value[k]);
      }
    }
    const int count = rows_of_lane(p, at.rows, at.lane);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const Moments m = sums[k].moments(count);
      of_channel[(k * p.vectors + at.column) * p.lanes + at.lane] = make_float2(m.mean, m.m2);
    }
  }
  __syncthreads();
  const int width = static_cast<int>(p.width), groups = p.slab / width;
  const int warps = static_cast<int>(blockDim.x) / kWarp, here = static_cast<int>(threadIdx.x) % kWarp;
  for (int g = static_cast<int>(threadIdx.x) / kWarp; g < groups; g += warps) {
    const auto means = [&](int c) { return of_channel + ((c % N) * p.vectors + c / N) * p.lanes; };
    const float pivot = means(g * width)->x;
    Pool of_group;
    for (int lane = here; lane < p.lanes; lane += kWarp) {
      Moments m;
      m.n = static_cast<float>(rows_of_lane(p, at.rows, lane));
#pragma unroll 4
      for (int c = g * width; c < (g + 1) * width; ++c) {
        const float2 of_lane = means(c)[lane];
        m.mean = of_lane.x, m.m2 = of_lane.y;
        of_group.add(m, pivot);
      }
    }
    const Moments m = of_group.merge_warp(pivot, static_cast<float>(at.rows) * static_cast<float>(width));
    if (here == 0) {
      float *to = slot(p, at.sample * p.a.groups + at.first / width + g, at.part);
      to[0] = m.mean, to[1] = m.m2;
    }
  }
}

// By one warp: the moments of a group, from those of its parts.
__device__ __forceinline__ Moments merge_last_parts(const LastParams &p, int64_t unit) {
  const float2 *parts = reinterpret_cast<const float2 *>(slot(p, unit, 0));
  const float pivot = __ldcg(parts).x;
  Pool of_group;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < static_cast<int>(p.parts); i += kWarp) {
    const float2 part = __ldcg(parts + i);
    const int64_t left = p.a.positions - i * p.chunk;
    Moments m;
    m.n = static_cast<float>(left < 0 ? 0 : left < p.chunk ? left : p.chunk) * static_cast<float>(p.width);
    m.mean = part.x, m.m2 = part.y;
    of_group.add(m, pivot);
  }
  return of_group.merge_warp(pivot, static_cast<float>(p.elements));
}

// x, weight and bias are asked for before wait_for_previous: last_sums_kernel has waited for all that could
// write them before it lets this kernel start.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kLastThreads, kLastResident / kLastThreads)
    last_result_kernel(const __grid_constant__ LastParams p) {
  // Of the slab's channels: mean, what is multiplied and what is added; behind them of its groups mean, rstd.
  extern __shared__ float4 numbers[];
  float2 *of_group = reinterpret_cast<float2 *>(numbers + p.slab);
  const LastPart<N> at(p);
  const bool works = static_cast<int>(threadIdx.x) < p.threads;
  const int64_t offset = at.offset(p);
  const T *x = static_cast<const T *>(p.a.x) + offset;
  T *out = static_cast<T *>(p.a.out) + offset;
  const int count = works ? rows_of_lane(p, at.rows, at.lane) : 0;
  Vec<T, N> v[kLastUnroll];
  const auto row_of = [&](int i) { return at.lane + i * p.lanes; };
  const auto load = [&](int last) {
#pragma unroll
    for (int u = 0; u < kLastUnroll; ++u) {
      if (last - u >= 0) v[u].template load<Cache::kStream>(x + row_of(last - u) * p.a.channels);
    }
  };
  load(count - 1);
  const auto param = [&](const void *from, int c, float otherwise) {
    return parameter(from, p.a.weight_type, at.first + c, otherwise);
  };
  const int mine = static_cast<int>(threadIdx.x);
  float weight = 1.0f, bias = 0.0f;
  if (mine < p.slab) weight = param(p.a.weight, mine, 1.0f), bias = param(p.a.bias, mine, 0.0f);
  wait_for_previous();
  const int width = static_cast<int>(p.width), groups = p.slab / width;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int g = static_cast<int>(threadIdx.x) / kWarp; g < groups; g += warps) {
    const int64_t unit = at.sample * p.a.groups + at.first / width + g;
    const Moments m = merge_last_parts(p, unit);
    if (threadIdx.x % kWarp == 0) {
      of_group[g] = make_float2(m.mean, reciprocal_deviation(p, m));
      if (at.part == 0) *reinterpret_cast<float2 *>(slot(p, unit, p.a.parts)) = of_group[g];
    }
  }
  __syncthreads();
  for (int c = mine; c < p.slab; c += static_cast<int>(blockDim.x)) {
    if (c != mine) weight = param(p.a.weight, c, 1.0f), bias = param(p.a.bias, c, 0.0f);
    const float2 s = of_group[c / width];
    numbers[c] = make_float4(s.x, s.y * weight, bias, 0.0f);
  }
  __syncthreads();
  float mean[N], factor[N], summand[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float4 of_mine = numbers[works ? at.column * N + k : 0];
    mean[k] = of_mine.x, factor[k] = of_mine.y, summand[k] = of_mine.z;
  }
  for (int last = count - 1; last >= 0; last -= kLastUnroll) {
    if (last != count - 1) load(last);
#pragma unroll
    for (int u = 0; u < kLastUnroll; ++u) {
      if (last - u < 0) break;
      float y[N];
      v[u].get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = (y[k] - mean[k]) * factor[k] + summand[k];
      store_result<T, N, kSilu>(out + row_of(last - u) * p.a.channels, y);
    }
  }
}

// Groups of a slab: the fewest that divide all and whose channels are whole sectors of memory, a line of it at
// least; else all; 0: a CTA has not the threads for these.
template <class T, int N>
int64_t slab_groups(const Params &p) {
  constexpr int64_t kSector = 32;
  const auto fits = [&](int64_t groups) {
    return groups * p.width % N == 0 && groups * p.width / N <= kLastThreads;
  };
  for (int64_t groups = 1; groups <= p.a.groups; ++groups) {
    const int64_t bytes = groups * p.width * static_cast<int64_t>(sizeof(T));
    if (groups * p.width / N > kLastThreads) break;
    if (p.a.groups % groups == 0 && bytes % kSector == 0 && bytes >= kLineBytes && fits(groups)) return groups;
  }
  return fits(p.a.groups) ? p.a.groups : 0;
}

// False where a CTA cannot have whole groups.
template <class T, int N, bool kSilu>
bool launch_last(const Params &params, void *stream, int32_t *status) {
  const int64_t groups = slab_groups<T, N>(params);
  if (groups == 0 || params.a.channels > kMaxGrid || params.a.positions > kMaxGrid ||
      reinterpret_cast<uint64_t>(params.a.stats) % sizeof(float2) != 0) {
    return false;
  }
  LastParams p{params};
  p.slab = static_cast<int>(groups * p.width);
  p.vectors = p.slab / N;
  const int most = p.vectors <= kLastUsual ? kLastUsual : kLastThreads;
  p.lanes = most / p.vectors;
  p.threads = p.lanes * p.vectors;
  // The sums of a group are the same for any number of samples.
  const int64_t slabs = p.a.groups / groups;
  int64_t parts = ceil_div(p.a.positions, kLastFewRows * p.lanes);
  if (parts * slabs > kLastFewCtas) parts = ceil_div(p.a.positions, kLastRows * p.lanes);
  parts = std::min({parts, ceil_div(kLastCtas, slabs), p.parts});
  p.chunk = ceil_div(p.a.positions, parts);
  p.parts = ceil_div(p.a.positions, p.chunk);
  const int64_t ctas = p.a.batch * p.parts * slabs;
  const int numbers = p.slab * static_cast<int>(sizeof(float4)) +
                      static_cast<int>(groups) * static_cast<int>(sizeof(float2));
  if (ctas > kMaxGrid || (numbers > (48 << 10) && numbers > shared_memory_limit())) return false;
  p.by_slabs = FastDivisor(slabs);
  p.by_parts = FastDivisor(p.parts);
  p.by_vectors = FastDivisor(p.vectors);
  const int threads = static_cast<int>(ceil_div(p.threads, kWarp) * kWarp);
  const int slots = p.threads * N * static_cast<int>(sizeof(float2));
  *status = launch(&last_sums_kernel<T, N>, ctas, threads, p, stream, kName, slots);
  if (*status == HFP_OK) {
    *status = launch(&last_result_kernel<T, N, kSilu>, ctas, threads, p, stream, kName, numbers);
  }
  return true;
}

}  // namespace hfp::cuda::group_norms
