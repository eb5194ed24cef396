// cross_entropy.cpp: the loss of each row of logits, and its gradient; see hfp_cross_entropy.
#if !defined(HFP_SIMD)

#include <cmath>

#define HFP_SIMD_SOURCE "cross_entropy.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t cross_entropy(const CrossEntropyArgs &args) {
  parallel(HFP_FOR_SIMD(cross_entropy_kernel)(args), args, args.rows.rows,
           rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

int32_t cross_entropy_backward(const CrossEntropyArgs &args) {
  parallel(HFP_FOR_SIMD(cross_entropy_backward_kernel)(args), args, args.rows.rows,
           rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

int32_t log_probs(const LogProbsArgs &args) {
  parallel(HFP_FOR_SIMD(log_probs_kernel)(args), args, args.rows.rows, rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

int32_t cross_entropy_with_gradient(const CrossEntropyTotalArgs &args) {
  CrossEntropyArgs rows = args.rows;
  float divisor = args.divisor.value;
  if (args.counts) {
    int64_t count = 0;
    for (int64_t i = 0; i < rows.rows.rows; ++i) count += rows.target[i] != rows.ignore_index;
    divisor = static_cast<float>(count);
  }
  const float share = 1 / divisor;
  rows.grad = &share;
  rows.one_grad = true;
  rows.saved_lse = rows.lse;
  parallel(HFP_FOR_SIMD(cross_entropy_with_gradient_kernel)(rows), rows, rows.rows.rows,
           rows_grain(rows.rows.cols), 1);
  double sum = 0;
  for (int64_t i = 0; i < rows.rows.rows; ++i) sum += rows.loss[i];
  *args.total = static_cast<float>(sum * static_cast<double>(share));
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// cap tanh(x / cap) = x' (1 - e) / (1 + e) with e = exp(-2 |x| / cap) and x' = +-cap. Its derivative
// 1 - tanh^2 = 4 e / (1 + e)^2, which does not cancel.
struct Capped {
  vf value, slope;
};

HFP_INLINE Capped soft_cap(vf x, float cap) {
  const vf u = magnitude(x) / cap;
  const vf e = exp_nonpositive(-2.0f * u);
  const vf r = 1.0f / (1.0f + e);
  // Near 0, 1 - e cancels: the first terms of the series there, whose error is u^7.
  const vf square = u * u;
  const vf series = u * fma(square, fma(square, splat(2.0f / 15), splat(-1.0f / 3)), splat(1.0f));
  const vf tanh = u < 0.05f ? series : (1.0f - e) * r;
  const vf size = cap * tanh;
  return {x < 0.0f ? -size : size, 4.0f * e * r * r};
}

template <bool Cap>
HFP_INLINE vf capped(vf x, float cap) {
  if constexpr (Cap) return soft_cap(x, cap).value;
  else return x;
}

template <DType T>
HFP_INLINE vf load_row(const char *x, int64_t i, int64_t n) {
  return n == kLanes ? load<T>(x + i * size_of(T)) : load_n<T>(x + i * size_of(T), n);
}

HFP_INLINE vi lane_numbers() {
  vi lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  return lane;
}

template <DType T, bool Cap>
static void cross_entropy_rows(const CrossEntropyArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.rows.cols;
  const float cap = args.softcap, low = -__builtin_inff();
  const double smoothing = args.label_smoothing;
  const vi lanes = lane_numbers();
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const int64_t target = args.target[row];
    if (target == args.ignore_index) {
      args.loss[row] = args.lse[row] = 0;
      continue;
    }
    const char *x = at(args.logits, cursor.offset(), T);
    // The maximum of each lane; a NaN passes by here and is caught by the sum.
    vf most = splat(low);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf v = capped<Cap>(load_row<T>(x, i, n), cap);
      if (n < kLanes) v = lanes < static_cast<int32_t>(n) ? v : splat(low);
      most = v > most ? v : most;
    }
    float top = low;
    for (int k = 0; k < kLanes; ++k) top = most[k] > top ? most[k] : top;
    const float shift = top == low ? 0.0f : top;
    double sum = 0, plain = 0;
    for (int64_t block = 0; block < cols; block += kBlock) {
      const int64_t stop = cols - block < kBlock ? cols : block + kBlock;
      vf s = {}, p = {};
      for (int64_t i = block; i < stop; i += kLanes) {
        const int64_t n = stop - i < kLanes ? stop - i : kLanes;
        const vf v = capped<Cap>(load_row<T>(x, i, n), cap);
        vf e = exp_nonpositive(v - shift);
        if (n < kLanes) e = lanes < static_cast<int32_t>(n) ? e : vf{};
        s += e;
        p += v;  // 0 past the end
      }
      sum += sum_lanes(s);
      plain += sum_lanes(p);
    }
    const double lse = shift + std::log(sum);
    args.lse[row] = static_cast<float>(lse);
    if (target < 0 || target >= cols) {
      args.loss[row] = __builtin_nanf("");
      continue;
    }
    const double z = capped<Cap>(load_n<T>(x + target * size_of(T), 1), cap)[0];
    double loss = lse - (1 - smoothing) * z;
    if (smoothing > 0) loss -= smoothing * plain / static_cast<double>(cols);
    args.loss[row] = static_cast<float>(loss);
  }
}

template <DType T, bool Cap>
static void cross_entropy_backward_rows(const CrossEntropyArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.rows.cols;
  const float cap = args.softcap;
  const float smooth = args.label_smoothing / static_cast<float>(cols);
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    const int64_t target = args.target[row];
    const bool ignored = target == args.ignore_index;
    const bool inside = target >= 0 && target < cols;
    const char *x = at(args.logits, cursor.offset(), T);
    char *dx = at(args.dlogits, row * cols, T);
    const float given = args.grad[args.one_grad ? 0 : row];
    const float grad = ignored ? 0.0f : inside ? given : __builtin_nanf("");
    const vf lse = splat(args.saved_lse[row]);
    // Read before dx, which may be the same memory, is written.
    vf z_target = {};
    if (inside) z_target = load_n<T>(x + target * size_of(T), 1);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      vf y = {};
      if (!ignored) {
        const vf v = load_row<T>(x, i, n);
        vf slope = splat(grad);
        vf z = v;
        if constexpr (Cap) {
          const Capped c = soft_cap(v, cap);
          z = c.value;
          slope *= c.slope;
        }
        // z - lse <= 0 apart from rounding; exp_nonpositive bears that.
        y = (exp_nonpositive(z - lse) - smooth) * slope;
      }
      if (n == kLanes) store<T>(dx + i * size_of(T), y);
      else store_n<T>(dx + i * size_of(T), y, n);
    }
    if (inside && !ignored) {
      vf slope = splat(grad);
      vf z = z_target;
      if constexpr (Cap) {
        const Capped c = soft_cap(z_target, cap);
        z = c.value;
        slope *= c.slope;
      }
      const vf y = (exp_nonpositive(z - lse) - (1.0f - args.label_smoothing) - smooth) * slope;
      store_n<T>(dx + target * size_of(T), y, 1);
    }
  }
}

// Row by row: the gradient finds the logits in the cache.
template <DType T, bool Cap>
static void cross_entropy_with_gradient_rows(const CrossEntropyArgs &args, int64_t begin,
                                             int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    cross_entropy_rows<T, Cap>(args, row, row + 1);
    cross_entropy_backward_rows<T, Cap>(args, row, row + 1);
  }
}

// The loss of each row, of an ignored one too, since its lse is needed; then the row once more.
template <DType T, bool Cap>
static void log_probs_rows(const LogProbsArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.rows.cols;
  CrossEntropyArgs of = {};
  of.loss = args.loss;
  of.lse = args.lse;
  of.logits = args.logits;
  of.target = args.target;
  of.type = args.type;
  of.rows = args.rows;
  of.label_smoothing = args.label_smoothing;
  of.softcap = args.softcap;
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    of.ignore_index = ~args.target[row];  // not this row's target
    cross_entropy_rows<T, Cap>(of, row, row + 1);
    const vf lse = splat(args.lse[row]);
    const char *x = at(args.logits, cursor.offset(), T);
    char *out = at(args.log_probs, row * cols, T);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes;
      const vf y = capped<Cap>(load_row<T>(x, i, n), args.softcap) - lse;
      if (n == kLanes) store<T>(out + i * size_of(T), y);
      else store_n<T>(out + i * size_of(T), y, n);
    }
    if (args.target[row] == args.ignore_index) args.loss[row] = args.lse[row] = 0;
  }
}

