// api_backward.cpp: the gradients and losses of hfpatch.h: validate (check.h), fill in a backend's
// arguments (kernels.h), dispatch on the device.
#include "check_any_shape.h"

HFP_BACKENDS(rms_norm_backward, NormBackwardArgs)
HFP_BACKENDS(layer_norm_backward, NormBackwardArgs)
HFP_BACKENDS(activation_backward, ActivationBackwardArgs)
HFP_BACKENDS(gated_backward, GatedBackwardArgs)
HFP_BACKENDS(cross_entropy, CrossEntropyArgs)
HFP_BACKENDS(log_probs, LogProbsArgs)
HFP_BACKENDS(cross_entropy_backward, CrossEntropyArgs)
HFP_BACKENDS(cross_entropy_with_gradient, CrossEntropyTotalArgs)

using hfp::Check;
using hfp::DType;
using hfp::Tensor;

namespace {

constexpr const char *kActivations =
    "an activation: 0 (gelu erf), 1 (gelu tanh), 2 (gelu sigmoid), 3 (silu) or 4 (relu)";

int64_t rows_of(const Tensor &t) {
  int64_t rows = 1;
  // Of an empty tensor only the product of all sizes but the zeros is known not to overflow.
  for (int32_t i = 0; i + 1 < t.raw->ndim; ++i)
    if (t.raw->shape[i] == 0) return 0;
  for (int32_t i = 0; i + 1 < t.raw->ndim; ++i) rows *= t.raw->shape[i];
  return rows;
}

// A gradient of a parameter: contiguous [D] in its dtype.
bool wanted(Check &check, const char *gradient, DLTensor *raw, const Tensor &parameter,
            const char *name, int64_t cols, Tensor *tensor) {
  if (!parameter.present) {
    return check.fail("`needs` must not ask for `%s` without `%s`", gradient, name);
  }
  return check.shaped(gradient, raw, 1, &cols, parameter.type, tensor);
}

// What both norms share; `grad_type` is the dtype of the forward's result.
bool norm_backward(Check &check, DLTensor *dx, DLTensor *dweight, DLTensor *dbias,
                   DLTensor *partials, const Tensor &g, const Tensor &a, const Tensor &w,
                   const Tensor &b, DType grad_type, double eps, int64_t needs,
                   hfp::NormBackwardArgs *args) {
  Tensor o, dw, db, sums;
  if (g.type != grad_type) {
    return check.fail("`grad` must be %s, the dtype of the forward's result, got %s",
                      hfp::name_of(grad_type), hfp::name_of(g.type));
  }
  const bool ok =
      check.same_shape(a, g) && check.number("eps", eps, 0, "finite and >= 0") &&
      check.in_range("needs", needs, HFP_NEED_COUNT, "a sum of 1 (weight) and 2 (bias), or 0") &&
      check.shaped("dx", dx, a.raw->ndim, a.raw->shape, a.type, &o);
  if (!ok) return false;
  const int64_t rows = rows_of(a), cols = a.last();
  if ((needs & HFP_NEED_WEIGHT) &&
      !wanted(check, "dweight", dweight, w, "weight", cols, &dw)) {
    return false;
  }
  if ((needs & HFP_NEED_BIAS) && !wanted(check, "dbias", dbias, b, "bias", cols, &db)) return false;
  if (needs != 0) {
    const int64_t wide = needs == (HFP_NEED_WEIGHT | HFP_NEED_BIAS) ? 2 * cols : cols;
    const int64_t shape[2] = {hfp_partial_rows(rows, cols), wide};
    if (!check.shaped("partials", partials, 2, shape, DType::F32, &sums)) return false;
  }
  args->dx = o.data;
  args->dweight = dw.data;
  args->dbias = db.data;
  args->partials = reinterpret_cast<float *>(sums.data);
  args->grad = g.data;
  args->x = a.data;
  args->weight = w.data;
  args->grad_type = g.type;
  args->x_type = a.type;
  args->weight_type = w.present ? w.type : a.type;
  args->bias_type = b.present ? b.type : a.type;
  args->hat_type = DType::F32;
  args->grad_rows = g.rows;
  args->x_rows = a.rows;
  args->x_rows.rows = args->grad_rows.rows = cols == 0 ? 0 : rows;
  args->partial_rows = hfp_partial_rows(rows, cols);
  args->eps = static_cast<float>(eps);
  return true;
}

// Unlike Check::run, also for an empty dx: the sums over no rows are still written.
int32_t run_norm(Check &check, const hfp::NormBackwardArgs &args, const Tensor &x,
                 int32_t (*cpu)(const hfp::NormBackwardArgs &),
                 int32_t (*cuda)(const hfp::NormBackwardArgs &, int, void *), void *stream) {
  Tensor written = x;
  if (x.last() > 0 && (args.dweight || args.dbias)) written.numel = 1;
#if defined(CUDA_KERNEL)
  return check.run(written, args, cpu, cuda, stream);
#else
  (void)cuda;
  return check.run(written, args, cpu, nullptr, stream);
#endif
}

}  // namespace

