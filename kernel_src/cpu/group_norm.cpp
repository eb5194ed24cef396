// group_norm.cpp: group norm over channels and positions, with an optional SiLU. Wu & He,
// arXiv:1803.08494.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "group_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t group_norm(const GroupNormArgs &args) {
  const int64_t elements = args.channels / args.groups * args.positions;
  parallel(HFP_FOR_SIMD(group_norm_kernel)(args.type), args, args.batch * args.groups,
           rows_grain(elements), 1);
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

// Runs of consecutive elements of one group: all of it, or its channels at each position.
struct GroupRuns {
  int64_t count, length, stride;
};

HFP_INLINE GroupRuns group_runs(const GroupNormArgs &args) {
  const int64_t width = args.channels / args.groups;
  if (args.channels_last) return {args.positions, width, args.channels};
  return {1, width * args.positions, 0};
}

template <DType X, class Term>
HFP_INLINE double group_sum(const char *x, const GroupRuns &runs, float hi, float lo) {
  double total = 0;
  for (int64_t i = 0; i < runs.count; ++i) {
    total += reduce<X, Term>(x + i * runs.stride * size_of(X), runs.length, hi, lo);
  }
  return total;
}

template <DType X>
HFP_INLINE vf group_result(vf y, bool silu) {
  return silu ? activate<HFP_ACT_SILU, X>(round_to<X>(y)) : y;
}

// Channel c of NCHW: one factor and one summand for all its positions.
template <DType X>
HFP_INLINE void group_channel(const GroupNormArgs &args, const char *x, char *out, int64_t c,
                              vf mean_hi, vf mean_lo, vf rstd) {
  const int64_t width = size_of(args.weight_type);
  vf factor = splat(1.0f), summand = {};
  if (args.weight) {
    const char *p = static_cast<const char *>(args.weight) + c * width;
    factor = splat(load_any(args.weight_type, p, 1)[0]);
  }
  if (args.bias) {
    const char *p = static_cast<const char *>(args.bias) + c * width;
    summand = splat(load_any(args.weight_type, p, 1)[0]);
  }
  for (int64_t i = 0; i < args.positions; i += kLanes) {
    const int64_t n = args.positions - i < kLanes ? args.positions - i : kLanes;
    const vf v = load_up_to<X>(x + i * size_of(X), n);
    const vf y = fma(((v - mean_hi) - mean_lo) * rstd, factor, summand);
    store_up_to<X>(out + i * size_of(X), group_result<X>(y, args.silu), n);
  }
}

// The group's channels, from c on, at one position of NHWC.
template <DType X>
HFP_INLINE void group_position(const GroupNormArgs &args, const char *x, char *out, int64_t c,
                               int64_t count, vf mean_hi, vf mean_lo, vf rstd) {
  const int64_t width = size_of(args.weight_type);
  const char *weight = static_cast<const char *>(args.weight) + c * width;
  const char *bias = static_cast<const char *>(args.bias) + c * width;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    vf y = ((load_up_to<X>(x + i * size_of(X), n) - mean_hi) - mean_lo) * rstd;
    if (args.weight) y *= load_any(args.weight_type, weight + i * width, n);
    if (args.bias) y += load_any(args.weight_type, bias + i * width, n);
    store_up_to<X>(out + i * size_of(X), group_result<X>(y, args.silu), n);
  }
}

// Two passes, as in layer_norm.cpp: mean, then squared deviations.
template <DType X>
static void group_norm_groups(const GroupNormArgs &args, int64_t begin, int64_t end) {
  const int64_t width = args.channels / args.groups;
  const GroupRuns runs = group_runs(args);
  const double elements = static_cast<double>(width * args.positions);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / args.groups, c = unit % args.groups * width;
    const int64_t first =
        sample * args.channels * args.positions + c * (args.channels_last ? 1 : args.positions);
    const char *x = at(args.x, first, X);
    char *out = at(args.out, first, X);
    const float pivot = load_n<X>(x, 1)[0];
    const double mean = pivot + group_sum<X, ShiftedTerm>(x, runs, pivot, 0) / elements;
    const float hi = static_cast<float>(mean), lo = static_cast<float>(mean - hi);
    const double variance = group_sum<X, ShiftedSquareTerm>(x, runs, hi, lo) / elements;
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(variance + args.eps));
    float *stats = args.stats + unit * (args.parts + 1) * 2;
    for (int64_t i = 0; i < 2 * args.parts; ++i) stats[i] = 0;  // no parts here: nothing undefined
    stats[2 * args.parts] = hi, stats[2 * args.parts + 1] = rstd;
    if (args.channels_last) {
      for (int64_t i = 0; i < args.positions; ++i) {
        const int64_t offset = i * args.channels * size_of(X);
        group_position<X>(args, x + offset, out + offset, c, width, splat(hi), splat(lo),
                          splat(rstd));
      }
    } else {
      for (int64_t i = 0; i < width; ++i) {
        const int64_t offset = i * args.positions * size_of(X);
        group_channel<X>(args, x + offset, out + offset, c + i, splat(hi), splat(lo),
                         splat(rstd));
      }
    }
  }
}

using GroupNormKernel = void (*)(const GroupNormArgs &, int64_t, int64_t);

static GroupNormKernel group_norm_kernel(DType type) {
  return type == DType::F32   ? group_norm_groups<DType::F32>
         : type == DType::F16 ? group_norm_groups<DType::F16>
                              : group_norm_groups<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
