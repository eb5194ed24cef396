// topk.cpp: the k greatest values of each row, descending; see hfp_topk.
#include "row_select.h"

#define HFP_SIMD_SOURCE "row_top.h"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {
namespace {

template <DType T>
void topk_rows(const TopkArgs &args, int64_t begin, int64_t end) {
  TopPairs pairs;
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const char *x = at(args.x, cursor.offset(), T);
    HFP_FOR_SIMD(top_of_row<T>)(x, args.rows.cols, args.k, &pairs);
    std::sort(pairs.found, pairs.found + args.k, std::greater<uint64_t>());
    char *values = at(args.values, row * args.k, T);
    int64_t *indices = args.indices + row * args.k;
    for (int i = 0; i < args.k; ++i) {
      const int64_t index = index_of(pairs.found[i]);
      indices[i] = index;
      std::memcpy(values + i * size_of(T), x + index * size_of(T), size_of(T));
    }
  }
}

}  // namespace

int32_t topk(const TopkArgs &args) {
  const auto rows = args.type == DType::F32   ? &topk_rows<DType::F32>
                    : args.type == DType::F16 ? &topk_rows<DType::F16>
                                              : &topk_rows<DType::BF16>;
  parallel(rows, args, args.rows.rows, rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp
