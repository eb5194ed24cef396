// softmax.cpp: the softmax of each row and its gradient; see hfp_softmax.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "softmax.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t softmax(const SoftmaxArgs &args) {
  parallel(HFP_FOR_SIMD(softmax_kernel)(args), args, args.x_rows.rows,
           rows_grain(args.x_rows.cols), 1);
  return HFP_OK;
}

int32_t softmax_backward(const SoftmaxArgs &args) {
  parallel(HFP_FOR_SIMD(softmax_backward_kernel)(args), args, args.y_rows.rows,
           rows_grain(args.y_rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "simd_math.h"
#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Columns that are added up in fp32, at most 256 after each other with the narrowest registers.
constexpr int64_t kSumCols = 1024;

HFP_INLINE vi softmax_lanes() {
  vi lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  return lane;
}

// scale * x + mask of n <= kLanes columns; -inf past them.
template <DType T, bool Mask>
HFP_INLINE vf scaled(const SoftmaxArgs &args, const char *x, const char *mask, int64_t i,
                     int64_t n, vi lanes) {
  vf z = load_up_to<T>(x + i * size_of(T), n) * args.scale;
  if constexpr (Mask) {
    z += load_any(args.mask_type, mask + i * size_of(args.mask_type), n);
  }
  return n == kLanes ? z : lanes < static_cast<int32_t>(n) ? z : splat(-__builtin_inff());
}

// The greatest one, or NaN if there is one.
template <DType T, bool Mask>
HFP_INLINE float row_maximum(const SoftmaxArgs &args, const char *x, const char *mask,
                             int64_t cols, vi lanes) {
  vf most = splat(-__builtin_inff());
  vi nan = {};
  for (int64_t i = 0; i < cols; i += kLanes) {
    const int64_t n = cols - i < kLanes ? cols - i : kLanes;
    const vf z = scaled<T, Mask>(args, x, mask, i, n, lanes);
    most = z > most ? z : most;
    nan |= (vi)(z != z);
  }
  float top = most[0];
  int32_t any = 0;
  for (int k = 0; k < kLanes; ++k) {
    top = most[k] > top ? most[k] : top;
    any |= nan[k];
  }
  return any ? __builtin_nanf("") : top;
}

template <DType T, bool Mask>
static void softmax_rows(const SoftmaxArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const vi lanes = softmax_lanes();
  RowCursor cursor(args.x_rows, begin), mask_cursor(args.mask_rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next(), mask_cursor.next()) {
    const char *x = at(args.x, cursor.offset(), T);
    const char *mask = Mask ? at(args.mask, mask_cursor.offset(), args.mask_type) : nullptr;
    char *out = at(args.out, row * cols, T);
    const float top = row_maximum<T, Mask>(args, x, mask, cols, lanes);
    // As torch: -inf - -inf and inf - inf are NaN, and with them the sum.
    if (!(top > -__builtin_inff() && top < __builtin_inff())) {
      const vf nan = splat(__builtin_nanf(""));
      for (int64_t i = 0; i < cols; i += kLanes) {
        store_up_to<T>(out + i * size_of(T), nan, cols - i < kLanes ? cols - i : kLanes);
      }
      continue;
    }
    // fp32 results keep the exponentials on their way to the sum; half types would round them.
    double sum = 0;
    for (int64_t block = 0; block < cols; block += kSumCols) {
      const int64_t stop = cols - block < kSumCols ? cols : block + kSumCols;
      vf s = {};
      for (int64_t i = block; i < stop; i += kLanes) {
        const int64_t n = stop - i < kLanes ? stop - i : kLanes;
        vf e = exp_nonpositive(scaled<T, Mask>(args, x, mask, i, n, lanes) - top);
        s += e;
        if constexpr (T == DType::F32) store_up_to<T>(out + i * size_of(T), e, n);
      }
      sum += sum_lanes(s);
    }
    const float share = static_cast<float>(1 / sum);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf e;
      if constexpr (T == DType::F32) e = load_up_to<T>(out + i * size_of(T), n);
      else e = exp_nonpositive(scaled<T, Mask>(args, x, mask, i, n, lanes) - top);
      store_up_to<T>(out + i * size_of(T), e * share, n);
    }
  }
}

template <DType T>
static void softmax_backward_rows(const SoftmaxArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.y_rows.cols;
  RowCursor grads(args.grad_rows, begin), ys(args.y_rows, begin);
  for (int64_t row = begin; row < end; ++row, grads.next(), ys.next()) {
    const char *g = at(args.grad, grads.offset(), T), *y = at(args.y, ys.offset(), T);
    char *dx = at(args.out, row * cols, T);
    double dot = 0;
    for (int64_t block = 0; block < cols; block += kSumCols) {
      const int64_t stop = cols - block < kSumCols ? cols : block + kSumCols;
      vf s = {};
      for (int64_t i = block; i < stop; i += kLanes) {
        const int64_t n = stop - i < kLanes ? stop - i : kLanes;
        s = fma(load_up_to<T>(g + i * size_of(T), n), load_up_to<T>(y + i * size_of(T), n), s);
      }
      dot += sum_lanes(s);
    }
    const float by = static_cast<float>(dot);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      const vf p = load_up_to<T>(y + i * size_of(T), n) * args.scale;
      store_up_to<T>(dx + i * size_of(T), p * (load_up_to<T>(g + i * size_of(T), n) - by), n);
    }
  }
}

using Softmax = void (*)(const SoftmaxArgs &, int64_t, int64_t);

static Softmax softmax_kernel(const SoftmaxArgs &args) {
  const bool mask = args.mask != nullptr;
  switch (args.type) {
    case DType::F32:
      return mask ? softmax_rows<DType::F32, true> : softmax_rows<DType::F32, false>;
    case DType::F16:
      return mask ? softmax_rows<DType::F16, true> : softmax_rows<DType::F16, false>;
    default:
      return mask ? softmax_rows<DType::BF16, true> : softmax_rows<DType::BF16, false>;
  }
}

static Softmax softmax_backward_kernel(const SoftmaxArgs &args) {
  switch (args.type) {
    case DType::F32: return softmax_backward_rows<DType::F32>;
    case DType::F16: return softmax_backward_rows<DType::F16>;
    default: return softmax_backward_rows<DType::BF16>;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
