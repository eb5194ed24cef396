// rows.cuh: how the ops that reduce over a row share it out: who holds what, and the sum over it.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// ---------------------------------------------------------------------------------------------
// Layouts; plan_rows in tuning.cuh chooses one

// Threads per row as a template parameter; kCta stands for "the whole CTA".
inline constexpr int kCta = 0;

__host__ __device__ constexpr int max_threads(int row_threads, int vectors) {
  if (row_threads != kCta) return kRowThreads;
  return vectors == 2 || vectors == 4 ? kMaxThreadsX4 : vectors == 8 ? kMaxThreadsX8 : kMaxThreads;
}

// Threads of a CTA of rms_norm and layer_norm: see kNarrowThreads.
__host__ __device__ constexpr int norm_threads(int row_threads, int vectors) {
  return row_threads == 8 && vectors == 1 ? kNarrowThreads : max_threads(row_threads, vectors);
}

template <int kWordsPerVector>
inline constexpr bool kWarpOf8 = 8 * kWordsPerVector <= kHoldWords;

// K::kernel<threads per row, vectors per thread>() and K::loop() are pointers to its kernels,
// K::words() the registers of one vector of the row and its parameters.
template <class K>
auto select_kernel(Shape shape) {
  switch (shape) {
    case Shape::k8x2: return K::template kernel<8, 2>();
    case Shape::k16x2: return K::template kernel<16, 2>();
    case Shape::k32x2: return K::template kernel<32, 2>();
    case Shape::k32x4: return K::template kernel<32, 4>();
    case Shape::k32x8:
      // Never planned where the condition is false; then its kernel is not built either.
      if constexpr (kWarpOf8<K::words()>) return K::template kernel<32, 8>();
      break;
    case Shape::kCtaX1: return K::template kernel<kCta, 1>();
    case Shape::kCtaX4: return K::template kernel<kCta, 4>();
    default: break;
  }
  return K::template kernel<kCta, 8>();
}

template <class K>
auto select_general_kernel(Shape shape) {
  switch (shape) {
    case Shape::k8x2: return K::template kernel<8, 2>();
    case Shape::k32x4: return K::template kernel<32, 4>();
    case Shape::kCtaX8: return K::template kernel<kCta, 8>();
    default: return K::loop();
  }
}

// ---------------------------------------------------------------------------------------------
// The threads of one row

// kCtaThreads: of a CTA with several rows. kInWarp: a CTA's row without a vector left over, so many of
// them in each thread, those of a warp one after the other, which reads memory more in order; 0: a
// thread's vectors are as many apart as there are threads.
template <int kThreads, int kCtaThreads = kRowThreads, int kInWarp = 0>
struct Group {
  static constexpr bool kWholeCta = kThreads == kCta, kWholeWarps = kInWarp > 0;
  // A warp is the widest set of threads that shuffle.
  static constexpr int kLanes = kWholeCta ? 32 : kThreads;

  __device__ static int index() {
    if constexpr (kWholeWarps) return threadIdx.x / 32u * (kInWarp * 32) + threadIdx.x % 32u;
    else return kWholeCta ? threadIdx.x : threadIdx.x % static_cast<unsigned>(kLanes);
  }
  __device__ static int stride() {
    if constexpr (kWholeWarps) return 32;
    else return kWholeCta ? blockDim.x : kThreads;
  }
  // g of the 32 vectors 32 g, 32 g + 1, ... of the row that are a warp's i-th.
  __device__ static unsigned group(unsigned warp, unsigned i) {
    return kWholeWarps ? warp * kInWarp + i : warp + i * (blockDim.x / 32u);
  }
  // Of the warps of a CTA's row: this one, and how many there are.
  __device__ static unsigned warp() { return threadIdx.x / 32u; }
  __device__ static unsigned warps() { return blockDim.x / 32u; }
  // What a warp has for all of them, seen after meet(); and where they put it the next time.
  __device__ static void put(float *partial, unsigned at, float v) { partial[at] = v; }
  __device__ static void meet(float *) { __syncthreads(); }
  __device__ static float *next(float *partial) {
    __syncthreads();  // all have read it
    return partial;
  }
  __device__ static int64_t row(int64_t first) {
    if (kWholeCta) return first + blockIdx.x;
    return first + static_cast<int64_t>(blockIdx.x) * (kCtaThreads / kLanes) +
           threadIdx.x / static_cast<unsigned>(kLanes);
  }

  __device__ static float sum_lanes(float v) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
  }

  // Sums each of K values over the lanes, K a power of two: lane l returns the sum of
  // v[l / (kLanes / K)], added up in the order of sum_lanes. In each of the first steps a lane keeps
  // half of its values and hands over the others, so that this takes K - 1 shuffles and the rest
  // of one sum instead of K sums.
  template <int K>
  __device__ static float sum_lanes_of_each(float (&v)[K]) {
    const int lane = threadIdx.x % 32u;
#pragma unroll
    for (int half = K / 2, bit = kLanes / 2; half > 0; half /= 2, bit /= 2) {
      const bool upper = (lane & bit) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
        v[i] = keep + __shfl_xor_sync(~0u, give, bit);
      }
    }
