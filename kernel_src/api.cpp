// api.cpp: the functions of hfpatch.h: validate (check.h), fill in a backend's arguments
// (kernels.h), dispatch on the device.
//
// Macros of the build: CUDA_KERNEL, there are CUDA kernels; HFP_CUDA_ARCHS, a string naming their
// architectures, separated by spaces, commas or semicolons.
#include <limits>

#include "check.h"

HFP_BACKENDS(rms_norm, RmsNormArgs)
HFP_BACKENDS(layer_norm, LayerNormArgs)
HFP_BACKENDS(activation, ActivationArgs)
HFP_BACKENDS(gated, GatedArgs)
HFP_BACKENDS(fused_norm, FusedNormArgs)
HFP_BACKENDS(rms_norm_silu, RmsNormSiluArgs)
HFP_BACKENDS(gate_residual, PointwiseArgs)
HFP_BACKENDS(gated_norm, GatedNormArgs)

using hfp::Check;
using hfp::DType;
using hfp::Tensor;

namespace {

thread_local char message[hfp::kMessageSize] = "";

constexpr const char *kActivations =
    "an activation: 0 (gelu erf), 1 (gelu tanh), 2 (gelu sigmoid), 3 (silu) or 4 (relu)";

// As torch.promote_types for the three supported dtypes.
DType promote(DType a, DType b) { return a == b ? a : DType::F32; }

DType norm_result(int64_t cast, const Tensor &x, const Tensor &weight) {
  if (!weight.present || cast == HFP_CAST_NONE) return x.type;
  return cast == HFP_CAST_INPUT ? promote(x.type, weight.type) : weight.type;
}

#define HFP_TEXT(x) HFP_TEXT_(x)
#define HFP_TEXT_(x) #x
#if defined(__clang__)
constexpr const char *kCompiler = "clang " HFP_TEXT(__clang_major__) "." HFP_TEXT(__clang_minor__);
#elif defined(__GNUC__)
constexpr const char *kCompiler = "gcc " HFP_TEXT(__GNUC__) "." HFP_TEXT(__GNUC_MINOR__);
#else
constexpr const char *kCompiler = "unknown";
#endif

#if !defined(HFP_CUDA_ARCHS)
#define HFP_CUDA_ARCHS ""
#endif

struct BuildInfo {
  char text[1024];
  size_t used = 0;

  void put(const char *s) {
    while (*s && used + 1 < sizeof text) text[used++] = *s++;
    text[used] = '\0';
  }

  BuildInfo() {
    put("{\"abi\": " HFP_TEXT(HFP_ABI_VERSION) ", \"devices\": [\"cpu\"");
#if defined(CUDA_KERNEL)
    put(", \"cuda\"");
#endif
    put("], \"cuda_archs\": [");
    bool inside = false, first = true;
    for (const char *p = HFP_CUDA_ARCHS; *p; ++p) {
      const bool separator = *p == ' ' || *p == ',' || *p == ';' || *p == '"' || *p == '\\';
      if (!separator && !inside) put(first ? "\"" : ", \""), first = false;
      if (separator && inside) put("\"");
      inside = !separator;
      const char c[2] = {*p, '\0'};
      if (inside) put(c);
    }
    if (inside) put("\"");
    put("], \"compiler\": \"");
    put(kCompiler);
    put("\", \"simd\": \"");
    put(hfp::cpu::simd_level());
#if defined(_OPENMP)
    put("\", \"openmp\": true}");
#else
    put("\", \"openmp\": false}");
#endif
  }
};

}  // namespace

int32_t hfp::set_error(int32_t status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return status;
}

