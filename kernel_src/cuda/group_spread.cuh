// group_spread.cuh: groups of NCHW that are spread over CTAs, each of which holds a part in registers and
// shared memory, so that x is read once (sm_90): the CTAs of a group leave their moments in memory and wait
// for those of the others. One launch, after one that clears these places.
//
// CTAs start in the order of their numbers, so that those of the first group that is not done are all on the
// GPU. While they wait and write, x of later ones comes to L2. But for the layout of one wave, the groups of
// the first one start one after the other: else all CTAs read, then all write, and so do those after them.
#pragma once

#include "async_copy.cuh"
#include "group_overlap.cuh"

namespace hfp::cuda::group_norms {

// How often a thread looks for the moments of others before its CTA adds up their parts itself, about 2 ms:
// they may be behind it in a queue, and the CTAs before them wait as well.
inline constexpr int kPatience = 1 << 12;
inline constexpr uint64_t kNoMoments = ~uint64_t{0};  // no NaN that is computed has these bits

struct SpreadParams : OverlapParams {
  int each;        // vectors of a run
  int first_wave;  // CTAs
  int ahead;       // CTAs on: whose vectors a CTA brings to L2
  int pause;       // clocks between the groups of the first wave
  bool passing;    // more than a wave: L2 gives the result up before x
};

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
// Where vector u of a thread's run lies in the part.
template <int kCta, int kRuns>
__device__ __forceinline__ int run_vector(int run, int u) {
  return (u * kRuns + run) * kCta + static_cast<int>(threadIdx.x);
}

// By a CTA: the moments of all parts of a group as soon as they are there; false: they are not yet.
__device__ __forceinline__ bool wait_for_parts(const SpreadParams &p, int unit, uint64_t *of_part) {
  const int i = static_cast<int>(threadIdx.x);
  bool there = true;
  if (i < static_cast<int>(p.parts)) {
    uint64_t word;
    int looks = 0;
    do {
      word = read_moments(moments_word(p, unit, i));
    } while (word == kNoMoments && ++looks < kPatience);
    of_part[i] = word;
    there = word != kNoMoments;
  }
  return __syncthreads_and(there) != 0;
}

// By each warp: mean and rstd, from the moments of all parts.
template <int kPartElements>
__device__ __forceinline__ Stats merge_parts(const SpreadParams &p, const uint64_t *of_part) {
  const float pivot = __uint_as_float(static_cast<uint32_t>(of_part[0]));
  Pool of_group;
#pragma unroll 2
  for (int i = threadIdx.x % kWarp; i < static_cast<int>(p.parts); i += kWarp) {
    const uint64_t word = of_part[i];
    Moments m;
    m.n = static_cast<float>(kPartElements);
    m.mean = __uint_as_float(static_cast<uint32_t>(word));
    m.m2 = __uint_as_float(static_cast<uint32_t>(word >> 32));
    of_group.add(m, pivot);
  }
  const Moments m = of_group.merge_warp(pivot, static_cast<float>(p.elements));
  return {m.mean, reciprocal_deviation(p, m)};
}

// What a warp has of a run, whose vectors are of_x(u), goes to its place in of_warp.
template <class OfX>
__device__ __forceinline__ void add_run(const OfX &of_x, float4 *of_warp) {
  Sums sums;
  int seen = 0;
#pragma unroll
  for (int u = 0; u < kRun; ++u) sums.add_vector(of_x(u), seen);
  const Moments m = merge_lanes(sums, seen);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = make_float4(m.n, m.mean, m.m2, 0.0f);
}

// By a CTA: the parts of a group that are not there. What their own CTAs find meanwhile counts, since these
// may write over a part then (out may be x).
template <class T, int N, int kCta, int kRuns>
__device__ __forceinline__ void add_missing_parts(const SpreadParams &p, int unit, float4 *of_warp) {
  constexpr int kPart = kRuns * kRun * kCta;
  for (int i = 0; i < static_cast<int>(p.parts); ++i) {
    uint64_t *word = moments_word(p, unit, i);
    if (!__syncthreads_or(threadIdx.x == 0 && read_moments(word) == kNoMoments)) continue;
    const T *x = static_cast<const T *>(p.a.x) + unit * p.elements + i * int64_t{kPart * N};
    for (int run = 0; run < kRuns; ++run) {
      Vec<T, N> v[kRun];
#pragma unroll
      for (int u = 0; u < kRun; ++u) {
        v[u].template load<Cache::kStream>(x + run_vector<kCta, kRuns>(run, u) * N);
      }
      add_run([&](int u) -> const Vec<T, N> & { return v[u]; }, of_warp + run * (kCta / kWarp));
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) continue;
    const Moments m = merge_part<kRuns * kCta>(of_warp, kPart * N);
    if (threadIdx.x == 0) {
      atomicCAS(reinterpret_cast<unsigned long long *>(word), kNoMoments, as_word(m));
    }
  }
}
#endif

// x is asked for before wait_for_previous, as in group_overlap_kernel. kRuns: of a thread.
template <class T, int N, bool kSilu, int kCta, int kRuns>
__global__ void __launch_bounds__(kCta, resident_ctas(kCta, kSpreadThreads))
    group_spread_kernel(const __grid_constant__ SpreadParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kPart = kRuns * kRun * kCta;  // vectors
  static_assert(kRuns == 1 || kRuns == 2);
  extern __shared__ __align__(kLineBytes) uint4 held[];
  __shared__ float4 of_warp[kRuns * kCta / kWarp];
  __shared__ uint64_t of_part[kCta];
  __shared__ float2 of_channel;  // weight and bias
  const int cta = static_cast<int>(blockIdx.x);
  const int unit = static_cast<int>(p.by_parts.divide(blockIdx.x));
  const int part = cta - unit * static_cast<int>(p.parts);
  if (p.pause != 0 && cta < p.first_wave) {
    const int64_t until = clock64() + static_cast<int64_t>(unit) * p.pause;
    while (clock64() < until) __nanosleep(20);
  }
  const uint64_t passing = passing_policy();
  Vec<T, N> v[kRun];
  const auto load = [&](uint64_t policy) {
    const T *x = static_cast<const T *>(p.a.x) + blockIdx.x * int64_t{kPart * N};
#pragma unroll
    for (int u = 0; u < kRun; ++u) v[u] = load_passing<T, N>(x + run_vector<kCta, kRuns>(0, u) * N, policy);
  };
  load(passing);
  [[maybe_unused]] uint4 *place = held + threadIdx.x;
  if constexpr (kRuns == 2) {
    const T *x = static_cast<const T *>(p.a.x) + cta * int64_t{kPart * N};
#pragma unroll
    for (int u = 0; u < kRun; ++u) {
      copy_passing(place + u * kCta, x + run_vector<kCta, kRuns>(1, u) * N, passing);
    }
    end_copies();
  }
  const int later = cta + p.ahead;
  if (p.ahead != 0 && threadIdx.x == 0 && later >= p.first_wave && later < static_cast<int>(gridDim.x)) {
    bring_row(static_cast<const T *>(p.a.x) + later * int64_t{kPart * N}, kPart);
  }
  wait_for_previous();

  const int sample = static_cast<int>(p.by_groups.divide(static_cast<uint32_t>(unit)));
  const int64_t c = (unit - sample * p.a.groups) * p.width +
                    p.channel_vectors.divide(static_cast<uint32_t>(part * kPart));
  if (threadIdx.x == 0) {
    of_channel = make_float2(parameter(p.a.weight, p.a.weight_type, c, 1.0f),
                             parameter(p.a.bias, p.a.weight_type, c, 0.0f));
  }
  add_run([&](int u) -> const Vec<T, N> & { return v[u]; }, of_warp);
  [[maybe_unused]] const auto in_shared = [&](int u) {
    const uint4 words = place[u * kCta];
    return Vec<T, N>{{words.x, words.y, words.z, words.w}};
  };
  if constexpr (kRuns == 2) {
    wait_for_copies<0>();
    add_run(in_shared, of_warp + kCta / kWarp);
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const Moments m = merge_part<kRuns * kCta>(of_warp, kPart * N);
    if (threadIdx.x == 0) {
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(moments_word(p, unit, part)), "l"(as_word(m))
                   : "memory");
    }
  }
  if (!wait_for_parts(p, unit, of_part)) {
    do {
      add_missing_parts<T, N, kCta, kRuns>(p, unit, of_warp);
    } while (!wait_for_parts(p, unit, of_part));
    load(passing_policy());
  }
  const Stats s = merge_parts<kPart * N>(p, of_part);
  if (part == 0 && threadIdx.x == 0) {
    float *to = slot(p, unit, p.a.parts);
    to[0] = s.mean, to[1] = s.rstd;
  }