extern "C" {

int64_t hfp_partial_rows(int64_t rows, int64_t cols) {
  // As many CTAs of cols / 8 threads as an H100's 132 SMs hold at 1024 threads each. CTAs of narrow
  // rows have 128 threads with more registers, and take several rows at once.
  const int64_t width = cols > 1 ? cols : 1;
  const int64_t at_once = 1024 / width > 1 ? 1024 / width : 1;
  int64_t per_sm = 8192 / width;
  const int64_t room = width <= 512 ? 4 : 8;
  per_sm = per_sm < 1 ? 1 : per_sm > room ? room : per_sm;
  const int64_t most = (rows + at_once - 1) / at_once;
  return most < 132 * per_sm ? most : 132 * per_sm;
}

int32_t hfp_rms_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias, DLTensor *partials,
                              const DLTensor *grad, const DLTensor *x, const DLTensor *weight,
                              const DLTensor *bias, double eps, double weight_offset, int64_t cast,
                              int64_t needs, void *stream) {
  Check check("hfp_rms_norm_backward");
  Tensor g, a, w, b;
  hfp::NormBackwardArgs args = {};
  const bool ok = check.input("grad", grad, &g) && check.input("x", x, &a) &&
                  check.param("weight", weight, a, &w) && check.param("bias", bias, a, &b) &&
                  check.same_type(w, b) &&
                  check.number("weight_offset", weight_offset, -FLT_MAX, "finite") &&
                  check.in_range("cast", cast, HFP_CAST_COUNT, "0 (none), 1 (input) or 2 (weight)");
  if (!ok) return check.status();
  if (cast != HFP_CAST_NONE && weight_offset != 0) {
    check.fail("`weight_offset` must be 0 unless `cast` is 0 (none), got %g with `cast` %lld",
               weight_offset, static_cast<long long>(cast));
    return check.status();
  }
  const bool once = !w.present || cast == HFP_CAST_NONE;
  const DType result = once || (cast == HFP_CAST_INPUT && a.type == w.type) ? a.type
                       : cast == HFP_CAST_INPUT                             ? DType::F32
                                                                            : w.type;
  if (!norm_backward(check, dx, dweight, dbias, partials, g, a, w, b, result, eps, needs, &args)) {
    return check.status();
  }
  if (!once) args.hat_type = cast == HFP_CAST_INPUT ? a.type : w.type;
  args.weight_offset = static_cast<float>(weight_offset);
  return run_norm(check, args, a, &hfp::cpu::rms_norm_backward, HFP_CUDA(rms_norm_backward), stream);
}

int32_t hfp_layer_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias,
                                DLTensor *partials, const DLTensor *grad, const DLTensor *x,
                                const DLTensor *weight, const DLTensor *bias, double eps,
                                int64_t needs, void *stream) {
  Check check("hfp_layer_norm_backward");
  Tensor g, a, w, b;
  hfp::NormBackwardArgs args = {};
  const bool ok =
      check.input("grad", grad, &g) && check.input("x", x, &a) &&
      check.param("weight", weight, a, &w) && check.param("bias", bias, a, &b) &&
      norm_backward(check, dx, dweight, dbias, partials, g, a, w, b, a.type, eps, needs, &args);
  if (!ok) return check.status();
  return run_norm(check, args, a, &hfp::cpu::layer_norm_backward, HFP_CUDA(layer_norm_backward),
                  stream);
}