extern "C" {

const char *hfp_last_error(void) { return message; }

int32_t hfp_abi_version(void) { return HFP_ABI_VERSION; }

const char *hfp_build_info(void) {
  static const BuildInfo info;
  return info.text;
}

int32_t hfp_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight, const DLTensor *bias,
                     double eps, double weight_offset, int64_t cast, void *stream) {
  Check check("hfp_rms_norm");
  Tensor o, a, w, b;
  const bool ok = check.input("x", x, &a) && check.param("weight", weight, a, &w) &&
                  check.param("bias", bias, a, &b) && check.same_type(w, b) &&
                  check.number("eps", eps, 0, "finite and >= 0") &&
                  check.number("weight_offset", weight_offset, -FLT_MAX, "finite") &&
                  check.in_range("cast", cast, HFP_CAST_COUNT, "0 (none), 1 (input) or 2 (weight)");
  if (!ok) return check.status();
  if (cast != HFP_CAST_NONE && weight_offset != 0) {
    check.fail("`weight_offset` must be 0 unless `cast` is 0 (none), got %g with `cast` %lld",
               weight_offset, static_cast<long long>(cast));
    return check.status();
  }
  if (!check.output(out, a, 1, norm_result(cast, a, w), &o)) return check.status();
  hfp::RmsNormArgs args = {};
  args.out = o.data;
  args.x = a.data;
  args.weight = w.data;
  args.bias = b.data;
  args.out_type = o.type;
  args.x_type = a.type;
  args.weight_type = w.present ? w.type : b.present ? b.type : a.type;
  args.x_rows = a.rows;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.cast = w.present ? static_cast<int>(cast) : HFP_CAST_NONE;
  return check.run(o, args, &hfp::cpu::rms_norm, HFP_CUDA(rms_norm), stream);
}

int32_t hfp_layer_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight,
                       const DLTensor *bias, double eps, void *stream) {
  Check check("hfp_layer_norm");
  Tensor o, a, w, b;
  const bool ok = check.input("x", x, &a) && check.param("weight", weight, a, &w) &&
                  check.param("bias", bias, a, &b) &&
                  check.number("eps", eps, 0, "finite and >= 0") &&
                  check.output(out, a, 1, a.type, &o);
  if (!ok) return check.status();
  hfp::LayerNormArgs args = {};
  args.out = o.data;
  args.x = a.data;
  args.weight = w.data;
  args.bias = b.data;
  args.type = a.type;
  args.weight_type = w.present ? w.type : a.type;
  args.bias_type = b.present ? b.type : a.type;
  args.x_rows = a.rows;
  args.eps = static_cast<float>(eps);
  return check.run(o, args, &hfp::cpu::layer_norm, HFP_CUDA(layer_norm), stream);
}

static int32_t activation(Check &check, DLTensor *out, const DLTensor *x, int64_t activation,
                          void *stream) {
  Tensor o, a;
  if (!check.input("x", x, &a) || !check.output(out, a, 1, a.type, &o)) return check.status();
  hfp::ActivationArgs args = {};
  args.out = o.data;
  args.x = a.data;
  args.type = a.type;
  args.x_rows = a.contiguous ? hfp::one_row(a) : a.rows;
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::activation, HFP_CUDA(activation), stream);
}

int32_t hfp_gelu(DLTensor *out, const DLTensor *x, int64_t approximate, void *stream) {
  Check check("hfp_gelu");
  if (!check.in_range("approximate", approximate, HFP_ACT_SILU,
                      "0 (erf), 1 (tanh) or 2 (sigmoid)")) {
    return check.status();
  }
  return activation(check, out, x, approximate, stream);
}

int32_t hfp_silu(DLTensor *out, const DLTensor *x, void *stream) {
  Check check("hfp_silu");
  return activation(check, out, x, HFP_ACT_SILU, stream);
}

int32_t hfp_gated(DLTensor *out, const DLTensor *gate, const DLTensor *up, int64_t activation,
                  void *stream) {
  Check check("hfp_gated");
  Tensor o, g, u;
  const bool ok = check.in_range("activation", activation, HFP_ACT_COUNT, kActivations) &&
                  check.input("gate", gate, &g) && check.input("up", up, &u) &&
                  check.same_shape(g, u) && check.same_type(g, u) &&
                  check.output(out, g, 1, g.type, &o);
  if (!ok) return check.status();
  const bool flat = g.contiguous && u.contiguous;
  hfp::GatedArgs args = {};
  args.out = o.data;
  args.gate = g.data;
  args.up = u.data;
  args.type = g.type;
  args.gate_rows = flat ? hfp::one_row(g) : g.rows;
  args.up_rows = flat ? hfp::one_row(u) : u.rows;
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::gated, HFP_CUDA(gated), stream);
}

