// balance.cpp: the loss that balances the load of experts, and its gradient; see
// hfp_load_balancing_loss.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "balance.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t balance(const BalanceArgs &args) {
  const int64_t experts = args.rows.cols, width = 2 * experts + 1;
  parallel(HFP_FOR_SIMD(balance_kernel)(args), args, args.parts, 1, 1);
  for (int64_t i = 0; i < width; ++i) {
    double sum = 0;
    for (int64_t p = 0; p < args.parts; ++p) sum += args.partials[p * width + i];
    args.stats[i] = static_cast<float>(sum);
  }
  const double all = args.stats[2 * experts], share = all != 0 ? 1 / all : 0;
  double loss = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const double f = args.stats[e] * share, p = args.stats[experts + e] * share;
    args.stats[e] = static_cast<float>(f);
    args.stats[experts + e] = static_cast<float>(p);
    loss += f * p;
  }
  *args.loss = static_cast<float>(loss * static_cast<double>(experts));
  return HFP_OK;
}

int32_t balance_backward(const BalanceArgs &args) {
  parallel(HFP_FOR_SIMD(balance_backward_kernel)(args), args, args.rows.rows,
           rows_grain(args.rows.cols), 1);
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

// softmax of one row in fp32, padded with 0; the logits stay in `x`, padded with -infinity.
template <DType T>
HFP_INLINE void softmax_row(const char *row, int64_t cols, float *x, float *p) {
  const vf least = splat(-__builtin_inff());
  vi lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  vf tops = least, sums = {};
  for (int64_t i = 0; i < cols; i += kLanes) {
    const int64_t n = cols - i < kLanes ? cols - i : kLanes;
    vf v = load_up_to<T>(row + i * size_of(T), n);
    if (n < kLanes) v = lane < static_cast<int32_t>(n) ? v : least;
    __builtin_memcpy(x + i, &v, sizeof v);
    tops = v > tops ? v : tops;  // a NaN is passed over, and comes out of the exponential
  }
  float top = tops[0];
  for (int k = 1; k < kLanes; ++k) top = tops[k] > top ? tops[k] : top;
  for (int64_t i = 0; i < cols; i += kLanes) {
    vf v;
    __builtin_memcpy(&v, x + i, sizeof v);
    v = exp_nonpositive(v - top);
    __builtin_memcpy(p + i, &v, sizeof v);
    sums += v;
  }
  const vf share = splat(1.0f / sum_lanes(sums));
  for (int64_t i = 0; i < cols; i += kLanes) {
    vf v;
    __builtin_memcpy(&v, p + i, sizeof v);
    v *= share;
    __builtin_memcpy(p + i, &v, sizeof v);
  }
}

constexpr int64_t kExpertRoom = HFP_MAX_EXPERTS + kLanes;

template <DType T>
static void balance_parts(const BalanceArgs &args, int64_t begin, int64_t end) {
  const int64_t tokens = args.rows.rows, experts = args.rows.cols, width = 2 * experts + 1;
  const int64_t share = (tokens + args.parts - 1) / args.parts;
  alignas(64) float x[kExpertRoom];
  alignas(64) float p[kExpertRoom];
  for (int64_t part = begin; part < end; ++part) {
    float *sums = args.partials + part * width;
    for (int64_t i = 0; i < width; ++i) sums[i] = 0;
    const int64_t first = part * share < tokens ? part * share : tokens;
    const int64_t last = first + share < tokens ? first + share : tokens;
    if (first == last) continue;
    RowCursor cursor(args.rows, first);
    for (int64_t t = first; t < last; ++t, cursor.next()) {
      const float weight = args.mask ? args.mask[t] : 1.0f;
      sums[2 * experts] += weight;
      if (weight == 0.0f) continue;
      softmax_row<T>(at(args.logits, cursor.offset(), T), experts, x, p);
      for (int64_t e = 0; e < experts; ++e) sums[experts + e] += weight * p[e];
      for (int j = 0; j < args.k; ++j) {
        int64_t best = -1;
        // A share below 0 marks what has been taken; the shares have been added up.
        for (int64_t e = 0; e < experts; ++e) {
          if (p[e] >= 0 && (best < 0 || x[e] > x[best])) best = e;
        }
        if (best < 0) break;  // NaN
        p[best] = -1;
        sums[best] += weight;
      }
    }
  }
}

template <DType T>
static void balance_backward_rows(const BalanceArgs &args, int64_t begin, int64_t end) {
  const int64_t experts = args.rows.cols;
  const float all = args.saved[2 * experts];
  const float factor = all != 0 ? *args.grad * static_cast<float>(experts) / all : 0.0f;
  alignas(64) float x[kExpertRoom];
  alignas(64) float p[kExpertRoom];
  RowCursor cursor(args.rows, begin);
  for (int64_t t = begin; t < end; ++t, cursor.next()) {
    char *out = at(args.dlogits, t * experts, T);
    const float weight = factor * (args.mask ? args.mask[t] : 1.0f);
    softmax_row<T>(at(args.logits, cursor.offset(), T), experts, x, p);
    vf products = {};
    for (int64_t i = 0; i < experts; i += kLanes) {
      const int64_t n = experts - i < kLanes ? experts - i : kLanes;
      vf v;
      __builtin_memcpy(&v, p + i, sizeof v);
      const vf f = load_up_to<DType::F32>(reinterpret_cast<const char *>(args.saved + i), n);
      products = fma(v, f, products);
    }
    const vf middle = splat(sum_lanes(products));
    for (int64_t i = 0; i < experts; i += kLanes) {
      const int64_t n = experts - i < kLanes ? experts - i : kLanes;
      const vf f = load_up_to<DType::F32>(reinterpret_cast<const char *>(args.saved + i), n);
      vf v;
      __builtin_memcpy(&v, p + i, sizeof v);
      v = weight == 0.0f ? vf{} : v * (f - middle) * weight;
      store_up_to<T>(out + i * size_of(T), v, n);
    }
  }
}

using BalanceKernel = void (*)(const BalanceArgs &, int64_t, int64_t);

static BalanceKernel balance_kernel(const BalanceArgs &args) {
  return args.type == DType::F32   ? balance_parts<DType::F32>
         : args.type == DType::F16 ? balance_parts<DType::F16>
                                   : balance_parts<DType::BF16>;
}
static BalanceKernel balance_backward_kernel(const BalanceArgs &args) {
  return args.type == DType::F32   ? balance_backward_rows<DType::F32>
         : args.type == DType::F16 ? balance_backward_rows<DType::F16>
                                   : balance_backward_rows<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
