// api_optim.cpp: the functions over lists of tensors of hfpatch.h: validate (check.h), fill in a
// backend's arguments (kernels.h), dispatch on the device.
#include <cmath>

#include "list_overlap.h"

HFP_BACKENDS(adamw_step, AdamWArgs)
HFP_BACKENDS(grad_norm, GradNormArgs)
HFP_BACKENDS(scale_grads, ScaleGradsArgs)

using hfp::Check;
using hfp::DType;
using hfp::Scalar;
using hfp::Tensor;
using hfp::list_tensor;
using hfp::numel_of;
using hfp::scalar;

namespace {

const HfpTensorList kEmpty = {nullptr, 0};

bool same_layout(const DLTensor &a, const DLTensor &b) {
  if (a.ndim != b.ndim) return false;
  int64_t a_step = 1, b_step = 1;  // contiguous strides, for NULL
  for (int32_t i = a.ndim - 1; i >= 0; --i) {
    if (a.shape[i] != b.shape[i]) return false;
    const int64_t x = a.strides ? a.strides[i] : a_step, y = b.strides ? b.strides[i] : b_step;
    if (a.shape[i] > 1 && x != y) return false;
    a_step *= a.shape[i];
    b_step *= b.shape[i];
  }
  return true;
}

bool list_pointer(Check &check, const char *name, const HfpTensorList *list) {
  if (!list) return check.fail("`%s` must be a list, got NULL", name);
  if (list->count < 0 || (list->count > 0 && !list->tensors)) {
    return check.fail("`%s` must hold its tensors, got %lld of them at %p", name,
                      static_cast<long long>(list->count), static_cast<const void *>(list->tensors));
  }
  return true;
}

// A list that goes with `params`: as long (or empty, if `optional`), of one dtype, each tensor laid
// out like its parameter.
bool companion(Check &check, const char *name, const HfpTensorList *list,
               const HfpTensorList &params, bool optional, DType *type) {
  if (!list_pointer(check, name, list)) return false;
  if (optional && list->count == 0) return true;
  if (list->count != params.count) {
    return check.fail("`%s` must have %s%lld tensors like `params`, got %lld", name,
                      optional ? "no or " : "", static_cast<long long>(params.count),
                      static_cast<long long>(list->count));
  }
  for (int64_t i = 0; i < list->count; ++i) {
    Tensor t;
    if (!list_tensor(check, name, i, list->tensors[i], &t)) return false;
    if (i == 0) *type = t.type;
    if (t.type != *type) {
      return check.fail("`%s` must have one dtype, got %s and %s (`%s[%lld]`)", name,
                        hfp::name_of(*type), hfp::name_of(t.type), name, static_cast<long long>(i));
    }
    const DLTensor &param = *params.tensors[i];
    if (!same_layout(param, *list->tensors[i])) {
      const long long at = i;
      return check.fail("`%s[%lld]` must have the shape and strides of `params[%lld]` %s, got shape"
                        " %s",
                        name, at, at, hfp::ShapeText(param).text,
                        hfp::ShapeText(*list->tensors[i]).text);
    }
  }
  return true;
}

bool fraction(Check &check, const char *name, double value) {
  if (value >= 0 && value < 1) return true;
  return check.fail("`%s` must be at least 0 and below 1, got %g", name, value);
}

// Types that go together; see hfpatch.h.
bool adamw_types(Check &check, const hfp::AdamWArgs &args, DType squares, DType tops,
                 DType masters) {
  const DType p = args.param_type, m = args.moment_type;
  const bool master = args.masters->count > 0;
  if (master && p == DType::F32) {
    return check.fail("`masters` must be empty for float32 params, got %lld tensors",
                      static_cast<long long>(args.masters->count));
  }
  if (master && masters != DType::F32) {
    return check.fail("`masters` must be float32, got %s", hfp::name_of(masters));
  }
  if (args.grad_type != p && !(master && args.grad_type == DType::F32)) {
    return check.fail("`grads` must have the dtype of `params` (%s)%s, got %s", hfp::name_of(p),
                      master ? " or float32" : "", hfp::name_of(args.grad_type));
  }
  if (m != DType::F32 && (m != p || master)) {
    return check.fail("`exp_avgs` must be %s%s, got %s", master ? "" : "of the dtype of `params` or ",
                      "float32", hfp::name_of(m));
  }
  if (squares != m) {
    return check.fail("`exp_avg_sqs` must have the dtype of `exp_avgs` (%s), got %s",
                      hfp::name_of(m), hfp::name_of(squares));
  }
  if (args.max_exp_avg_sqs->count > 0 && tops != m) {
    return check.fail("`max_exp_avg_sqs` must have the dtype of `exp_avgs` (%s), got %s",
                      hfp::name_of(m), hfp::name_of(tops));
  }
  return true;
}

char *data_of(const DLTensor &t) { return static_cast<char *>(t.data) + t.byte_offset; }

}  // namespace

