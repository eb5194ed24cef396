// overlap.h: whether two strided tensors share memory.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels.h"

namespace hfp {

// The bytes of a view: up to three outer dimensions, the largest step first, around rows of
// `row_bytes`. `low` is its lowest byte, negative strides or not.
struct Span {
  const char *data = nullptr, *low = nullptr;
  int64_t element = 0, row_bytes = 0, bytes = 0;  // bytes: from `low` to the end of the last element
  int64_t count[3] = {1, 1, 1}, step[3] = {0, 0, 0};
  int64_t from_first_to_last = 0;  // bytes from the first row to the last
  bool dense = false;
  Rows rows;

  Span() = default;
  Span(const char *first, int64_t element_bytes, const Rows &r, bool contiguous)
      : data(first), low(first), element(element_bytes), row_bytes(r.cols * element_bytes),
        dense(contiguous), rows(r) {
    const int64_t sizes[3] = {r.rows / (r.n1 * r.n2), r.n1, r.n2};
    const int64_t strides[3] = {r.s0 * element, r.s1 * element, r.s2 * element};
    bytes = row_bytes;
    for (int i = 0; i < 3; ++i) {
      const int64_t reach = sizes[i] > 1 ? (sizes[i] - 1) * strides[i] : 0;
      from_first_to_last += reach;
      if (reach < 0) low += reach;
      bytes += reach < 0 ? -reach : reach;
      int64_t n = reach == 0 ? 1 : sizes[i], s = strides[i] < 0 ? -strides[i] : strides[i];
      for (int k = 0; k < 3; ++k) {  // an insertion sort
        if (n > 1 && (count[k] == 1 || s > step[k])) {
          const int64_t other_n = count[k], other_s = step[k];
          count[k] = n, step[k] = s;
          n = other_n, s = other_s;
        }
      }
    }
  }

  bool same_as(const Span &o) const {
    return data == o.data && element == o.element && rows.rows == o.rows.rows &&
           rows.cols == o.rows.cols && rows.n1 == o.rows.n1 && rows.n2 == o.rows.n2 &&
           rows.s0 == o.rows.s0 && rows.s1 == o.rows.s1 && rows.s2 == o.rows.s2;
  }

  // Whether an element lies in the bytes [begin, end) from `low` on, begin < end. Exact for views
  // whose dimensions nest, as those that slicing, splitting and permuting make.
  bool touches(int64_t begin, int64_t end, int level = 0, int64_t base = 0) const {
    if (level == 3) return base < end && base + row_bytes > begin;
    int64_t extent = row_bytes;  // of what lies inside this dimension
    for (int i = level + 1; i < 3; ++i) extent += (count[i] - 1) * step[i];
    if (count[level] == 1) return touches(begin, end, level + 1, base);
    if (base >= end) return false;
    int64_t last = (end - 1 - base) / step[level];
    if (last > count[level] - 1) last = count[level] - 1;
    if (base + last * step[level] >= begin) return true;  // it starts inside
    // Blocks that start before; more than one only where blocks overlap each other.
    for (int tries = 0; tries < 8 && last >= 0; ++tries, --last) {
      const int64_t block = base + last * step[level];
      if (block + extent <= begin) return false;
      if (touches(begin, end, level + 1, block)) return true;
    }
    return false;
  }
};

// Whether `a` and `b` surely share an element. Of two views with gaps, the first and the last rows
// are compared: shifted views are found, and views that interleave are not taken for overlapping.
inline bool overlap(const Span &a, const Span &b) {
  if (a.low >= b.low + b.bytes || b.low >= a.low + a.bytes) return false;
  if (a.dense) return b.touches(a.low - b.low, a.low + a.bytes - b.low);
  if (b.dense) return a.touches(b.low - a.low, b.low + b.bytes - a.low);
  const auto row_in = [](const Span &rows, const Span &other) {
    for (const int64_t to : {int64_t{0}, rows.from_first_to_last}) {
      const int64_t begin = rows.data + to - other.low;
      if (begin + rows.row_bytes > 0 && begin < other.bytes &&
          other.touches(begin, begin + rows.row_bytes)) {
        return true;
      }
    }
    return false;
  };
  return row_in(a, b) || row_in(b, a);
}

}  // namespace hfp
