// simd_math.h: exp, sigmoid, the normal distribution function and the activations on one register.
// No include guard: included once per instruction set, inside the inner part of an op's .cpp.
//
// Errors are in units in the last place (ulp) of the fp32 result, u = 2^-24.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Adding kRounder leaves round(x) in the low bits of the significand, for |x| < 2^22.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// p * 2^n for -150 <= n <= 0; shifted = n + kRounder. In two halves where there is no instruction
// for it, so that a subnormal result is rounded once.
HFP_INLINE vf scale(vf p, vf n, vf shifted) {
#if HFP_SIMD_LEVEL == 2
  (void)shifted;
  return _mm512_scalef_ps(p, n);
#else
  (void)n;
  const vi exponent = (vi)shifted - 0x4b400000;  // the bits of kRounder
  const vi half = exponent >> 1;
  return p * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
#endif
}

// exp(x) for x <= 0, within 1.5 ulp. NaN stays NaN; -inf and all below -104 give exactly 0.
//
// n = round(x / ln 2); r = x - n ln 2 in two parts of ln 2, the first with 9 trailing zeros so that
// n * hi is exact for n >= -150 with or without FMA; |r| <= ln(2) / 2.
// exp(r) = 1 + r + r^2 q(r), q of degree 4, minimax: truncation 8e-9 = 0.13 u.
HFP_INLINE vf exp_nonpositive(vf x) {
  x = at_least(x, -104.0f);
  const vf shifted = fma(x, splat(1.44269504f), splat(kRounder));
  const vf n = shifted - kRounder;
  vf r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-06f), r);
  vf q = fma(splat(0.0013941213f), r, splat(0.008363235f));
  q = fma(q, r, splat(0.041666374f));
  q = fma(q, r, splat(0.16666576f));
  q = fma(q, r, splat(0.5f));
  return scale(fma(r * r, q, r) + 1.0f, n, shifted);
}

// 2^(a k) for a k <= 0: f = a k - n needs no second part of k, since the callers can bear an error
// of |a k| u (half types: |a k| < 30 wherever the result is not 0; see times_normal_cdf).
// 2^f = 1 + f q(f) on |f| <= 1/2, minimax: degree 5, 1.5e-7 = 2.5 u; degree 4, 5.3e-6 = 2^-17.5.
template <bool Half>
HFP_INLINE vf exp2_product(vf a, float k) {
  const vf x = at_least(a * k, -150.5f);
  const vf shifted = x + kRounder;
  const vf n = shifted - kRounder;
  const vf f = x - n;
  vf q;
  if constexpr (Half) {
    q = fma(splat(0.009676159f), f, splat(0.05583901f));
    q = fma(q, f, splat(0.24022166f));
    q = fma(q, f, splat(0.6931367f));
  } else {
    q = fma(splat(0.001340057f), f, splat(0.009666469f));
    q = fma(q, f, splat(0.055503327f));
    q = fma(q, f, splat(0.24022348f));
    q = fma(q, f, splat(0.69314718f));
  }
  return scale(fma(q, f, splat(1.0f)), n, shifted);
}

// x * sigmoid(z): exp only of -|z|, so nothing overflows and the left tail keeps its relative
// precision. fp32: within 4 ulp while exp(-|z|) is normal; half types: within 2^-17 relative, 1/64
// of their own rounding or less. z = +-inf gives 1 and 0, and -inf * 0 is NaN, as in PyTorch.
template <bool Half>
HFP_INLINE vf times_sigmoid(vf x, vf z) {
  vf e;
  if constexpr (Half) e = exp2_product<true>(magnitude(z), -1.44269504f);
  else e = exp_nonpositive(-magnitude(z));
  return x * (z < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// x * Phi(x), Phi the standard normal distribution function: 0.5 (1 + erf(x / sqrt 2)).
//
// With t = |x|, the tail is Q(t) = 1 - Phi(t) = exp(-t^2 / 2) G(t), and Phi(x) is Q or 1 - Q: the
// left tail does not vanish by cancellation, as it does in 1 + erf(x). G(t) falls from 0.5 like
// 1 / (t sqrt(2 pi)), and is w * poly(w) in w = 1 / (1 + c t), minimax for the relative error:
//   fp32: 8 terms, t <= 8: 5.8e-8 = 1 u (4e-4 at worst beyond, where Q < 1e-15)
//   half: 6 terms, t <= 6: 1.7e-6 = 2^-19 (below 1e-3 beyond, where Q < 1e-9)
// Rounding t^2 and its product with k costs t^2 u of Q, so that for x < 0 the relative error grows
// from 4 u at 0 to 120 u at -10, where Q is 8e-24; for x >= 0 Phi is within 3 u. Where Q underflows
// it is exactly 0.
template <bool Half>
HFP_INLINE vf normal_tail(vf x, vf e) {  // Q(|x|); e = exp(-x^2 / 2)
  const vf t = magnitude(x);
  vf g;
  if constexpr (Half) {
    const vf w = 1.0f / fma(t, splat(0.43f), splat(1.0f));
    g = fma(splat(0.06427682f), w, splat(-0.24542466f));
    g = fma(g, w, splat(0.25029442f));
    g = fma(g, w, splat(0.07714288f));
    g = fma(g, w, splat(0.18301101f));
    g = fma(g, w, splat(0.17070036f)) * w;
  } else {
    const vf w = 1.0f / fma(t, splat(0.40f), splat(1.0f));
    g = fma(splat(-0.03842547f), w, splat(0.19463125f));
    g = fma(g, w, splat(-0.36080346f));
    g = fma(g, w, splat(0.2355915f));
    g = fma(g, w, splat(-0.0012898628f));
    g = fma(g, w, splat(0.15347727f));
    g = fma(g, w, splat(0.15710887f));
    g = fma(g, w, splat(0.15970989f)) * w;
  }
  return e * g;
}

template <bool Half>
HFP_INLINE vf exp_minus_half_square(vf x) {
  return exp2_product<Half>(x * x, -0.72134752f);  // -log2(e) / 2
}

template <bool Half>
HFP_INLINE vf times_normal_cdf(vf x) {
  const vf tail = normal_tail<Half>(x, exp_minus_half_square<Half>(x));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u), which needs no tanh and does not cancel on the left.
// T is the dtype that the result will be rounded to.
template <int Activation, DType T>
HFP_INLINE vf activate(vf x) {
  constexpr bool kHalf = T != DType::F32;
  if constexpr (Activation == HFP_ACT_GELU_ERF) {
    return times_normal_cdf<kHalf>(x);
  } else if constexpr (Activation == HFP_ACT_GELU_TANH) {
    constexpr float kScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return times_sigmoid<kHalf>(x, x * fma(x * x, splat(kScale * 0.044715f), splat(kScale)));
  } else if constexpr (Activation == HFP_ACT_GELU_SIGMOID) {
    return times_sigmoid<kHalf>(x, x * 1.702f);
  } else if constexpr (Activation == HFP_ACT_SILU) {
    return times_sigmoid<kHalf>(x, x);
  } else {
    return x < 0.0f ? vf{} : x;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
