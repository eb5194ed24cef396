// row_top.h: the k greatest of a row in one pass, for topk and sample, and all from a value on. No
// include guard: it is the HFP_SIMD_SOURCE of a .cpp that has included row_select.h.
//
// Only these loops are compiled for an instruction set, as functions that are not inlined into what
// calls them: GCC 12 leaves out the vzeroupper before a call to plain code of the same file, whose SSE
// instructions then wait for the upper halves of their registers.

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

// A bit for each of the 4 kLanes elements from p on that is above `bar` or NaN.
template <DType T>
HFP_INLINE uint64_t step_above(const char *p, vf bar) {
  constexpr int64_t next = kLanes * size_of(T);
  return lanes_above(load<T>(p), bar) | lanes_above(load<T>(p + next), bar) << kLanes |
         lanes_above(load<T>(p + 2 * next), bar) << (2 * kLanes) |
         lanes_above(load<T>(p + 3 * next), bar) << (3 * kLanes);
}

template <DType T>
HFP_INLINE uint64_t pair_at(const char *x, int64_t i) {
  return pair_of(key_of(element<T>(x, i)), static_cast<uint32_t>(i));
}

// The pairs of those k elements, in any order except for the last one, which is the least.
//
// `found` collects whatever is above the k-th greatest of what has been seen before, which whole
// registers are compared with. When it is full it is cut back to its k greatest, and the bar rises.
// What equals the bar comes after k elements that are not below it, so it is none of the k.
template <DType T>
static __attribute__((noinline)) void top_of_row(const char *x, int64_t cols, int k, TopPairs *pairs) {
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
        above = step_above<T>(p, bar);
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

// The indices of what is above `bar` or NaN, ascending, and how many; -1 if there are more than `room`.
template <DType T>
static __attribute__((noinline)) int64_t indices_above(const char *x, int64_t cols, float bar,
                                                       int64_t room, uint32_t *indices) {
  constexpr int64_t kStep = 4 * kLanes, size = size_of(T);
  int64_t i = 0, count = 0;
  for (; i + kStep <= cols; i += kStep) {
    uint64_t above = step_above<T>(x + i * size, splat(bar));
    if (!above) continue;
    if (count + __builtin_popcountll(above) > room) return -1;
    for (; above; above &= above - 1) {
      indices[count++] = static_cast<uint32_t>(i + __builtin_ctzll(above));
    }
  }
  for (; i < cols; ++i) {
    if (element<T>(x, i) <= bar) continue;
    if (count == room) return -1;
    indices[count++] = static_cast<uint32_t>(i);
  }
  return count;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
