// activations_grad.cuh: the activations of HFP_ACT_* together with their derivatives, in fp32.
#pragma once

#include "activations.cuh"

namespace hfp::cuda {

struct Slope {
  float value, slope;  // act(x), act'(x)
};

// x sigmoid(z) and its derivative s + s x (1 - s) dz, in this order finite where x dz is not; 1 - s
// from e directly, since it cancels.
// e = exp(-z) is infinite for z < -88: s and 1 - s are then 0 and 1.
template <bool kAccurate>
__device__ __forceinline__ Slope sigmoid_slope(float x, float z, float dz) {
  constexpr float kLog2E = 1.44269504f;
  float e, s;
  if constexpr (kAccurate) {
    e = expf(-z);
    s = 1.0f / (1.0f + e);
  } else {
    e = fast_exp2(z * -kLog2E);
    s = fast_reciprocal(1.0f + e);
  }
  const float rest = z < -80.0f ? 1.0f : e * s;
  return {x * s, fmaf(x * s * rest, dz, s)};
}

template <int kActivation, bool kAccurate>
__device__ __forceinline__ Slope activate_slope(float x) {
  if constexpr (kActivation == HFP_ACT_GELU_ERF) {
    // Phi(x) + x phi(x)
    constexpr float kDensity = 0.3989422804f;  // 1 / sqrt(2 pi)
    float cdf, e;
    if constexpr (kAccurate) {
      cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
      e = expf(-0.5f * x * x);
    } else {
      e = fast_exp_minus_half_square(x);
      const float h = fast_normal_tail(x, e);
      cdf = x < 0.0f ? h : 1.0f - h;
    }
    return {x * cdf, fmaf(x * kDensity, e, cdf)};
  } else if constexpr (kActivation == HFP_ACT_GELU_TANH) {
    // From |x| = 16 on the derivative is 0 or 1 in fp32, and x^3 is kept from overflowing.
    constexpr float kScale = 1.59576912f, kCubic = kScale * 0.044715f;
    const float c = x < -16.0f ? -16.0f : x > 16.0f ? 16.0f : x;
    const float square = c * c;
    Slope y = sigmoid_slope<kAccurate>(c, c * fmaf(square, kCubic, kScale),
                                       fmaf(square, 3.0f * kCubic, kScale));
    if (x > 16.0f) y.value = x;
    return y;
  } else if constexpr (kActivation == HFP_ACT_GELU_SIGMOID) {
    return sigmoid_slope<kAccurate>(x, 1.702f * x, 1.702f);
  } else if constexpr (kActivation == HFP_ACT_SILU) {
    return sigmoid_slope<kAccurate>(x, x, 1.0f);
  } else {
    static_assert(kActivation == HFP_ACT_RELU, "unknown activation");
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  }
}

}  // namespace hfp::cuda
