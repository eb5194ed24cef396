// broadcast_backward.cpp: the gradients of a * b + c and of act(x + bias), whose b, c and bias are
// the same for many rows: see BroadcastBackwardArgs.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "broadcast_backward.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

// Part p of a sum's rows is [p * reduced / parts, (p + 1) * reduced / parts): whoever computes it,
// the result is the same.
int32_t broadcast_backward(const BroadcastBackwardArgs &args) {
  const int64_t sums = args.outer * args.inner, cols = args.x_rows.cols;
  const int64_t elements = args.reduced / args.parts * cols;
  parallel(HFP_FOR_SIMD(broadcast_backward_kernel)(args), args, sums * args.parts,
           kGrainElements / (elements > 0 ? elements : 1), 1);
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

constexpr int64_t kSumColumns = 512;  // at once, on the stack
constexpr int kMulAdd = -1;

HFP_INLINE void accumulate(float *sum, vf v, int64_t n) {
  char *p = reinterpret_cast<char *>(sum);
  store_up_to<DType::F32>(p, load_up_to<DType::F32>(p, n) + v, n);
}

// One row, columns [col, col + count).
template <DType X, int Activation>
HFP_INLINE void backward_row(const BroadcastBackwardArgs &args, char *dx, const char *grad,
                             const char *x, const char *param, int64_t count, float *first,
                             float *second) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    const vf g = load_any(args.grad_type, grad + i * size_of(args.grad_type), n);
    const vf v = load_up_to<X>(x + i * size_of(X), n);
    const vf p = load_any(args.param_type, param + i * size_of(args.param_type), n);
    if constexpr (Activation == kMulAdd) {
      store_up_to<X>(dx + i * size_of(X), g * p, n);
      accumulate(first + i, g * v, n);
      accumulate(second + i, g, n);
    } else {
      const vf d = g * activate_slope<Activation, X>(round_to<X>(v + p)).slope;
      store_up_to<X>(dx + i * size_of(X), d, n);
      accumulate(second + i, d, n);
    }
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

template <DType X, int Activation>
static void backward_parts(const BroadcastBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols, parts = args.parts;
  const int64_t wide = cols * ((args.first ? 1 : 0) + (args.second ? 1 : 0));
  const int64_t whole = args.reduced / parts, more = args.reduced % parts;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sum = unit / parts, part = unit % parts;
    const int64_t outer = sum / args.inner, inner = sum % args.inner;
    // Without the product part * reduced, which can overflow.
    const int64_t from = part * whole + (part < more ? part : more);
    const int64_t to = from + whole + (part < more ? 1 : 0);
    for (int64_t col = 0; col < cols; col += kSumColumns) {
      const int64_t count = cols - col < kSumColumns ? cols - col : kSumColumns;
      alignas(64) float first[kSumColumns] = {}, second[kSumColumns] = {};
      for (int64_t r = from; r < to; ++r) {
        const int64_t row = (outer * args.reduced + r) * args.inner + inner;
        const int64_t g = RowCursor(args.grad_rows, row).offset() + col;
        const int64_t x = RowCursor(args.x_rows, row).offset() + col;
        const int64_t p = RowCursor(args.param_rows, row).offset() + col;
        backward_row<X, Activation>(args, at(args.dx, row * cols + col, X),
                                    at(args.grad, g, args.grad_type), at(args.x, x, X),
                                    at(args.param, p, args.param_type), count, first, second);
      }
      if (parts == 1) {
        put_sums(args.first, args.param_type, sum * cols + col, first, count);
        put_sums(args.second, args.param_type, sum * cols + col, second, count);
      } else {
        float *partials = args.partials + unit * wide + col;
        if (args.first) put_sums(partials, DType::F32, 0, first, count);
        if (args.second) {
          put_sums(partials + (args.first ? cols : 0), DType::F32, 0, second, count);
        }
      }
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

template <DType X>
static BroadcastBackward backward_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return backward_parts<X, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return backward_parts<X, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return backward_parts<X, HFP_ACT_GELU_SIGMOID>;
    case HFP_ACT_SILU:
      return backward_parts<X, HFP_ACT_SILU>;
    default:
      return backward_parts<X, kMulAdd>;
  }
}

static BroadcastBackward broadcast_backward_kernel(const BroadcastBackwardArgs &args) {
  return args.type == DType::F32   ? backward_choose<DType::F32>(args.activation)
         : args.type == DType::F16 ? backward_choose<DType::F16>(args.activation)
                                   : backward_choose<DType::BF16>(args.activation);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