static int32_t activation_backward(Check &check, DLTensor *dx, const DLTensor *grad,
                                   const DLTensor *x, int64_t activation, void *stream) {
  Tensor o, g, a;
  const bool ok = check.input("grad", grad, &g) && check.input("x", x, &a) &&
                  check.same_shape(a, g) && check.same_type(a, g) &&
                  check.shaped("dx", dx, a.raw->ndim, a.raw->shape, a.type, &o);
  if (!ok) return check.status();
  const bool flat = g.contiguous && a.contiguous;
  hfp::ActivationBackwardArgs args = {};
  args.dx = o.data;
  args.grad = g.data;
  args.x = a.data;
  args.type = a.type;
  args.grad_rows = flat ? hfp::one_row(g) : g.rows;
  args.x_rows = flat ? hfp::one_row(a) : a.rows;
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::activation_backward, HFP_CUDA(activation_backward), stream);
}

int32_t hfp_gelu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x,
                          int64_t approximate, void *stream) {
  Check check("hfp_gelu_backward");
  if (!check.in_range("approximate", approximate, HFP_ACT_SILU,
                      "0 (erf), 1 (tanh) or 2 (sigmoid)")) {
    return check.status();
  }
  return activation_backward(check, dx, grad, x, approximate, stream);
}

int32_t hfp_silu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x, void *stream) {
  Check check("hfp_silu_backward");
  return activation_backward(check, dx, grad, x, HFP_ACT_SILU, stream);
}

int32_t hfp_gated_backward(DLTensor *dgate, DLTensor *dup, const DLTensor *grad,
                           const DLTensor *gate, const DLTensor *up, int64_t activation,
                           void *stream) {
  Check check("hfp_gated_backward");
  Tensor og, ou, d, g, u;
  const bool ok = check.in_range("activation", activation, HFP_ACT_COUNT, kActivations) &&
                  check.input("grad", grad, &d) && check.input("gate", gate, &g) &&
                  check.input("up", up, &u) && check.same_shape(g, d) && check.same_type(g, d) &&
                  check.same_shape(g, u) && check.same_type(g, u) &&
                  check.shaped("dgate", dgate, g.raw->ndim, g.raw->shape, g.type, &og) &&
                  check.shaped("dup", dup, g.raw->ndim, g.raw->shape, g.type, &ou);
  if (!ok) return check.status();
  const bool flat = d.contiguous && g.contiguous && u.contiguous;
  hfp::GatedBackwardArgs args = {};
  args.dgate = og.data;
  args.dup = ou.data;
  args.grad = d.data;
  args.gate = g.data;
  args.up = u.data;
  args.type = g.type;
  args.grad_rows = flat ? hfp::one_row(d) : d.rows;
  args.gate_rows = flat ? hfp::one_row(g) : g.rows;
  args.up_rows = flat ? hfp::one_row(u) : u.rows;
  args.out_stride = args.gate_rows.cols;
  args.activation = static_cast<int>(activation);
  return check.run(og, args, &hfp::cpu::gated_backward, HFP_CUDA(gated_backward), stream);
}

int32_t hfp_gated_packed_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x,
                                  int64_t activation, int64_t gate_first, void *stream) {
  Check check("hfp_gated_packed_backward");
  Tensor o, d, a;
  const bool ok = check.in_range("activation", activation, HFP_ACT_COUNT, kActivations) &&
                  check.in_range("gate_first", gate_first, 2, "0 or 1") &&
                  check.input("grad", grad, &d) && check.input("x", x, &a) &&
                  check.same_type(a, d);
  if (!ok) return check.status();
  if (a.last() % 2 != 0) {
    check.fail("`x` must have an even last dimension, the gate and up halves, got %lld",
               static_cast<long long>(a.last()));
    return check.status();
  }
  bool same = d.raw->ndim == a.raw->ndim && 2 * d.last() == a.last();
  for (int32_t i = 0; same && i + 1 < a.raw->ndim; ++i) same = d.raw->shape[i] == a.raw->shape[i];
  if (!same) {
    check.fail("`grad` must have shape %s, half of `x`, got %s", hfp::ShapeText(*a.raw, 2).text,
               hfp::ShapeText(*d.raw).text);
    return check.status();
  }
  if (!check.shaped("dx", dx, a.raw->ndim, a.raw->shape, a.type, &o)) return check.status();
  if (o.numel == 0) return HFP_OK;  // no half to point to
  const int64_t half = d.last(), step = half * hfp::size_of(a.type);
  hfp::GatedBackwardArgs args = {};
  args.dgate = gate_first ? o.data : o.data + step;
  args.dup = gate_first ? o.data + step : o.data;
  args.grad = d.data;
  args.gate = gate_first ? a.data : a.data + step;
  args.up = gate_first ? a.data + step : a.data;
  args.type = a.type;
  args.grad_rows = d.rows;
  args.gate_rows = args.up_rows = a.rows;
  args.gate_rows.cols = args.up_rows.cols = half;
  args.out_stride = 2 * half;
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::gated_backward, HFP_CUDA(gated_backward), stream);
}

