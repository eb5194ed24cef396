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

HFP_INLINE void group_stats(const GroupNormArgs &args, int64_t unit, float mean, float rstd) {
  float *stats = args.stats + unit * (args.parts + 1) * 2;
  for (int64_t i = 0; i < 2 * args.parts; ++i) stats[i] = 0;  // no parts here: nothing undefined
  stats[2 * args.parts] = mean, stats[2 * args.parts + 1] = rstd;
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

// The group's channels, from c on, at one position of NHWC; of groups wider than a span.
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

// Of NHWC whole groups are computed together, so that registers are full: a group has a few channels
// only at each position. Each channel is summed by itself, and a group sums its channels, so that
// which groups come together changes no bit.
constexpr int64_t kSpan = 512;
constexpr int64_t kSpanPositions = 64;  // added up in fp32: as many as a lane of reduce() adds

struct SpanValues {  // of each channel
  alignas(64) float hi[kSpan], lo[kSpan], rstd[kSpan], weight[kSpan], bias[kSpan], sum[kSpan];
  double total[kSpan];
};

HFP_INLINE vf span_load(const float *values) {
  return load<DType::F32>(reinterpret_cast<const char *>(values));
}

// Adds `Rows` positions of the channels that are a register.
template <DType X, class Term, int Rows>
HFP_INLINE void span_add(SpanValues &of, const char *x, int64_t stride, int64_t i, int64_t n) {
  const vf hi = span_load(of.hi + i), lo = span_load(of.lo + i);
  vf sum = span_load(of.sum + i);
  for (int k = 0; k < Rows; ++k) sum = Term::add(sum, load_up_to<X>(x + k * stride, n), hi, lo);
  store<DType::F32>(reinterpret_cast<char *>(of.sum + i), sum);
}

template <DType X, class Term, int Rows>
HFP_INLINE void span_rows(SpanValues &of, const char *x, int64_t stride, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    span_add<X, Term, Rows>(of, x + i * size_of(X), stride, i, kLanes);
  }
  if (i < count) span_add<X, Term, Rows>(of, x + i * size_of(X), stride, i, count - i);
}

// The sum of each channel; lanes past the last one sum up what nobody reads.
template <DType X, class Term>
HFP_INLINE void span_sums(const GroupNormArgs &args, SpanValues &of, const char *x, int64_t count) {
  const int64_t stride = args.channels * size_of(X);
  for (int64_t i = 0; i < kSpan; ++i) of.total[i] = 0;
  for (int64_t first = 0; first < args.positions; first += kSpanPositions) {
    const int64_t left = args.positions - first;
    const int64_t positions = left < kSpanPositions ? left : kSpanPositions;
    for (int64_t i = 0; i < kSpan; ++i) of.sum[i] = 0;
    const char *p = x + first * stride;
    int64_t j = 0;
    for (; j + 4 <= positions; j += 4, p += 4 * stride) span_rows<X, Term, 4>(of, p, stride, count);
    for (; j < positions; ++j, p += stride) span_rows<X, Term, 1>(of, p, stride, count);
    for (int64_t i = 0; i < count; ++i) of.total[i] += of.sum[i];
  }
}

template <DType X>
HFP_INLINE void span_result(const GroupNormArgs &args, const SpanValues &of, const char *x,
                            char *out, int64_t i, int64_t n) {
  const vf centred = (load_up_to<X>(x, n) - span_load(of.hi + i)) - span_load(of.lo + i);
  const vf y = fma(centred * span_load(of.rstd + i), span_load(of.weight + i),
                   span_load(of.bias + i));
  store_up_to<X>(out, group_result<X>(y, args.silu), n);
}

// `groups` groups of one sample from group `first` on, of `width` channels.
template <DType X>
static void group_norm_span(const GroupNormArgs &args, int64_t sample, int64_t first,
                            int64_t groups) {
  const int64_t width = args.channels / args.groups, count = groups * width, c = first * width;
  const double elements = static_cast<double>(width * args.positions);
  const int64_t offset = sample * args.channels * args.positions + c;
  const char *x = at(args.x, offset, X);
  char *out = at(args.out, offset, X);
  SpanValues of = {};
  for (int64_t i = 0; i < count; ++i) {
    of.hi[i] = load_n<X>(x + i / width * width * size_of(X), 1)[0];
  }
  span_sums<X, ShiftedTerm>(args, of, x, count);
  double means[kSpan];
  for (int64_t g = 0; g < groups; ++g) {
    double total = 0;
    for (int64_t i = g * width; i < (g + 1) * width; ++i) total += of.total[i];
    means[g] = of.hi[g * width] + total / elements;
  }
  for (int64_t i = 0; i < count; ++i) {
    of.hi[i] = static_cast<float>(means[i / width]);
    of.lo[i] = static_cast<float>(means[i / width] - of.hi[i]);
  }
  span_sums<X, ShiftedSquareTerm>(args, of, x, count);
  const int64_t size = size_of(args.weight_type);
  for (int64_t g = 0; g < groups; ++g) {
    double variance = 0;
    for (int64_t i = g * width; i < (g + 1) * width; ++i) variance += of.total[i];
    variance /= elements;
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(variance + args.eps));
    for (int64_t i = g * width; i < (g + 1) * width; ++i) {
      const char *weight = static_cast<const char *>(args.weight) + (c + i) * size;
      const char *bias = static_cast<const char *>(args.bias) + (c + i) * size;
      of.rstd[i] = rstd;
      of.weight[i] = args.weight ? load_any(args.weight_type, weight, 1)[0] : 1.0f;
      of.bias[i] = args.bias ? load_any(args.weight_type, bias, 1)[0] : 0.0f;
    }
    group_stats(args, sample * args.groups + first + g, of.hi[g * width], rstd);
  }
  const int64_t stride = args.channels * size_of(X);
  for (int64_t j = 0; j < args.positions; ++j, x += stride, out += stride) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      span_result<X>(args, of, x + i * size_of(X), out + i * size_of(X), i, kLanes);
    }
    if (i < count) {
      span_result<X>(args, of, x + i * size_of(X), out + i * size_of(X), i, count - i);
    }
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
    if (args.channels_last && width <= kSpan) {
      int64_t groups = kSpan / width;
      if (groups > end - unit) groups = end - unit;
      if (groups > args.groups - unit % args.groups) groups = args.groups - unit % args.groups;
      group_norm_span<X>(args, sample, unit % args.groups, groups);
      unit += groups - 1;
      continue;
    }
    const int64_t first =
        sample * args.channels * args.positions + c * (args.channels_last ? 1 : args.positions);
    const char *x = at(args.x, first, X);
    char *out = at(args.out, first, X);
    const float pivot = load_n<X>(x, 1)[0];
    const double mean = pivot + group_sum<X, ShiftedTerm>(x, runs, pivot, 0) / elements;
    const float hi = static_cast<float>(mean), lo = static_cast<float>(mean - hi);
    const double variance = group_sum<X, ShiftedSquareTerm>(x, runs, hi, lo) / elements;
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(variance + args.eps));
    group_stats(args, unit, hi, rstd);
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
