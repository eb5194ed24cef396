// mul_add.cpp: out = a * b + c, b and c broadcast over rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "mul_add.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t mul_add(const MulAddArgs &args) {
  parallel(HFP_FOR_SIMD(mul_add_kernel)(args.type), args, args.a_rows.rows,
           rows_grain(args.a_rows.cols), 1);
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
static void mul_add_rows(const MulAddArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.a_rows.cols;
  const int64_t param_size = size_of(args.param_type), out_size = size_of(args.out_type);
  RowCursor a_row(args.a_rows, begin), b_row(args.b_rows, begin), c_row(args.c_rows, begin);
  for (int64_t r = begin; r < end; ++r, a_row.next(), b_row.next(), c_row.next()) {
    const char *a = at(args.a, a_row.offset(), X);
    const char *b = at(args.b, b_row.offset(), args.param_type);
    const char *c = at(args.c, c_row.offset(), args.param_type);
    char *out = at(args.out, r * cols, args.out_type);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = load_up_to<X>(a + i * size_of(X), n) *
             load_any(args.param_type, b + i * param_size, n);
      if (args.eager) y = round_any(args.out_type, y);
      y += load_any(args.param_type, c + i * param_size, n);
      store_any(args.out_type, out + i * out_size, y, n);
    }
  }
}

using MulAddKernel = void (*)(const MulAddArgs &, int64_t, int64_t);

static MulAddKernel mul_add_kernel(DType type) {
  return type == DType::F32   ? mul_add_rows<DType::F32>
         : type == DType::F16 ? mul_add_rows<DType::F16>
                              : mul_add_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
