// group_norm.cu: group norm with an optional SiLU. Wu & He, arXiv:1803.08494.
//
// In NCHW a group lies in one piece. Up to 32768 vectors of 16 bytes it stays in the shared memory of
// one CTA, or of a cluster of CTAs (sm_90): one launch, one pass over memory. All others take three
// launches: partial moments of parts of each group; mean and rstd from them; the result. Those are up
// to millions of elements, and there are too few groups to fill a GPU with one CTA each. The second
// pass over x goes backwards, so that it begins with what L2 still holds.
#include "activations.cuh"
#include "async_copy.cuh"
#include "elementwise.cuh"
#include "mailbox.cuh"

namespace hfp::cuda {

namespace {

constexpr int kThreads = 256;       // of the kernels over NCHW
constexpr int kLastThreads = 512;   // at most, of those over NHWC
constexpr int kChannelSlots = 4096; // channels times positions at once that a CTA merges in NHWC
constexpr int kWarp = 32;
constexpr int kUnroll = 4;          // NCHW: vectors of a thread at once
// Vectors of a group that is read once: up to here one CTA is as fast as a cluster; most in one CTA
// where there are no clusters; most in a cluster.
constexpr int64_t kOneCta = 512, kMostAlone = 2048, kMostShared = 32768;
constexpr int kMostChannels = 256;  // of such a group

// Clusters. A group is in parts of kThreads threads each: few up to kMostFew vectors, more up to
// kMostSome, else most. They are two CTAs, or one each where groups are too few to fill the GPU; most
// parts are sixteen CTAs where the GPU can schedule them, else eight. The bits are the same for any
// number of CTAs. Figures: docs/gpus.md.
constexpr int64_t kMostFew = 10240, kMostSome = 20480, kManyGroups = 64;
constexpr int kFewParts = 4, kSomeParts = 8, kMostParts = 16;
constexpr int kSharedThreads = kSomeParts / 2 * kThreads;  // most of a CTA
constexpr int kStaticBytes = 6 << 10;  // at most, besides the group
constexpr int kCopies = 4;  // groups of loads of a thread, each of kUnroll vectors but the last

struct Params {
  static constexpr bool kStartsEarly = true;
  const GroupNormArgs a;
  int64_t width;     // channels of a group
  int64_t elements;  // of a group
  int64_t chunk;     // of a part: elements (NCHW) or positions (NHWC)
  int64_t work;      // CTAs' worth of it
  int lanes;         // NHWC: positions that a CTA looks at at once
  FastDivisor channel_vectors;  // NCHW
  bool whole_params;  // NHWC: weight and bias can be loaded by vectors
};

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
  float n = 0.0f, sum = 0.0f, squares = 0.0f;

