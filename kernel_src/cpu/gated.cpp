// gated.cpp: out = act(gate) * up, elementwise, also of clamped tensors. Shazeer,
// arXiv:2002.05202.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "gated.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t gated(const GatedArgs &args) {
  const auto kernel = HFP_FOR_SIMD(gated_kernel)(args);
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

// min(max(x, low), high), NaN kept, as torch.clamp: high where low is above it.
HFP_INLINE vf clamped(vf x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

// Bounds rounded to T, so that what is clamped is of T.
template <DType T>
HFP_INLINE GatedClamps rounded(GatedClamps c) {
  float *const bounds[] = {&c.gate_min, &c.gate_max, &c.act_min, &c.act_max, &c.up_min, &c.up_max};
  for (float *bound : bounds) *bound = round_to<T>(splat(*bound))[0];
  return c;
}

// act(gate) is rounded to T before the product, as two eager operators would.
template <DType T, int Activation>
struct Gated {
  HFP_INLINE vf apply(const GatedClamps &, vf gate, vf up) {
    return round_to<T>(activate<Activation, T>(gate)) * up;
  }
};

// Every operator of eager PyTorch rounds.
template <DType T, int Activation>
struct GatedClamped {
  HFP_INLINE vf apply(const GatedClamps &c, vf gate, vf up) {
    gate = clamped(gate, c.gate_min, c.gate_max);
    vf act;
    if constexpr (Activation == HFP_ACT_SILU) {
      act = times_sigmoid<T != DType::F32>(gate, gate * c.alpha);
    } else {
      act = activate<Activation, T>(gate);
    }
    act = clamped(round_to<T>(act), c.act_min, c.act_max);
    return act * round_to<T>(clamped(up, c.up_min, c.up_max) + c.up_offset);
  }
};

template <DType T, class F, bool Full>
HFP_INLINE vf gated_one(const GatedClamps &c, const char *gate, const char *up, int64_t n) {
  return F::apply(c, load_if<T, Full>(gate, n), load_if<T, Full>(up, n));
}

template <DType T, class F>
HFP_INLINE void gated_columns(const GatedClamps &c, char *out, const char *gate, const char *up,
                              int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= cols; i += 2 * kLanes) {
    const int64_t first = i * size_of(T), second = (i + kLanes) * size_of(T);
    store_pair<T>(out + first, gated_one<T, F, true>(c, gate + first, up + first, kLanes),
                  gated_one<T, F, true>(c, gate + second, up + second, kLanes));
  }
  for (; i + kLanes <= cols; i += kLanes) {
    const int64_t at = i * size_of(T);
    store<T>(out + at, gated_one<T, F, true>(c, gate + at, up + at, kLanes));
  }
  if (i < cols) {
    const int64_t at = i * size_of(T), n = cols - i;
    store_n<T>(out + at, gated_one<T, F, false>(c, gate + at, up + at, n), n);
  }
}

// Elements [begin, end) of `out`, which may start and end inside a row.
template <DType T, class F>
static void gated_range(const GatedArgs &args, int64_t begin, int64_t end) {
  const GatedClamps c = rounded<T>(args.clamps);
  const int64_t cols = args.gate_rows.cols;
  RowCursor gate(args.gate_rows, begin / cols), up(args.up_rows, begin / cols);
  int64_t col = begin % cols;
  for (int64_t i = begin; i < end; gate.next(), up.next(), col = 0) {
    const int64_t n = cols - col < end - i ? cols - col : end - i;
    gated_columns<T, F>(c, at(args.out, i, T), at(args.gate, gate.offset() + col, T),
                     at(args.up, up.offset() + col, T), n);
    i += n;
  }
}

using GatedKernel = void (*)(const GatedArgs &, int64_t, int64_t);

template <DType T, template <DType, int> class F>
static GatedKernel gated_choose(int activation) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return gated_range<T, F<T, HFP_ACT_GELU_ERF>>;
    case HFP_ACT_GELU_TANH:
      return gated_range<T, F<T, HFP_ACT_GELU_TANH>>;
    case HFP_ACT_GELU_SIGMOID:
      return gated_range<T, F<T, HFP_ACT_GELU_SIGMOID>>;
    case HFP_ACT_SILU:
      return gated_range<T, F<T, HFP_ACT_SILU>>;
    default:
      return gated_range<T, F<T, HFP_ACT_RELU>>;
  }
}

template <DType T>
static GatedKernel gated_choose(const GatedArgs &args) {
  return args.clamped ? gated_choose<T, GatedClamped>(args.activation)
                      : gated_choose<T, Gated>(args.activation);
}

static GatedKernel gated_kernel(const GatedArgs &args) {
  return args.type == DType::F32   ? gated_choose<DType::F32>(args)
         : args.type == DType::F16 ? gated_choose<DType::F16>(args)
                                   : gated_choose<DType::BF16>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