int32_t hfp_gated_clamped(DLTensor *out, const DLTensor *gate, const DLTensor *up,
                          int64_t activation, double alpha, double gate_min, double gate_max,
                          double up_min, double up_max, double up_offset, int64_t clamp_activated,
                          void *stream) {
  Check check("hfp_gated_clamped");
  Tensor o, g, u;
  const struct {
    const char *name;
    double value;
  } bounds[] = {
      {"gate_min", gate_min}, {"gate_max", gate_max}, {"up_min", up_min}, {"up_max", up_max}};
  for (const auto &bound : bounds) {
    if (bound.value == bound.value) continue;
    check.fail("`%s` must be a number or infinite, got NaN", bound.name);
    return check.status();
  }
  for (int i = 0; i < 4; ++i) {  // an infinite bound is none; on the wrong side it leaves nothing
    if (i % 2 == 0 ? bounds[i].value <= FLT_MAX : bounds[i].value >= -FLT_MAX) continue;
    check.fail("`%s` must be %s, got %g", bounds[i].name,
               i % 2 == 0 ? "finite or -infinity" : "finite or infinity", bounds[i].value);
    return check.status();
  }
  bool ok = check.in_range("activation", activation, HFP_ACT_COUNT, kActivations) &&
            check.number("alpha", alpha, -FLT_MAX, "finite") &&
            check.number("up_offset", up_offset, -FLT_MAX, "finite") &&
            check.in_range("clamp_activated", clamp_activated, 2, "0 or 1");
  if (ok && activation != HFP_ACT_SILU && alpha != 1.0) {
    ok = check.fail("`alpha` must be 1 unless `activation` is 3 (silu), got %g", alpha);
  }
  ok = ok && check.input("gate", gate, &g) && check.input("up", up, &u) &&
       check.same_shape(g, u) && check.same_type(g, u) && check.output(out, g, 1, g.type, &o);
  if (!ok) return check.status();
  const bool flat = g.contiguous && u.contiguous;
  const float low = static_cast<float>(gate_min), high = static_cast<float>(gate_max);
  constexpr float kNone = std::numeric_limits<float>::infinity();
  hfp::GatedArgs args = {};
  args.out = o.data;
  args.gate = g.data;
  args.up = u.data;
  args.type = g.type;
  args.gate_rows = flat ? hfp::one_row(g) : g.rows;
  args.up_rows = flat ? hfp::one_row(u) : u.rows;
  args.activation = static_cast<int>(activation);
  args.clamped = true;
  args.clamps.alpha = static_cast<float>(alpha);
  args.clamps.gate_min = clamp_activated ? -kNone : low;
  args.clamps.gate_max = clamp_activated ? kNone : high;
  args.clamps.act_min = clamp_activated ? low : -kNone;
  args.clamps.act_max = clamp_activated ? high : kNone;
  args.clamps.up_min = static_cast<float>(up_min);
  args.clamps.up_max = static_cast<float>(up_max);
  args.clamps.up_offset = up_offset == 0 ? -0.0f : static_cast<float>(up_offset);
  return check.run(o, args, &hfp::cpu::gated, HFP_CUDA(gated), stream);
}

int32_t hfp_gated_packed(DLTensor *out, const DLTensor *x, int64_t activation, int64_t gate_first,
                         void *stream) {
  Check check("hfp_gated_packed");
  Tensor o, a;
  const bool ok = check.in_range("activation", activation, HFP_ACT_COUNT, kActivations) &&
                  check.in_range("gate_first", gate_first, 2, "0 or 1") &&
                  check.input("x", x, &a);
  if (!ok) return check.status();
  if (a.last() % 2 != 0) {
    check.fail("`x` must have an even last dimension, the gate and up halves, got %lld",
               static_cast<long long>(a.last()));
    return check.status();
  }
  if (!check.output(out, a, 2, a.type, &o)) return check.status();
  if (o.numel == 0) return HFP_OK;  // no half to point to
  hfp::GatedArgs args = {};
  hfp::Rows half = a.rows;
  half.cols /= 2;
  char *second = a.data + half.cols * hfp::size_of(a.type);
  args.out = o.data;
  args.gate = gate_first ? a.data : second;
  args.up = gate_first ? second : a.data;
  args.type = a.type;
  args.gate_rows = args.up_rows = half;
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::gated, HFP_CUDA(gated), stream);
}