namespace hfp {

FlatTensor flat_tensor(const HfpTensorList &list, int64_t i) {
  const DLTensor &t = *list.tensors[i];
  DType type = DType::F32;
  supported(t.dtype, &type);
  return {data_of(t), type, numel_of(t)};
}

AdamWTensor AdamWArgs::operator[](int64_t i) const {
  const auto data = [i](const HfpTensorList &list) -> void * {
    return list.count > 0 ? data_of(*list.tensors[i]) : nullptr;
  };
  AdamWTensor t = {};
  t.param = data(*params);
  t.master = static_cast<float *>(data(*masters));
  t.grad = data(*grads);
  t.exp_avg = data(*exp_avgs);
  t.exp_avg_sq = data(*exp_avg_sqs);
  t.max_exp_avg_sq = data(*max_exp_avg_sqs);
  const DLTensor &step = *steps->tensors[i];
  const float *count = reinterpret_cast<const float *>(data_of(step));
  if (step.device.device_type == kDLCPU) t.step.value = *count;
  else t.step.pointer = count;
  t.numel = numel_of(*params->tensors[i]);
  return t;
}

}  // namespace hfp

extern "C" {

int32_t hfp_adamw_step(const HfpTensorList *params, const HfpTensorList *grads,
                       const HfpTensorList *exp_avgs, const HfpTensorList *exp_avg_sqs,
                       const HfpTensorList *max_exp_avg_sqs, const HfpTensorList *masters,
                       const HfpTensorList *steps, const DLTensor *lr_tensor,
                       const DLTensor *clip_coef, const DLTensor *grad_scale,
                       const DLTensor *found_inf, double lr, double beta1, double beta2, double eps,
                       double weight_decay, int64_t maximize, void *stream) {
  constexpr const char *kName = "hfp_adamw_step";
  Check check(kName);
  hfp::AdamWArgs args = {};
  DType squares = DType::F32, tops = DType::F32, master = DType::F32;
  Tensor first, all;
  bool ok = list_pointer(check, "params", params);
  for (int64_t i = 0; ok && i < params->count; ++i) {
    Tensor t;
    ok = list_tensor(check, "params", i, params->tensors[i], &t);
    if (!ok) break;
    if (i == 0) first = t;
    if (t.numel > all.numel) all.numel = t.numel;
    if (t.type != first.type) {
      ok = check.fail("`params` must have one dtype, got %s and %s (`params[%lld]`)",
                      hfp::name_of(first.type), hfp::name_of(t.type), static_cast<long long>(i));
    }
  }
  args.params = params;
  args.grads = grads;
  args.exp_avgs = exp_avgs;
  args.exp_avg_sqs = exp_avg_sqs;
  args.max_exp_avg_sqs = max_exp_avg_sqs ? max_exp_avg_sqs : &kEmpty;
  args.masters = masters ? masters : &kEmpty;
  args.steps = steps;
  args.param_type = first.type;
  ok = ok && companion(check, "grads", grads, *params, false, &args.grad_type) &&
       companion(check, "exp_avgs", exp_avgs, *params, false, &args.moment_type) &&
       companion(check, "exp_avg_sqs", exp_avg_sqs, *params, false, &squares) &&
       companion(check, "max_exp_avg_sqs", args.max_exp_avg_sqs, *params, true, &tops) &&
       companion(check, "masters", args.masters, *params, true, &master) &&
       list_pointer(check, "steps", steps) && check.number("lr", lr, 0, "finite and >= 0") &&
       fraction(check, "beta1", beta1) && fraction(check, "beta2", beta2) &&
       check.number("eps", eps, 0, "finite and >= 0") &&
       check.number("weight_decay", weight_decay, 0, "finite and >= 0") &&
       check.in_range("maximize", maximize, 2, "0 or 1");
  if (!ok) return check.status();
  if (steps->count != params->count) {
    check.fail("`steps` must have %lld tensors like `params`, got %lld",
               static_cast<long long>(params->count), static_cast<long long>(steps->count));
    return check.status();
  }
  if (params->count == 0) return HFP_OK;
  if (!adamw_types(check, args, squares, tops, master)) return check.status();

  int32_t status = HFP_OK;
  for (int64_t i = 0; i < steps->count; ++i) {
    Scalar step;
    if (!steps->tensors[i]) {
      check.fail("`steps[%lld]` must be a tensor, got NULL", static_cast<long long>(i));
      return check.status();
    }
    if (!scalar(check, kName, "steps", i, steps->tensors[i], first, &step, &status)) return status;
  }
  args.lr.value = static_cast<float>(lr);
  args.clip_coef.value = args.grad_scale.value = 1.0f;
  ok = scalar(check, kName, "lr_tensor", -1, lr_tensor, first, &args.lr, &status) &&
       scalar(check, kName, "clip_coef", -1, clip_coef, first, &args.clip_coef, &status) &&
       scalar(check, kName, "grad_scale", -1, grad_scale, first, &args.grad_scale, &status) &&
       scalar(check, kName, "found_inf", -1, found_inf, first, &args.found_inf, &status);
  if (!ok) return status;
  status = hfp::disjoint(check, first.raw->device.device_type,
                         {{"params", true, params},
                          {"grads", false, grads},
                          {"exp_avgs", true, exp_avgs},
                          {"exp_avg_sqs", true, exp_avg_sqs},
                          {"max_exp_avg_sqs", true, args.max_exp_avg_sqs},
                          {"masters", true, args.masters},
                          {"steps", false, steps},
                          {"lr_tensor", false, nullptr, lr_tensor},
                          {"clip_coef", false, nullptr, clip_coef},
                          {"grad_scale", false, nullptr, grad_scale},
                          {"found_inf", false, nullptr, found_inf}});
  if (status != HFP_OK) return status;
  if (!args.found_inf.pointer && args.found_inf.value != 0) return HFP_OK;
  args.beta2 = static_cast<float>(beta2);
  args.one_minus_beta1 = static_cast<float>(1 - beta1);
  args.one_minus_beta2 = static_cast<float>(1 - beta2);
  args.log_beta1 = static_cast<float>(std::log(beta1));
  args.log_beta2 = static_cast<float>(std::log(beta2));
  args.eps = static_cast<float>(eps);
  args.weight_decay = static_cast<float>(weight_decay);
  args.maximize = maximize != 0;
  return check.run(all, args, &hfp::cpu::adamw_step, HFP_CUDA(adamw_step), stream);
}

int64_t hfp_norm_partials(const HfpTensorList *tensors) {
  int64_t chunks = 0;
  if (!tensors || !tensors->tensors) return 0;
  for (int64_t i = 0; i < tensors->count; ++i) {
    const DLTensor *t = tensors->tensors[i];
    if (!t || (t->ndim > 0 && !t->shape)) continue;  // hfp_grad_norm refuses it
    chunks += (numel_of(*t) + HFP_NORM_CHUNK - 1) / HFP_NORM_CHUNK;
  }
  return chunks;
}

int32_t hfp_grad_norm(DLTensor *norm, DLTensor *partials, const HfpTensorList *tensors,
                      int64_t norm_type, void *stream) {
  Check check("hfp_grad_norm");
  Tensor out, sums;
  bool ok = list_pointer(check, "tensors", tensors) &&
            check.in_range("norm_type", norm_type, HFP_GRAD_NORM_COUNT, "0 (L2) or 1 (infinity)");
  if (ok && tensors->count == 0) ok = check.fail("`tensors` must hold at least one tensor, got 0");
  for (int64_t i = 0; ok && i < tensors->count; ++i) {
    Tensor t;
    ok = list_tensor(check, "tensors", i, tensors->tensors[i], &t);
  }
  if (!ok || !hfp::one_number(check, "norm", norm, &out)) return check.status();
  const int64_t count = hfp_norm_partials(tensors);
  if (!check.shaped("partials", partials, 1, &count, DType::F32, &sums)) return check.status();
  const int32_t status = hfp::disjoint(check, norm->device.device_type,
                                       {{"norm", true, nullptr, norm},
                                        {"partials", true, nullptr, partials},
                                        {"tensors", false, tensors}});
  if (status != HFP_OK) return status;
  hfp::GradNormArgs args = {};
  args.norm = reinterpret_cast<float *>(out.data);
  args.partials = reinterpret_cast<float *>(sums.data);
  args.count = count;
  args.tensors = tensors;
  args.norm_type = static_cast<int>(norm_type);
  return check.run(out, args, &hfp::cpu::grad_norm, HFP_CUDA(grad_norm), stream);
}

// The end of both: `number` is what the factor is made of.
static int32_t scale_grads(Check &check, const HfpTensorList *grads, const char *name,
                           const DLTensor *number, bool clips, double max_norm, void *stream) {
  Tensor all, one;
  bool ok = list_pointer(check, "grads", grads);
  if (ok && clips && !(max_norm >= 0)) ok = check.fail("`max_norm` must be >= 0, got %g", max_norm);
  for (int64_t i = 0; ok && i < grads->count; ++i) {
    Tensor t;
    ok = list_tensor(check, "grads", i, grads->tensors[i], &t);
    if (ok && t.numel > all.numel) all.numel = t.numel;
  }
  if (!ok || !hfp::one_number(check, name, number, &one)) return check.status();
  const int32_t status = hfp::disjoint(check, number->device.device_type,
                                       {{"grads", true, grads}, {name, false, nullptr, number}});
  if (status != HFP_OK) return status;
  hfp::ScaleGradsArgs args = {};
  args.grads = grads;
  (clips ? args.total_norm : args.factor) = reinterpret_cast<const float *>(one.data);
  args.max_norm = static_cast<float>(max_norm);
  return check.run(all, args, &hfp::cpu::scale_grads, HFP_CUDA(scale_grads), stream);
}

int32_t hfp_clip_grads(const HfpTensorList *grads, const DLTensor *total_norm, double max_norm,
                       void *stream) {
  Check check("hfp_clip_grads");
  return scale_grads(check, grads, "total_norm", total_norm, true, max_norm, stream);
}

int32_t hfp_scale_grads(const HfpTensorList *grads, const DLTensor *factor, void *stream) {
  Check check("hfp_scale_grads");
  return scale_grads(check, grads, "factor", factor, false, 0, stream);
}

}  // extern "C"
