// pair.cpp: a + alpha * b, a * b and a * alpha; see hfp_add, hfp_mul and hfp_scale.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "pair.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t pair(const PairArgs &args) {
  const bool flat = args.a_rows.rows == 1;
  // One row is split between columns; the share of a thread is whole lines.
  parallel(HFP_FOR_SIMD(pair_kernel)(args), args, flat ? args.a_rows.cols : args.a_rows.rows,
           flat ? kGrainElements : rows_grain(args.a_rows.cols), flat ? 64 : 1);
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
HFP_INLINE void pair_of(const PairArgs &args, const char *a, const char *b, char *out, int64_t cols) {
  const vf alpha = splat(args.alpha);
  for (int64_t i = 0; i < cols; i += kLanes) {
    const int64_t n = cols - i < kLanes ? cols - i : kLanes, to = i * size_of(T);
    vf y = load_up_to<T>(a + to, n);
    if (!b) {
      y *= alpha;
    } else if (args.product) {
      y *= load_up_to<T>(b + to, n);
    } else {
      y += alpha * load_up_to<T>(b + to, n);
    }
    store_up_to<T>(out + to, y, n);
  }
}

template <DType T>
static void pair_rows(const PairArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.a_rows.cols;
  if (args.a_rows.rows == 1) {
    pair_of<T>(args, at(args.a, begin, T), args.b ? at(args.b, begin, T) : nullptr,
               at(args.out, begin, T), end - begin);
    return;
  }
  RowCursor a_row(args.a_rows, begin), b_row(args.b_rows, begin);
  for (int64_t r = begin; r < end; ++r, a_row.next(), b_row.next()) {
    pair_of<T>(args, at(args.a, a_row.offset(), T), args.b ? at(args.b, b_row.offset(), T) : nullptr,
               at(args.out, r * cols, T), cols);
  }
}

using PairKernel = void (*)(const PairArgs &, int64_t, int64_t);

static PairKernel pair_kernel(const PairArgs &args) {
  return args.type == DType::F32   ? pair_rows<DType::F32>
         : args.type == DType::F16 ? pair_rows<DType::F16>
                                   : pair_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
