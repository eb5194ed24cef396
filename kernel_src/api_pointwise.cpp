// api_pointwise.cpp: bias with activation or residual, a * b + c, and gradients: validate (check.h), fill
// in a backend's arguments (kernels.h), dispatch on the device.
#include "check.h"

HFP_BACKENDS(add_activation, PointwiseArgs)
HFP_BACKENDS(broadcast_backward, BroadcastBackwardArgs)
HFP_BACKENDS(pair, PairArgs)
HFP_BACKENDS(add_bias, PointwiseArgs)
HFP_BACKENDS(mul_add, PointwiseArgs)

using hfp::BroadcastBackwardArgs;
using hfp::Check;
using hfp::DType;
using hfp::PointwiseArgs;
using hfp::Tensor;

namespace {

constexpr const char *kApproximations = "0 (erf), 1 (tanh) or 2 (sigmoid)";
constexpr const char *kCasts = "0 (none) or 1 (input)";

// As torch.promote_types for the three supported dtypes.
DType promote(DType a, DType b) { return a == b ? a : DType::F32; }

// Required, unlike Check::param.
bool bias_of(Check &check, const DLTensor *bias, const Tensor &x, Tensor *b) {
  if (!bias) return check.fail("`bias` must be a tensor, got NULL");
  return check.param("bias", bias, x, b) && check.same_type(x, *b);
}

int32_t add_activation(Check &check, DLTensor *out, const DLTensor *x, const DLTensor *bias,
                       int64_t activation, void *stream) {
  Tensor o, a, b;
  const bool ok = check.input("x", x, &a) && bias_of(check, bias, a, &b) &&
                  check.output(out, a, 1, a.type, &o);
  if (!ok) return check.status();
  PointwiseArgs args = {o.data, o.type, {hfp::input_of(a), hfp::column_vector(b, a)}};
  args.activation = static_cast<int>(activation);
  return check.run(o, args, &hfp::cpu::add_activation, HFP_CUDA(add_activation), stream);
}

// Which rows of x share a row of the parameter: its leading sizes, over those of x, are the same,
// then 1, then the same again.
bool layout(Check &check, const Tensor &parameter, const Tensor &x, BroadcastBackwardArgs *args) {
  const DLTensor &p = *parameter.raw, &like = *x.raw;
  const bool per_sample = p.ndim == 2 && like.ndim > 2;
  args->outer = args->reduced = args->inner = 1;
  int phase = 0;  // outer, reduced, inner
  for (int32_t i = 0; i + 1 < like.ndim; ++i) {
    const int64_t size = like.shape[i];
    const int64_t own = per_sample ? (i == 0 ? p.shape[0] : 1) : p.ndim == 1 ? 1 : p.shape[i];
    if (size == 1) continue;
    if (own == size && phase == 1) phase = 2;
    if (own != size && phase == 0) phase = 1;
    if (own != size && phase == 2) {
      return check.fail("`%s` must be broadcast over adjacent dimensions of `%s` %s, got %s; expand"
                        " it", parameter.name, x.name, hfp::ShapeText(like).text,
                        hfp::ShapeText(p).text);
    }
    (phase == 0 ? args->outer : phase == 1 ? args->reduced : args->inner) *= size;
  }
  return true;
}

// `partials`, and the parts of each sum. rows: of x; sums: how many; wanted: results.
bool parts_of(Check &check, DLTensor *partials, int64_t cols, int wanted,
              BroadcastBackwardArgs *args) {
  const int64_t sums = args->outer * args->inner, rows = sums * args->reduced;
  const int64_t shape[2] = {wanted ? hfp_sum_partial_rows(rows, cols, sums) : 0, wanted * cols};
  args->parts = 1;
  if (shape[0] == 0) return true;  // not read
  args->parts = shape[0] / sums;
  Tensor p;
  if (!check.shaped("partials", partials, 2, shape, DType::F32, &p)) return false;
  args->partials = reinterpret_cast<float *>(p.data);
  return true;
}

// Unlike Check::run, also for an empty dx: the sums over no rows are still written.
int32_t run_backward(Check &check, const BroadcastBackwardArgs &args, const Tensor &dx,
                     const Tensor &first, const Tensor &second, void *stream) {
  const Tensor &written = first.numel > 0 ? first : second.numel > 0 ? second : dx;
  return check.run(written, args, &hfp::cpu::broadcast_backward, HFP_CUDA(broadcast_backward),
                   stream);
}

int32_t add_activation_backward(Check &check, DLTensor *dx, DLTensor *dbias, DLTensor *partials,
                                const DLTensor *grad, const DLTensor *x, const DLTensor *bias,
                                int64_t activation, int64_t needs, void *stream) {
  Tensor o, g, a, b, db, none;
  BroadcastBackwardArgs args = {};
  bool ok = check.input("grad", grad, &g) && check.input("x", x, &a) && check.same_shape(a, g) &&
            check.same_type(a, g) && bias_of(check, bias, a, &b);
  if (!ok) return check.status();
  if (needs != 0 && needs != HFP_NEED_BIAS) {
    check.fail("`needs` must be 2 (bias) or 0, got %lld", static_cast<long long>(needs));
    return check.status();
  }
  const int64_t cols = a.last();
  args.reduced = 1;
  for (int32_t i = 0; i + 1 < a.raw->ndim; ++i) args.reduced *= a.raw->shape[i];
  args.outer = args.inner = 1;
  ok = check.shaped("dx", dx, a.raw->ndim, a.raw->shape, a.type, &o) &&
       (needs == 0 || check.shaped("dbias", dbias, 1, &cols, b.type, &db)) &&
       parts_of(check, partials, cols, needs != 0, &args);
  if (!ok) return check.status();
  args.dx = o.data;
  args.second = db.data;
  args.grad = g.data;
  args.x = a.data;
  args.param = b.data;
  args.type = args.grad_type = args.param_type = a.type;
  args.grad_rows = g.rows;
  args.x_rows = a.rows;
  args.param_rows.rows = args.param_rows.n2 = args.reduced;
  args.param_rows.cols = args.x_rows.cols = cols;
  args.activation = static_cast<int>(activation);
  return run_backward(check, args, o, none, db, stream);
}

// A result of a and b, or of a alone where `b` is null and `alone`.
int32_t pair(Check &check, DLTensor *out, const char *name, const DLTensor *a, const DLTensor *b,
             bool alone, double alpha, bool product, void *stream) {
  Tensor o, left, right;
  bool ok = check.input(name, a, &left);
  if (ok && !alone) {
    bool whole = b && b->ndim == a->ndim && b->shape;
    for (int32_t i = 0; whole && i < a->ndim; ++i) whole = b->shape[i] == a->shape[i];
    // What is broadcast is read again after a row is written; what is not may be the result.
    ok = (whole ? check.input("b", b, &right) : check.modulation("b", b, left, &right)) &&
         check.same_type(left, right);
  }
  if (!ok || !check.output(out, left, 1, left.type, &o)) return check.status();
  hfp::PairArgs args = {};
  args.out = o.data;
  args.a = left.data;
  args.b = right.data;
  args.type = left.type;
  args.alpha = static_cast<float>(alpha);
  args.product = product;
  const bool flat = left.contiguous && (alone || right.contiguous);
  args.a_rows = flat ? hfp::one_row(left) : left.rows;
  args.b_rows = flat || alone ? args.a_rows : right.rows;
  return check.run(o, args, &hfp::cpu::pair, HFP_CUDA(pair), stream);
}

}  // namespace

