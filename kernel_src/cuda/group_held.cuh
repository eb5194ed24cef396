// group_held.cuh: groups of NCHW that stay on chip: one launch, one pass over memory. Up to 20480
// vectors of 16 bytes lie in the shared memory of one CTA, or of a cluster of CTAs (sm_90).
#pragma once

#include "async_copy.cuh"
#include "cluster.cuh"
#include "group_common.cuh"

namespace hfp::cuda::group_norms {

inline constexpr int kMostChannels = 256;  // of a group in shared memory
inline constexpr int kSharedThreads = kMostParts / 2 * kThreads;  // most of a CTA
inline constexpr int kStaticBytes = 6 << 10;  // at most, besides the group
inline constexpr int kCopies = 4;  // groups of loads of a thread, each of kUnroll vectors but the last

// What all vectors of a channel are multiplied by, and what is added to them, into shared memory.
__device__ __forceinline__ void keep_channels(const Params &p, int group, float2 *of_channel) {
  const int width = static_cast<int>(p.width);
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    const int64_t at = static_cast<int64_t>(group) * width + c;
    of_channel[c] = make_float2(parameter(p.a.weight, p.a.weight_type, at, 1.0f),
                                parameter(p.a.bias, p.a.weight_type, at, 0.0f));
  }
}

// The result of one vector of a group, which lies in shared memory.
template <class T, int N, bool kSilu>
__device__ __forceinline__ void finish_held(const Params &p, const uint4 &word, int at, float mean,
                                            float rstd, const float2 *of_channel, T *to) {
  const float2 c = of_channel[p.channel_vectors.divide(static_cast<uint32_t>(at))];
  const float factor = rstd * c.x, summand = c.y;
  const Vec<T, N> v{{word.x, word.y, word.z, word.w}};
  float y[N];
  v.get(y);
#pragma unroll
  for (int k = 0; k < N; ++k) y[k] = (y[k] - mean) * factor + summand;
  store_result<T, N, kSilu>(to, y);
}

__device__ __forceinline__ float keep_stats(const Params &p, int64_t unit, const Moments &m,
                                            bool first) {
  const float rstd = reciprocal_deviation(p, m);
  if (first) {
    float *to = slot(p, unit, p.a.parts);
    to[0] = m.mean, to[1] = rstd;
  }
  return rstd;
}

// A CTA per group of NCHW, which lies in shared memory: registers would hold it too, but so few CTAs
// then that the groups of a UNet take three rounds. A place is its thread's alone, so there is nothing
// to wait for.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kThreads)
    group_held_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  extern __shared__ __align__(kLineBytes) uint4 held[];
  constexpr int kWarps = kThreads / kWarp;
  __shared__ Moments of_warp[kWarps];
  __shared__ float2 of_channel[kMostChannels];  // weight and bias
  const int64_t unit = blockIdx.x;
  const int count = static_cast<int>(p.chunk);
  const T *x = static_cast<const T *>(p.a.x) + unit * p.elements;

  Sums sums;
  int seen = 0;
  for (int at = threadIdx.x; at < count; at += kUnroll * blockDim.x) {
    Vec<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int here = at + u * static_cast<int>(blockDim.x);
      if (here < count) v[u].template load<Cache::kStream>(x + static_cast<int64_t>(here) * N);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int here = at + u * static_cast<int>(blockDim.x);
      if (here >= count) break;
      held[here] = make_uint4(v[u].word[0], v[u].word[1], v[u].word[2], v[u].word[3]);
      sums.add_vector(v[u], seen);
    }
  }
  keep_channels(p, static_cast<int>(blockIdx.x % static_cast<unsigned>(p.a.groups)), of_channel);
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  Moments m = sums.moments(seen);
  m.merge_warp();
  if (lane == 0) of_warp[threadIdx.x / kWarp] = m;
  __syncthreads();
  m = lane % kWarps < warps ? of_warp[lane % kWarps] : Moments{};
  m.merge_warp<kWarps>();
  const float rstd = keep_stats(p, unit, m, threadIdx.x == 0);

  T *out = static_cast<T *>(p.a.out) + unit * p.elements;
#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += blockDim.x) {
    finish_held<T, N, kSilu>(p, held[at], at, m.mean, rstd, of_channel,
                             out + static_cast<int64_t>(at) * N);
  }
}

