// fused_norm.cpp: norms with a residual sum before them, a modulation after them, or both.
// AdaLN: Peebles & Xie, arXiv:2212.09748. Where it rounds: HFP_CAST_* in hfpatch.h.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "fused_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t fused_norm(const FusedNormArgs &args) {
  parallel(HFP_FOR_SIMD(fused_norm_kernel)(args), args, args.x_rows.rows,
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

// What all rows share; a copy, since a store through a char pointer might change the arguments.
struct FusedNorm {
  DType weight_type, modulation_type, out_type;
  const char *weight, *bias;
  float weight_offset;
  int cast;
  bool eager;
};

// Same: this argument has the dtype of x, as all have then.
template <DType X, bool Same>
HFP_INLINE vf fused_load(DType type, const char *p, int64_t i, int64_t n) {
  if constexpr (Same) return load_up_to<X>(p + i * size_of(X), n);
  else return load_any(type, p + i * size_of(type), n);
}

template <DType X, bool Same>
HFP_INLINE vf fused_round(DType type, vf v) {
  if constexpr (Same) return round_to<X>(v);
  else return round_any(type, v);
}

template <DType X, bool Same>
HFP_INLINE void sum_columns(const FusedNorm &f, const FusedRow &row, char *sum, int64_t i,
                            int64_t n) {
  vf y = load_up_to<X>(row.x + i * size_of(X), n);
  if (row.gate) {
    y *= fused_load<X, Same>(f.modulation_type, row.gate, i, n);
    if (f.eager) y = round_to<X>(y);  // the gate has the dtype of x then
  }
  store_up_to<X>(sum + i * size_of(X), load_up_to<X>(row.residual + i * size_of(X), n) + y, n);
}

template <DType X, bool Same>
HFP_INLINE void fused_sum(const FusedNorm &f, const FusedRow row, char *sum, int64_t cols) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) sum_columns<X, Same>(f, row, sum, i, kLanes);
  if (i < cols) sum_columns<X, Same>(f, row, sum, i, cols - i);
}

struct FusedScale {
  vf mean_hi, mean_lo, rstd;
};

template <DType X, bool Same>
HFP_INLINE vf fused_columns(const FusedNorm &f, const FusedRow &row, const char *x,
                            const FusedScale &s, int64_t i, int64_t n) {
  vf y = ((load_up_to<X>(x + i * size_of(X), n) - s.mean_hi) - s.mean_lo) * s.rstd;
  if (f.cast != HFP_CAST_NONE) {
    y = fused_round<X, Same>(f.cast == HFP_CAST_INPUT ? X : f.weight_type, y);
  }
  if (f.weight) {
    y *= fused_load<X, Same>(f.weight_type, f.weight, i, n) + splat(f.weight_offset);
    if (f.cast != HFP_CAST_NONE) y = fused_round<X, Same>(f.out_type, y);
  }
  if (f.bias) y += fused_load<X, Same>(f.weight_type, f.bias, i, n);
  if (row.scale) {
    vf scale = fused_load<X, Same>(f.modulation_type, row.scale, i, n) + splat(1.0f);
    if (f.eager) {
      scale = fused_round<X, Same>(f.modulation_type, scale);
      y = fused_round<X, Same>(f.out_type, round_to<X>(y) * scale);
    } else {
      y *= scale;
    }
    y += fused_load<X, Same>(f.modulation_type, row.shift, i, n);
  }
  return y;
}

template <DType X, bool Same>
HFP_INLINE void fused_out(const FusedNorm &f, const FusedRow row, const char *x, char *out,
                          const FusedScale s, int64_t cols) {
  if constexpr (Same) {
    constexpr int64_t size = size_of(X);
    int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      const vf a = fused_columns<X, Same>(f, row, x, s, i, kLanes);
      const vf b = fused_columns<X, Same>(f, row, x, s, i + kLanes, kLanes);
      store_pair<X>(out + i * size, a, b);
    }
    for (; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      store_up_to<X>(out + i * size, fused_columns<X, Same>(f, row, x, s, i, n), n);
    }
  } else {
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      const vf y = fused_columns<X, Same>(f, row, x, s, i, n);
      store_any(f.out_type, out + i * size_of(f.out_type), y, n);
    }
  }
}

template <DType X, bool Same>
static void fused_rows(const FusedNormArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const FusedNorm f = {
      args.weight_type, args.modulation_type, args.out_type,
      static_cast<const char *>(args.weight), static_cast<const char *>(args.bias),
      args.weight_offset, args.cast, args.eager,
  };
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
      fused_sum<X, Same>(f, row, sum, cols);
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
    const double rstd = 1.0 / __builtin_sqrt(square + eps);
    const FusedScale scale = {splat(hi), splat(lo), splat(static_cast<float>(rstd))};
    fused_out<X, Same>(f, row, x, at(args.out, r * cols, args.out_type), scale, cols);
    x_row.next(), residual_row.next(), gate_row.next(), scale_row.next(), shift_row.next();
  }
}

using FusedNormKernel = void (*)(const FusedNormArgs &, int64_t, int64_t);

template <DType X>
static FusedNormKernel fused_choose(const FusedNormArgs &args) {
  // What is absent is not read, whatever its dtype is called.
  const bool same = args.out_type == X && (args.weight_type == X || (!args.weight && !args.bias)) &&
                    (args.modulation_type == X || (!args.gate && !args.scale));
  return same ? fused_rows<X, true> : fused_rows<X, false>;
}

static FusedNormKernel fused_norm_kernel(const FusedNormArgs &args) {
  return args.type == DType::F32   ? fused_choose<DType::F32>(args)
         : args.type == DType::F16 ? fused_choose<DType::F16>(args)
                                   : fused_choose<DType::BF16>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