// The arguments that the loss and its gradient share.
static bool cross_entropy_inputs(Check &check, const Tensor &logits, const DLTensor *target,
                                 double label_smoothing, double softcap, Tensor *t) {
  if (logits.raw->ndim < 2) {
    return check.fail("`logits` must have at least 2 dimensions, got %d", logits.raw->ndim);
  }
  if (!check.indices("target", target, logits.raw->ndim - 1, logits.raw->shape, t) ||
      !check.number("label_smoothing", label_smoothing, 0, "between 0 and 1") ||
      !check.number("softcap", softcap, 0, "finite and >= 0 (0: none)")) {
    return false;
  }
  if (label_smoothing > 1) {
    return check.fail("`label_smoothing` must be between 0 and 1, got %g", label_smoothing);
  }
  if (logits.last() == 0 && t->numel > 0) {
    return check.fail("`logits` must have at least one class, got shape %s",
                      hfp::ShapeText(*logits.raw).text);
  }
  return true;
}

static hfp::CrossEntropyArgs cross_entropy_args(const Tensor &logits, const Tensor &target,
                                                int64_t ignore_index, double label_smoothing,
                                                double softcap) {
  hfp::CrossEntropyArgs args = {};
  args.logits = logits.data;
  args.target = reinterpret_cast<const int64_t *>(target.data);
  args.type = logits.type;
  args.rows = logits.rows;
  args.ignore_index = ignore_index;
  args.label_smoothing = static_cast<float>(label_smoothing);
  args.softcap = static_cast<float>(softcap);
  return args;
}

int32_t hfp_cross_entropy(DLTensor *loss, DLTensor *lse, const DLTensor *logits,
                          const DLTensor *target, int64_t ignore_index, double label_smoothing,
                          double softcap, void *stream) {
  Check check("hfp_cross_entropy");
  Tensor l, s, a, t;
  const bool ok = check.input("logits", logits, &a) &&
                  cross_entropy_inputs(check, a, target, label_smoothing, softcap, &t) &&
                  check.shaped("loss", loss, a.raw->ndim - 1, a.raw->shape, DType::F32, &l) &&
                  check.shaped("lse", lse, a.raw->ndim - 1, a.raw->shape, DType::F32, &s);
  if (!ok) return check.status();
  hfp::CrossEntropyArgs args = cross_entropy_args(a, t, ignore_index, label_smoothing, softcap);
  args.loss = reinterpret_cast<float *>(l.data);
  args.lse = reinterpret_cast<float *>(s.data);
  return check.run(l, args, &hfp::cpu::cross_entropy, HFP_CUDA(cross_entropy), stream);
}

int32_t hfp_cross_entropy_log_probs(DLTensor *loss, DLTensor *lse, DLTensor *log_probs,
                                    const DLTensor *logits, const DLTensor *target,
                                    int64_t ignore_index, double label_smoothing, double softcap,
                                    void *stream) {
  Check check("hfp_cross_entropy_log_probs");
  Tensor l, s, p, a, t;
  const bool ok = check.input("logits", logits, &a, "log_probs") &&
                  cross_entropy_inputs(check, a, target, label_smoothing, softcap, &t) &&
                  check.shaped("loss", loss, a.raw->ndim - 1, a.raw->shape, DType::F32, &l) &&
                  check.shaped("lse", lse, a.raw->ndim - 1, a.raw->shape, DType::F32, &s) &&
                  check.shaped("log_probs", log_probs, a.raw->ndim, a.raw->shape, a.type, &p);
  if (!ok) return check.status();
  hfp::LogProbsArgs args = {};
  args.loss = reinterpret_cast<float *>(l.data);
  args.lse = reinterpret_cast<float *>(s.data);
  args.log_probs = p.data;
  args.logits = a.data;
  args.target = reinterpret_cast<const int64_t *>(t.data);
  args.type = a.type;
  args.rows = a.rows;
  args.ignore_index = ignore_index;
  args.label_smoothing = static_cast<float>(label_smoothing);
  args.softcap = static_cast<float>(softcap);
  return check.run(l, args, &hfp::cpu::log_probs, HFP_CUDA(log_probs), stream);
}

