// norm_backward.cpp: the gradients of rms_norm and layer_norm. With r = rsqrt(mean square + eps) and
// h = grad * weight, xhat the normalized row:
//   rms_norm:   dx = r (h - xhat mean(h xhat))
//   layer_norm: dx = r (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of grad * xhat, dbias = sum over rows of grad
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "norm_backward.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

namespace {

// Part p of the rows is [p * rows / P, (p + 1) * rows / P): whoever computes it, its sums are the same.
template <class Kernel, class Sum>
int32_t norm_backward(const NormBackwardArgs &args, Kernel kernel, Sum sum) {
  const int64_t cols = args.x_rows.cols;
  const int64_t parts = args.partial_rows;
  if (args.x_rows.rows > 0) {
    const int64_t elements = args.x_rows.rows * cols / parts;
    parallel(kernel, args, parts, kGrainElements / (elements > 0 ? elements : 1), 1);
  }
  const int64_t wanted = (args.dweight ? 1 : 0) + (args.dbias ? 1 : 0);
  if (wanted > 0) {
    parallel(sum, args, wanted * cols, kGrainElements / (parts > 0 ? parts : 1), 64);
  }
  return HFP_OK;
}

}  // namespace

int32_t rms_norm_backward(const NormBackwardArgs &args) {
  return norm_backward(args, HFP_FOR_SIMD(rms_norm_backward_kernel)(args),
                       HFP_FOR_SIMD(sum_partials));
}

