// activation.cpp: out = act(x), elementwise.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "activation.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t activation(const ActivationArgs &args) {
  const auto kernel = HFP_FOR_SIMD(activation_kernel)(args.type, args.activation);
  parallel(kernel, args, args.x_rows.rows * args.x_rows.cols, kGrainElements, 64);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T, int Activation>
HFP_INLINE void activation_columns(char *out, const char *x, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
    const char *p = x + i * size_of(T);
    store_pair<T>(out + i * size_of(T), activate<Activation, T>(load<T>(p)),
                  activate<Activation, T>(load<T>(p + kLanes * size_of(T))));
  }
  for (; i + kLanes <= cols; i += kLanes) {
    store<T>(out + i * size_of(T), activate<Activation, T>(load<T>(x + i * size_of(T))));
  }
  if (i < cols) {
    const vf y = activate<Activation, T>(load_n<T>(x + i * size_of(T), cols - i));
    store_n<T>(out + i * size_of(T), y, cols - i);
  }
}

// Elements [begin, end) of `out`, which may start and end inside a row.
template <DType T, int Activation>
static void activation_range(const ActivationArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  RowCursor cursor(args.x_rows, begin / cols);
  int64_t col = begin % cols;
  for (int64_t i = begin; i < end; cursor.next(), col = 0) {
    const int64_t n = cols - col < end - i ? cols - col : end - i;
    activation_columns<T, Activation>(at(args.out, i, T), at(args.x, cursor.offset() + col, T), n);
    i += n;
  }
}

using ActivationKernel = void (*)(const ActivationArgs &, int64_t, int64_t);

template <DType T>
static ActivationKernel activation_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return activation_range<T, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return activation_range<T, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return activation_range<T, HFP_ACT_GELU_SIGMOID>;
    case HFP_ACT_SILU:
      return activation_range<T, HFP_ACT_SILU>;
    default:
      return activation_range<T, HFP_ACT_RELU>;
  }
}

static ActivationKernel activation_kernel(DType type, int activation) {
  return type == DType::F32   ? activation_choose<DType::F32>(activation)
         : type == DType::F16 ? activation_choose<DType::F16>(activation)
                              : activation_choose<DType::BF16>(activation);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
