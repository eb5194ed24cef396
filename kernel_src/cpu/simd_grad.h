// simd_grad.h: the activations together with their derivatives, on one register. No include guard:
// included once per instruction set, after simd_math.h.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

struct Slope {
  vf value, slope;  // act(x), act'(x)
};

// x sigmoid(z) and its derivative s + s x (1 - s) dz, with 1 - s not by subtraction; in this order
// finite where x dz is not.
template <bool Half>
HFP_INLINE Slope sigmoid_slope(vf x, vf z, vf dz) {
  vf e;
  if constexpr (Half) e = exp2_product<true>(magnitude(z), -1.44269504f);
  else e = exp_nonpositive(-magnitude(z));
  const vf r = 1.0f / (1.0f + e);
  const vf s = (z < 0.0f ? e : splat(1.0f)) * r;
  const vf rest = (z < 0.0f ? splat(1.0f) : e) * r;
  return {x * s, fma(x * s * rest, dz, s)};
}

// T is the dtype that the result will be rounded to.
template <int Activation, DType T>
HFP_INLINE Slope activate_slope(vf x) {
  constexpr bool kHalf = T != DType::F32;
  if constexpr (Activation == HFP_ACT_GELU_ERF) {
    // Phi(x) + x phi(x)
    const vf e = exp_minus_half_square<kHalf>(x);
    const vf tail = normal_tail<kHalf>(x, e);
    const vf cdf = x < 0.0f ? tail : 1.0f - tail;
    return {x * cdf, fma(x * 0.3989422804f, e, cdf)};
  } else if constexpr (Activation == HFP_ACT_GELU_TANH) {
    // From |x| = 16 on the derivative is 0 or 1 in fp32, and x^3 is kept from overflowing.
    constexpr float kScale = 1.5957691216057308f, kCubic = kScale * 0.044715f;
    const vf c = x < -16.0f ? splat(-16.0f) : x > 16.0f ? splat(16.0f) : x;
    const vf square = c * c;
    const vf z = c * fma(square, splat(kCubic), splat(kScale));
    Slope y = sigmoid_slope<kHalf>(c, z, fma(square, splat(3 * kCubic), splat(kScale)));
    y.value = x > 16.0f ? x : y.value;
    return y;
  } else if constexpr (Activation == HFP_ACT_GELU_SIGMOID) {
    return sigmoid_slope<kHalf>(x, x * 1.702f, splat(1.702f));
  } else if constexpr (Activation == HFP_ACT_SILU) {
    return sigmoid_slope<kHalf>(x, x, splat(1.0f));
  } else {
    return {x < 0.0f ? vf{} : x, x > 0.0f ? splat(1.0f) : vf{}};
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
