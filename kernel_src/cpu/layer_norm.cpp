// layer_norm.cpp: (x - mean) * rsqrt(var + eps), weight and bias. Ba et al., arXiv:1607.06450.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "layer_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t layer_norm(const LayerNormArgs &args) {
  const auto kernel =
      HFP_FOR_SIMD(layer_norm_kernel)(args.type, args.weight ? args.weight_type : args.type,
                                      args.bias ? args.bias_type : args.type);
  parallel(kernel, args, args.x_rows.rows, rows_grain(args.x_rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType X, DType W, DType B, bool Full>
HFP_INLINE vf layer_columns(const char *x, const char *weight, const char *bias, vf mean_hi,
                            vf mean_lo, vf rstd, int64_t i, int64_t n) {
  vf y = ((load_if<X, Full>(x + i * size_of(X), n) - mean_hi) - mean_lo) * rstd;
  if (weight) y *= load_if<W, Full>(weight + i * size_of(W), n);
  if (bias) y += load_if<B, Full>(bias + i * size_of(B), n);
  return y;
}

// Two passes over a row that stays in the cache: mean, then squared deviations. The mean is summed
// relative to the row's first element and kept as a pair of floats, so that a large common offset
// costs no digits of the variance; a constant row has variance 0 exactly.
template <DType X, DType W, DType B>
static void layer_rows(const LayerNormArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const char *weight = static_cast<const char *>(args.weight);
  const char *bias = static_cast<const char *>(args.bias);
  const double eps = args.eps, count = static_cast<double>(cols);
  RowCursor cursor(args.x_rows, begin);
  char *out = at(args.out, begin * cols, X);
  for (int64_t row = begin; row < end; ++row, cursor.next(), out += cols * size_of(X)) {
    const char *x = at(args.x, cursor.offset(), X);
    const float first = load_n<X>(x, 1)[0];
    const double mean = first + reduce<X, ShiftedTerm>(x, cols, first, 0) / count;
    const float hi = static_cast<float>(mean), lo = static_cast<float>(mean - hi);
    const double variance = reduce<X, ShiftedSquareTerm>(x, cols, hi, lo) / count;
    const vf rstd = splat(static_cast<float>(1.0 / __builtin_sqrt(variance + eps)));
    const vf mean_hi = splat(hi), mean_lo = splat(lo);
    int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      const int64_t j = i + kLanes;
      store_pair<X>(
          out + i * size_of(X),
          layer_columns<X, W, B, true>(x, weight, bias, mean_hi, mean_lo, rstd, i, kLanes),
          layer_columns<X, W, B, true>(x, weight, bias, mean_hi, mean_lo, rstd, j, kLanes));
    }
    for (; i + kLanes <= cols; i += kLanes) {
      store<X>(out + i * size_of(X),
               layer_columns<X, W, B, true>(x, weight, bias, mean_hi, mean_lo, rstd, i, kLanes));
    }
    if (i < cols) {
      const int64_t n = cols - i;
      store_n<X>(out + i * size_of(X),
                 layer_columns<X, W, B, false>(x, weight, bias, mean_hi, mean_lo, rstd, i, n), n);
    }
  }
}

using LayerKernel = void (*)(const LayerNormArgs &, int64_t, int64_t);

template <DType X, DType W>
static LayerKernel layer_choose_bias(DType b) {
  return b == DType::F32   ? layer_rows<X, W, DType::F32>
         : b == DType::F16 ? layer_rows<X, W, DType::F16>
                           : layer_rows<X, W, DType::BF16>;
}

template <DType X>
static LayerKernel layer_choose_weight(DType w, DType b) {
  return w == DType::F32   ? layer_choose_bias<X, DType::F32>(b)
         : w == DType::F16 ? layer_choose_bias<X, DType::F16>(b)
                           : layer_choose_bias<X, DType::BF16>(b);
}

static LayerKernel layer_norm_kernel(DType x, DType w, DType b) {
  return x == DType::F32   ? layer_choose_weight<DType::F32>(w, b)
         : x == DType::F16 ? layer_choose_weight<DType::F16>(w, b)
                           : layer_choose_weight<DType::BF16>(w, b);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
