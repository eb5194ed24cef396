// gate_residual.cpp: out = residual + gate * x, the gate broadcast over rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "gate_residual.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t gate_residual(const PointwiseArgs &args) {
  const Input &x = args.in[2];
  parallel(HFP_FOR_SIMD(gate_residual_kernel)(x.type), args, x.rows.rows, rows_grain(x.rows.cols),
           1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType X>
static void gate_residual_rows(const PointwiseArgs &args, int64_t begin, int64_t end) {
  const Input &summand = args.in[0], &factor = args.in[1], &scaled = args.in[2];
  const int64_t cols = scaled.rows.cols;
  const int64_t gate_size = size_of(factor.type), out_size = size_of(args.out_type);
  RowCursor x_row(scaled.rows, begin), residual_row(summand.rows, begin);
  RowCursor gate_row(factor.rows, begin);
  for (int64_t r = begin; r < end; ++r, x_row.next(), residual_row.next(), gate_row.next()) {
    const char *x = at(scaled.data, x_row.offset(), X);
    const char *residual = at(summand.data, residual_row.offset(), X);
    const char *gate = at(factor.data, gate_row.offset(), factor.type);
    char *out = at(args.out, r * cols, args.out_type);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = load_any(factor.type, gate + i * gate_size, n) *
             load_up_to<X>(x + i * size_of(X), n);
      if (args.eager) y = round_any(args.out_type, y);
      y = load_up_to<X>(residual + i * size_of(X), n) + y;
      store_any(args.out_type, out + i * out_size, y, n);
    }
  }
}

using GateResidualKernel = void (*)(const PointwiseArgs &, int64_t, int64_t);

static GateResidualKernel gate_residual_kernel(DType type) {
  return type == DType::F32   ? gate_residual_rows<DType::F32>
         : type == DType::F16 ? gate_residual_rows<DType::F16>
                              : gate_residual_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
