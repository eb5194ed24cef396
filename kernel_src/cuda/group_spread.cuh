// group_spread.cuh: groups of NCHW that are spread over CTAs, each of which holds its part in registers, so
// that x is read once (sm_90): the CTAs of a group leave their moments in memory and wait for those of the
// others. One launch, after one that clears these places, and all CTAs at once on an H100. The sums are
// those of group_overlap.cuh.
#pragma once

#include "group_overlap.cuh"

namespace hfp::cuda::group_norms {

inline constexpr int kSpreadCta = kNarrowCta, kSpreadParts = 2;  // threads; parts of a CTA
inline constexpr int kSpreadThreads = 1024;                      // of an SM
inline constexpr int64_t kMostSpread = 64 * 1024;                // vectors of a group
// How often a thread looks for the moments of others before its CTA adds up their parts itself, about 2 ms:
// they may be behind it in a queue, and the CTAs before them wait as well.
inline constexpr int kPatience = 1 << 12;
inline constexpr uint64_t kNoMoments = ~uint64_t{0};  // no NaN that is computed has these bits

struct SpreadParams : OverlapParams {
  FastDivisor by_ctas;
  int ctas;  // of a group
  int each;  // vectors of a thread
};

using SpreadPart = Part<kSpreadCta>;

__device__ __forceinline__ uint64_t *moments_word(const OverlapParams &p, int unit, int part) {
  return reinterpret_cast<uint64_t *>(slot(p, unit, part));
}

__device__ __forceinline__ uint64_t read_moments(const uint64_t *from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

__device__ __forceinline__ uint64_t as_word(const Moments &m) {
  return static_cast<uint64_t>(__float_as_uint(m.m2)) << 32 | __float_as_uint(m.mean);
}

#if __CUDA_ARCH__ >= 900
// By one warp: mean and rstd of a group as soon as all its parts are there; false: they are not yet.
template <int N>
__device__ __forceinline__ bool wait_for_parts(const SpreadParams &p, int unit, Stats &s) {
  const int parts = static_cast<int>(p.parts);
  float pivot = 0.0f;
  Pool of_group;
  bool there = true;
  int looks = 0;
  for (int first = 0; first < parts; first += kWarp) {
    const int i = first + static_cast<int>(threadIdx.x) % kWarp;
    uint64_t word = 0;
    if (i < parts) {
      do {
        word = read_moments(moments_word(p, unit, i));
      } while (word == kNoMoments && ++looks < kPatience);
      there = there && word != kNoMoments;
    }
    Moments m;
    m.n = static_cast<float>(SpreadPart::kVectors * N);
    m.mean = __uint_as_float(static_cast<uint32_t>(word));
    m.m2 = __uint_as_float(static_cast<uint32_t>(word >> 32));
    if (first == 0) pivot = __shfl_sync(~0u, m.mean, 0);
    if (i < parts) of_group.add(m, pivot);
  }
  const Moments m = of_group.merge_warp(pivot, static_cast<float>(p.elements));
  s = {m.mean, reciprocal_deviation(p, m)};
  return __all_sync(~0u, there);
}

// By a CTA: the parts of a group that are not there. What their own CTAs find meanwhile counts, since these
// may write over a part then (out may be x).
template <class T, int N>
__device__ __forceinline__ void add_missing_parts(const SpreadParams &p, int unit, float4 *of_warp) {
  for (int i = 0; i < static_cast<int>(p.parts); ++i) {
    uint64_t *word = moments_word(p, unit, i);
    if (!__syncthreads_or(threadIdx.x == 0 && read_moments(word) == kNoMoments)) continue;
    const SpreadPart part(p, unit, i);
    const T *x = static_cast<const T *>(p.a.x) + part.first * N;
    Vec<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u].template load<Cache::kStream>(x + u * kSpreadCta * N);
    add_vectors<T, N, kSpreadCta, true>(part, v, of_warp);
    __syncthreads();
    if (threadIdx.x >= kWarp) continue;
    const Moments m = merge_part<kSpreadCta>(of_warp, SpreadPart::kVectors * N);
    if (threadIdx.x == 0) {
      atomicCAS(reinterpret_cast<unsigned long long *>(word), kNoMoments, as_word(m));
    }
  }
}
#endif

// x is asked for before wait_for_previous, as in group_overlap_kernel.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kSpreadCta, resident_ctas(kSpreadCta, kSpreadThreads))
    group_spread_kernel(const __grid_constant__ SpreadParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ float4 of_warp[kSpreadParts][kSpreadCta / kWarp];
  __shared__ Stats of_group;
  __shared__ float2 of_channel;  // weight and bias
  const int unit = static_cast<int>(p.by_ctas.divide(blockIdx.x));
  const int first = (static_cast<int>(blockIdx.x) - unit * p.ctas) * kSpreadParts;
  const SpreadPart part(p, unit, first);
  const T *x = static_cast<const T *>(p.a.x) + part.first * N;
  Vec<T, N> v[kSpreadParts][kUnroll];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kSpreadParts * kUnroll; ++i) {
      v[i / kUnroll][i % kUnroll] = load_passing<T, N>(x + i * kSpreadCta * N);
    }
  };
  load();
  wait_for_previous();

  const int sample = static_cast<int>(p.by_groups.divide(static_cast<uint32_t>(unit)));
  const int64_t c = (unit - sample * p.a.groups) * p.width +
                    p.channel_vectors.divide(static_cast<uint32_t>(first * SpreadPart::kVectors));
  if (threadIdx.x == 0) {
    of_channel = make_float2(parameter(p.a.weight, p.a.weight_type, c, 1.0f),
                             parameter(p.a.bias, p.a.weight_type, c, 0.0f));
  }
