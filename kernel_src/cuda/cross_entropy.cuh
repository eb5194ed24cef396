// cross_entropy.cuh: what the loss of a row of logits and its gradient are made of, for
// cross_entropy.cu and cross_entropy_with_gradient.cu.
//
// Each lane finds the maximum of its vectors, two elements at once where it can, then their sum of
// exp(z - maximum); sums are rescaled where they meet (Milakov & Gimelshein, arXiv:1805.02867). All in
// powers of two, z log2(e), which is what the hardware computes.
#pragma once

#include "mailbox.cuh"
#include "row_ops.cuh"

namespace hfp::cuda {

struct CrossEntropyParams {
  static constexpr bool kStartsEarly = true;
  float *loss, *lse;
  void *dlogits;
  const float *grad, *saved_lse;
  int64_t grad_step;  // 1; 0: one for all rows
  const void *logits;
  const int64_t *target;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;  // per row
  int strands;      // of the forward
  int64_t chunks;   // of the gradient, per row
  int64_t ignore_index;
  float label_smoothing, inverse_cols;
  float softcap, inverse_softcap;  // softcap 0: none
  uint32_t zero;                   // 0; see Vec::stay_packed
};

inline CrossEntropyParams params_of(const CrossEntropyArgs &a) {
  CrossEntropyParams p{};
  p.loss = a.loss;
  p.lse = a.lse;
  p.dlogits = a.dlogits;
  p.grad = a.grad;
  p.grad_step = a.one_grad ? 0 : 1;
  p.saved_lse = a.saved_lse;
  p.logits = a.logits;
  p.target = a.target;
  p.x_rows = a.rows;
  p.ignore_index = a.ignore_index;
  p.label_smoothing = a.label_smoothing;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.rows.cols));
  p.softcap = a.softcap;
  p.inverse_softcap = a.softcap > 0.0f ? 1.0f / a.softcap : 0.0f;
  return p;
}

inline constexpr float kLog2E = 1.4426950408889634f;
// Their sum is 1 / kLog2E, so that lse of a single logit is that logit.
inline constexpr float kLn2 = 0.69314718f, kLn2Low = 7.3487e-9f;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// cap tanh(x / cap), and its derivative 4 e / (1 + e)^2 with e = exp(-2 |x| / cap). Near 0, where
// 1 - e cancels, the series of tanh, whose error is of order u^7.
struct Capped {
  float value, slope;
};

__device__ __forceinline__ Capped soft_cap(float x, float cap, float inverse_cap) {
  const float u = fabsf(x) * inverse_cap;
  const float e = fast_exp2(u * (-2.0f * kLog2E));
  const float r = fast_reciprocal(1.0f + e);
  const float square = u * u;
  const float series = u * fmaf(square, fmaf(square, 2.0f / 15, -1.0f / 3), 1.0f);
  const float tanh = u < 0.05f ? series : (1.0f - e) * r;
  return {copysignf(cap * tanh, x), 4.0f * e * r * r};
}

template <bool kCap>
__device__ __forceinline__ float capped(const CrossEntropyParams &p, float x) {
  if constexpr (kCap) return soft_cap(x, p.softcap, p.inverse_softcap).value;
  return x;
}

// ---------------------------------------------------------------------------------------------
// What is seen of a row

// What was seen of a row: sum(2^(z log2(e) - most)), and the sum of z. `most` of nothing is -inf,
// and its sum 0.
struct Seen {
  float most = minus_inf(), sum = 0.0f, plain = 0.0f;

  // What is subtracted in exponents: -inf - -inf would be NaN.
  __device__ __forceinline__ static float shift(float most) {
    return most == minus_inf() ? 0.0f : most;
  }

  __device__ __forceinline__ void merge(const Seen &other) {
    const float high = fmaxf(most, other.most), by = shift(high);
    sum = sum * fast_exp2(most - by) + other.sum * fast_exp2(other.most - by);
    most = high, plain += other.plain;
  }

  // Of all lanes, on all lanes; `plain` only where it is asked for.
  __device__ __forceinline__ void merge_lanes(bool with_plain) {
    const float high = max_lanes<32>(most);
    sum = Group<32>::sum_lanes(sum * fast_exp2(most - shift(high)));
    most = high;
    if (with_plain) plain = Group<32>::sum_lanes(plain);
  }
};

inline constexpr int kLaneVectors = 8;
inline constexpr int kWave = 32 * kLaneVectors;  // vectors of a warp at a time

