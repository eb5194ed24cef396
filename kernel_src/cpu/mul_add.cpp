// mul_add.cpp: out = a * b + c, b and c broadcast over rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "mul_add.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t mul_add(const PointwiseArgs &args) {
  const Input &a = args.in[0];
  parallel(HFP_FOR_SIMD(mul_add_kernel)(a.type), args, a.rows.rows, rows_grain(a.rows.cols), 1);
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
static void mul_add_rows(const PointwiseArgs &args, int64_t begin, int64_t end) {
  const Input &x = args.in[0], &factor = args.in[1], &summand = args.in[2];
  const DType param_type = factor.type;
  const int64_t cols = x.rows.cols;
  const int64_t param_size = size_of(param_type), out_size = size_of(args.out_type);
  RowCursor a_row(x.rows, begin), b_row(factor.rows, begin), c_row(summand.rows, begin);
  for (int64_t r = begin; r < end; ++r, a_row.next(), b_row.next(), c_row.next()) {
    const char *a = at(x.data, a_row.offset(), X);
    const char *b = at(factor.data, b_row.offset(), param_type);
    const char *c = at(summand.data, c_row.offset(), param_type);
    char *out = at(args.out, r * cols, args.out_type);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = load_up_to<X>(a + i * size_of(X), n) *
             load_any(param_type, b + i * param_size, n);
      if (args.eager) y = round_any(args.out_type, y);
      y += load_any(param_type, c + i * param_size, n);
      store_any(args.out_type, out + i * out_size, y, n);
    }
  }
}

using MulAddKernel = void (*)(const PointwiseArgs &, int64_t, int64_t);

static MulAddKernel mul_add_kernel(DType type) {
  return type == DType::F32   ? mul_add_rows<DType::F32>
         : type == DType::F16 ? mul_add_rows<DType::F16>
                              : mul_add_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