#pragma unroll
  for (int j = 0; j < kSpreadParts; ++j) add_vectors<T, N, kSpreadCta, true>(part, v[j], of_warp[j]);
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x) / kWarp;  // part of a warp
  if (own < kSpreadParts) {
    const Moments m = merge_part<kSpreadCta>(of_warp[own], SpreadPart::kVectors * N);
    if (threadIdx.x % kWarp == 0) {
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(moments_word(p, unit, first + own)),
                   "l"(as_word(m))
                   : "memory");
    }
  }
  const auto all_there = [&] {
    bool there = true;
    if (threadIdx.x < kWarp) {
      Stats s;
      there = wait_for_parts<N>(p, unit, s);
      if (threadIdx.x == 0) of_group = s;
    }
    return __syncthreads_and(there) != 0;
  };
  if (!all_there()) {
    do {
      add_missing_parts<T, N>(p, unit, of_warp[0]);
    } while (!all_there());
    load();
  }
  const Stats s = of_group;
  if (first == 0 && threadIdx.x == 0) {
    float *to = slot(p, unit, p.a.parts);
    to[0] = s.mean, to[1] = s.rstd;
  }

  T *out = static_cast<T *>(p.a.out) + part.first * N;
  const float factor = s.rstd * of_channel.x, bias = of_channel.y;
#pragma unroll
  for (int i = 0; i < kSpreadParts * kUnroll; ++i) {
    if (i >= p.each) break;  // never: but for this branch ptxas stores all of them last
    float y[N];
    v[i / kUnroll][i % kUnroll].get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = (y[k] - s.mean) * factor + bias;
    store_result<T, N, kSilu>(out + i * kSpreadCta * N, y);
  }
#endif
}

__global__ void __launch_bounds__(kThreads) group_unset_kernel(const __grid_constant__ SpreadParams p) {
  wait_for_previous();
  const int task = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (task >= p.tasks) return;
  const auto part = SpreadPart::of_task(p, task);
  *moments_word(p, part.unit, part.part) = kNoMoments;
}

// False where groups are others, or the GPU is. A CTA has whole parts, of one channel.
template <class T, int N, bool kSilu>
bool launch_spread(const Params &params, int device, void *stream, int32_t *status) {
  constexpr int64_t kVectors = kSpreadParts * SpreadPart::kVectors;  // of a CTA
  static ClusterRoom room;  // for CTAs: a GPU, or what a process has of it, may have fewer SMs
  const int64_t vectors = params.elements / N, units = params.a.batch * params.a.groups;
  auto *kernel = &group_spread_kernel<T, N, kSilu>;
  if (vectors > kMostSpread || vectors % kVectors != 0 || params.a.positions / N % kVectors != 0 ||
      reinterpret_cast<uint64_t>(params.a.stats) % sizeof(uint64_t) != 0 ||
      !has_clusters(reinterpret_cast<const void *>(kernel), device) ||
      units * (vectors / kVectors) > room.of(kernel, kSpreadCta, 0, 1, device)) {
    return false;
  }
  SpreadParams p{{params}};
  p.vectors = static_cast<int>(vectors);
  p.ctas = static_cast<int>(vectors / kVectors);
  p.parts = p.ctas * kSpreadParts;
  p.tasks = static_cast<int>(units * p.parts);
  p.each = kSpreadParts * kUnroll;
  p.by_parts = FastDivisor(p.parts);
  p.by_ctas = FastDivisor(p.ctas);
  p.by_groups = FastDivisor(p.a.groups);
  p.channel_vectors = FastDivisor(p.a.positions / N);
  *status = launch(&group_unset_kernel, ceil_div(p.tasks, kThreads), kThreads, p, stream, kName);
  if (*status == HFP_OK) *status = launch(kernel, units * p.ctas, kSpreadCta, p, stream, kName);
  return true;
}

}  // namespace hfp::cuda::group_norms