#pragma unroll
    for (int bit = kLanes / 2 / K; bit > 0; bit /= 2) v[0] += __shfl_xor_sync(~0u, v[0], bit);
    return v[0];
  }

  // The sum over the row of one value per vector; v[i] is that of vector index() + i * stride().
  // Every thread of the CTA calls it, also those whose row is past the end. `partial`:
  // kPartials floats of shared memory that no other sum of the same row uses, so that one barrier
  // is enough.
  //
  // Same input, same bits: the order depends on the columns alone. Up to 1024 vectors several
  // layouts can hold a row, and all of them add in one order: first the 32 vectors 32 g, 32 g + 1,
  // ... of each g, which one warp always holds, as sum_lanes does; then these sums over g, as
  // sum_lanes does too, with g for the lane. Where the width leaves no choice of layout (half a
  // warp or less; eight vectors in each thread of a CTA) a thread adds up its own vectors first.
  template <int K>
  __device__ static float sum(float (&v)[K], float *partial) {
    if constexpr (kLanes < 32 || (kWholeCta && K == 8)) {
      float own = 0.0f;
#pragma unroll
      for (int i = 0; i < K; ++i) own += v[i];
      own = sum_lanes(own);
      if constexpr (kWholeCta) {
        const int lane = threadIdx.x % 32u, warps = blockDim.x / 32u;
        if (lane == 0) partial[threadIdx.x / 32u] = own;
        __syncthreads();
        own = sum_lanes(lane < warps ? partial[lane] : 0.0f);
      }
      return own;
    } else {
      float of_32 = sum_lanes_of_each(v);  // the vectors of g = l / (32 / K)
      if constexpr (kWholeCta) {
        const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
        if (lane % (32 / K) == 0) partial[group(warp, lane / (32 / K))] = of_32;
        __syncthreads();
        of_32 = lane < K * warps ? partial[lane] : 0.0f;
        if constexpr (K > 1) {
          if (lane + 32 < K * warps) of_32 += partial[lane + 32];
        }
        return sum_lanes(of_32);
      } else {
#pragma unroll
        for (int bit = 16; bit >= 32 / K; bit /= 2) of_32 += __shfl_xor_sync(~0u, of_32, bit);
        return of_32;
      }
    }
  }
};

// A CTA of 64 threads: the sums of 32 vectors are so few that each thread adds them all up, in the
// order of Group<kCta>::sum, instead of five shuffles.
template <>
struct Group<64> : Group<kCta> {
  __device__ static int stride() { return 64; }

  // partial: aligned to 16 bytes.
  __device__ static float sum(float (&v)[2], float *partial) {
    const float of_32 = sum_lanes_of_each(v);
    const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    if (lane % 16 == 0) partial[warp + lane / 16 * 2] = of_32;
    __syncthreads();
    const float4 of = *reinterpret_cast<const float4 *>(partial);
    return (of.x + of.z) + (of.y + of.w);
  }
};

// ---------------------------------------------------------------------------------------------
// Parameters (weights, biases) of length cols

struct AnyType {};  // a parameter dtype that is known at run time only

template <class W, int N>
struct ParamVec : Vec<W, N> {};
template <int N>
struct ParamVec<AnyType, N> {
  static constexpr int kWords = N;
};

template <class W, int kThreads, int kVectors, int kWordsPerVector>
inline constexpr bool kHoldParams = !std::is_same_v<W, AnyType> &&
                                    !(kThreads == kCta && kVectors == 8) &&
                                    kVectors * kWordsPerVector <= kHoldWords;

// The vectors of one thread. A parameter that is null is `otherwise` throughout.
template <class W, int N, int kVectors>
__device__ __forceinline__ void load_params(ParamVec<W, N> (&v)[kVectors], const void *from,
                                            int index, int stride, int vectors, float otherwise) {
  if (from != nullptr) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = index + i * stride;
      if (at < vectors) {
        v[i].template load<Cache::kReadOnly>(static_cast<const W *>(from) + at * N);
      }
    }
  } else {
    float value[N];
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = otherwise;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i].set(value);
  }
}

template <class G, class W, int N, int kVectors>
__device__ __forceinline__ void load_params(ParamVec<W, N> (&v)[kVectors], const void *from,
                                            int vectors, float otherwise) {
  load_params(v, from, G::index(), G::stride(), vectors, otherwise);
}

// One vector of a parameter; `type` counts where W does not say it.
template <class W, int N>
__device__ __forceinline__ void load_param(float (&value)[N], const void *from, DType type,
                                           int64_t offset, float otherwise) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = otherwise;
  } else if constexpr (std::is_same_v<W, AnyType>) {
    load_any(value, from, type, offset);
  } else {
    Vec<W, N> v;
    v.template load<Cache::kReadOnly>(static_cast<const W *>(from) + offset);
    v.get(value);
  }
}

template <class T, int N>
__device__ __forceinline__ float sum_of_squares(const Vec<T, N> &v) {
  float x[N], sum = 0.0f;
  v.get(x);
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

// -0: y + -0 is y for every y, also for -0.
inline constexpr float kNoBias = -0.0f;

// ---------------------------------------------------------------------------------------------
// Launching

// Runs `kernel` over all rows: in one launch, unless there are more CTAs than a grid can have.
template <class Params>
int32_t launch_rows(void (*kernel)(Params), const RowPlan &plan, Params &params, void *stream,
                    const char *op) {
  const int64_t per_launch = kMaxGrid * plan.cta_rows;
  for (params.first_row = 0; params.first_row < params.x_rows.rows;
       params.first_row += per_launch) {
    const int64_t left = params.x_rows.rows - params.first_row;
    const int64_t here = left < per_launch ? left : per_launch;
    const int64_t grid = (here + plan.cta_rows - 1) / plan.cta_rows;
    const int32_t status = launch(kernel, grid, plan.threads, params, stream, op);
    if (status != HFP_OK) return status;
  }
  return HFP_OK;
}

}  // namespace hfp::cuda
