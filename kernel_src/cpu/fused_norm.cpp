// fused_norm.cpp: norms with a residual sum before them, a modulation after them, or both.
// AdaLN: Peebles & Xie, arXiv:2212.09748. Where it rounds: HFP_CAST_* in hfpatch.h.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "fused_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t fused_norm(const FusedNormArgs &args) {
  parallel(HFP_FOR_SIMD(fused_norm_kernel)(args.type), args, args.x_rows.rows,
           rows_grain(args.x_rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// The pointers of one row; null where the argument is.
struct FusedRow {
  const char *x, *residual, *gate, *scale, *shift;
};

template <DType X>
HFP_INLINE void fused_sum(const FusedNormArgs &args, const FusedRow &row, char *sum,
                          int64_t cols) {
  const int64_t gate_size = size_of(args.modulation_type);
  for (int64_t i = 0; i < cols; i += kLanes) {
    const int64_t n = cols - i < kLanes ? cols - i : kLanes;
    vf y = load_any(X, row.x + i * size_of(X), n);
    if (row.gate) {
      y *= load_any(args.modulation_type, row.gate + i * gate_size, n);
      if (args.eager) y = round_to<X>(y);  // the gate has the dtype of x then
    }
    store_any(X, sum + i * size_of(X), load_any(X, row.residual + i * size_of(X), n) + y, n);
  }
}

template <DType X>
HFP_INLINE vf fused_columns(const FusedNormArgs &args, const FusedRow &row, const char *x,
                            vf mean_hi, vf mean_lo, vf rstd, int64_t i, int64_t n) {
  const DType weight_type = args.weight_type, modulation_type = args.modulation_type;
  const char *weight = static_cast<const char *>(args.weight);
  const char *bias = static_cast<const char *>(args.bias);
  vf y = ((load_any(X, x + i * size_of(X), n) - mean_hi) - mean_lo) * rstd;
  if (args.cast != HFP_CAST_NONE) y = round_any(args.cast == HFP_CAST_INPUT ? X : weight_type, y);
  if (weight) {
    y *= load_any(weight_type, weight + i * size_of(weight_type), n) + splat(args.weight_offset);
    if (args.cast != HFP_CAST_NONE) y = round_any(args.out_type, y);
  }
  if (bias) y += load_any(weight_type, bias + i * size_of(weight_type), n);
  if (row.scale) {
    const int64_t at = i * size_of(modulation_type);
    vf scale = load_any(modulation_type, row.scale + at, n) + splat(1.0f);
    if (args.eager) {
      scale = round_any(modulation_type, scale);
      y = round_any(args.out_type, round_to<X>(y) * scale);
    } else {
      y *= scale;
    }
    y += load_any(modulation_type, row.shift + at, n);
  }
  return y;
}

template <DType X>
static void fused_rows(const FusedNormArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols, out_size = size_of(args.out_type);
  const double eps = args.eps, count = static_cast<double>(cols);
  // An absent argument is walked as x is, and not read.
  RowCursor x_row(args.x_rows, begin);
  RowCursor residual_row(args.residual ? args.residual_rows : args.x_rows, begin);
  RowCursor gate_row(args.gate ? args.gate_rows : args.x_rows, begin);
  RowCursor scale_row(args.scale ? args.scale_rows : args.x_rows, begin);
  RowCursor shift_row(args.shift ? args.shift_rows : args.x_rows, begin);
  const DType mod = args.modulation_type;
  for (int64_t r = begin; r < end; ++r) {
    const FusedRow row = {
        at(args.x, x_row.offset(), X),
        args.residual ? at(args.residual, residual_row.offset(), X) : nullptr,
        args.gate ? at(args.gate, gate_row.offset(), mod) : nullptr,
        args.scale ? at(args.scale, scale_row.offset(), mod) : nullptr,
        args.shift ? at(args.shift, shift_row.offset(), mod) : nullptr,
    };
    const char *x = row.x;
    if (args.sum) {
      char *sum = at(args.sum, r * cols, X);
      fused_sum<X>(args, row, sum, cols);
      x = sum;
    }
    // As in layer_norm.cpp and rms_norm.cpp.
    float hi = 0, lo = 0;
    double square;
    if (args.norm_type == HFP_NORM_LAYER) {
      const float first = load_n<X>(x, 1)[0];
      const double mean = first + reduce<X, ShiftedTerm>(x, cols, first, 0) / count;
      hi = static_cast<float>(mean), lo = static_cast<float>(mean - hi);
      square = reduce<X, ShiftedSquareTerm>(x, cols, hi, lo) / count;
    } else {
      square = reduce<X, SquareTerm>(x, cols, 0, 0) / count;
    }
    const vf rstd = splat(static_cast<float>(1.0 / __builtin_sqrt(square + eps)));
    char *out = at(args.out, r * cols, args.out_type);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      store_any(args.out_type, out + i * out_size,
                fused_columns<X>(args, row, x, splat(hi), splat(lo), rstd, i, n), n);
    }
    x_row.next(), residual_row.next(), gate_row.next(), scale_row.next(), shift_row.next();
  }
}

using FusedNormKernel = void (*)(const FusedNormArgs &, int64_t, int64_t);

static FusedNormKernel fused_norm_kernel(DType type) {
  return type == DType::F32   ? fused_rows<DType::F32>
         : type == DType::F16 ? fused_rows<DType::F16>
                              : fused_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