int32_t hfp_cross_entropy_backward(DLTensor *dlogits, const DLTensor *grad, const DLTensor *logits,
                                   const DLTensor *target, const DLTensor *lse,
                                   int64_t ignore_index, double label_smoothing, double softcap,
                                   void *stream) {
  Check check("hfp_cross_entropy_backward");
  Tensor o, g, a, t, s;
  const bool ok =
      check.input("logits", logits, &a) &&
      cross_entropy_inputs(check, a, target, label_smoothing, softcap, &t) &&
      check.shaped("grad", grad, a.raw->ndim - 1, a.raw->shape, DType::F32, &g) &&
      check.shaped("lse", lse, a.raw->ndim - 1, a.raw->shape, DType::F32, &s) &&
      check.shaped("dlogits", dlogits, a.raw->ndim, a.raw->shape, a.type, &o);
  if (!ok) return check.status();
  hfp::CrossEntropyArgs args = cross_entropy_args(a, t, ignore_index, label_smoothing, softcap);
  args.dlogits = o.data;
  args.grad = reinterpret_cast<const float *>(g.data);
  args.saved_lse = reinterpret_cast<const float *>(s.data);
  return check.run(o, args, &hfp::cpu::cross_entropy_backward, HFP_CUDA(cross_entropy_backward),
                   stream);
}

int32_t hfp_cross_entropy_with_gradient(DLTensor *total, DLTensor *loss, DLTensor *lse,
                                        DLTensor *dlogits, const DLTensor *logits,
                                        const DLTensor *target, const DLTensor *divisor_tensor,
                                        double divisor, int64_t ignore_index,
                                        double label_smoothing, double softcap, void *stream) {
  constexpr const char *kName = "hfp_cross_entropy_with_gradient";
  Check check(kName);
  Tensor all, l, s, o, a, t;
  int32_t status = HFP_OK;
  hfp::Scalar by;
  by.value = static_cast<float>(divisor);
  const bool ok =
      check.input("logits", logits, &a, "dlogits") &&
      cross_entropy_inputs(check, a, target, label_smoothing, softcap, &t) &&
      check.number("divisor", divisor, 0, "finite and >= 0 (0: the rows that are not ignored)") &&
      hfp::one_number(check, "total", total, &all) && check.writes(all) &&
      check.shaped("loss", loss, a.raw->ndim - 1, a.raw->shape, DType::F32, &l) &&
      check.shaped("lse", lse, a.raw->ndim - 1, a.raw->shape, DType::F32, &s) &&
      check.shaped("dlogits", dlogits, a.raw->ndim, a.raw->shape, a.type, &o);
  if (!ok) return check.status();
  if (!hfp::scalar(check, kName, "divisor_tensor", -1, divisor_tensor, a, &by, &status)) return status;
  hfp::CrossEntropyTotalArgs args = {};
  args.total = reinterpret_cast<float *>(all.data);
  args.rows = cross_entropy_args(a, t, ignore_index, label_smoothing, softcap);
  if (a.numel == 0) args.rows.rows.rows = 0;
  args.rows.loss = reinterpret_cast<float *>(l.data);
  args.rows.lse = reinterpret_cast<float *>(s.data);
  args.rows.dlogits = o.data;
  args.counts = divisor_tensor == nullptr && divisor == 0;
  args.divisor = by;
  return check.run(all, args, &hfp::cpu::cross_entropy_with_gradient,
                   HFP_CUDA(cross_entropy_with_gradient), stream);
}

}  // extern "C"
