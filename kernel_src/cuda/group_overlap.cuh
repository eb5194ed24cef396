// group_overlap.cuh: groups of NCHW that are read twice, the second time from L2 (sm_90): while one CTA
// writes the result of a part, others add up parts of the next groups. One launch, after one that
// clears what it counts in.
//
// The first pass is p.lag parts ahead: a group, so that no CTA waits for one with a higher number, and
// as many as are at work, so that few wait at all. CTAs start in the order of their numbers, as CUB's
// scans take for granted as well.
#pragma once

#include "cluster.cuh"
#include "group_common.cuh"
#include "ordered.cuh"

namespace hfp::cuda::group_norms {

struct OverlapParams : Params {
  int vectors;  // of a group
  int tasks;    // parts of all groups
  int lag;      // parts
  FastDivisor by_parts, by_groups;
  bool one_channel;  // all of a part
};

// A part of a group and a thread's vectors of it.
template <int kCta>
struct Part {
  static constexpr int kVectors = kUnroll * kCta;
  int unit, part, vectors;
  int64_t first;  // of the thread, in the tensor

  __device__ Part(const OverlapParams &p, int of_unit, int at) : unit(of_unit), part(at) {
    vectors = min(p.vectors - part * kVectors, kVectors);
    first = static_cast<int64_t>(unit) * p.vectors + part * kVectors + threadIdx.x;
  }
  __device__ static Part of_task(const OverlapParams &p, int task) {
    const int unit = static_cast<int>(p.by_parts.divide(static_cast<uint32_t>(task)));
    return Part(p, unit, task - unit * static_cast<int>(p.parts));
  }
  __device__ int at(int u) const { return static_cast<int>(threadIdx.x) + u * kCta; }
};

// Mean and rstd of a group, in its last slot, are one word. Before they are there, its upper half is 0
// and its lower half counts the parts that have been added up.
__device__ __forceinline__ uint64_t *result_word(const OverlapParams &p, int unit) {
  return reinterpret_cast<uint64_t *>(slot(p, unit, p.a.parts));
}

__device__ __forceinline__ Stats wait_for_stats(const OverlapParams &p, int unit) {
  uint64_t word;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(word)
                 : "l"(result_word(p, unit))
                 : "memory");
  } while (word >> 32 == 0);
  return {__uint_as_float(static_cast<uint32_t>(word)),
          __uint_as_float(static_cast<uint32_t>(word >> 32))};
}

// By one warp: the moments of all parts of a group, which are there. N elements a vector.
template <int kCta, int N>
__device__ __forceinline__ void publish_stats(const OverlapParams &p, int unit) {
  const float2 *parts = reinterpret_cast<const float2 *>(slot(p, unit, 0));
  const float pivot = __ldcg(parts).x;
  Pool of_group;
#pragma unroll 8
  for (int i = threadIdx.x; i < static_cast<int>(p.parts); i += kWarp) {
    const float2 part = __ldcg(parts + i);
    Moments m;
    m.n = static_cast<float>(min(p.vectors - i * Part<kCta>::kVectors, Part<kCta>::kVectors) * N);
    m.mean = part.x, m.m2 = part.y;
    of_group.add(m, pivot);
  }
  const Moments m = of_group.merge_warp(pivot, static_cast<float>(p.elements));
  uint32_t rstd = __float_as_uint(reciprocal_deviation(p, m));
  if (rstd == 0) rstd = 0x80000000u;  // -0, of an infinite variance: 0 says that there is none yet
  if (threadIdx.x == 0) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(result_word(p, unit)),
                 "l"(static_cast<uint64_t>(rstd) << 32 | __float_as_uint(m.mean))
                 : "memory");
  }
}

#if __CUDA_ARCH__ >= 900
// What a warp has of a part, of whose vectors each thread has v, goes to its place in of_warp. kWhole: no
// part has fewer vectors than others.
template <class T, int N, int kCta, bool kWhole = false>
__device__ __forceinline__ void add_vectors(const Part<kCta> &part, const Vec<T, N> (&v)[kUnroll],
                                            float4 *of_warp) {
  Sums sums;
  int seen = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (kWhole || part.at(u) < part.vectors) sums.add_vector(v[u], seen);
  }
  const Moments m = merge_lanes(sums, seen);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = make_float4(m.n, m.mean, m.m2, 0.0f);
}

// By one warp: the moments of a part of n elements.
template <int kCta>
__device__ __forceinline__ Moments merge_part(const float4 *of_warp, int n) {
  const int lane = threadIdx.x % kWarp;
  const float pivot = of_warp[0].y;
  Pool of_part;
  if (lane < kCta / kWarp) {
    const float4 w = of_warp[lane];
    Moments m;
    m.n = w.x, m.mean = w.y, m.m2 = w.z;
    of_part.add(m, pivot);
  }
  return of_part.merge_warp(pivot, static_cast<float>(n));
}

template <class T, int N, int kCta>
__device__ __forceinline__ void add_part(const OverlapParams &p, int task) {
  __shared__ float4 of_warp[kCta / kWarp];
  const auto part = Part<kCta>::of_task(p, task);
  const T *x = static_cast<const T *>(p.a.x) + part.first * N;
  Vec<T, N> v[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (part.at(u) < part.vectors) v[u].template load<Cache::kStream>(x + u * kCta * N);
  }
  wait_for_previous();
  add_vectors<T, N, kCta>(part, v, of_warp);
  __syncthreads();
  if (threadIdx.x >= kWarp) return;

  const Moments m = merge_part<kCta>(of_warp, part.vectors * N);
  uint32_t before = 0;
  if (threadIdx.x == 0) {
    float *to = slot(p, part.unit, part.part);
    to[0] = m.mean, to[1] = m.m2;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(result_word(p, part.unit))
                 : "memory");
  }
  if (__shfl_sync(~0u, before, 0) + 1 < static_cast<uint32_t>(p.parts)) return;
  __threadfence();
  publish_stats<kCta, N>(p, part.unit);
}