extern "C" {

int32_t hfp_add(DLTensor *out, const DLTensor *a, const DLTensor *b, double alpha, void *stream) {
  Check check("hfp_add");
  if (!check.number("alpha", alpha, -FLT_MAX, "finite")) return check.status();
  return pair(check, out, "a", a, b, false, alpha, false, stream);
}

int32_t hfp_mul(DLTensor *out, const DLTensor *a, const DLTensor *b, void *stream) {
  Check check("hfp_mul");
  return pair(check, out, "a", a, b, false, 1, true, stream);
}

int32_t hfp_scale(DLTensor *out, const DLTensor *x, double factor, void *stream) {
  Check check("hfp_scale");
  if (!check.number("factor", factor, -FLT_MAX, "finite")) return check.status();
  return pair(check, out, "x", x, nullptr, true, factor, true, stream);
}

int64_t hfp_sum_partial_rows(int64_t rows, int64_t cols, int64_t sums) {
  if (sums < 1 || rows <= sums) return 0;
  const int64_t parts = hfp_partial_rows(rows, cols) / sums, most = rows / sums;
  return parts < 2 ? 0 : (parts < most ? parts : most) * sums;
}

int32_t hfp_add_gelu(DLTensor *out, const DLTensor *x, const DLTensor *bias, int64_t approximate,
                     void *stream) {
  Check check("hfp_add_gelu");
  if (!check.in_range("approximate", approximate, HFP_ACT_SILU, kApproximations)) {
    return check.status();
  }
  return add_activation(check, out, x, bias, approximate, stream);
}

int32_t hfp_add_silu(DLTensor *out, const DLTensor *x, const DLTensor *bias, void *stream) {
  Check check("hfp_add_silu");
  return add_activation(check, out, x, bias, HFP_ACT_SILU, stream);
}

int32_t hfp_add_bias(DLTensor *out, const DLTensor *x, const DLTensor *bias,
                     const DLTensor *residual, void *stream) {
  Check check("hfp_add_bias");
  Tensor o, a, b, r;
  const bool ok = check.input("x", x, &a) && bias_of(check, bias, a, &b) &&
                  (!residual || (check.input("residual", residual, &r) &&
                                 check.same_shape(a, r) && check.same_type(a, r))) &&
                  check.output(out, a, 1, a.type, &o);
  if (!ok) return check.status();
  const PointwiseArgs args = {
      o.data, o.type, {hfp::input_of(a), hfp::column_vector(b, a), hfp::input_of(r)}};
  return check.run(o, args, &hfp::cpu::add_bias, HFP_CUDA(add_bias), stream);
}

int32_t hfp_add_gelu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials,
                              const DLTensor *grad, const DLTensor *x, const DLTensor *bias,
                              int64_t approximate, int64_t needs, void *stream) {
  Check check("hfp_add_gelu_backward");
  if (!check.in_range("approximate", approximate, HFP_ACT_SILU, kApproximations)) {
    return check.status();
  }
  return add_activation_backward(check, dx, dbias, partials, grad, x, bias, approximate, needs,
                                 stream);
}