// What the functions with a norm and a modulation share; `sum` may be absent.
static bool modulated_norm(Check &check, const Tensor &a, const DLTensor *scale,
                           const DLTensor *shift, const DLTensor *weight, const DLTensor *bias,
                           double eps, int64_t norm_type, int64_t cast, hfp::FusedNormArgs *args,
                           Tensor *s) {
  Tensor t, w, b;
  const bool ok = check.modulation("scale", scale, a, s) &&
                  check.modulation("shift", shift, a, &t) && check.same_type(*s, t) &&
                  check.param("weight", weight, a, &w) && check.param("bias", bias, a, &b) &&
                  check.same_type(w, b) && check.number("eps", eps, 0, "finite and >= 0") &&
                  check.in_range("norm_type", norm_type, HFP_NORM_COUNT, "0 (rms) or 1 (layer)") &&
                  check.in_range("cast", cast, HFP_CAST_WEIGHT, "0 (none) or 1 (input)");
  if (!ok) return false;
  args->weight = w.data;
  args->bias = b.data;
  args->scale = s->data;
  args->shift = t.data;
  args->type = a.type;
  args->weight_type = w.present ? w.type : b.present ? b.type : a.type;
  args->modulation_type = s->type;
  args->scale_rows = s->rows;
  args->shift_rows = t.rows;
  args->eps = static_cast<float>(eps);
  args->norm_type = static_cast<int>(norm_type);
  args->cast = HFP_CAST_NONE;
  args->eager = cast == HFP_CAST_INPUT;
  return true;
}

int32_t hfp_norm_modulate(DLTensor *out, const DLTensor *x, const DLTensor *scale,
                          const DLTensor *shift, const DLTensor *weight, const DLTensor *bias,
                          double eps, int64_t norm_type, int64_t cast, void *stream) {
  Check check("hfp_norm_modulate");
  Tensor o, a, s;
  hfp::FusedNormArgs args = {};
  const bool ok =
      check.input("x", x, &a) &&
      modulated_norm(check, a, scale, shift, weight, bias, eps, norm_type, cast, &args, &s) &&
      check.output(out, a, 1, args.eager ? promote(a.type, s.type) : a.type, &o);
  if (!ok) return check.status();
  args.out = o.data;
  args.out_type = o.type;
  args.x = a.data;
  args.x_rows = a.rows;
  return check.run(o, args, &hfp::cpu::fused_norm, HFP_CUDA(fused_norm), stream);
}

int32_t hfp_rms_norm_silu(DLTensor *out, const DLTensor *x, const DLTensor *addend,
                          const DLTensor *weight, const DLTensor *scale, const DLTensor *shift,
                          double eps, void *stream) {
  Check check("hfp_rms_norm_silu");
  Tensor o, a, d, w, s, t;
  bool ok = check.input("x", x, &a) && check.param("addend", addend, a, &d) &&
            check.same_type(a, d) && check.param("weight", weight, a, &w) &&
            check.number("eps", eps, 0, "finite and >= 0");
  if (!ok) return check.status();
  if ((scale == nullptr) != (shift == nullptr)) {
    check.fail("`scale` must be NULL exactly when `shift` is; pass both or neither");
    return check.status();
  }
  ok = (!scale || (check.modulation("scale", scale, a, &s) &&
                   check.modulation("shift", shift, a, &t) && check.same_type(s, t))) &&
       check.output(out, a, 1, a.type, &o);
  if (!ok) return check.status();
  hfp::RmsNormSiluArgs args = {};
  args.out = o.data;
  args.x = a.data;
  args.addend = d.data;
  args.weight = w.data;
  args.scale = s.data;
  args.shift = t.data;
  args.type = a.type;
  args.weight_type = w.present ? w.type : a.type;
  args.modulation_type = s.present ? s.type : a.type;
  args.x_rows = a.rows;
  args.scale_rows = s.rows;
  args.shift_rows = t.rows;
  args.eps = static_cast<float>(eps);
  return check.run(o, args, &hfp::cpu::rms_norm_silu, HFP_CUDA(rms_norm_silu), stream);
}

