// norm_backward.cpp: the gradients of rms_norm and layer_norm. With r = rsqrt(mean square + eps) and
// h = grad * weight, xhat the normalized row:
//   rms_norm:   dx = r (h - xhat mean(h xhat))
//   layer_norm: dx = r (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of grad * xhat, dbias = sum over rows of grad
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "norm_backward.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

namespace {

// Part p of the rows is [p * rows / P, (p + 1) * rows / P): whoever computes it, its sums are the same.
template <class Kernel, class Sum>
int32_t norm_backward(NormBackwardArgs args, Kernel kernel, Sum sum) {
  const int64_t cols = args.x_rows.cols;
  // A unit of work is a part here: of few rows there are more, for threads to have something to do.
  const int64_t rows = args.x_rows.rows / 32;
  const int64_t rows_of_part = rows < 4 ? 4 : rows < kPartRows ? rows : kPartRows;
  const int64_t parts = summed_parts(args.x_rows.rows, rows_of_part, args.partial_rows);
  args.partial_rows = parts;
  if (args.x_rows.rows > 0) {
    const int64_t elements = args.x_rows.rows * cols / parts;
    parallel(kernel, args, parts, kGrainElements / (elements > 0 ? elements : 1), 1);
  }
  const int64_t wanted = (args.dweight ? 1 : 0) + (args.dbias ? 1 : 0);
  if (wanted > 0) {
    parallel(sum, args, wanted * cols, kGrainElements / (parts > 0 ? parts : 1), 64);
  }
  return HFP_OK;
}

}  // namespace

int32_t rms_norm_backward(const NormBackwardArgs &args) {
  return norm_backward(args, HFP_FOR_SIMD(rms_norm_backward_kernel)(args),
                       HFP_FOR_SIMD(sum_partials));
}

int32_t layer_norm_backward(const NormBackwardArgs &args) {
  return norm_backward(args, HFP_FOR_SIMD(layer_norm_backward_kernel)(args),
                       HFP_FOR_SIMD(sum_partials));
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// What the columns of all rows share, read once: a store through a char pointer might change args.
struct Upstream {
  DType grad_type, weight_type;
  const char *weight;  // or null
  vf offset;
};

// Same: grad and weight have the dtype of x.
template <DType X, bool Same>
HFP_INLINE vf load_grad(const Upstream &up, const char *grad, int64_t i, int64_t n) {
  if constexpr (Same) return load_up_to<X>(grad + i * size_of(X), n);
  else return load_any(up.grad_type, grad + i * size_of(up.grad_type), n);
}

// Where there is a weight.
template <DType X, bool Same>
HFP_INLINE vf load_weight(const Upstream &up, int64_t i, int64_t n) {
  if constexpr (Same) return load_up_to<X>(up.weight + i * size_of(X), n) + up.offset;
  const int64_t size = size_of(up.weight_type);
  return load_any(up.weight_type, up.weight + i * size, n) + up.offset;
}

// grad * weight
template <DType X, bool Same>
HFP_INLINE vf weighted(const Upstream &up, vf g, int64_t i, int64_t n) {
  return up.weight ? g * load_weight<X, Same>(up, i, n) : g;
}

// Over a row, or every fourth register of it: (x - mean)^2, h, and h (x - mean).
struct Terms {
  vf square = {}, h = {}, product = {};
};

struct RowSums {
  double square = 0, h = 0, product = 0;
};

template <DType X, bool Same, bool Centred>
HFP_INLINE void add_terms(Terms *terms, const Upstream &up, const char *x, const char *grad, vf hi,
                          vf lo, int64_t i, int64_t n) {
  const vf h = weighted<X, Same>(up, load_grad<X, Same>(up, grad, i, n), i, n);  // 0 past the end
  vf v = load_up_to<X>(x + i * size_of(X), n);
  if constexpr (Centred) {
    v = (v - hi) - lo;
    terms->h += h;
  }
  terms->product = fma(h, v, terms->product);
  if (Centred && n < kLanes) {  // -mean past the end
    vi lane;
    for (int k = 0; k < kLanes; ++k) lane[k] = k;
    v = lane < static_cast<int32_t>(n) ? v : vf{};
  }
  terms->square = fma(v, v, terms->square);
}

// In one pass. The order is that of reduce() of simd.h: the squares are the forward's, bit for bit.
template <DType X, bool Same, bool Centred>
HFP_INLINE RowSums sums_of_row(const Upstream &up, const char *x, const char *grad, int64_t cols,
                               vf hi, vf lo) {
  RowSums total;
  for (int64_t block = 0; block < cols; block += kBlock) {
    const int64_t end = cols - block < kBlock ? cols : block + kBlock;
    Terms a, b, c, d;
    int64_t i = block;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      add_terms<X, Same, Centred>(&a, up, x, grad, hi, lo, i, kLanes);
      add_terms<X, Same, Centred>(&b, up, x, grad, hi, lo, i + kLanes, kLanes);
      add_terms<X, Same, Centred>(&c, up, x, grad, hi, lo, i + 2 * kLanes, kLanes);
      add_terms<X, Same, Centred>(&d, up, x, grad, hi, lo, i + 3 * kLanes, kLanes);
    }
    if (i + kLanes <= end) {
      add_terms<X, Same, Centred>(&a, up, x, grad, hi, lo, i, kLanes);
      i += kLanes;
      if (i + kLanes <= end) {
        add_terms<X, Same, Centred>(&b, up, x, grad, hi, lo, i, kLanes);
        i += kLanes;
        if (i + kLanes <= end) {
          add_terms<X, Same, Centred>(&c, up, x, grad, hi, lo, i, kLanes);
          i += kLanes;
        }
      }
    }
    if (i < end) add_terms<X, Same, Centred>(&d, up, x, grad, hi, lo, i, end - i);
    total.square += sum_lanes((a.square + b.square) + (c.square + d.square));
    total.product += sum_lanes((a.product + b.product) + (c.product + d.product));
    if constexpr (Centred) total.h += sum_lanes((a.h + b.h) + (c.h + d.h));
  }
  return total;
}