// A lane's share of a wave, the vectors that begin at vector `at`: the maximum first, so that an element
// then takes a multiplication with addition, a power of two and an addition. Any number near the
// maximum serves: with a cap, that of the greatest logit.
template <class T, bool kAligned, bool kCap>
__device__ __forceinline__ Seen see_vectors(const CrossEntropyParams &p, Wave<T, kLaneVectors> &v,
                                            int64_t at) {
  constexpr int N = kVectorOf<T>;
  constexpr bool kCheck = kCap || !kAligned;  // else what lies past the end adds 2^-inf
  const int64_t first = (at + threadIdx.x % 32u) * N;
  const int left = p.x_rows.cols - first < kWave * N
                       ? static_cast<int>(p.x_rows.cols - first)
                       : kWave * N;
  Seen own;
  own.most = greatest<T, false, kLaneVectors>(v);
  own.most = capped<kCap>(p, own.most) * kLog2E;
  const float by = Seen::shift(own.most);
  constexpr int kSums = 4;  // added up side by side
  float sum[kSums] = {};
#pragma unroll
  for (int u = 0; u < kLaneVectors; ++u) {
    float z[N];
    if constexpr (!kHasMaxOfTwos) v[u].stay_packed(p.zero);
    v[u].get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = fast_exp2(fmaf(capped<kCap>(p, z[i]), kLog2E, -by));
      if (!kCheck || 32 * u * N + i < left) sum[i % kSums] += e;
    }
  }
  own.sum = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  if (p.label_smoothing > 0.0f) {
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      float z[N];
      Vec<T, N> again = v[u];
      again.stay_packed(p.zero);
      again.get(z);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (32 * u * N + i < left) own.plain += capped<kCap>(p, z[i]);
      }
    }
  }
  return own;
}

template <class T>
__device__ __forceinline__ float logit_of_target(const CrossEntropyParams &p, const T *x,
                                                 int64_t target) {
  float z[1] = {not_a_number()};
  if (target >= 0 && target < p.x_rows.cols) {
    Vec<T, 1> one;
    one.template load<Cache::kStream>(x + target);
    one.get(z);
  }
  return z[0];
}

// log(sum(exp(z))) of the row.
__device__ __forceinline__ float lse_of(const Seen &all) {
  const float by = Seen::shift(all.most);
  return fmaf(by, kLn2, fmaf(by, kLn2Low, logf(all.sum)));
}

// By one warp, from what all its lanes have. logit: the target's, NaN if there is none.
template <bool kCap>
__device__ __forceinline__ void finish(const CrossEntropyParams &p, int64_t row, float logit,
                                       const Seen &all) {
  if (threadIdx.x % 32u != 0) return;
  const float lse = lse_of(all);
  float loss = fmaf(p.label_smoothing - 1.0f, capped<kCap>(p, logit), lse);
  if (p.label_smoothing > 0.0f) loss -= p.label_smoothing * (all.plain * p.inverse_cols);
  p.loss[row] = loss;
  p.lse[row] = lse;
}

// The strands of a row, in their order; on all lanes.
__device__ __forceinline__ Seen merge_strands(const CrossEntropyParams &p, const float4 *strands,
                                              int count) {
  Seen all;
  for (int i = threadIdx.x % 32u; i < count; i += 32) {
    all.merge({strands[i].x, strands[i].y, strands[i].z});
  }
  all.merge_lanes(p.label_smoothing > 0.0f);
  return all;
}

__device__ __forceinline__ void ignore_row(const CrossEntropyParams &p, int64_t row) {
  p.loss[row] = p.lse[row] = 0.0f;
}

// ---------------------------------------------------------------------------------------------
// The gradient

template <class T, int N, bool kCap>
__device__ __forceinline__ void gradient(const CrossEntropyParams &p, const Vec<T, N> &v,
                                         float lse, float grad, int64_t col, int64_t target,
                                         T *to) {
  const float smooth = p.label_smoothing * p.inverse_cols;
  float z[N], slope[N], share[N];
  v.get(z);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    slope[i] = grad;
    if constexpr (kCap) {
      const Capped c = soft_cap(z[i], p.softcap, p.inverse_softcap);
      z[i] = c.value;
      slope[i] *= c.slope;
    }
    share[i] = fast_exp2((z[i] - lse) * kLog2E) - smooth;
  }
  if (target >= col && target < col + N) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (col + i == target) share[i] -= 1.0f - p.label_smoothing;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) share[i] *= slope[i];
  store_as<T>(to, col, share);
}

}  // namespace hfp::cuda