int32_t hfp_gate_residual(DLTensor *out, const DLTensor *residual, const DLTensor *gate,
                          const DLTensor *x, int64_t cast, void *stream) {
  Check check("hfp_gate_residual");
  Tensor o, r, g, a;
  const bool ok = check.in_range("cast", cast, HFP_CAST_WEIGHT, "0 (none) or 1 (input)") &&
                  check.input("residual", residual, &r) && check.input("x", x, &a) &&
                  check.same_shape(r, a) && check.same_type(r, a) &&
                  check.modulation("gate", gate, r, &g) &&
                  check.output(out, r, 1, cast ? promote(r.type, g.type) : r.type, &o);
  if (!ok) return check.status();
  hfp::PointwiseArgs args = {
      o.data, o.type, {hfp::input_of(r), hfp::input_of(g), hfp::input_of(a)}};
  args.eager = cast == HFP_CAST_INPUT;
  return check.run(o, args, &hfp::cpu::gate_residual, HFP_CUDA(gate_residual), stream);
}

int32_t hfp_gate_residual_norm_modulate(DLTensor *sum, DLTensor *out, const DLTensor *residual,
                                        const DLTensor *gate, const DLTensor *x,
                                        const DLTensor *scale, const DLTensor *shift,
                                        const DLTensor *weight, const DLTensor *bias, double eps,
                                        int64_t norm_type, int64_t cast, void *stream) {
  Check check("hfp_gate_residual_norm_modulate");
  Tensor o, total, r, g, a, s;
  hfp::FusedNormArgs args = {};
  const bool ok =
      check.input("residual", residual, &r) && check.input("x", x, &a) && check.same_shape(r, a) &&
      check.same_type(r, a) && check.modulation("gate", gate, r, &g) &&
      modulated_norm(check, r, scale, shift, weight, bias, eps, norm_type, cast, &args, &s) &&
      check.same_type(s, g);
  if (!ok) return check.status();
  if (args.eager && g.type != r.type) {
    check.fail("`gate` must have the dtype of `residual` (%s) unless `cast` is 0 (none), got %s",
               hfp::name_of(r.type), hfp::name_of(g.type));
    return check.status();
  }
  if (!check.output(sum, r, 1, r.type, &total, "sum") || !check.output(out, r, 1, r.type, &o)) {
    return check.status();
  }
  args.out = o.data;
  args.sum = total.data;
  args.out_type = o.type;
  args.x = a.data;
  args.residual = r.data;
  args.gate = g.data;
  args.x_rows = a.rows;
  args.residual_rows = r.rows;
  args.gate_rows = g.rows;
  return check.run(o, args, &hfp::cpu::fused_norm, HFP_CUDA(fused_norm), stream);
}

// x + residual and its norm; `cast` has been checked.
static int32_t add_norm(Check &check, DLTensor *out, DLTensor *sum, const DLTensor *x,
                        const DLTensor *residual, const DLTensor *weight, const DLTensor *bias,
                        double eps, double weight_offset, int64_t cast, int norm_type,
                        void *stream) {
  Tensor o, total, a, r, w, b;
  const bool ok = check.input("x", x, &a) && check.input("residual", residual, &r) &&
                  check.same_shape(a, r) && check.same_type(a, r) &&
                  check.param("weight", weight, a, &w) && check.param("bias", bias, a, &b) &&
                  check.same_type(w, b) && check.number("eps", eps, 0, "finite and >= 0") &&
                  check.output(out, a, 1, norm_result(cast, a, w), &o) &&
                  check.output(sum, a, 1, a.type, &total, "sum");
  if (!ok) return check.status();
  hfp::FusedNormArgs args = {};
  args.out = o.data;
  args.sum = total.data;
  args.x = a.data;
  args.residual = r.data;
  args.weight = w.data;
  args.bias = b.data;
  args.type = args.modulation_type = a.type;
  args.out_type = o.type;
  args.weight_type = w.present ? w.type : b.present ? b.type : a.type;
  args.x_rows = a.rows;
  args.residual_rows = r.rows;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.norm_type = norm_type;
  args.cast = w.present ? static_cast<int>(cast) : HFP_CAST_NONE;
  return check.run(o, args, &hfp::cpu::fused_norm, HFP_CUDA(fused_norm), stream);
}

