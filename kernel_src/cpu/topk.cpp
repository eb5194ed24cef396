// topk.cpp: the k greatest values of each row, descending; see hfp_topk.
#include <algorithm>
#include <functional>

#include "row_select.h"

namespace hfp {
namespace cpu {
namespace {

template <DType T>
struct ValueKeys {
  const char *x;
  bool operator()(int64_t i, uint32_t *key) const {
    *key = key_of(element<T>(x, i));
    return true;
  }
};

// Those that equal `key`, the lowest index first.
template <DType T>
struct TiedIndices {
  const char *x;
  uint32_t key, mask;
  bool operator()(int64_t i, uint32_t *index) const {
    *index = ~static_cast<uint32_t>(i) & mask;
    return key_of(element<T>(x, i)) == key;
  }
};

template <DType T>
void topk_rows(const TopkArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.rows.cols;
  const int digits = index_digits(cols);
  const uint32_t mask = digits == 4 ? ~0u : (1u << (8 * digits)) - 1;
  uint64_t found[HFP_MAX_TOPK];
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const char *x = at(args.x, cursor.offset(), T);
    uint64_t left = static_cast<uint64_t>(args.k), all = 0;
    const uint32_t least = select_key(ValueKeys<T>{x}, cols, 4, 24, &left, &all);
    uint32_t least_index = 0;
    const bool tied = left < all;
    if (tied) {
      least_index = select_key(TiedIndices<T>{x, least, mask}, cols, digits, 8 * digits - 8, &left,
                               &all);
    }
    int count = 0;
    for (int64_t i = 0; i < cols && count < args.k; ++i) {
      const uint32_t key = key_of(element<T>(x, i));
      if (key < least) continue;
      if (tied && key == least && (~static_cast<uint32_t>(i) & mask) < least_index) continue;
      found[count++] = pair_of(key, static_cast<uint32_t>(i));
    }
    std::sort(found, found + count, std::greater<uint64_t>());
    char *values = at(args.values, row * args.k, T);
    int64_t *indices = args.indices + row * args.k;
    for (int i = 0; i < count; ++i) {
      const int64_t index = index_of(found[i]);
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