int32_t hfp_add_silu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials,
                              const DLTensor *grad, const DLTensor *x, const DLTensor *bias,
                              int64_t needs, void *stream) {
  Check check("hfp_add_silu_backward");
  return add_activation_backward(check, dx, dbias, partials, grad, x, bias, HFP_ACT_SILU, needs,
                                 stream);
}

int32_t hfp_mul_add(DLTensor *out, const DLTensor *a, const DLTensor *b, const DLTensor *c,
                    int64_t cast, void *stream) {
  Check check("hfp_mul_add");
  Tensor o, x, m, s;
  const bool ok =
      check.in_range("cast", cast, HFP_CAST_WEIGHT, kCasts) && check.input("a", a, &x) &&
      check.modulation("b", b, x, &m) && check.modulation("c", c, x, &s) &&
      check.same_type(m, s) &&
      check.output(out, x, 1, cast == HFP_CAST_INPUT ? promote(x.type, m.type) : x.type, &o);
  if (!ok) return check.status();
  PointwiseArgs args = {o.data, o.type, {hfp::input_of(x), hfp::input_of(m), hfp::input_of(s)}};
  args.eager = cast == HFP_CAST_INPUT;
  return check.run(o, args, &hfp::cpu::mul_add, HFP_CUDA(mul_add), stream);
}

int32_t hfp_mul_add_backward(DLTensor *da, DLTensor *db, DLTensor *dc, DLTensor *partials,
                             const DLTensor *grad, const DLTensor *a, const DLTensor *b,
                             int64_t cast, int64_t needs, void *stream) {
  Check check("hfp_mul_add_backward");
  Tensor o, g, x, m, first, second;
  BroadcastBackwardArgs args = {};
  bool ok = check.in_range("cast", cast, HFP_CAST_WEIGHT, kCasts) &&
            check.in_range("needs", needs, HFP_NEED_COUNT, "a sum of 1 (b) and 2 (c), or 0") &&
            check.input("grad", grad, &g) && check.input("a", a, &x) && check.same_shape(x, g) &&
            check.modulation("b", b, x, &m) && layout(check, m, x, &args);
  if (!ok) return check.status();
  const DType result = cast == HFP_CAST_INPUT ? promote(x.type, m.type) : x.type;
  if (g.type != result) {
    check.fail("`grad` must be %s, the dtype of the forward's result, got %s",
               hfp::name_of(result), hfp::name_of(g.type));
    return check.status();
  }
  const bool need_b = (needs & HFP_NEED_WEIGHT) != 0, need_c = (needs & HFP_NEED_BIAS) != 0;
  ok = check.shaped("da", da, x.raw->ndim, x.raw->shape, x.type, &o) &&
       (!need_b || check.shaped("db", db, b->ndim, b->shape, m.type, &first)) &&
       (!need_c || check.shaped("dc", dc, b->ndim, b->shape, m.type, &second)) &&
       parts_of(check, partials, x.last(), need_b + need_c, &args);
  if (!ok) return check.status();
  args.dx = o.data;
  args.first = first.data;
  args.second = second.data;
  args.grad = g.data;
  args.x = x.data;
  args.param = m.data;
  args.type = x.type;
  args.grad_type = g.type;
  args.param_type = m.type;
  args.grad_rows = g.rows;
  args.x_rows = x.rows;
  args.param_rows = m.rows;
  args.x_rows.cols = x.last();
  args.activation = -1;
  return run_backward(check, args, o, first, second, stream);
}

}  // extern "C"