  __device__ void add(const Moments &m, float pivot) {
    const float d = m.mean - pivot, of_all = m.n * d;
    n += m.n;
    sum += of_all;
    squares += fmaf(of_all, d, m.m2);
  }
  __device__ Moments merge_warp(float pivot) {
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) {
      n += __shfl_xor_sync(~0u, n, lane);
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

// The place of part p of group `unit` in stats; p == parts: mean and rstd.
__device__ __forceinline__ float *slot(const Params &p, int64_t unit, int64_t part) {
  return p.a.stats + (unit * (p.a.parts + 1) + part) * 2;
}

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
    const int64_t unit = work / p.a.parts, part = work % p.a.parts;
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

// A CTA per part of the positions of a sample, for all groups. Thread t holds vector t % V of the
// channels at positions t / V, t / V + lanes, ...
template <class T, int N>
__global__ void __launch_bounds__(kLastThreads)
    last_parts_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  __shared__ float means[kChannelSlots], squares[kChannelSlots];
  const int vectors = static_cast<int>(p.a.channels / N);
  const int lane = threadIdx.x / vectors, column = threadIdx.x % vectors;
  const int channels = static_cast<int>(p.a.channels), width = static_cast<int>(p.width);
  for (int64_t work = blockIdx.x; work < p.work; work += gridDim.x) {
    const int64_t sample = work / p.a.parts, part = work % p.a.parts;
    const int64_t begin = part * p.chunk;
    const int64_t end = begin + p.chunk < p.a.positions ? begin + p.chunk : p.a.positions;
    if (lane < p.lanes) {
      const T *x = static_cast<const T *>(p.a.x) + sample * p.a.channels * p.a.positions +
                   column * N;
      Sums sums[N];
      int64_t count = 0;
      for (int64_t i = begin + lane; i < end; i += p.lanes) {
        Vec<T, N> v;
        float value[N];
        v.template load<Cache::kReadOnly>(x + i * p.a.channels);
        v.get(value);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (count == 0) sums[k].pivot = value[k];
          sums[k].add(value[k]);
        }
        ++count;
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Moments m = sums[k].moments(count);
        means[lane * channels + column * N + k] = m.mean;
        squares[lane * channels + column * N + k] = m.m2;
      }
    }
    __syncthreads();
    const int warps = blockDim.x / kWarp, here = threadIdx.x % kWarp;
    for (int g = threadIdx.x / kWarp; g < p.a.groups; g += warps) {
      Moments m;
#pragma unroll 1
      for (int e = here; e < p.lanes * width; e += kWarp) {
        const int l = e / width, at = l * channels + g * width + e % width;
        const int64_t left = end - begin - l;
        Moments b;
        b.n = left > 0 ? static_cast<float>((left + p.lanes - 1) / p.lanes) : 0.0f;
        b.mean = means[at], b.m2 = squares[at];
        m.merge(b);
      }
      m.merge_warp();
      if (here == 0) {
        float *to = slot(p, sample * p.a.groups + g, part);
        to[0] = m.mean, to[1] = m.m2;
      }
    }
    __syncthreads();
  }
}

struct Stats {
  float mean, rstd;
};

__device__ __forceinline__ Stats merged(const Params &p, int64_t unit) {
  const float *from = slot(p, unit, p.a.parts);
  return {from[0], from[1]};
}

// Mean and rstd of each group, from all of its parts. A warp per group.
template <bool kLast>
__global__ void __launch_bounds__(kThreads)
    group_moments_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  const int lane = threadIdx.x % kWarp;
  const int64_t units = p.a.batch * p.a.groups, whole = kLast ? p.a.positions : p.elements;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) +
                      threadIdx.x / kWarp;
       unit < units;
       unit += stride) {
    Moments m;
    for (int64_t part = lane; part < p.a.parts; part += kWarp) {
      const int64_t left = whole - part * p.chunk;
      const int64_t here = left < 0 ? 0 : left < p.chunk ? left : p.chunk;
      Moments b;
      b.n = static_cast<float>(kLast ? here * p.width : here);
      const float *from = slot(p, unit, part);
      b.mean = __ldcg(from), b.m2 = __ldcg(from + 1);
      m.merge(b);
    }
    m.merge_warp();
    if (lane == 0) {
      float *to = slot(p, unit, p.a.parts);
      to[0] = m.mean, to[1] = rsqrtf(m.m2 / static_cast<float>(p.elements) + p.a.eps);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// The result

__device__ __forceinline__ float parameter(const void *from, DType type, int64_t at,
                                           float otherwise) {
  if (from == nullptr) return otherwise;
  float value[1];
  load_any<1>(value, from, type, at);
  return value[0];
}

// Of the channels [at, at + N).
template <int N>
__device__ __forceinline__ void parameters(const Params &p, const void *from, int64_t at,
                                           float otherwise, float (&value)[N]) {
  if (from != nullptr && p.whole_params) {
    load_any<N>(value, from, p.a.weight_type, at);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = parameter(from, p.a.weight_type, at + k, otherwise);
  }
}

// y is rounded to T before the activation, as by the two modules. The store is an intrinsic because
// the compiler takes an assignment of 16 bytes apart here, into four stores of words that lie 16 bytes
// from those of the next lane.
template <class T, int N, bool kSilu>
__device__ __forceinline__ void store_result(T *to, float (&y)[N]) {
  if constexpr (kSilu) {
    round_to<T>(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = activate<HFP_ACT_SILU, std::is_same_v<T, float>>(y[k]);
  }
  Vec<T, N> v;
  v.set(y);
  if constexpr (Vec<T, N>::kBytes == kVectorBytes) {
    __stwb(reinterpret_cast<uint4 *>(to), make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
  } else {
    v.store(to);
  }
}

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
  const float rstd = rsqrtf(m.m2 / static_cast<float>(p.elements) + p.a.eps);
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
  extern __shared__ uint4 held[];
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
  extern __shared__ uint4 held[];
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
  if (threadIdx.x == 0) {
    mail.init();
    mail.announce(warps * static_cast<int>(sizeof(float4)));
  }
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

  Moments m = sums.moments(seen);
  float pivot = __shfl_sync(~0u, m.mean, 0);
  Pool of_lanes;
  of_lanes.add(m, pivot);
  m = of_lanes.merge_warp(pivot);
  CTAs::left();
  const float own[4] = {m.n, m.mean, m.m2, 0.0f};
  if (lane < ctas) mail.send(&of_warp[warp].x, own, static_cast<unsigned>(lane));
  __syncthreads();  // of_channel
  mail.wait(0);
  Pool of_group;
  pivot = of_warp[0].y;
  for (int i = lane; i < warps; i += kWarp) {
    const float4 w = of_warp[i];
    m.n = w.x, m.mean = w.y, m.m2 = w.z;
    of_group.add(m, pivot);
  }
  m = of_group.merge_warp(pivot);
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

// As last_parts_kernel shares it out.
template <class T, int N, bool kSilu>
__global__ void __launch_bounds__(kLastThreads)
    last_result_kernel(const __grid_constant__ Params p) {
  wait_for_previous();
  const int vectors = static_cast<int>(p.a.channels / N);
  const int lane = threadIdx.x / vectors, c = threadIdx.x % vectors * N;
  if (lane >= p.lanes) return;
  for (int64_t work = blockIdx.x; work < p.work; work += gridDim.x) {
    const int64_t sample = work / p.a.parts, begin = work % p.a.parts * p.chunk;
    const int64_t end = begin + p.chunk < p.a.positions ? begin + p.chunk : p.a.positions;
    float mean[N], factor[N], summand[N];
    parameters<N>(p, p.a.weight, c, 1.0f, factor);
    parameters<N>(p, p.a.bias, c, 0.0f, summand);
    const int width = static_cast<int>(p.width);
    int64_t unit = sample * p.a.groups + c / width;
    Stats s = merged(p, unit);
#pragma unroll
    for (int k = 0, in_group = c % width; k < N; ++k, ++in_group) {
      if (in_group == width) {
        in_group = 0;
        s = merged(p, ++unit);
      }
      mean[k] = s.mean;
      factor[k] *= s.rstd;
    }
    const int64_t base = sample * p.a.channels * p.a.positions + c;
    const T *x = static_cast<const T *>(p.a.x) + base;
    T *out = static_cast<T *>(p.a.out) + base;
    for (int64_t i = begin + lane; i < end; i += p.lanes) {
      Vec<T, N> v;
      float y[N];
      v.template load<Cache::kStream>(x + i * p.a.channels);
      v.get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = (y[k] - mean[k]) * factor[k] + summand[k];
      store_result<T, N, kSilu>(out + i * p.a.channels, y);
    }
  }
}

// NHWC with rows that the kernels above do not take: one element at a time.
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

constexpr const char *kName = "group_norm";

int64_t up_to_grid(int64_t work) { return work < kMaxGrid ? work : kMaxGrid; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <bool kLast>
int32_t launch_moments(Params &p, void *stream) {
  const int64_t grid = ceil_div(p.a.batch * p.a.groups, kThreads / kWarp);
  return launch(&group_moments_kernel<kLast>, up_to_grid(grid), kThreads, p, stream, kName);
}

// CTAs of a group of most parts. The answer per device is kept.
template <class T, int N, bool kSilu>
int most_ctas(int device) {
  constexpr int kDevices = 64, kHeld = kMostShared / kMostParts * kVectorBytes;
  static std::atomic<int8_t> known[kDevices];  // 0: not asked yet
  if (device < 0 || device >= kDevices) return kClusterSize;
  int ctas = known[device].load(std::memory_order_relaxed);
  if (ctas == 0) {
    ctas = allow_large_clusters(&group_shared_kernel<T, N, kSilu>, kMostParts, kThreads, kHeld)
               ? kMostParts
               : kClusterSize;
    known[device].store(static_cast<int8_t>(ctas), std::memory_order_relaxed);
  }
  return ctas;
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
    const int parts = vectors <= kMostFew ? kFewParts : vectors <= kMostSome ? kSomeParts : kMostParts;
    p.chunk = ceil_div(vectors, parts);
    const int part_bytes = static_cast<int>(ceil_div(p.chunk, kThreads)) * kThreads * kVectorBytes;
    // Not all GPUs with clusters have the shared memory for half of the parts: sm_120 has 99 KB.
    const bool half_fits = parts / 2 * part_bytes + kStaticBytes <= shared_memory_limit();
    const int ctas = parts == kMostParts                 ? most_ctas<T, N, kSilu>(device)
                     : units >= kManyGroups && half_fits ? 2
                                                         : parts;
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

template <class T, int N, bool kSilu>
int32_t launch_first(Params p, void *stream) {
  p.chunk = ceil_div(ceil_div(p.elements, p.a.parts), N) * N;
  p.work = p.a.batch * p.a.groups * p.a.parts;
  int32_t status = launch(&group_parts_kernel<T, N, false>, up_to_grid(p.work), kThreads, p,
                          stream, kName);
  if (status == HFP_OK) status = launch_moments<false>(p, stream);
  if (status != HFP_OK) return status;
  // As many threads as a short channel has vectors.
  const int64_t vectors = ceil_div(p.a.positions, N);
  const int threads = vectors >= kThreads ? kThreads : static_cast<int>(ceil_div(vectors, 32) * 32);
  p.work = p.a.batch * p.a.channels * ceil_div(p.a.positions, int64_t{kUnroll} * threads * N);
  return launch(&first_result_kernel<T, N, kSilu>, up_to_grid(p.work), threads, p, stream, kName);
}

template <class T, int N, bool kSilu>
int32_t launch_last(Params p, void *stream) {
  const int64_t vectors = p.a.channels / N;
  p.lanes = static_cast<int>(kLastThreads / vectors);
  const int threads = static_cast<int>(ceil_div(p.lanes * vectors, 32) * 32);
  p.chunk = ceil_div(p.a.positions, p.a.parts);
  p.work = p.a.batch * p.a.parts;
  int32_t status =
      launch(&last_parts_kernel<T, N>, up_to_grid(p.work), threads, p, stream, kName);
  if (status == HFP_OK) status = launch_moments<true>(p, stream);
  if (status != HFP_OK) return status;
  return launch(&last_result_kernel<T, N, kSilu>, up_to_grid(p.work), threads, p, stream, kName);
}

template <class T, bool kSilu>
int32_t launch_any(Params p, void *stream) {
  p.chunk = ceil_div(p.elements, p.a.parts);
  p.work = p.a.batch * p.a.groups * p.a.parts;
  int32_t status = launch(&group_parts_kernel<T, 1, true>, up_to_grid(p.work), kThreads, p,
                          stream, kName);
  if (status == HFP_OK) status = launch_moments<false>(p, stream);
  if (status != HFP_OK) return status;
  const int64_t grid = ceil_div(p.a.batch * p.a.channels * p.a.positions, kThreads);
  return launch(&any_result_kernel<T, kSilu>, up_to_grid(grid), kThreads, p, stream, kName);
}

template <class T, bool kSilu>
int32_t launch_group_norm(const GroupNormArgs &args, int device, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t width = args.channels / args.groups;
  const bool whole_params = pointer_aligned(args.weight) && pointer_aligned(args.bias);
  const Params p{args, width, width * args.positions, 0, 0, 0, {}, whole_params};
  const bool aligned = pointer_aligned(args.x) && pointer_aligned(args.out);
  if (args.channels_last) {
    if (aligned && args.channels % kWidest == 0 && args.channels / kWidest <= kLastThreads) {
      return launch_last<T, kWidest, kSilu>(p, stream);
    }
    return launch_any<T, kSilu>(p, stream);
  }
  if (aligned && args.positions % kWidest == 0) {
    int32_t status = HFP_OK;
    if (launch_held<T, kWidest, kSilu>(p, device, stream, &status)) return status;
    return launch_first<T, kWidest, kSilu>(p, stream);
  }
  return launch_first<T, 1, kSilu>(p, stream);
}

template <class T>
int32_t launch_group_norm(const GroupNormArgs &args, int device, void *stream) {
  return args.silu ? launch_group_norm<T, true>(args, device, stream)
                   : launch_group_norm<T, false>(args, device, stream);
}

}  // namespace

int32_t group_norm(const GroupNormArgs &args, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kName);
  switch (args.type) {
    case DType::F32: return launch_group_norm<float>(args, device, stream);
    case DType::F16: return launch_group_norm<__half>(args, device, stream);
    default: return launch_group_norm<__nv_bfloat16>(args, device, stream);
  }
}

}  // namespace hfp::cuda
