// broadcast_backward.cpp: the gradients of a * b + c and of act(x + bias), whose b, c and bias are
// the same for many rows: see BroadcastBackwardArgs.
#if !defined(HFP_SIMD)

#include "common.h"

namespace hfp {
namespace cpu {

constexpr int64_t kSumColumns = 4096;  // of a unit of work; its sums are on the stack

inline int64_t column_blocks(int64_t cols) { return (cols + kSumColumns - 1) / kSumColumns; }

}  // namespace cpu
}  // namespace hfp

#define HFP_SIMD_SOURCE "broadcast_backward.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

// Part p of a sum's rows is [p * reduced / parts, (p + 1) * reduced / parts): whoever computes it,
// the result is the same.
int32_t broadcast_backward(const BroadcastBackwardArgs &given) {
  BroadcastBackwardArgs args = given;
  const int64_t rows_of_part = args.reduced < 4 * kPartRows ? 4 : kPartRows;
  args.parts = args.parts > 1 ? summed_parts(args.reduced, rows_of_part, args.parts) : 1;
  const int64_t sums = args.outer * args.inner, cols = args.x_rows.cols;
  const int64_t wide = cols < kSumColumns ? cols : kSumColumns;
  const int64_t elements = args.reduced / args.parts * wide;
  parallel(HFP_FOR_SIMD(broadcast_backward_kernel)(args), args,
           sums * args.parts * column_blocks(cols), kGrainElements / (elements > 0 ? elements : 1),
           1);
  if (args.parts > 1) {
    parallel(HFP_FOR_SIMD(sum_parts), args, sums, kGrainElements / (args.parts * cols), 1);
  }
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"
#include "simd_math.h"
#include "simd_grad.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

constexpr int kMulAdd = -1;

// What all rows of a unit share. Copies: a store through a char pointer might change the arguments.
struct Broadcast {
  DType grad_type, param_type;
  const char *param;
  float *first, *second;  // sums of its columns
  int64_t count;          // columns
};

struct GradRow {
  char *dx;
  const char *grad, *x;
};

struct GradSums {
  vf first, second;
};

// One register of one row. Same: grad and the parameter have the dtype of x.
template <DType X, bool Same, int Activation>
HFP_INLINE GradSums backward_one(const Broadcast &b, const GradRow &row, vf p, int64_t i, int64_t n,
                                 GradSums sums) {
  vf g;
  if constexpr (Same) g = load_up_to<X>(row.grad + i * size_of(X), n);
  else g = load_any(b.grad_type, row.grad + i * size_of(b.grad_type), n);
  const vf v = load_up_to<X>(row.x + i * size_of(X), n);
  vf d;
  if constexpr (Activation == kMulAdd) {
    d = g * p;
    sums.first = fma(g, v, sums.first);
    sums.second += g;
  } else {
    d = g * activate_slope<Activation, X>(round_to<X>(v + p)).slope;
    sums.second += d;
  }
  store_up_to<X>(row.dx + i * size_of(X), d, n);
  return sums;
}

// One register of Rows consecutive rows of a sum.
template <DType X, bool Same, int Activation, int Rows>
HFP_INLINE void backward_register(const Broadcast &b, const GradRow &row0, const GradRow &row1,
                                  int64_t i, int64_t n) {
  vf p;
  if constexpr (Same) p = load_up_to<X>(b.param + i * size_of(X), n);
  else p = load_any(b.param_type, b.param + i * size_of(b.param_type), n);
  char *first = reinterpret_cast<char *>(b.first + i);
  char *second = reinterpret_cast<char *>(b.second + i);
  GradSums sums = {load<DType::F32>(first), load<DType::F32>(second)};
  sums = backward_one<X, Same, Activation>(b, row0, p, i, n, sums);
  if constexpr (Rows == 2) sums = backward_one<X, Same, Activation>(b, row1, p, i, n, sums);
  if constexpr (Activation == kMulAdd) store<DType::F32>(first, sums.first);
  store<DType::F32>(second, sums.second);
}

template <DType X, bool Same, int Activation, int Rows>
HFP_INLINE void backward_rows(const Broadcast b, const GradRow row0, const GradRow row1) {
  int64_t i = 0;
  for (; i + kLanes <= b.count; i += kLanes) {
    backward_register<X, Same, Activation, Rows>(b, row0, row1, i, kLanes);
  }
  if (i < b.count) {
    backward_register<X, Same, Activation, Rows>(b, row0, row1, i, b.count - i);
  }
}

// `count` fp32 sums to where they belong; nothing if `to` is null.
HFP_INLINE void put_sums(void *to, DType type, int64_t at_element, const float *sums,
                         int64_t count) {
  if (!to) return;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    store_any(type, at(to, at_element + i, type),
              load_up_to<DType::F32>(reinterpret_cast<const char *>(sums + i), n), n);
  }
}

// The rows of one sum, one after the other.
class GradCursor {
 public:
  GradCursor(const BroadcastBackwardArgs &args, int64_t row, int64_t col)
      : args_(args), grad_(args.grad_rows, row), x_(args.x_rows, row), row_(row), col_(col) {}

