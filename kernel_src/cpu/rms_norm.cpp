// rms_norm.cpp: x * rsqrt(mean(x^2) + eps), weight and bias. Zhang & Sennrich, arXiv:1910.07467.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "rms_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t rms_norm(const RmsNormArgs &args) {
  const auto kernel = HFP_FOR_SIMD(rms_norm_kernel)(args.x_type, args.weight_type, args.cast);
  parallel(kernel, args, args.x_rows.rows, rows_grain(args.x_rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Where this instantiation rounds, see HFP_CAST_*: xhat to kHat, then products to kOut.
template <DType X, DType W, int Cast>
struct RmsRounding {
  static constexpr DType kHat = Cast == HFP_CAST_NONE ? DType::F32 : Cast == HFP_CAST_INPUT ? X : W;
  static constexpr DType kOut = Cast == HFP_CAST_NONE    ? X
                                : Cast == HFP_CAST_WEIGHT ? W
                                : X == W                  ? X
                                                          : DType::F32;
};

template <DType X, DType W, int Cast, bool Full>
HFP_INLINE vf rms_columns(const char *x, const char *weight, const char *bias, vf rstd, vf offset,
                          int64_t i, int64_t n) {
  using Rounding = RmsRounding<X, W, Cast>;
  vf y = load_if<X, Full>(x + i * size_of(X), n) * rstd;
  if constexpr (Cast == HFP_CAST_NONE) {
    if (weight) y *= offset + load_if<W, Full>(weight + i * size_of(W), n);
    if (bias) y += load_if<W, Full>(bias + i * size_of(W), n);
  } else {
    y = round_to<Rounding::kHat>(y);
    if (weight) y *= load_if<W, Full>(weight + i * size_of(W), n);
    if (bias) y = round_to<Rounding::kOut>(y) + load_if<W, Full>(bias + i * size_of(W), n);
  }
  return y;
}

template <DType X, DType W, int Cast>
static void rms_rows(const RmsNormArgs &args, int64_t begin, int64_t end) {
  constexpr DType Out = RmsRounding<X, W, Cast>::kOut;
  const int64_t cols = args.x_rows.cols;
  const char *weight = static_cast<const char *>(args.weight);
  const char *bias = static_cast<const char *>(args.bias);
  const vf offset = splat(args.weight_offset);
  const double eps = args.eps, count = static_cast<double>(cols);
  RowCursor cursor(args.x_rows, begin);
  char *out = at(args.out, begin * cols, Out);
  for (int64_t row = begin; row < end; ++row, cursor.next(), out += cols * size_of(Out)) {
    const char *x = at(args.x, cursor.offset(), X);
    const double mean_square = reduce<X, SquareTerm>(x, cols, 0, 0) / count;
    const vf rstd = splat(static_cast<float>(1.0 / __builtin_sqrt(mean_square + eps)));
    int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      store_pair<Out>(
          out + i * size_of(Out),
          rms_columns<X, W, Cast, true>(x, weight, bias, rstd, offset, i, kLanes),
          rms_columns<X, W, Cast, true>(x, weight, bias, rstd, offset, i + kLanes, kLanes));
    }
    for (; i + kLanes <= cols; i += kLanes) {
      store<Out>(out + i * size_of(Out),
                 rms_columns<X, W, Cast, true>(x, weight, bias, rstd, offset, i, kLanes));
    }
    if (i < cols) {
      store_n<Out>(out + i * size_of(Out),
                   rms_columns<X, W, Cast, false>(x, weight, bias, rstd, offset, i, cols - i),
                   cols - i);
    }
  }
}

using RmsKernel = void (*)(const RmsNormArgs &, int64_t, int64_t);

template <DType X, DType W>
static RmsKernel rms_choose_cast(int cast) {
  return cast == HFP_CAST_NONE    ? rms_rows<X, W, HFP_CAST_NONE>
         : cast == HFP_CAST_INPUT ? rms_rows<X, W, HFP_CAST_INPUT>
                                  : rms_rows<X, W, HFP_CAST_WEIGHT>;
}

template <DType X>
static RmsKernel rms_choose_weight(DType w, int cast) {
  return w == DType::F32   ? rms_choose_cast<X, DType::F32>(cast)
         : w == DType::F16 ? rms_choose_cast<X, DType::F16>(cast)
                           : rms_choose_cast<X, DType::BF16>(cast);
}

static RmsKernel rms_norm_kernel(DType x, DType w, int cast) {
  return x == DType::F32   ? rms_choose_weight<DType::F32>(w, cast)
         : x == DType::F16 ? rms_choose_weight<DType::F16>(w, cast)
                           : rms_choose_weight<DType::BF16>(w, cast);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
