// grad_norm.cpp: the norm of a list of tensors, clipping by it, and scaling; see hfp_grad_norm,
// hfp_clip_grads and hfp_scale_grads.
#if !defined(HFP_SIMD)

#include <cmath>

#include "list_parts.h"

namespace hfp {
namespace cpu {

struct NormPart {
  FlatTensor t;
  float *partials;  // of this tensor
};

struct ScalePart {
  FlatTensor t;
  float factor;
};

}  // namespace cpu
}  // namespace hfp

#define HFP_SIMD_SOURCE "grad_norm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

static float finish_norm(const GradNormArgs &args) {
  if (args.norm_type == HFP_GRAD_NORM_L2) {
    double sum = 0;
    for (int64_t i = 0; i < args.count; ++i) sum += args.partials[i];
    return static_cast<float>(std::sqrt(sum));
  }
  float most = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    const float x = args.partials[i];
    if (x > most || x != x) most = x;  // a NaN stays: nothing is greater
  }
  return most;
}

namespace {

struct ScaleList {
  const ScaleGradsArgs &args;
  float factor;

  int64_t count() const { return args.grads->count; }
  int64_t size(int64_t i) const { return flat_tensor(*args.grads, i).numel; }

  void run(int64_t i, int64_t begin, int64_t end) const {
    const ScalePart part = {flat_tensor(*args.grads, i), factor};
    HFP_FOR_SIMD(scale_kernel)(part.t.type)(part, begin, end);
  }
};

}  // namespace

int32_t grad_norm(const GradNormArgs &args) {
  NormPart part = {};
  part.partials = args.partials;
  for (int64_t i = 0; i < args.tensors->count; ++i) {
    part.t = flat_tensor(*args.tensors, i);
    const int64_t chunks = (part.t.numel + HFP_NORM_CHUNK - 1) / HFP_NORM_CHUNK;
    if (chunks == 0) continue;
    parallel(HFP_FOR_SIMD(norm_kernel)(part.t.type, args.norm_type), part, chunks, 2, 1);
    part.partials += chunks;
  }
  *args.norm = finish_norm(args);
  return HFP_OK;
}

int32_t scale_grads(const ScaleGradsArgs &args) {
  const bool clips = args.total_norm != nullptr;
  const float factor = clips ? args.max_norm / (*args.total_norm + 1e-6f) : *args.factor;
  if (clips ? factor >= 1 : factor == 1) return HFP_OK;  // false for NaN
  parallel_list(ScaleList{args, factor}, 1024, kGrainElements);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Chunks [begin, end) of one tensor.
template <DType T>
static void sums_of_squares(const NormPart &part, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t start = chunk * HFP_NORM_CHUNK, left = part.t.numel - start;
    const int64_t n = left < HFP_NORM_CHUNK ? left : HFP_NORM_CHUNK;
    part.partials[chunk] =
        static_cast<float>(reduce<T, SquareTerm>(at(part.t.data, start, T), n, 0.0f, 0.0f));
  }
}

template <DType T>
static void largest_magnitudes(const NormPart &part, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t start = chunk * HFP_NORM_CHUNK, left = part.t.numel - start;
    const int64_t n = left < HFP_NORM_CHUNK ? left : HFP_NORM_CHUNK;
    vf most = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const char *p = at(part.t.data, start + i, T);
      const vf x = magnitude(n - i < kLanes ? load_n<T>(p, n - i) : load<T>(p));
      most = x > most ? x : x == x ? most : x;
    }
    float all = 0;
    for (int k = 0; k < kLanes; ++k) {
      const float x = most[k];
      if (x > all || x != x) all = x;
    }
    part.partials[chunk] = all;
  }
}

using NormKernel = void (*)(const NormPart &, int64_t, int64_t);

template <DType T>
static NormKernel norm_choose(int norm_type) {
  return norm_type == HFP_GRAD_NORM_L2 ? sums_of_squares<T> : largest_magnitudes<T>;
}

static NormKernel norm_kernel(DType type, int norm_type) {
  return type == DType::F32   ? norm_choose<DType::F32>(norm_type)
         : type == DType::F16 ? norm_choose<DType::F16>(norm_type)
                              : norm_choose<DType::BF16>(norm_type);
}

template <DType T>
static void scale_range(const ScalePart &part, int64_t begin, int64_t end) {
  const vf factor = splat(part.factor);
  char *x = at(part.t.data, 0, T);
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
    char *p = x + i * size_of(T), *q = p + kLanes * size_of(T);
    store_pair<T>(p, load<T>(p) * factor, load<T>(q) * factor);
  }
  for (; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    char *p = x + i * size_of(T);
    if (n == kLanes) store<T>(p, load<T>(p) * factor);
    else store_n<T>(p, load_n<T>(p, n) * factor, n);
  }
}

using ScaleKernel = void (*)(const ScalePart &, int64_t, int64_t);

static ScaleKernel scale_kernel(DType type) {
  return type == DType::F32   ? scale_range<DType::F32>
         : type == DType::F16 ? scale_range<DType::F16>
                              : scale_range<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