int32_t hfp_add_rms_norm(DLTensor *out, DLTensor *sum, const DLTensor *x, const DLTensor *residual,
                         const DLTensor *weight, const DLTensor *bias, double eps,
                         double weight_offset, int64_t cast, void *stream) {
  Check check("hfp_add_rms_norm");
  const bool ok =
      check.number("weight_offset", weight_offset, -FLT_MAX, "finite") &&
      check.in_range("cast", cast, HFP_CAST_COUNT, "0 (none), 1 (input) or 2 (weight)");
  if (!ok) return check.status();
  if (cast != HFP_CAST_NONE && weight_offset != 0) {
    check.fail("`weight_offset` must be 0 unless `cast` is 0 (none), got %g with `cast` %lld",
               weight_offset, static_cast<long long>(cast));
    return check.status();
  }
  return add_norm(check, out, sum, x, residual, weight, bias, eps, weight_offset, cast,
                  HFP_NORM_RMS, stream);
}

int32_t hfp_add_layer_norm(DLTensor *out, DLTensor *sum, const DLTensor *x,
                           const DLTensor *residual, const DLTensor *weight, const DLTensor *bias,
                           double eps, void *stream) {
  Check check("hfp_add_layer_norm");
  return add_norm(check, out, sum, x, residual, weight, bias, eps, 0, HFP_CAST_NONE,
                  HFP_NORM_LAYER, stream);
}

int32_t hfp_gated_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *gate,
                           const DLTensor *weight, double eps, int64_t group_size,
                           int64_t norm_before_gate, int64_t cast, int64_t gate_activation,
                           void *stream) {
  Check check("hfp_gated_rms_norm");
  Tensor o, a, g, w;
  const bool ok = check.input("x", x, &a) &&
                  (!gate || (check.input("gate", gate, &g) && check.same_shape(a, g) &&
                             check.same_type(a, g))) &&
                  check.param("weight", weight, a, &w) &&
                  check.in_range("cast", cast, HFP_CAST_WEIGHT, "0 (none) or 1 (input)") &&
                  (cast == HFP_CAST_NONE || check.same_type(a, w)) &&
                  check.number("eps", eps, 0, "finite and >= 0") &&
                  check.in_range("norm_before_gate", norm_before_gate, 2, "0 or 1") &&
                  check.in_range("gate_activation", gate_activation, HFP_GATE_COUNT,
                                 "0 (silu) or 1 (sigmoid)") &&
                  check.output(out, a, 1, a.type, &o);
  if (!ok) return check.status();
  if (group_size < 0 || (group_size > 0 && a.last() % group_size != 0)) {
    check.fail("`group_size` must be 0 or divide the last dimension of `x` (%lld), got %lld",
               static_cast<long long>(a.last()), static_cast<long long>(group_size));
    return check.status();
  }
  if (o.numel == 0) return HFP_OK;  // no group to cut
  const int64_t size = group_size > 0 ? group_size : a.last();
  hfp::GatedNormArgs args = {};
  if (!check.groups(a, size, &args.x_rows)) return check.status();
  args.gate_rows = args.x_rows;
  if (gate && !check.groups(g, size, &args.gate_rows)) return check.status();
  args.out = o.data;
  args.x = a.data;
  args.gate = g.data;
  args.weight = w.data;
  args.type = a.type;
  // Row r has the weights of group r % groups; of one group, with a stride of 0 and no division.
  const int64_t groups = a.last() / size;
  args.weight_rows.rows = args.x_rows.rows;
  args.weight_rows.cols = size;
  args.weight_rows.n2 = groups > 1 ? groups : args.x_rows.rows;
  args.weight_rows.n1 = args.x_rows.rows / args.weight_rows.n2;
  args.weight_rows.s2 = groups > 1 ? size : 0;
  args.eps = static_cast<float>(eps);
  args.norm_before_gate = norm_before_gate != 0;
  args.weight_type = w.present ? w.type : a.type;
  args.once = cast == HFP_CAST_NONE;
  args.sigmoid = gate_activation == HFP_GATE_SIGMOID;
  return check.run(o, args, &hfp::cpu::gated_norm, HFP_CUDA(gated_norm), stream);
}

}  // extern "C"
