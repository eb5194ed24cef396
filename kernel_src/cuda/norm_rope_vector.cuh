// norm_rope_vector.cuh: RoPE of the rows of q and k that are normalized across heads, of two batches at
// once, by wide tables that they share. A thread has one vector of each row, so that a warp reads what
// lies together.
#pragma once

#include "rope_plan.cuh"

namespace hfp::cuda {

// Sums of kRows values over the CTA with one barrier: of threads 1 apart, 2, 4 and so on. Before these come
// those that are `first` apart, if that is not 0.
template <int kRows>
__device__ __forceinline__ void sum_cta(float (&v)[kRows], float (*partial)[32], uint32_t first = 0) {
  const unsigned lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
  if (first > 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r] += __shfl_xor_sync(~0u, v[r], first);
  }
#pragma unroll
  for (unsigned apart = 1; apart < 32; apart *= 2) {
    if (apart == first) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r] += __shfl_xor_sync(~0u, v[r], apart);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) partial[r][warp] = v[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    v[r] = lane < warps ? partial[r][lane] : 0.0f;
#pragma unroll
    for (unsigned apart = 1; apart < 32; apart *= 2) v[r] += __shfl_xor_sync(~0u, v[r], apart);
  }
}

// Both columns of a pair, which hold the same, are used: of vectors of which it needs every second word ptxas
// loads each by itself.
template <class T, bool kRound, int N>
__device__ __forceinline__ void rotate_neighbours(float (&y)[N], const Vec<float, N> &cos,
                                                  const Vec<float, N> &sin) {
  float c[N], s[N];
  cos.get(c), sin.get(s);
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float product[4] = {__fmul_rn(y[i], c[i]), __fmul_rn(y[i + 1], s[i]),
                        __fmul_rn(y[i + 1], c[i + 1]), __fmul_rn(y[i], s[i + 1])};
    if constexpr (kRound) round_to<T>(product);
    y[i] = __fsub_rn(product[0], product[1]);
    y[i + 1] = __fadd_rn(product[2], product[3]);
  }
}

// Whether each two batches read the same wide tables, by heads whose vectors, two a unit, a warp holds.
inline bool shares_wide_tables(const RopeArgs &a, uint32_t units) {
  return a.wide && !a.paired && a.batch % 2 == 0 && a.cos.batch == 0 && a.sin.batch == 0 &&
         units <= 16;
}

inline RopeArgs batches_in_twos(const RopeArgs &a) {
  RopeArgs two = a;
  two.batch = a.batch / 2;
  for (RopeTensor *t : {&two.q, &two.k}) t->x_batch *= 2, t->out_batch *= 2;
  return two;
}

inline constexpr int kMostVectorThreads = 512;

// A batch of the launch is two. The sums are those of norm_rope_whole_kernel, whose threads have the two
// vectors of a unit, so that a warp's loads are of half lines. The tables are constants of a model: those of
// the first wave are brought to L2 before the wait. bf16 on an H200, us, cold, threads with units -> these:
// 2 x 2688 x 32 x 64 36.1 -> 33.2, 2 x 8064 96.4 -> 93.7, 4 x 2688 60.4 -> 55.8, 2 x 256 5.35 -> 5.03, 2 x 2688
// x 32 x 128 66.4 -> 64.7. With every second word of the tables 34.2, and 35.2 where they are not brought.
template <class T, int N>
__global__ void __launch_bounds__(kMostVectorThreads, 2)
    norm_rope_vector_kernel(const __grid_constant__ RopeParams p) {
  constexpr int kRows = 4;  // q's and k's in turns
  __shared__ float partial[kRows][32];
  const Token where = token_at(p, p.first_token + blockIdx.x);
  const uint32_t head = threadIdx.x >> (p.lane_bits + 1);
  const uint32_t col = (threadIdx.x & (2 * p.lanes - 1)) * N;
  const auto offset = [&](int64_t batch, int64_t seq, int64_t of_head) {
    return narrow_offset(where, head, batch, seq, of_head);
  };
  const T *x[2] = {
      static_cast<const T *>(p.q.x) + offset(p.q.x_batch, p.q.x_seq, p.q.x_head) + col,
      static_cast<const T *>(p.k.x) + offset(p.k.x_batch, p.k.x_seq, p.k.x_head) + col};
  const float *cos = static_cast<const float *>(p.cos.data) + offset(0, p.cos.seq, p.cos.head) + col;
  const float *sin = static_cast<const float *>(p.sin.data) + offset(0, p.sin.seq, p.sin.head) + col;
  settle(x[0], x[1], cos, sin);
  const bool active = head < static_cast<uint32_t>(p.q.heads);
  if (active && blockIdx.x * blockDim.x < kFullSms * kSomeThreads) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(cos));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(sin));
  }
  wait_for_previous();

  const int64_t q_batch = p.q.x_batch / 2, k_batch = p.k.x_batch / 2;
  Vec<T, N> v[kRows];
  Vec<float, N> cosines, sines;
  if (active && p.zero == 0) {  // in a branch, as in load_in_place
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r].template load<Cache::kStream>(x[r % 2] + r / 2 * (r % 2 == 0 ? q_batch : k_batch));
    }
    cosines.template load<Cache::kReadOnly>(cos), sines.template load<Cache::kReadOnly>(sin);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) v[r].zero();
    cosines.zero(), sines.zero();
  }
  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) scale[r] = sum_of_squares(v[r]);
  sum_cta(scale, partial, p.lanes);
  if (!active) return;

#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const RopeTensor &t = of == 0 ? p.q : p.k;
    T *out = static_cast<T *>(t.out) + offset(t.out_batch, t.out_seq, t.out_head) + col;
    Weights<T, N> weight;
    weight.load_from(p, t.weight, static_cast<int64_t>(head) * p.dim + col);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int r = 2 * b + of;
      const float each = rsqrtf(fmaf(scale[r], of == 0 ? p.inverse_q : p.inverse_k, p.eps));
      v[r].stay_packed(p.zero);
      normalize<T, T>(p, v[r], each, weight);
      float y[N];
      v[r].get(y);
      if (p.round_products) rotate_neighbours<T, true>(y, cosines, sines);
      else rotate_neighbours<T, false>(y, cosines, sines);
      v[r].set(y);
      v[r].store(out + b * (t.out_batch / 2));
    }
  }
}

}  // namespace hfp::cuda
