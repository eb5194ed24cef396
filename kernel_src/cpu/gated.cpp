// gated.cpp: out = act(gate) * up, elementwise. Shazeer, arXiv:2002.05202.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "gated.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t gated(const GatedArgs &args) {
  const auto kernel = HFP_FOR_SIMD(gated_kernel)(args.type, args.activation);
  parallel(kernel, args, args.gate_rows.rows * args.gate_rows.cols, kGrainElements, 64);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// act(gate) is rounded to T before the product, as two eager operators would.
template <DType T, int Activation, bool Full>
HFP_INLINE vf gated_one(const char *gate, const char *up, int64_t n) {
  const vf act = round_to<T>(activate<Activation, T>(load_if<T, Full>(gate, n)));
  return act * load_if<T, Full>(up, n);
}

template <DType T, int Activation>
HFP_INLINE void gated_columns(char *out, const char *gate, const char *up, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
    const int64_t first = i * size_of(T), second = (i + kLanes) * size_of(T);
    store_pair<T>(out + first, gated_one<T, Activation, true>(gate + first, up + first, kLanes),
                  gated_one<T, Activation, true>(gate + second, up + second, kLanes));
  }
  for (; i + kLanes <= cols; i += kLanes) {
    const int64_t at = i * size_of(T);
    store<T>(out + at, gated_one<T, Activation, true>(gate + at, up + at, kLanes));
  }
  if (i < cols) {
    const int64_t at = i * size_of(T), n = cols - i;
    store_n<T>(out + at, gated_one<T, Activation, false>(gate + at, up + at, n), n);
  }
}

// Elements [begin, end) of `out`, which may start and end inside a row.
template <DType T, int Activation>
static void gated_range(const GatedArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.gate_rows.cols;
  RowCursor gate(args.gate_rows, begin / cols), up(args.up_rows, begin / cols);
  int64_t col = begin % cols;
  for (int64_t i = begin; i < end; gate.next(), up.next(), col = 0) {
    const int64_t n = cols - col < end - i ? cols - col : end - i;
    gated_columns<T, Activation>(at(args.out, i, T), at(args.gate, gate.offset() + col, T),
                                 at(args.up, up.offset() + col, T), n);
    i += n;
  }
}

using GatedKernel = void (*)(const GatedArgs &, int64_t, int64_t);

template <DType T>
static GatedKernel gated_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return gated_range<T, HFP_ACT_GELU_ERF>;
    case HFP_ACT_GELU_TANH:
      return gated_range<T, HFP_ACT_GELU_TANH>;
    case HFP_ACT_GELU_SIGMOID:
      return gated_range<T, HFP_ACT_GELU_SIGMOID>;
    case HFP_ACT_SILU:
      return gated_range<T, HFP_ACT_SILU>;
    default:
      return gated_range<T, HFP_ACT_RELU>;
  }
}

static GatedKernel gated_kernel(DType type, int activation) {
  return type == DType::F32   ? gated_choose<DType::F32>(activation)
         : type == DType::F16 ? gated_choose<DType::F16>(activation)
                              : gated_choose<DType::BF16>(activation);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
