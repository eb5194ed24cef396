// adamw.cpp: one step of AdamW over a list of parameters; see hfp_adamw_step.
#if !defined(HFP_SIMD)

#include <cmath>

#include "common.h"

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

int32_t adamw_step(const AdamWArgs &args) {
  AdamWStep step = {};
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
  for (int64_t i = 0; i < args.params->count; ++i) {
    step.t = args[i];
    if (step.t.numel == 0) continue;
    const float count = step.t.step.value;
    step.step_size = args.lr.value / -std::expm1(count * args.log_beta1);
    step.root_correction = 1.0f / std::sqrt(-std::expm1(count * args.log_beta2));
    parallel(HFP_FOR_SIMD(adamw_range), step, step.t.numel, kGrainElements / 4, 64);
  }
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

static void adamw_range(const AdamWStep &s, int64_t begin, int64_t end) {
  const DType param = s.param_type, grad = s.grad_type, moment = s.moment_type;
  const AdamWTensor &t = s.t;
  const float factor = s.grad_factor, root_correction = s.root_correction, eps = s.eps;
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    char *at_param = at(t.param, i, param);
    const vf g = load_any(grad, at(t.grad, i, grad), n) * factor;
    vf m = load_any(moment, at(t.exp_avg, i, moment), n);
    vf v = load_any(moment, at(t.exp_avg_sq, i, moment), n);
    vf p = t.master ? load_up_to<DType::F32>(at(t.master, i, DType::F32), n)
                    : load_any(param, at_param, n);
    m = fma(splat(s.one_minus_beta1), g - m, m);
    v = fma(splat(s.beta2), v, s.one_minus_beta2 * g * g);
    store_any(moment, at(t.exp_avg, i, moment), m, n);
    store_any(moment, at(t.exp_avg_sq, i, moment), v, n);
    if (t.max_exp_avg_sq) {
      v = larger(load_any(moment, at(t.max_exp_avg_sq, i, moment), n), v);
      store_any(moment, at(t.max_exp_avg_sq, i, moment), v, n);
    }
    const vf ratio = m / (square_root(v) * root_correction + eps);
    p -= fma(splat(s.decay), p, s.step_size * ratio);
    if (t.master) store_up_to<DType::F32>(at(t.master, i, DType::F32), p, n);
    store_any(param, at_param, p, n);
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
