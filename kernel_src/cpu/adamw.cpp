// adamw.cpp: one step of AdamW over a list of parameters; see hfp_adamw_step.
#if !defined(HFP_SIMD)

#include <cmath>

#include "list_parts.h"

namespace hfp {
namespace cpu {

// What an element of one parameter needs besides its own values.
struct AdamWStep {
  AdamWTensor t;
  DType param_type, grad_type, moment_type;
  float grad_factor;  // with the sign of `maximize`
  float beta2, one_minus_beta1, one_minus_beta2;
  float eps, decay, step_size, root_correction;
};

}  // namespace cpu
}  // namespace hfp

#define HFP_SIMD_SOURCE "adamw.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

namespace {

struct AdamWList {
  const AdamWArgs &args;
  AdamWStep shared;  // what is the same for all parameters

  int64_t count() const { return args.params->count; }
  int64_t size(int64_t i) const { return flat_tensor(*args.params, i).numel; }

  void run(int64_t i, int64_t begin, int64_t end) const {
    AdamWStep step = shared;
    step.t = args[i];
    const float count = step.t.step.value;
    step.step_size = args.lr.value / -std::expm1(count * args.log_beta1);
    step.root_correction = 1.0f / std::sqrt(-std::expm1(count * args.log_beta2));
    const bool plain = step.param_type == DType::F32 && step.grad_type == DType::F32 &&
                       step.moment_type == DType::F32 && !step.t.master && !step.t.max_exp_avg_sq;
    if (plain) HFP_FOR_SIMD(adamw_range<true>)(step, begin, end);
    else HFP_FOR_SIMD(adamw_range<false>)(step, begin, end);
  }
};

}  // namespace

int32_t adamw_step(const AdamWArgs &args) {
  AdamWList list = {args, {}};
  AdamWStep &step = list.shared;
  step.param_type = args.param_type;
  step.grad_type = args.grad_type;
  step.moment_type = args.moment_type;
  const float factor = args.clip_coef.value / args.grad_scale.value;
  step.grad_factor = args.maximize ? -factor : factor;
  step.beta2 = args.beta2;
  step.one_minus_beta1 = args.one_minus_beta1;
  step.one_minus_beta2 = args.one_minus_beta2;
  step.eps = args.eps;
  step.decay = args.lr.value * args.weight_decay;
  parallel_list(list, 1024, kGrainElements / 4);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

HFP_INLINE vf square_root(vf x) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_sqrt_ps(x);
#elif HFP_SIMD_LEVEL == 1
  return _mm256_sqrt_ps(x);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
  return vsqrtq_f32(x);
#else
  vf y;
  for (int k = 0; k < kLanes; ++k) y[k] = __builtin_sqrtf(x[k]);
  return y;
#endif
}

// The larger one; NaN if either is.
HFP_INLINE vf larger(vf a, vf b) {
  const vf most = b > a ? b : a;
  return b == b ? most : b;
}

// One register. Plain: all fp32, no AMSGrad.
template <bool Plain>
HFP_INLINE void adamw_register(const AdamWStep &s, int64_t i, int64_t n) {
  const DType param = Plain ? DType::F32 : s.param_type;
  const DType grad = Plain ? DType::F32 : s.grad_type;
  const DType moment = Plain ? DType::F32 : s.moment_type;
  const AdamWTensor &t = s.t;
  char *at_param = at(t.param, i, param);
  char *at_m = at(t.exp_avg, i, moment), *at_v = at(t.exp_avg_sq, i, moment);
  const vf g = load_any(grad, at(t.grad, i, grad), n) * s.grad_factor;
  vf m = load_any(moment, at_m, n);
  vf v = load_any(moment, at_v, n);
  vf p = !Plain && t.master ? load_up_to<DType::F32>(at(t.master, i, DType::F32), n)
                            : load_any(param, at_param, n);
  m = fma(splat(s.one_minus_beta1), g - m, m);
  v = fma(splat(s.beta2), v, s.one_minus_beta2 * g * g);
  store_any(moment, at_m, m, n);
  store_any(moment, at_v, v, n);
  if (!Plain && t.max_exp_avg_sq) {
    char *most = at(t.max_exp_avg_sq, i, moment);
    v = larger(load_any(moment, most, n), v);
    store_any(moment, most, v, n);
  }
  const vf ratio = m / (square_root(v) * s.root_correction + s.eps);
  p -= fma(splat(s.decay), p, s.step_size * ratio);
  if (!Plain && t.master) store_up_to<DType::F32>(at(t.master, i, DType::F32), p, n);
  store_any(param, at_param, p, n);
}

template <bool Plain>
static void adamw_range(const AdamWStep &step, int64_t begin, int64_t end) {
  const AdamWStep s = step;  // a copy: a store through a char pointer might change `step`
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) adamw_register<Plain>(s, i, kLanes);
  if (i < end) adamw_register<Plain>(s, i, end - i);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
