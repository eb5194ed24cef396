// topk.cpp: the k greatest values of each row, descending; see hfp_topk.
#if !defined(HFP_SIMD)

#include "row_select.h"

#define HFP_SIMD_SOURCE "topk.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t topk(const TopkArgs &args) {
  parallel(HFP_FOR_SIMD(topk_kernel)(args.type), args, args.rows.rows, rows_grain(args.rows.cols),
           1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "row_top.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T>
static void topk_rows(const TopkArgs &args, int64_t begin, int64_t end) {
  TopPairs pairs;
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const char *x = at(args.x, cursor.offset(), T);
    top_of_row<T>(x, args.rows.cols, args.k, &pairs);
    descending(pairs.found, args.k);
    char *values = at(args.values, row * args.k, T);
    int64_t *indices = args.indices + row * args.k;
    for (int i = 0; i < args.k; ++i) {
      const int64_t index = index_of(pairs.found[i]);
      indices[i] = index;
      std::memcpy(values + i * size_of(T), x + index * size_of(T), size_of(T));
    }
  }
}

static void (*topk_kernel(DType type))(const TopkArgs &, int64_t, int64_t) {
  return type == DType::F32   ? topk_rows<DType::F32>
         : type == DType::F16 ? topk_rows<DType::F16>
                              : topk_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