constexpr int kAtOnce = 4;  // rows

// One, where four of them, with their gradients, would fill the first cache and one leaves room. us, rows
// one by one and by fours, 512 rows in fp32 by one thread: 64 columns 47 and 36, 256 68 and 61, 512 106 and
// 160, 768 166 and 269, 1024 284 and 356, 1536 683 and 564, 4096 2375 and 1831.
HFP_INLINE int rows_at_once(int64_t bytes) { return bytes > 1024 && bytes < 6144 ? 1 : kAtOnce; }

HFP_INLINE char *as_bytes(float *p) { return reinterpret_cast<char *>(p); }

// A row, and what dx and the parameters' sums need besides its columns.
struct Row {
  const char *x, *grad;
  char *dx;
  vf hi, lo, rstd, mean_h, mean_product;
};

// Each step of all rows before the next one, which waits for it.
template <DType X, bool Same, bool Centred>
HFP_INLINE void read_rows(const Upstream &up, Row *rows, int held, int64_t cols, double eps) {
  const double count = static_cast<double>(cols);
  float hi[kAtOnce] = {}, lo[kAtOnce] = {};
  if constexpr (Centred) {
    for (int r = 0; r < held; ++r) {
      const float start = load_n<X>(rows[r].x, 1)[0];
      const double mean = start + reduce<X, ShiftedTerm>(rows[r].x, cols, start, 0) / count;
      hi[r] = static_cast<float>(mean), lo[r] = static_cast<float>(mean - hi[r]);
    }
  }
  RowSums sums[kAtOnce];
  for (int r = 0; r < held; ++r) {
    rows[r].hi = splat(hi[r]), rows[r].lo = splat(lo[r]);
    sums[r] = sums_of_row<X, Same, Centred>(up, rows[r].x, rows[r].grad, cols, rows[r].hi,
                                            rows[r].lo);
  }
  for (int r = 0; r < held; ++r) {
    const double rstd = 1.0 / __builtin_sqrt(sums[r].square / count + eps);
    rows[r].rstd = splat(static_cast<float>(rstd));
    rows[r].mean_h = splat(static_cast<float>(sums[r].h / count));
    rows[r].mean_product = splat(static_cast<float>(sums[r].product * rstd / count));
  }
}

// The parameters' sums of a part; `begun`: of rows before these.
struct ParamSums {
  float *weight, *bias;  // or null
  bool begun;
};

// Of `count` rows: the parameters' sums, to which they are added in order, are read and written once.
template <DType X, bool Same, bool Centred>
HFP_INLINE void write_columns(const Upstream &up, const Row *rows, int count, DType hat_type,
                              const ParamSums &sums, int64_t i, int64_t n) {
  vf weight_sum = {}, bias_sum = {};
  if (sums.begun) {
    if (sums.weight) weight_sum = load_up_to<DType::F32>(as_bytes(sums.weight + i), n);
    if (sums.bias) bias_sum = load_up_to<DType::F32>(as_bytes(sums.bias + i), n);
  }
  for (int r = 0; r < count; ++r) {
    const Row &row = rows[r];
    vf hat = load_up_to<X>(row.x + i * size_of(X), n);
    if constexpr (Centred) hat = (hat - row.hi) - row.lo;
    hat *= row.rstd;
    // Read before dx is written, which may be one of them.
    const vf g = load_grad<X, Same>(up, row.grad, i, n);
    // Rounded where it is written: a compiler may contract products and sums in one caller alone.
    const vf h = up.weight ? fma(g, load_weight<X, Same>(up, i, n), -row.mean_h) : g - row.mean_h;
    store_up_to<X>(row.dx + i * size_of(X), row.rstd * fma(-hat, row.mean_product, h), n);
    if (sums.weight) weight_sum = fma(g, round_any(hat_type, hat), weight_sum);
    bias_sum += g;
  }
  if (sums.weight) store_up_to<DType::F32>(as_bytes(sums.weight + i), weight_sum, n);
  if (sums.bias) store_up_to<DType::F32>(as_bytes(sums.bias + i), bias_sum, n);
}

