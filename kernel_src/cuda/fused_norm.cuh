// fused_norm.cuh: what the kernels of fused_norm.cu share: the call, and the steps on one vector.
#pragma once

#include "layer_map.cuh"
#include "packed.cuh"
#include "row_split.cuh"

namespace hfp::cuda {

struct FusedNormParams {
  static constexpr bool kStartsEarly = true;
  void *out, *sum;
  const void *x, *residual, *gate, *weight, *bias, *scale, *shift;
  Rows x_rows, residual_rows, gate_rows, scale_rows, shift_rows;
  RowSplit<5> split;  // the same five, for fused_norm_half.cuh
  int64_t first_row;
  int64_t vectors;  // per row
  float inverse_cols, eps, weight_offset;
  DType out_type, weight_type, modulation_type;
  DType round_type;  // of xhat if two_step; F32: not at all
  bool layer;        // the norm subtracts the mean
  bool two_step;     // HFP_CAST_INPUT, _WEIGHT: round xhat, multiply, round, add
  bool eager;        // round after each step of the modulation and the gate
  uint32_t zero;     // 0; see Vec::stay_packed
};

// ---------------------------------------------------------------------------------------------
// Steps on one vector. P: the dtype of all parameters, or AnyType.

// The dtype of a product of T and P.
template <class T, class P>
using Promoted = std::conditional_t<std::is_same_v<T, P>, T, float>;

// v = residual + gate * v, rounded to T.
template <class T, int N>
__device__ __forceinline__ void add_residual(Vec<T, N> &v, const Vec<T, N> &residual,
                                             const float (&gate)[N], bool gated, bool eager) {
  if constexpr (kInTwos<T, N> && kHasTwos<T>) {
    if (!gated) {
      v = add_twos(residual, v);
      return;
    }
  }
  float y[N], r[N];
  v.get(y);
  if (gated) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(gate[i], y[i]);
    if (eager) round_to<T>(y);  // the gate has the dtype of x then
  }
  residual.get(r);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(r[i], y[i]);
  v.set(y);
}

// y * (1 + scale) + shift, and the store.
template <class T, class P, int N>
__device__ __forceinline__ void modulate(const FusedNormParams &p, float (&y)[N],
                                         float (&scale)[N], const float (&shift)[N], int64_t at) {
  constexpr bool kAny = std::is_same_v<P, AnyType>;
#pragma unroll
  for (int i = 0; i < N; ++i) scale[i] += 1.0f;
  if (p.eager) {
    round_to<T>(y);
    if constexpr (kAny) round_any(scale, p.modulation_type);
    else round_to<P>(scale);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], scale[i]);
    if constexpr (kAny) round_any(y, p.out_type);
    else round_to<Promoted<T, P>>(y);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], scale[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(y[i], shift[i]);
  if constexpr (kAny) {
    store_any(p.out, p.out_type, at, y);
  } else if (!std::is_same_v<T, P> && p.eager) {
    store_as<Promoted<T, P>>(p.out, at, y);
  } else {
    store_as<T>(p.out, at, y);
  }
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> add_one(const Vec<T, N> &v) {
  float one[N];
#pragma unroll
  for (int i = 0; i < N; ++i) one[i] = 1.0f;
  Vec<T, N> ones;
  ones.set(one);
  return add_twos(v, ones);
}

// modulate() and finish_affine() where they round after each step and all is of one half type.
template <class T, int N>
__device__ __forceinline__ void finish_twos(const FusedNormParams &p, const float (&y)[N],
                                            const Vec<T, N> &mul, const Vec<T, N> &add,
                                            int64_t at) {
  Vec<T, N> hat;
  hat.set(y);
  add_twos(mul_twos(hat, mul), add).store(static_cast<T *>(p.out) + at);
}

// y * (weight + weight_offset) + bias in one rounding or none, as layer_norm.cu and rms_norm.cu.
template <bool kLayer, int N>
__device__ __forceinline__ void affine(float (&y)[N], const float (&w)[N], const float (&b)[N],
                                       float weight_offset) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (kLayer) y[i] = fmaf(y[i], w[i], b[i]);
    else y[i] = __fadd_rn(__fmul_rn(y[i], w[i] + weight_offset), b[i]);
  }
}

template <int N>
__device__ __forceinline__ void affine(const FusedNormParams &p, float (&y)[N],
                                       const float (&w)[N], const float (&b)[N]) {
  if (p.layer) affine<true>(y, w, b, p.weight_offset);
  else affine<false>(y, w, b, p.weight_offset);
}

// The end of a norm without modulation.
template <class T, class P, int N>
__device__ __forceinline__ void finish_affine(const FusedNormParams &p, float (&y)[N],
                                              const float (&w)[N], const float (&b)[N],
                                              int64_t at) {
  constexpr bool kAny = std::is_same_v<P, AnyType>;
  if (p.two_step) {
    if constexpr (kAny) round_any(y, p.round_type);
    else if (p.round_type != DType::F32) round_to<T>(y);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], w[i]);
    if constexpr (kAny) round_any(y, p.out_type);
    else round_to<Promoted<T, P>>(y);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fadd_rn(y[i], b[i]);
  } else {
    affine(p, y, w, b);
  }
  if constexpr (kAny) {
    store_any(p.out, p.out_type, at, y);
  } else if (!std::is_same_v<T, P> && p.two_step) {
    store_as<Promoted<T, P>>(p.out, at, y);
  } else {
    store_as<T>(p.out, at, y);
  }
}

}  // namespace hfp::cuda
