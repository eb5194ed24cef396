// gated_norm.cpp: rms norm of groups of columns, with a gate or without one. Dao & Gu, arXiv:2405.21060.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "gated_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t gated_norm(const GatedNormArgs &args) {
  parallel(HFP_FOR_SIMD(gated_norm_kernel)(args.type), args, args.x_rows.rows,
           rows_grain(args.x_rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"
#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Where the gate's factor goes, if there is one.
enum class Gate { kNone, kFirst, kLast };

// silu or sigmoid of the gate
template <DType X>
HFP_INLINE vf gate_value(const char *gate, int64_t i, int64_t n, bool sigmoid) {
  const vf g = load_up_to<X>(gate + i * size_of(X), n);
  return times_sigmoid<X != DType::F32>(sigmoid ? splat(1.0f) : g, g);
}

// What is normalized: x, or x * act(gate). Past the end of the row there is 0 * act(0).
template <DType X>
HFP_INLINE vf gated_input(const char *x, const char *gate, int64_t i, int64_t n, Gate place,
                          bool sigmoid) {
  vf y = load_up_to<X>(x + i * size_of(X), n);
  if (place == Gate::kFirst) y *= gate_value<X>(gate, i, n, sigmoid);
  return y;
}

// In blocks, which are added in double, as `reduce` does.
template <DType X>
HFP_INLINE double gated_squares(const char *x, const char *gate, int64_t cols, Gate place,
                                bool sigmoid) {
  double total = 0;
  for (int64_t block = 0; block < cols; block += 16 * kLanes) {
    const int64_t end = cols - block < 16 * kLanes ? cols : block + 16 * kLanes;
    vf sum = {};
    for (int64_t i = block; i < end; i += kLanes) {
      const vf y = gated_input<X>(x, gate, i, end - i < kLanes ? end - i : kLanes, place, sigmoid);
      sum = fma(y, y, sum);
    }
    total += sum_lanes(sum);
  }
  return total;
}

template <DType X>
static void gated_norm_rows(const GatedNormArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const bool last = args.gate && args.norm_before_gate;
  const Gate place = !args.gate ? Gate::kNone : last ? Gate::kLast : Gate::kFirst;
  const bool sigmoid = args.sigmoid, steps = !args.once;
  const DType weight_type = args.weight_type;
  const double eps = args.eps, count = static_cast<double>(cols);
  RowCursor x_row(args.x_rows, begin), gate_row(args.gate_rows, begin);
  RowCursor weight_row(args.weight_rows, begin);
  for (int64_t r = begin; r < end; ++r, x_row.next(), gate_row.next(), weight_row.next()) {
    const char *x = at(args.x, x_row.offset(), X);
    const char *gate = args.gate ? at(args.gate, gate_row.offset(), X) : nullptr;
    const char *weight = args.weight ? at(args.weight, weight_row.offset(), weight_type) : nullptr;
    char *out = at(args.out, r * cols, X);
    const double square = gated_squares<X>(x, gate, cols, place, sigmoid) / count;
    const vf rstd = splat(static_cast<float>(1.0 / __builtin_sqrt(square + eps)));
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = gated_input<X>(x, gate, i, n, place, sigmoid) * rstd;
      if (steps && (weight || last)) y = round_to<X>(y);
      if (weight) {
        y *= load_any(weight_type, weight + i * size_of(weight_type), n);
        if (steps && last) y = round_to<X>(y);
      }
      if (last) y *= gate_value<X>(gate, i, n, sigmoid);
      store_up_to<X>(out + i * size_of(X), y, n);
    }
  }
}

using GatedNormKernel = void (*)(const GatedNormArgs &, int64_t, int64_t);

static GatedNormKernel gated_norm_kernel(DType type) {
  return type == DType::F32   ? gated_norm_rows<DType::F32>
         : type == DType::F16 ? gated_norm_rows<DType::F16>
                              : gated_norm_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
