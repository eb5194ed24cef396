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

// Columns that are added up in fp32, at most 256 after each other with the narrowest registers, and
// that stay in the first cache between two looks at them.
constexpr int64_t kSumCols = 1024;

HFP_INLINE vi softmax_lanes() {
  vi lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  return lane;
}

// A row of the input; copies, since a store through a char pointer might change the arguments.
struct SoftmaxRow {
  const char *x, *mask;
  DType mask_type;
  float scale;
};

// scale * x + mask of n <= kLanes columns; -inf past them.
template <DType T, bool Mask>
HFP_INLINE vf scaled(const SoftmaxRow &row, int64_t i, int64_t n) {
  vf z = load_up_to<T>(row.x + i * size_of(T), n) * row.scale;
  if constexpr (Mask) z += load_any(row.mask_type, row.mask + i * size_of(row.mask_type), n);
  if (n == kLanes) return z;
  return softmax_lanes() < static_cast<int32_t>(n) ? z : splat(-__builtin_inff());
}

// exp(z) for z <= 0; for half types to 2^-17, of which both the sum and the result are made.
template <DType T>
HFP_INLINE vf exponential(vf z) {
  if constexpr (T == DType::F32) return exp_nonpositive(z);
  else return exp2_product<true>(z, 1.44269504f);
}

HFP_INLINE vf greater(vf a, vf b) { return a > b ? a : b; }  // b if either is NaN

// The greatest one of columns [begin, end); NaN does not count.
template <DType T, bool Mask>
HFP_INLINE float block_maximum(const SoftmaxRow &row, int64_t begin, int64_t end) {
  const float low = -__builtin_inff();
  vf a = splat(low), b = a, c = a, d = a;
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    a = greater(scaled<T, Mask>(row, i, kLanes), a);
    b = greater(scaled<T, Mask>(row, i + kLanes, kLanes), b);
    c = greater(scaled<T, Mask>(row, i + 2 * kLanes, kLanes), c);
    d = greater(scaled<T, Mask>(row, i + 3 * kLanes, kLanes), d);
  }
  for (; i < end; i += kLanes) {
    a = greater(scaled<T, Mask>(row, i, end - i < kLanes ? end - i : kLanes), a);
  }
  a = greater(greater(a, b), greater(c, d));
  float top = low;
  for (int k = 0; k < kLanes; ++k) top = a[k] > top ? a[k] : top;
  return top;
}

template <DType T, bool Mask>
HFP_INLINE float block_sum(const SoftmaxRow &row, int64_t begin, int64_t end, float top) {
  vf a = {}, b = {};
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
    a += exponential<T>(scaled<T, Mask>(row, i, kLanes) - top);
    b += exponential<T>(scaled<T, Mask>(row, i + kLanes, kLanes) - top);
  }
  for (; i < end; i += kLanes) {
    a += exponential<T>(scaled<T, Mask>(row, i, end - i < kLanes ? end - i : kLanes) - top);
  }
  return sum_lanes(a + b);
}

// The greatest one and the sum of exp(z - greatest), in one pass: where a block raises the maximum,
// the sum before it is scaled down. (Milakov and Gimelshein, arXiv:1805.02867.)
struct SoftmaxSum {
  float top;
  double sum;  // NaN if there is a NaN or +inf
};

template <DType T, bool Mask>
HFP_INLINE SoftmaxSum softmax_sum(const SoftmaxRow &row, int64_t cols) {
  const float low = -__builtin_inff();
  SoftmaxSum s = {low, 0};
  for (int64_t block = 0; block < cols; block += kSumCols) {
    const int64_t stop = cols - block < kSumCols ? cols : block + kSumCols;
    const float top = block_maximum<T, Mask>(row, block, stop);
    if (top > s.top) {
      s.sum *= __builtin_exp(static_cast<double>(s.top) - top);
      s.top = top;
    }
    s.sum += block_sum<T, Mask>(row, block, stop, s.top == low ? 0.0f : s.top);
  }
  return s;
}

template <DType T, bool Mask>
HFP_INLINE void store_shares(char *out, const SoftmaxRow &row, float top, float share, int64_t i,
                             int64_t end) {
  for (; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    const vf a = exponential<T>(scaled<T, Mask>(row, i, n) - top) * share;
    store_up_to<T>(out + i * size_of(T), a, n);
  }
}

template <DType T, bool Mask, bool Stream>
static void softmax_rows(const SoftmaxArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  RowCursor cursor(args.x_rows, begin), mask_cursor(args.mask_rows, begin);
  for (int64_t r = begin; r < end; ++r, cursor.next(), mask_cursor.next()) {
    const SoftmaxRow row = {
        at(args.x, cursor.offset(), T),
        Mask ? at(args.mask, mask_cursor.offset(), args.mask_type) : nullptr,
        args.mask_type,
        args.scale,
    };
    char *out = at(args.out, r * cols, T);
    const SoftmaxSum s = softmax_sum<T, Mask>(row, cols);
    // As torch: a greatest one that is not finite makes the row NaN.
    const bool finite = s.top > -__builtin_inff() && s.sum < __builtin_inf();
    const float share = finite ? static_cast<float>(1 / s.sum) : __builtin_nanf("");
    const float top = finite ? s.top : 0.0f;
    int64_t i = Stream ? before_stream<T>(out, cols) : 0;
    if constexpr (Stream) store_shares<T, Mask>(out, row, top, share, 0, i);
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      const vf a = exponential<T>(scaled<T, Mask>(row, i, kLanes) - top) * share;
      const vf b = exponential<T>(scaled<T, Mask>(row, i + kLanes, kLanes) - top) * share;
      if constexpr (Stream) stream_pair<T>(out + i * size_of(T), a, b);
      else store_pair<T>(out + i * size_of(T), a, b);
    }
    store_shares<T, Mask>(out, row, top, share, i, cols);
  }
  if constexpr (Stream) end_stream();
}

