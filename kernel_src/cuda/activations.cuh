// activations.cuh: the activation functions of HFP_ACT_*, in fp32.
//
// Fp32 tensors get the accurate functions of the CUDA library. For half types these cost more time
// than the memory takes, so they get hardware exp2 and reciprocal: relative errors around 1e-6 (up
// to 1e-5 far in the tails), where a half type rounds at 5e-4 (fp16) and 4e-3 (bf16).
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// 2^x and 1/x in one instruction each, subnormals flushed to zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x * sigmoid(z). With z -> -inf the sigmoid ends at 0, so that x = -inf gives NaN, as eager does.
template <bool kAccurate>
__device__ __forceinline__ float times_sigmoid(float x, float z) {
  if constexpr (kAccurate) {
    return x / (1.0f + expf(-z));
  } else {
    constexpr float kLog2E = 1.44269504f;
    return x * fast_reciprocal(1.0f + fast_exp2(z * -kLog2E));
  }
}

// 0.5 x (1 + erf(x / sqrt 2)) for half types: x times h or 1 - h, h = 0.5 erfc(|x| / sqrt 2). Not
// from erf, because 1 + erf cancels for x < 0. h = exp(-x^2 / 2) q(k), k = 1 / (1 + c |x|), q a
// polynomial without constant term (the form of Abramowitz & Stegun 7.1.26) fitted for the least
// relative error on |x| <= 13.5, beyond which h < 2^-126: 5e-6.
__device__ __forceinline__ float fast_normal_tail(float x, float e) {  // h; e = exp(-x^2 / 2)
  const float k = fast_reciprocal(fmaf(0.31f, fabsf(x), 1.0f));
  float q = -0.073928338f;
  q = fmaf(q, k, 0.18044809f);
  q = fmaf(q, k, 0.015747111f);
  q = fmaf(q, k, 0.13342858f);
  q = fmaf(q, k, 0.12044156f);
  q = fmaf(q, k, 0.12386068f);
  return q * k * e;
}

__device__ __forceinline__ float fast_exp_minus_half_square(float x) {
  constexpr float kMinusHalfLog2E = -0.72134752f;
  return fast_exp2(x * x * kMinusHalfLog2E);
}

__device__ __forceinline__ float fast_gelu_erf(float x) {
  const float h = fast_normal_tail(x, fast_exp_minus_half_square(x));
  return x * (x < 0.0f ? h : 1.0f - h);
}

template <int kActivation, bool kAccurate>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == HFP_ACT_GELU_ERF) {
    if constexpr (kAccurate) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    return fast_gelu_erf(x);
  } else if constexpr (kActivation == HFP_ACT_GELU_TANH) {
    // 0.5 (1 + tanh u) = sigmoid(2 u), which does not cancel for u < 0.
    constexpr float kTwoSqrtTwoOverPi = 1.59576912f;
    return times_sigmoid<kAccurate>(x, kTwoSqrtTwoOverPi * x * fmaf(0.044715f * x, x, 1.0f));
  } else if constexpr (kActivation == HFP_ACT_GELU_SIGMOID) {
    return times_sigmoid<kAccurate>(x, 1.702f * x);
  } else if constexpr (kActivation == HFP_ACT_SILU) {
    return times_sigmoid<kAccurate>(x, x);
  } else {
    static_assert(kActivation == HFP_ACT_RELU, "unknown activation");
    return x < 0.0f ? 0.0f : x;  // not fmaxf, which drops NaN
  }
}

}  // namespace hfp::cuda
