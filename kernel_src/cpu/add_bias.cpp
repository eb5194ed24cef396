// add_bias.cpp: out = x + bias + residual, the bias the same for all rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "add_bias.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t add_bias(const PointwiseArgs &args) {
  const Input &x = args.in[0];
  parallel(HFP_FOR_SIMD(add_bias_kernel)(x.type), args, x.rows.rows, rows_grain(x.rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T>
static void add_bias_rows(const PointwiseArgs &args, int64_t begin, int64_t end) {
  const Input &from = args.in[0], &summand = args.in[2];
  const int64_t cols = from.rows.cols;
  const bool added = summand.data != nullptr;
  const char *bias = static_cast<const char *>(args.in[1].data);
  RowCursor x_row(from.rows, begin), residual_row(added ? summand.rows : from.rows, begin);
  for (int64_t r = begin; r < end; ++r, x_row.next(), residual_row.next()) {
    const char *x = at(from.data, x_row.offset(), T);
    const char *residual = added ? at(summand.data, residual_row.offset(), T) : nullptr;
    char *out = at(args.out, r * cols, T);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes, to = i * size_of(T);
      vf y = load_up_to<T>(x + to, n) + load_up_to<T>(bias + to, n);
      if (added) y += load_up_to<T>(residual + to, n);
      store_up_to<T>(out + to, y, n);
    }
  }
}

using AddBiasKernel = void (*)(const PointwiseArgs &, int64_t, int64_t);

static AddBiasKernel add_bias_kernel(DType type) {
  return type == DType::F32   ? add_bias_rows<DType::F32>
         : type == DType::F16 ? add_bias_rows<DType::F16>
                              : add_bias_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
