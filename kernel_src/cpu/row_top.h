// row_top.h: the k greatest of a row in one pass, for topk and sample. No include guard: included
// once per instruction set, inside the inner part of an op's .cpp, whose outer part has included
// row_select.h.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// A bit for each lane in which x is above `bar` or NaN.
HFP_INLINE uint64_t lanes_above(vf x, vf bar) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_cmp_ps_mask(x, bar, _CMP_NLE_UQ);
#elif HFP_SIMD_LEVEL == 1
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, bar, _CMP_NLE_UQ)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpnle_ps(x, bar)));
#else
  const vi above = ~(vi)(x <= bar);
  return (above[0] & 1u) | (above[1] & 2u) | (above[2] & 4u) | (above[3] & 8u);
#endif
}

template <DType T>
HFP_INLINE uint64_t pair_at(const char *x, int64_t i) {
  return pair_of(key_of(element<T>(x, i)), static_cast<uint32_t>(i));
}

// The pairs of those k elements, in any order but for the last one, which is the least.
//
// `found` collects whatever is above the k-th greatest of what has been seen before, which whole
// registers are compared with. When it is full it is cut back to its k greatest, and the bar rises.
// What equals the bar comes after k elements that are not below it, so it is none of the k.
template <DType T>
static void top_of_row(const char *x, int64_t cols, int k, TopPairs *pairs) {
  constexpr int64_t kStep = 4 * kLanes, size = size_of(T);
  static_assert(kStep <= kMostAppended, "a step must fit");
  uint64_t *found = pairs->found;
  const int room = 2 * k + kMoreThanK;
  int64_t i = 0;
  int count = 0;
  for (; i < cols && count < room; ++i) found[count++] = pair_at<T>(x, i);
  uint32_t bar_key = cut(found, count, k);
  if (count < room) return;
  count = k;
  while (i < cols) {
    if (bar_key == 0xffffffffu) return;  // k NaN: nothing is greater
    const vf bar = splat(value_of(bar_key));
    for (; i < cols && count < room; i += kStep) {
      const char *p = x + i * size;
      uint64_t above;
      if (i + kStep <= cols) {
        above = lanes_above(load<T>(p), bar) |
                lanes_above(load<T>(p + kLanes * size), bar) << kLanes |
                lanes_above(load<T>(p + 2 * kLanes * size), bar) << (2 * kLanes) |
                lanes_above(load<T>(p + 3 * kLanes * size), bar) << (3 * kLanes);
      } else {
        above = 0;
        for (int64_t j = i; j < cols; ++j) {
          above |= static_cast<uint64_t>(key_of(element<T>(x, j)) > bar_key) << (j - i);
        }
      }
      for (; above; above &= above - 1) {
        found[count++] = pair_at<T>(x, i + __builtin_ctzll(above));
      }
    }
    bar_key = cut(found, count, k);
    count = k;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
