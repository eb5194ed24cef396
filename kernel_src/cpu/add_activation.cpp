// add_activation.cpp: out = act(x + bias), the bias the same for all rows.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "add_activation.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t add_activation(const PointwiseArgs &args) {
  const Input &x = args.in[0];
  parallel(HFP_FOR_SIMD(add_activation_kernel)(x.type, args.activation), args, x.rows.rows,
           rows_grain(x.rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"
#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

template <DType T, int Activation>
static void add_activation_rows(const PointwiseArgs &args, int64_t begin, int64_t end) {
  const Input &from = args.in[0];
  const int64_t cols = from.rows.cols;
  const char *bias = static_cast<const char *>(args.in[1].data);
  RowCursor x_row(from.rows, begin);
  for (int64_t r = begin; r < end; ++r, x_row.next()) {
    const char *x = at(from.data, x_row.offset(), T);
    char *out = at(args.out, r * cols, T);
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i < kLanes ? cols - i : kLanes, to = i * size_of(T);
      const vf sum = round_to<T>(load_up_to<T>(x + to, n) + load_up_to<T>(bias + to, n));
      store_up_to<T>(out + to, activate<Activation, T>(sum), n);
    }
  }
}

using AddActivationKernel = void (*)(const PointwiseArgs &, int64_t, int64_t);

template <DType T>
static AddActivationKernel add_activation_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return add_activation_rows<T, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return add_activation_rows<T, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return add_activation_rows<T, HFP_ACT_GELU_SIGMOID>;
    default:
      return add_activation_rows<T, HFP_ACT_SILU>;
  }
}

static AddActivationKernel add_activation_kernel(DType type, int activation) {
  return type == DType::F32   ? add_activation_choose<DType::F32>(activation)
         : type == DType::F16 ? add_activation_choose<DType::F16>(activation)
                              : add_activation_choose<DType::BF16>(activation);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
