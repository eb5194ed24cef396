// activation_backward.cpp: dx = grad * act'(x), and the gradients of act(gate) * up; elementwise.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "activation_backward.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t activation_backward(const ActivationBackwardArgs &args) {
  const auto kernel = HFP_FOR_SIMD(activation_backward_kernel)(args.type, args.activation);
  parallel(kernel, args, args.x_rows.rows * args.x_rows.cols, kGrainElements, 64);
  return HFP_OK;
}

int32_t gated_backward(const GatedBackwardArgs &args) {
  const auto kernel = HFP_FOR_SIMD(gated_backward_kernel)(args.type, args.activation);
  parallel(kernel, args, args.gate_rows.rows * args.gate_rows.cols, kGrainElements, 64);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "simd_math.h"
#include "simd_grad.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T, bool Full>
HFP_INLINE void store_if(char *p, vf v, int64_t n) {
  if constexpr (Full) store<T>(p, v);
  else store_n<T>(p, v, n);
}

template <DType T, int Activation, bool Full>
HFP_INLINE void activation_backward_one(char *dx, const char *grad, const char *x, int64_t n) {
  const vf slope = activate_slope<Activation, T>(load_if<T, Full>(x, n)).slope;
  store_if<T, Full>(dx, load_if<T, Full>(grad, n) * slope, n);
}

// Elements [begin, end) of `dx`, which may start and end inside a row.
template <DType T, int Activation>
static void activation_backward_range(const ActivationBackwardArgs &args, int64_t begin,
                                      int64_t end) {
  const int64_t cols = args.x_rows.cols;
  RowCursor grads(args.grad_rows, begin / cols), xs(args.x_rows, begin / cols);
  int64_t col = begin % cols;
  for (int64_t i = begin; i < end; grads.next(), xs.next(), col = 0) {
    const int64_t n = cols - col < end - i ? cols - col : end - i;
    char *dx = at(args.dx, i, T);
    const char *grad = at(args.grad, grads.offset() + col, T);
    const char *x = at(args.x, xs.offset() + col, T);
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) {
      const int64_t to = k * size_of(T);
      activation_backward_one<T, Activation, true>(dx + to, grad + to, x + to, kLanes);
    }
    if (k < n) {
      const int64_t to = k * size_of(T);
      activation_backward_one<T, Activation, false>(dx + to, grad + to, x + to, n - k);
    }
    i += n;
  }
}

// act(gate) as the forward rounded it.
template <DType T, int Activation, bool Full>
HFP_INLINE void gated_backward_one(char *dgate, char *dup, const char *grad, const char *gate,
                                   const char *up, int64_t n) {
  const vf g = load_if<T, Full>(grad, n), u = load_if<T, Full>(up, n);
  const Slope act = activate_slope<Activation, T>(load_if<T, Full>(gate, n));
  store_if<T, Full>(dgate, g * u * act.slope, n);
  store_if<T, Full>(dup, g * round_to<T>(act.value), n);
}

template <DType T, int Activation>
static void gated_backward_range(const GatedBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.gate_rows.cols;
  int64_t row = begin / cols, col = begin % cols;
  RowCursor grads(args.grad_rows, row), gates(args.gate_rows, row), ups(args.up_rows, row);
  for (int64_t i = begin; i < end; ++row, grads.next(), gates.next(), ups.next(), col = 0) {
    const int64_t n = cols - col < end - i ? cols - col : end - i;
    char *dgate = at(args.dgate, row * args.out_stride + col, T);
    char *dup = at(args.dup, row * args.out_stride + col, T);
    const char *grad = at(args.grad, grads.offset() + col, T);
    const char *gate = at(args.gate, gates.offset() + col, T);
    const char *up = at(args.up, ups.offset() + col, T);
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) {
      const int64_t to = k * size_of(T);
      gated_backward_one<T, Activation, true>(dgate + to, dup + to, grad + to, gate + to, up + to,
                                              kLanes);
    }
    if (k < n) {
      const int64_t to = k * size_of(T);
      gated_backward_one<T, Activation, false>(dgate + to, dup + to, grad + to, gate + to, up + to,
                                               n - k);
    }
    i += n;
  }
}

template <class Args>
using Range = void (*)(const Args &, int64_t, int64_t);

template <DType T>
static Range<ActivationBackwardArgs> activation_backward_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return activation_backward_range<T, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return activation_backward_range<T, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return activation_backward_range<T, HFP_ACT_GELU_SIGMOID>;
    default:
      return activation_backward_range<T, HFP_ACT_SILU>;
  }
}

template <DType T>
static Range<GatedBackwardArgs> gated_backward_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return gated_backward_range<T, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return gated_backward_range<T, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return gated_backward_range<T, HFP_ACT_GELU_SIGMOID>;
    case HFP_ACT_SILU:
      return gated_backward_range<T, HFP_ACT_SILU>;
    default:
      return gated_backward_range<T, HFP_ACT_RELU>;
  }
}

static Range<ActivationBackwardArgs> activation_backward_kernel(DType type, int activation) {
  return type == DType::F32   ? activation_backward_choose<DType::F32>(activation)
         : type == DType::F16 ? activation_backward_choose<DType::F16>(activation)
                              : activation_backward_choose<DType::BF16>(activation);
}

static Range<GatedBackwardArgs> gated_backward_kernel(DType type, int activation) {
  return type == DType::F32   ? gated_backward_choose<DType::F32>(activation)
         : type == DType::F16 ? gated_backward_choose<DType::F16>(activation)
                              : gated_backward_choose<DType::BF16>(activation);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