// The products of columns [begin, end).
template <DType T>
HFP_INLINE float block_dot(const char *g, const char *y, int64_t begin, int64_t end) {
  constexpr int64_t size = size_of(T), next = kLanes * size;
  vf a = {}, b = {}, c = {}, d = {};
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    const char *p = g + i * size, *q = y + i * size;
    a = fma(load<T>(p), load<T>(q), a);
    b = fma(load<T>(p + next), load<T>(q + next), b);
    c = fma(load<T>(p + 2 * next), load<T>(q + 2 * next), c);
    d = fma(load<T>(p + 3 * next), load<T>(q + 3 * next), d);
  }
  for (; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    a = fma(load_up_to<T>(g + i * size, n), load_up_to<T>(y + i * size, n), a);
  }
  return sum_lanes((a + b) + (c + d));
}

template <DType T>
HFP_INLINE vf softmax_slope(const char *g, const char *y, float scale, float dot, int64_t i,
                            int64_t n) {
  const vf p = load_up_to<T>(y + i * size_of(T), n) * scale;
  return p * (load_up_to<T>(g + i * size_of(T), n) - dot);
}

template <DType T>
HFP_INLINE void store_slopes(char *dx, const char *g, const char *y, float scale, float dot,
                             int64_t i, int64_t end) {
  for (; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    store_up_to<T>(dx + i * size_of(T), softmax_slope<T>(g, y, scale, dot, i, n), n);
  }
}

template <DType T, bool Stream>
static void softmax_backward_rows(const SoftmaxArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.y_rows.cols;
  const float scale = args.scale;
  RowCursor grads(args.grad_rows, begin), ys(args.y_rows, begin);
  for (int64_t row = begin; row < end; ++row, grads.next(), ys.next()) {
    const char *g = at(args.grad, grads.offset(), T), *y = at(args.y, ys.offset(), T);
    char *dx = at(args.out, row * cols, T);
    double sum = 0;
    for (int64_t block = 0; block < cols; block += kSumCols) {
      sum += block_dot<T>(g, y, block, cols - block < kSumCols ? cols : block + kSumCols);
    }
    const float dot = static_cast<float>(sum);
    int64_t i = Stream ? before_stream<T>(dx, cols) : 0;
    if constexpr (Stream) store_slopes<T>(dx, g, y, scale, dot, 0, i);
    for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
      const vf a = softmax_slope<T>(g, y, scale, dot, i, kLanes);
      const vf b = softmax_slope<T>(g, y, scale, dot, i + kLanes, kLanes);
      if constexpr (Stream) stream_pair<T>(dx + i * size_of(T), a, b);
      else store_pair<T>(dx + i * size_of(T), a, b);
    }
    store_slopes<T>(dx, g, y, scale, dot, i, cols);
  }
  if constexpr (Stream) end_stream();
}

using Softmax = void (*)(const SoftmaxArgs &, int64_t, int64_t);

template <bool Mask, bool Stream>
static Softmax softmax_of(DType type) {
  switch (type) {
    case DType::F32: return softmax_rows<DType::F32, Mask, Stream>;
    case DType::F16: return softmax_rows<DType::F16, Mask, Stream>;
    default: return softmax_rows<DType::BF16, Mask, Stream>;
  }
}

static Softmax softmax_kernel(const SoftmaxArgs &args) {
  const int64_t bytes = args.x_rows.rows * args.x_rows.cols * size_of(args.type);
  const bool stream = args.out != args.x && streams(2 * bytes, args.out, bytes);
  if (args.mask != nullptr) return stream ? softmax_of<true, true>(args.type)
                                          : softmax_of<true, false>(args.type);
  return stream ? softmax_of<false, true>(args.type) : softmax_of<false, false>(args.type);
}

template <bool Stream>
static Softmax softmax_backward_of(DType type) {
  switch (type) {
    case DType::F32: return softmax_backward_rows<DType::F32, Stream>;
    case DType::F16: return softmax_backward_rows<DType::F16, Stream>;
    default: return softmax_backward_rows<DType::BF16, Stream>;
  }
}

static Softmax softmax_backward_kernel(const SoftmaxArgs &args) {
  const int64_t bytes = args.y_rows.rows * args.y_rows.cols * size_of(args.type);
  const bool in_place = args.out == args.grad || args.out == args.y;
  return !in_place && streams(3 * bytes, args.out, bytes) ? softmax_backward_of<true>(args.type)
                                                          : softmax_backward_of<false>(args.type);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