  T *out = static_cast<T *>(p.a.out) + cta * int64_t{kPart * N};
  const float factor = s.rstd * of_channel.x, bias = of_channel.y;
  const auto finish = [&](const Vec<T, N> &of_x, int at) {
    float y[N];
    of_x.get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = (y[k] - s.mean) * factor + bias;
    store_result<T, N, kSilu>(out + at * N, y, kRuns > 1 && p.passing);
  };
#pragma unroll
  for (int u = 0; u < kRun; ++u) {
    if (u >= p.each) break;  // never: without this branch ptxas stores all of them last
    finish(v[u], run_vector<kCta, kRuns>(0, u));
  }
  if constexpr (kRuns == 2) {
#pragma unroll 2
    for (int u = 0; u < kRun; ++u) finish(in_shared(u), run_vector<kCta, kRuns>(1, u));
  }
#endif
}

__global__ void __launch_bounds__(kThreads) group_unset_kernel(const __grid_constant__ SpreadParams p) {
  wait_for_previous();
  const int task = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (task >= p.tasks) return;
  const int unit = static_cast<int>(p.by_parts.divide(static_cast<uint32_t>(task)));
  *moments_word(p, unit, task - unit * static_cast<int>(p.parts)) = kNoMoments;
}

// False where groups are others, or the GPU is. A CTA has a part, of one channel. kOneWave: not for more.
template <class T, int N, bool kSilu, int kCta, int kRuns, bool kOneWave = false>
bool launch_spread(const Params &params, int device, void *stream, int32_t *status) {
  constexpr int64_t kPart = kRuns * kRun * kCta;
  constexpr int kBytes = (kRuns - 1) * kRun * kCta * kVectorBytes;
  static ClusterRoom room;  // for CTAs: a GPU, or what a process has of it, may have fewer SMs
  const int64_t vectors = params.elements / N, parts = vectors / kPart;
  const int64_t ctas = params.a.batch * params.a.groups * parts;
  auto *kernel = &group_spread_kernel<T, N, kSilu, kCta, kRuns>;
  if (params.a.positions / N % kPart != 0 || parts > kCta || ctas > kMaxGrid / 2 ||
      reinterpret_cast<uint64_t>(params.a.stats) % sizeof(uint64_t) != 0 ||
      !has_clusters(reinterpret_cast<const void *>(kernel), device)) {
    return false;
  }
  const int64_t at_once = room.of(kernel, kCta, kBytes, 1, device);
  if (parts * kGroupsAtOnce > at_once || (kOneWave && ctas > at_once)) return false;
  SpreadParams p{{params}};
  p.vectors = static_cast<int>(vectors);
  p.parts = parts;
  p.tasks = static_cast<int>(ctas);
  p.each = kRun;
  p.by_parts = FastDivisor(parts);
  p.by_groups = FastDivisor(p.a.groups);
  p.channel_vectors = FastDivisor(p.a.positions / N);
  p.first_wave = static_cast<int>(at_once);
  if (!kOneWave) {
    p.ahead = static_cast<int>(kSpreadAhead / (kPart * kVectorBytes));
    p.pause = static_cast<int>(vectors * kVectorBytes / kBytesPerClock);
    p.passing = ctas > at_once;
  }
  *status = launch(&group_unset_kernel, ceil_div(ctas, kThreads), kThreads, p, stream, kName);
  if (*status == HFP_OK) *status = launch(kernel, ctas, kCta, p, stream, kName, kBytes);
  return true;
}

// The sums of a group are the same for any number of groups.
template <class T, int N, bool kSilu>
bool launch_spread(const Params &params, int device, void *stream, int32_t *status) {
  if (params.elements / N > kMostSmall) {
    return launch_spread<T, N, kSilu, 256, 2>(params, device, stream, status);
  }
  return launch_spread<T, N, kSilu, 256, 1, true>(params, device, stream, status) ||
         launch_spread<T, N, kSilu, 128, 2>(params, device, stream, status);
}

}  // namespace hfp::cuda::group_norms