  GradRow take() {
    const DType type = args_.type;
    const GradRow row = {at(args_.dx, row_ * args_.x_rows.cols + col_, type),
                         at(args_.grad, grad_.offset() + col_, args_.grad_type),
                         at(args_.x, x_.offset() + col_, type)};
    row_ += args_.inner;
    if (args_.inner == 1) {
      grad_.next();
      x_.next();
    } else {
      grad_.move_to(row_);
      x_.move_to(row_);
    }
    return row;
  }

 private:
  const BroadcastBackwardArgs &args_;
  RowCursor grad_, x_;
  int64_t row_, col_;
};

// Units [begin, end): a block of the columns of a part of the rows of a sum.
template <DType X, bool Same, int Activation>
static void backward_units(const BroadcastBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols, parts = args.parts, blocks = column_blocks(cols);
  const int64_t wide = cols * ((args.first ? 1 : 0) + (args.second ? 1 : 0));
  const int64_t whole = args.reduced / parts, more = args.reduced % parts;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t slot = unit / blocks, col = unit % blocks * kSumColumns;
    const int64_t sum = slot / parts, part = slot % parts;
    const int64_t outer = sum / args.inner, inner = sum % args.inner;
    // Without the product part * reduced, which can overflow.
    const int64_t from = part * whole + (part < more ? part : more);
    const int64_t rows = whole + (part < more ? 1 : 0);
    const int64_t row = (outer * args.reduced + from) * args.inner + inner;
    const int64_t count = cols - col < kSumColumns ? cols - col : kSumColumns;
    // Whole registers are read and written, also at the end of a row.
    alignas(64) float first[kSumColumns], second[kSumColumns];
    if constexpr (Activation == kMulAdd) __builtin_memset(first, 0, sizeof first);
    __builtin_memset(second, 0, sizeof second);
    const char *param =
        rows > 0 ? at(args.param, RowCursor(args.param_rows, row).offset() + col, args.param_type)
                 : nullptr;
    const Broadcast b = {args.grad_type, args.param_type, param, first, second, count};
    GradCursor cursor(args, row, col);
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
      const GradRow row0 = cursor.take(), row1 = cursor.take();
      backward_rows<X, Same, Activation, 2>(b, row0, row1);
    }
    if (r < rows) {
      const GradRow last = cursor.take();
      backward_rows<X, Same, Activation, 1>(b, last, last);
    }
    if (parts == 1) {
      if constexpr (Activation == kMulAdd) {
        put_sums(args.first, args.param_type, sum * cols + col, first, count);
      }
      put_sums(args.second, args.param_type, sum * cols + col, second, count);
    } else {
      float *partials = args.partials + slot * wide + col;
      if constexpr (Activation == kMulAdd) {
        if (args.first) put_sums(partials, DType::F32, 0, first, count);
        if (args.first) partials += cols;
      }
      if (args.second) put_sums(partials, DType::F32, 0, second, count);
    }
  }
}

// Sums [begin, end), their parts added up in order.
static void sum_parts(const BroadcastBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const int64_t wide = cols * ((args.first ? 1 : 0) + (args.second ? 1 : 0));
  for (int64_t sum = begin; sum < end; ++sum) {
    const float *partials = args.partials + sum * args.parts * wide;
    int64_t n;
    for (int64_t i = 0; i < wide; i += n) {
      const bool to_first = args.first && i < cols;
      const int64_t limit = to_first ? cols : wide;
      n = limit - i < kLanes ? limit - i : kLanes;
      vf total = {};
      for (int64_t part = 0; part < args.parts; ++part) {
        total += load_up_to<DType::F32>(
            reinterpret_cast<const char *>(partials + part * wide + i), n);
      }
      const int64_t col = to_first || !args.first ? i : i - cols;
      store_any(args.param_type,
                at(to_first ? args.first : args.second, sum * cols + col, args.param_type), total,
                n);
    }
  }
}

using BroadcastBackward = void (*)(const BroadcastBackwardArgs &, int64_t, int64_t);

template <DType X, bool Same>
static BroadcastBackward backward_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return backward_units<X, true, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return backward_units<X, true, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return backward_units<X, true, HFP_ACT_GELU_SIGMOID>;
    case HFP_ACT_SILU:
      return backward_units<X, true, HFP_ACT_SILU>;
    default:
      return backward_units<X, Same, kMulAdd>;
  }
}

template <DType X>
static BroadcastBackward backward_choose_types(const BroadcastBackwardArgs &args) {
  return args.grad_type == X && args.param_type == X ? backward_choose<X, true>(args.activation)
                                                     : backward_choose<X, false>(args.activation);
}

static BroadcastBackward broadcast_backward_kernel(const BroadcastBackwardArgs &args) {
  return args.type == DType::F32   ? backward_choose_types<DType::F32>(args)
         : args.type == DType::F16 ? backward_choose_types<DType::F16>(args)
                                   : backward_choose_types<DType::BF16>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