template <DType X, bool Same, bool Centred>
HFP_INLINE void write_rows(const Upstream &up, const Row *rows, int count, DType hat_type,
                           const ParamSums &sums, int64_t cols) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) {
    write_columns<X, Same, Centred>(up, rows, count, hat_type, sums, i, kLanes);
  }
  if (i < cols) write_columns<X, Same, Centred>(up, rows, count, hat_type, sums, i, cols - i);
}

template <DType X, bool Same, bool Centred>
static void norm_backward_parts(const NormBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t rows = args.x_rows.rows, cols = args.x_rows.cols, parts = args.partial_rows;
  const int64_t wide = cols * ((args.dweight ? 1 : 0) + (args.dbias ? 1 : 0));
  const int most = rows_at_once(cols * size_of(X));
  const DType hat_type = args.hat_type;
  const Upstream up = {args.grad_type, args.weight_type, static_cast<const char *>(args.weight),
                       splat(args.weight_offset)};
  for (int64_t part = begin; part < end; ++part) {
    float *const of_part = args.partials + part * wide;
    ParamSums sums = {args.dweight ? of_part : nullptr,
                      args.dbias ? of_part + (args.dweight ? cols : 0) : nullptr, false};
    // Without the product part * rows, which can overflow.
    const int64_t whole = rows / parts, more = rows % parts;
    const int64_t first = part * whole + (part < more ? part : more);
    const int64_t last = first + whole + (part < more ? 1 : 0);
    if (first == last) {
      for (int64_t i = 0; i < wide; ++i) of_part[i] = 0;
      continue;
    }
    RowCursor xs(args.x_rows, first), grads(args.grad_rows, first);
    for (int64_t row = first; row < last; sums.begun = true) {
      Row at_once[kAtOnce];
      const int held = last - row < most ? static_cast<int>(last - row) : most;
      for (int r = 0; r < held; ++r, ++row, xs.next(), grads.next()) {
        at_once[r].x = at(args.x, xs.offset(), X);
        at_once[r].grad = at(args.grad, grads.offset(), up.grad_type);
        at_once[r].dx = at(args.dx, row * cols, X);
      }
      read_rows<X, Same, Centred>(up, at_once, held, cols, args.eps);
      if (held == kAtOnce) write_rows<X, Same, Centred>(up, at_once, kAtOnce, hat_type, sums, cols);
      else if (held == 1) write_rows<X, Same, Centred>(up, at_once, 1, hat_type, sums, cols);
      else write_rows<X, Same, Centred>(up, at_once, held, hat_type, sums, cols);
    }
  }
}

// Columns [begin, end) of the partial rows, added up in order.
static void sum_partials(const NormBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const int64_t wide = cols * ((args.dweight ? 1 : 0) + (args.dbias ? 1 : 0));
  int64_t n;
  for (int64_t i = begin; i < end; i += n) {
    const bool to_weight = args.dweight && i < cols;
    const int64_t limit = to_weight && cols < end ? cols : end;
    n = limit - i < kLanes ? limit - i : kLanes;
    vf sum = {};
    for (int64_t part = 0; part < args.partial_rows; ++part) {
      sum += load_up_to<DType::F32>(
          reinterpret_cast<const char *>(args.partials + part * wide + i), n);
    }
    const DType type = to_weight ? args.weight_type : args.bias_type;
    const int64_t col = to_weight || !args.dweight ? i : i - cols;
    store_any(type, at(to_weight ? args.dweight : args.dbias, col, type), sum, n);
  }
}

using NormBackward = void (*)(const NormBackwardArgs &, int64_t, int64_t);

template <bool Centred>
static NormBackward norm_backward_choose(const NormBackwardArgs &args) {
  const DType x = args.x_type;
  const bool same = args.grad_type == x && args.weight_type == x;
  if (x == DType::F32) {
    return same ? norm_backward_parts<DType::F32, true, Centred>
                : norm_backward_parts<DType::F32, false, Centred>;
  }
  if (x == DType::F16) {
    return same ? norm_backward_parts<DType::F16, true, Centred>
                : norm_backward_parts<DType::F16, false, Centred>;
  }
  return same ? norm_backward_parts<DType::BF16, true, Centred>
              : norm_backward_parts<DType::BF16, false, Centred>;
}

static NormBackward rms_norm_backward_kernel(const NormBackwardArgs &args) {
  return norm_backward_choose<false>(args);
}

static NormBackward layer_norm_backward_kernel(const NormBackwardArgs &args) {
  return norm_backward_choose<true>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