using LogProbs = void (*)(const LogProbsArgs &, int64_t, int64_t);

template <DType T>
static LogProbs choose_log_probs(const LogProbsArgs &args) {
  return args.softcap > 0 ? log_probs_rows<T, true> : log_probs_rows<T, false>;
}

static LogProbs log_probs_kernel(const LogProbsArgs &args) {
  return args.type == DType::F32   ? choose_log_probs<DType::F32>(args)
         : args.type == DType::F16 ? choose_log_probs<DType::F16>(args)
                                   : choose_log_probs<DType::BF16>(args);
}

using CrossEntropy = void (*)(const CrossEntropyArgs &, int64_t, int64_t);

enum class Pass { Loss, Gradient, Both };

template <Pass kPass, DType T, bool Cap>
static CrossEntropy pass_over_rows() {
  switch (kPass) {
    case Pass::Loss:
      return cross_entropy_rows<T, Cap>;
    case Pass::Gradient:
      return cross_entropy_backward_rows<T, Cap>;
    default:
      return cross_entropy_with_gradient_rows<T, Cap>;
  }
}

template <Pass kPass, DType T>
static CrossEntropy choose_cap(const CrossEntropyArgs &args) {
  return args.softcap > 0 ? pass_over_rows<kPass, T, true>() : pass_over_rows<kPass, T, false>();
}

template <Pass kPass>
static CrossEntropy choose(const CrossEntropyArgs &args) {
  return args.type == DType::F32   ? choose_cap<kPass, DType::F32>(args)
         : args.type == DType::F16 ? choose_cap<kPass, DType::F16>(args)
                                   : choose_cap<kPass, DType::BF16>(args);
}

static CrossEntropy cross_entropy_kernel(const CrossEntropyArgs &args) {
  return choose<Pass::Loss>(args);
}
static CrossEntropy cross_entropy_backward_kernel(const CrossEntropyArgs &args) {
  return choose<Pass::Gradient>(args);
}
static CrossEntropy cross_entropy_with_gradient_kernel(const CrossEntropyArgs &args) {
  return choose<Pass::Both>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