int32_t layer_norm_backward(const NormBackwardArgs &args) {
  return norm_backward(args, HFP_FOR_SIMD(layer_norm_backward_kernel)(args),
                       HFP_FOR_SIMD(sum_partials));
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// One register or its first n lanes, of a dtype known at run time only.
HFP_INLINE vf load_any(DType type, const char *p, int64_t n) {
  if (n == kLanes) {
    return type == DType::F32   ? load<DType::F32>(p)
           : type == DType::F16 ? load<DType::F16>(p)
                                : load<DType::BF16>(p);
  }
  return type == DType::F32   ? load_n<DType::F32>(p, n)
         : type == DType::F16 ? load_n<DType::F16>(p, n)
                              : load_n<DType::BF16>(p, n);
}

HFP_INLINE void store_any(DType type, char *p, vf v, int64_t n) {
  if (type == DType::F32) {
    n == kLanes ? store<DType::F32>(p, v) : store_n<DType::F32>(p, v, n);
  } else if (type == DType::F16) {
    n == kLanes ? store<DType::F16>(p, v) : store_n<DType::F16>(p, v, n);
  } else {
    n == kLanes ? store<DType::BF16>(p, v) : store_n<DType::BF16>(p, v, n);
  }
}

HFP_INLINE vf round_any(DType type, vf v) {
  return type == DType::F32   ? v
         : type == DType::F16 ? round_to<DType::F16>(v)
                              : round_to<DType::BF16>(v);
}

// n == kLanes or the tail. Same: grad and weight have the dtype of x.
template <DType X, bool Same>
HFP_INLINE vf load_as(DType type, const char *p, int64_t i, int64_t n) {
  if constexpr (Same) {
    return n == kLanes ? load<X>(p + i * size_of(X)) : load_n<X>(p + i * size_of(X), n);
  } else {
    return load_any(type, p + i * size_of(type), n);
  }
}

template <DType X, bool Same>
HFP_INLINE vf upstream(const NormBackwardArgs &args, const char *grad, int64_t i, int64_t n) {
  const vf g = load_as<X, Same>(args.grad_type, grad, i, n);
  if (!args.weight) return g;
  const char *weight = static_cast<const char *>(args.weight);
  return g * (load_as<X, Same>(args.weight_type, weight, i, n) + args.weight_offset);
}

// The sums of h and of h (x - mean) over a row; in blocks, as reduce() of simd.h.
template <DType X, bool Same, bool Centred>
HFP_INLINE void sum_products(const NormBackwardArgs &args, const char *x, const char *grad,
                             float hi, float lo, double *sum, double *product) {
  const int64_t cols = args.x_rows.cols;
  for (int64_t block = 0; block < cols; block += kBlock) {
    const int64_t end = cols - block < kBlock ? cols : block + kBlock;
    vf s = {}, d = {};
    for (int64_t i = block; i < end; i += kLanes) {
      const int64_t n = end - i < kLanes ? end - i : kLanes;
      const vf h = upstream<X, Same>(args, grad, i, n);  // 0 past the end
      vf v = load_as<X, true>(X, x, i, n);
      if constexpr (Centred) {
        v = (v - hi) - lo;
        s += h;
      }
      d = fma(h, v, d);
    }
    if constexpr (Centred) *sum += sum_lanes(s);
    *product += sum_lanes(d);
  }
}

template <DType X, bool Same, bool Centred>
static void norm_backward_parts(const NormBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t rows = args.x_rows.rows, cols = args.x_rows.cols, parts = args.partial_rows;
  const int64_t wide = cols * ((args.dweight ? 1 : 0) + (args.dbias ? 1 : 0));
  const double eps = args.eps, count = static_cast<double>(cols);
  for (int64_t part = begin; part < end; ++part) {
    float *sums = args.partials + part * wide;
    float *bias_sums = sums + (args.dweight ? cols : 0);
    for (int64_t i = 0; i < wide; ++i) sums[i] = 0;
    // Without the product part * rows, which can overflow.
    const int64_t whole = rows / parts, more = rows % parts;
    const int64_t first = part * whole + (part < more ? part : more);
    const int64_t last = first + whole + (part < more ? 1 : 0);
    if (first == last) continue;
    RowCursor xs(args.x_rows, first), grads(args.grad_rows, first);
    for (int64_t row = first; row < last; ++row, xs.next(), grads.next()) {
      const char *x = at(args.x, xs.offset(), X);
      const char *grad = at(args.grad, grads.offset(), args.grad_type);
      char *dx = at(args.dx, row * cols, X);
      float hi = 0, lo = 0;
      double square;
      if constexpr (Centred) {
        const float start = load_n<X>(x, 1)[0];
        const double mean = start + reduce<X, ShiftedTerm>(x, cols, start, 0) / count;
        hi = static_cast<float>(mean), lo = static_cast<float>(mean - hi);
        square = reduce<X, ShiftedSquareTerm>(x, cols, hi, lo) / count;
      } else {
        square = reduce<X, SquareTerm>(x, cols, 0, 0) / count;
      }
      double sum = 0, product = 0;
      sum_products<X, Same, Centred>(args, x, grad, hi, lo, &sum, &product);
      const double rstd = 1.0 / __builtin_sqrt(square + eps);
      const vf scale = splat(static_cast<float>(rstd));
      const vf mean_h = splat(static_cast<float>(sum / count));
      const vf mean_product = splat(static_cast<float>(product * rstd / count));
      for (int64_t i = 0; i < cols; i += kLanes) {
        const int64_t n = cols - i < kLanes ? cols - i : kLanes;
        vf hat = load_as<X, true>(X, x, i, n);
        if constexpr (Centred) hat = (hat - hi) - lo;
        hat *= scale;
        // Both before dx is written, which may be one of them.
        const vf g = load_as<X, Same>(args.grad_type, grad, i, n);
        const vf h = upstream<X, Same>(args, grad, i, n);
        store_any(X, dx + i * size_of(X), scale * ((h - mean_h) - hat * mean_product), n);
        if (args.dweight) {
          char *to = reinterpret_cast<char *>(sums + i);
          store_any(DType::F32, to,
                    fma(g, round_any(args.hat_type, hat), load_any(DType::F32, to, n)), n);
        }
        if (args.dbias) {
          char *to = reinterpret_cast<char *>(bias_sums + i);
          store_any(DType::F32, to, g + load_any(DType::F32, to, n), n);
        }
      }
    }
  }
}

// Columns [begin, end) of the partial rows, added up in order.
static void sum_partials(const NormBackwardArgs &args, int64_t begin, int64_t end) {
  const int64_t cols = args.x_rows.cols;
  const int64_t wide = cols * ((args.dweight ? 1 : 0) + (args.dbias ? 1 : 0));
  int64_t n;
  for (int64_t i = begin; i < end; i += n) {
    const bool to_weight = args.dweight && i < cols;
    const int64_t limit = to_weight && cols < end ? cols : end;
    n = limit - i < kLanes ? limit - i : kLanes;
    vf sum = {};
    for (int64_t part = 0; part < args.partial_rows; ++part) {
      sum += load_any(DType::F32,
                      reinterpret_cast<const char *>(args.partials + part * wide + i), n);
    }
    const DType type = to_weight ? args.weight_type : args.bias_type;
    const int64_t col = to_weight || !args.dweight ? i : i - cols;
    store_any(type, at(to_weight ? args.dweight : args.dbias, col, type), sum, n);
  }
}

using NormBackward = void (*)(const NormBackwardArgs &, int64_t, int64_t);

template <bool Centred>
static NormBackward norm_backward_choose(const NormBackwardArgs &args) {
  const DType x = args.x_type;
  const bool same = args.grad_type == x && args.weight_type == x;
  if (x == DType::F32) {
    return same ? norm_backward_parts<DType::F32, true, Centred>
                : norm_backward_parts<DType::F32, false, Centred>;
  }
  if (x == DType::F16) {
    return same ? norm_backward_parts<DType::F16, true, Centred>
                : norm_backward_parts<DType::F16, false, Centred>;
  }
  return same ? norm_backward_parts<DType::BF16, true, Centred>
              : norm_backward_parts<DType::BF16, false, Centred>;
}

static NormBackward rms_norm_backward_kernel(const NormBackwardArgs &args) {
  return norm_backward_choose<false>(args);
}

static NormBackward layer_norm_backward_kernel(const NormBackwardArgs &args) {
  return norm_backward_choose<true>(args);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
