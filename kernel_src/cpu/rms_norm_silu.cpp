// rms_norm_silu.cpp: a convolution's bias, rms norm, modulation and SiLU over rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "rms_norm_silu.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t rms_norm_silu(const RmsNormSiluArgs &args) {
  parallel(HFP_FOR_SIMD(rms_norm_silu_kernel)(args.type), args, args.x_rows.rows,
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

// x + addend; past the end of the row there is 0.
template <DType X>
HFP_INLINE vf silu_input(const char *x, const char *addend, int64_t i, int64_t n) {
  const vf y = load_up_to<X>(x + i * size_of(X), n);
  return addend ? y + load_up_to<X>(addend + i * size_of(X), n) : y;
}

// In blocks, which are added in double, as `reduce` does.
template <DType X>
HFP_INLINE double silu_squares(const char *x, const char *addend, int64_t cols) {
  double total = 0;
  for (int64_t block = 0; block < cols; block += 16 * kLanes) {
    const int64_t end = cols - block < 16 * kLanes ? cols : block + 16 * kLanes;
    vf sum = {};
    for (int64_t i = block; i < end; i += kLanes) {
      const vf y = silu_input<X>(x, addend, i, end - i < kLanes ? end - i : kLanes);
      sum = fma(y, y, sum);
    }
    total += sum_lanes(sum);
  }
  return total;
}

template <DType X>
static void rms_norm_silu_rows(const RmsNormSiluArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const DType weight_type = args.weight_type, modulation_type = args.modulation_type;
  const char *addend = static_cast<const char *>(args.addend);
  const char *weight = static_cast<const char *>(args.weight);
  const bool modulated = args.scale != nullptr;
  const double eps = args.eps, count = static_cast<double>(cols);
  const vf one = splat(1.0f);
  RowCursor x_row(args.x_rows, begin);
  RowCursor scale_row(modulated ? args.scale_rows : args.x_rows, begin);
  RowCursor shift_row(modulated ? args.shift_rows : args.x_rows, begin);
  for (int64_t r = begin; r < end; ++r, x_row.next(), scale_row.next(), shift_row.next()) {
    const char *x = at(args.x, x_row.offset(), X);
    const char *scale = modulated ? at(args.scale, scale_row.offset(), modulation_type) : nullptr;
    const char *shift = modulated ? at(args.shift, shift_row.offset(), modulation_type) : nullptr;
    char *out = at(args.out, r * cols, X);
    const double square = silu_squares<X>(x, addend, cols) / count;
    const vf rstd = splat(static_cast<float>(1.0 / __builtin_sqrt(square + eps)));
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = silu_input<X>(x, addend, i, n) * rstd;
      if (weight) y *= load_any(weight_type, weight + i * size_of(weight_type), n);
      if (modulated) {
        const int64_t to = i * size_of(modulation_type);
        y = fma(y, one + load_any(modulation_type, scale + to, n),
                load_any(modulation_type, shift + to, n));
      }
      store_up_to<X>(out + i * size_of(X), times_sigmoid<X != DType::F32>(y, y), n);
    }
  }
}

using RmsNormSiluKernel = void (*)(const RmsNormSiluArgs &, int64_t, int64_t);

static RmsNormSiluKernel rms_norm_silu_kernel(DType type) {
  return type == DType::F32   ? rms_norm_silu_rows<DType::F32>
         : type == DType::F16 ? rms_norm_silu_rows<DType::F16>
                              : rms_norm_silu_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