template <class T, int N, int kCta, bool kSilu>
__device__ __forceinline__ void write_part(const OverlapParams &p, int task) {
  const auto part = Part<kCta>::of_task(p, task);
  const T *x = static_cast<const T *>(p.a.x) + part.first * N;
  T *out = static_cast<T *>(p.a.out) + part.first * N;
  uint4 v[kUnroll];  // for the last time: L2 may give it up
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (part.at(u) < part.vectors) {
      v[u] = __ldcs(reinterpret_cast<const uint4 *>(x + u * kCta * N));
    }
  }
  wait_for_previous();
  const int sample = static_cast<int>(p.by_groups.divide(static_cast<uint32_t>(part.unit)));
  const int64_t first_channel = (part.unit - sample * p.a.groups) * p.width;
  float weight = 1.0f, bias = 0.0f;
  const auto use_channel = [&](int u) {
    const int vector = part.part * part.kVectors + part.at(u);
    const int64_t c = first_channel + p.channel_vectors.divide(static_cast<uint32_t>(vector));
    weight = parameter(p.a.weight, p.a.weight_type, c, 1.0f);
    bias = parameter(p.a.bias, p.a.weight_type, c, 0.0f);
  };
  if (part.at(0) < part.vectors) use_channel(0);
  const Stats s = wait_for_stats(p, part.unit);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (part.at(u) >= part.vectors) break;
    if (u > 0 && !p.one_channel) use_channel(u);
    const float factor = s.rstd * weight;
    float y[N];
    Vec<T, N>{{v[u].x, v[u].y, v[u].z, v[u].w}}.get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = (y[k] - s.mean) * factor + bias;
    store_result<T, N, kSilu>(out + u * kCta * N, y, true);
  }
}
#endif

// A CTA adds up a part or writes the result of one: p.lag parts are added up, then one is written for
// each that is, then the rest is written.
//
// x is asked for before wait_for_previous: group_clear_kernel has waited for all that could write x
// before it lets this kernel start. Behind the wait ptxas had the fourth load reuse the registers of the
// first, and wait for it: 1 x 512 x 16384 in bf16 on an H200 16.4 us, so 14.7.
template <class T, int N, int kCta, bool kSilu>
__global__ void __launch_bounds__(kCta, resident_ctas(kCta, kOverlapThreads<T>))
    group_overlap_kernel(const __grid_constant__ OverlapParams p) {
#if __CUDA_ARCH__ >= 900
  const int cta = static_cast<int>(blockIdx.x), after = cta - p.lag;
  const bool in_turns = after >= 0 && cta < 2 * p.tasks - p.lag;
  const bool writes = in_turns ? after % 2 == 0 : after >= 0;
  if (writes) {
    write_part<T, N, kCta, kSilu>(p, in_turns ? after / 2 : cta - p.tasks);
  } else {
    add_part<T, N, kCta>(p, in_turns ? p.lag + after / 2 : cta);
  }
#endif
}

__global__ void __launch_bounds__(kThreads) group_clear_kernel(const __grid_constant__ OverlapParams p) {
  wait_for_previous();
  const int units = p.tasks / static_cast<int>(p.parts);
  const int unit = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (unit < units) *result_word(p, unit) = 0;
}

template <class T, int N, int kCta, bool kSilu>
int32_t launch_overlap(OverlapParams &p, int sms, void *stream) {
  constexpr int kVectors = Part<kCta>::kVectors;
  p.parts = ceil_div(p.vectors, kVectors);
  p.tasks = static_cast<int>(p.a.batch * p.a.groups * p.parts);
  p.lag = static_cast<int>(p.parts) + kAheadThreads<kCta> * sms / kCta;
  if (p.lag > p.tasks) p.lag = p.tasks;
  p.by_parts = FastDivisor(p.parts);
  p.one_channel = p.a.positions / N % kVectors == 0;
  const int64_t clearing = ceil_div(p.a.batch * p.a.groups, kThreads);
  const int32_t status = launch(&group_clear_kernel, clearing, kThreads, p, stream, kName);
  if (status != HFP_OK) return status;
  return launch(&group_overlap_kernel<T, N, kCta, kSilu>, 2 * int64_t{p.tasks}, kCta, p, stream, kName);
}

// False where groups are too large, or the GPU another.
template <class T, int N, bool kSilu>
bool launch_overlap(const Params &params, int device, void *stream, int32_t *status) {
  const int64_t vectors = params.elements / N, units = params.a.batch * params.a.groups;
  const bool narrow = vectors <= kMostNarrow;
  int l2_bytes = 0, sms = 0;
  if (vectors > kMostOverlap || units > kMaxGrid / 2 / params.a.parts ||
      reinterpret_cast<uint64_t>(params.a.stats) % sizeof(uint64_t) != 0 ||
      cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      vectors * kVectorBytes > l2_bytes / kL2Share ||
      !has_clusters(reinterpret_cast<const void *>(&group_overlap_kernel<T, N, kNarrowCta, kSilu>),
                    device)) {
    return false;
  }
  OverlapParams p{params};
  p.vectors = static_cast<int>(vectors);
  p.by_groups = FastDivisor(p.a.groups);
  p.channel_vectors = FastDivisor(p.a.positions / N);
  *status = narrow ? launch_overlap<T, N, kNarrowCta, kSilu>(p, sms, stream)
                   : launch_overlap<T, N, kWideCta, kSilu>(p, sms, stream);
  return true;
}

}  // namespace hfp::cuda::group_norms