// A cluster per group of NCHW, likewise. Each part has kThreads threads, of one CTA, and p.chunk vectors:
// the number of CTAs changes neither a sum nor the order of sums. Each warp sends its moments to all
// CTAs; who waits, waits for those alone.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kSharedThreads)
    group_shared_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  using CTAs = Team<true>;
  extern __shared__ __align__(kLineBytes) uint4 held[];
  __shared__ __align__(16) float4 of_warp[kMostParts * kThreads / kWarp];  // n, mean, m2
  __shared__ Mailbox mail;
  __shared__ float2 of_channel[kMostChannels];
  const int ctas = static_cast<int>(CTAs::launched_size()), rank = static_cast<int>(CTAs::rank());
  const int threads = static_cast<int>(blockDim.x), warps = threads * ctas / kWarp;
  const int thread = rank * threads + static_cast<int>(threadIdx.x);  // of the cluster
  const int lane = thread % kWarp, warp = thread / kWarp;
  const int64_t unit = blockIdx.x / static_cast<unsigned>(ctas);
  const int chunk = static_cast<int>(p.chunk), begin = thread / kThreads * chunk;
  const int first = begin + thread % kThreads;
  const int end = min(static_cast<int>(p.elements / N), begin + chunk);
  const T *x = static_cast<const T *>(p.a.x) + unit * p.elements;
  mail.begin(warps * static_cast<int>(sizeof(float4)));
  CTAs::leave();  // and left(): nothing is sent before all mailboxes are there
  wait_for_previous();

  const auto limit = [&](int group) {  // of its vectors
    return group == kCopies - 1 ? end : min(end, first + (group + 1) * kUnroll * kThreads);
  };
  int at = first;
  uint4 *place = held + threadIdx.x;
#pragma unroll
  for (int g = 0; g < kCopies; ++g) {
    for (; at < limit(g); at += kThreads, place += threads) {
      copy_later(place, x + static_cast<int64_t>(at) * N);
    }
    end_copies();
  }
  keep_channels(p, static_cast<int>(unit % p.a.groups), of_channel);

  Sums sums;
  int seen = 0;
  at = first, place = held + threadIdx.x;
  const auto add_group = [&](int g) {
    for (; at < limit(g); at += kThreads, place += threads) {
      sums.add_vector(Vec<T, N>{{place->x, place->y, place->z, place->w}}, seen);
    }
  };
  static_assert(kCopies == 4);
  wait_for_copies<3>();
  add_group(0);
  wait_for_copies<2>();
  add_group(1);
  wait_for_copies<1>();
  add_group(2);
  wait_for_copies<0>();
  add_group(3);

  Moments m = merge_lanes(sums, seen);
  CTAs::left();
  const float own[4] = {m.n, m.mean, m.m2, 0.0f};
  if (lane < ctas) mail.send(&of_warp[warp].x, own, static_cast<unsigned>(lane));
  __syncthreads();  // of_channel
  mail.wait(0);
  Pool of_group;
  const float pivot = of_warp[0].y;
  for (int i = lane; i < warps; i += kWarp) {
    const float4 w = of_warp[i];
    m.n = w.x, m.mean = w.y, m.m2 = w.z;
    of_group.add(m, pivot);
  }
  m = of_group.merge_warp(pivot, static_cast<float>(p.elements));
  const float rstd = keep_stats(p, unit, m, thread == 0);

  T *out = static_cast<T *>(p.a.out) + unit * p.elements;
  place = held + threadIdx.x;
#pragma unroll 2
  for (at = first; at < end; at += kThreads, place += threads) {
    finish_held<T, N, kSilu>(p, *place, at, m.mean, rstd, of_channel,
                             out + static_cast<int64_t>(at) * N);
  }
#endif
}

// Groups that are read once; false where they are too large.
template <class T, int N, bool kSilu>
bool launch_held(Params p, int device, void *stream, int32_t *status) {
  const int64_t vectors = p.elements / N, units = p.a.batch * p.a.groups;
  auto *one = &group_held_kernel<T, N, kSilu>;
  auto *several = &group_shared_kernel<T, N, kSilu>;
  if (p.width > kMostChannels) return false;
  p.channel_vectors = FastDivisor(p.a.positions / N);
  if (vectors > kOneCta && vectors <= kMostShared && units <= kMaxGrid / kMostParts &&
      has_clusters(reinterpret_cast<const void *>(several), device)) {
    const int parts = vectors <= kMostFew ? kFewParts : kMostParts;
    p.chunk = ceil_div(vectors, parts);
    const int part_bytes = static_cast<int>(ceil_div(p.chunk, kThreads)) * kThreads * kVectorBytes;
    // Not all GPUs with clusters have the shared memory for half of the parts: sm_120 has 99 KB.
    const bool half_fits = parts / 2 * part_bytes + kStaticBytes <= shared_memory_limit();
    const int ctas = units >= kManyGroups && half_fits ? 2 : parts;
    const int in_cta = parts / ctas;
    *status = launch_clusters(several, units, in_cta * kThreads, p, stream, kName,
                              in_cta * part_bytes, ctas);
    return true;
  }
  if (vectors > kMostAlone || units > kMaxGrid) return false;
  p.chunk = vectors;
  const int threads = vectors < kThreads ? cta_threads(vectors, 1) : kThreads;
  *status = launch(one, units, threads, p, stream, kName, static_cast<int>(vectors) * kVectorBytes);
  return true;
}

}  // namespace hfp::cuda::group_norms
