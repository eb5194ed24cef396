// argmax.cpp: the first index of the greatest value of each row; see hfp_argmax, hfp_decode_choose.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "argmax.cpp"
#include "../row_keys.h"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t argmax(const ArgmaxArgs &args) {
  parallel(HFP_FOR_SIMD(argmax_kernel)(args), args, args.rows.rows, rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

#if HFP_SIMD_LEVEL == 2
HFP_INLINE bool any_lane(vi found) { return _mm512_movepi32_mask((__m512i)found) != 0; }
#elif HFP_SIMD_LEVEL == 1
HFP_INLINE bool any_lane(vi found) { return _mm256_movemask_ps((__m256)found) != 0; }
#else
HFP_INLINE bool any_lane(vi found) { return (found[0] | found[1] | found[2] | found[3]) != 0; }
#endif

// The first index at which x is `wanted`, or NaN if `nan`; there is one.
template <DType T>
HFP_INLINE int64_t first_of(const char *x, int64_t cols, float wanted, bool nan) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) {
    const vf v = load<T>(x + i * size_of(T));
    const vi found = nan ? (vi)(v != v) : (vi)(v == wanted);
    if (!any_lane(found)) continue;
    for (int k = 0; k < kLanes; ++k) {
      if (found[k]) return i + k;
    }
  }
  const vf v = load_n<T>(x + i * size_of(T), cols - i);
  for (int k = 0; k < kLanes; ++k) {
    if (nan ? v[k] != v[k] : v[k] == wanted) return i + k;
  }
  return i;
}

template <DType T>
static void argmax_rows(const ArgmaxArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.rows.cols;
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const char *x = at(args.x, cursor.offset(), T);
    // Two registers, so that one comparison need not wait for the last.
    vf a = splat(-__builtin_inff()), b = a;
    vi nan = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      const vf v = load<T>(x + i * size_of(T)), w = load<T>(x + (i + kLanes) * size_of(T));
      a = v > a ? v : a;
      b = w > b ? w : b;
      nan |= (vi)(v != v) | (vi)(w != w);
    }
    float top = -__builtin_inff();
    for (; i < cols; ++i) {
      const vf v = load_n<T>(x + i * size_of(T), 1);
      top = v[0] > top ? v[0] : top;
      if (v[0] != v[0]) nan[0] = -1;
    }
    a = a > b ? a : b;
    for (int k = 0; k < kLanes; ++k) top = a[k] > top ? a[k] : top;
    const int64_t found = first_of<T>(x, cols, top, any_lane(nan));
    if (args.out != nullptr) {
      args.out[row] = found;
    } else {
      choose(args.choice, choice_row(args.choice, row), row, found);
    }
  }
}

static void (*argmax_kernel(const ArgmaxArgs &args))(const ArgmaxArgs &, int64_t, int64_t) {
  switch (args.type) {
    case DType::F32: return argmax_rows<DType::F32>;
    case DType::F16: return argmax_rows<DType::F16>;
    default: return argmax_rows<DType::BF16>;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
