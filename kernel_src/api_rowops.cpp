// api_rowops.cpp: the row operations of hfpatch.h: validate (check.h), fill in a backend's
// arguments (kernels.h), dispatch on the device.
#include "check.h"
#include "row_keys.h"

HFP_BACKENDS(softmax, SoftmaxArgs)
HFP_BACKENDS(softmax_backward, SoftmaxArgs)
HFP_BACKENDS(argmax, ArgmaxArgs)
HFP_BACKENDS(topk, TopkArgs)
HFP_BACKENDS(sample, SampleArgs)

using hfp::Check;
using hfp::DType;
using hfp::Tensor;

namespace {

int64_t rows_of(const Tensor &t) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < t.raw->ndim; ++i) rows *= t.raw->shape[i];
  return rows;
}

bool workspace_of(Check &check, const DLTensor *raw, const Tensor &x, Tensor *tensor) {
  const int64_t size = hfp_row_workspace(rows_of(x), x.last());
  return check.indices("workspace", raw, 1, &size, tensor);
}

// The input of an op that answers with column numbers.
bool searched(Check &check, const char *name, const DLTensor *raw, int64_t most, Tensor *x) {
  if (!check.input(name, raw, x)) return false;
  if (raw->ndim < 2) {
    return check.fail("`%s` must have at least 2 dimensions, got %d", name, raw->ndim);
  }
  if (x->last() > most) {
    return check.fail("`%s` must have at most %lld columns, got %lld", name,
                      static_cast<long long>(most), static_cast<long long>(x->last()));
  }
  if (x->last() == 0 && rows_of(*x) > 0) {
    return check.fail("`%s` must have at least one column, got shape %s", name,
                      hfp::ShapeText(*raw).text);
  }
  return true;
}

// An optional tensor of one value per row of x.
bool per_row(Check &check, const char *name, const DLTensor *raw, const Tensor &x, bool integer,
             Tensor *tensor) {
  *tensor = Tensor();
  if (!raw) return true;
  const int32_t ndim = x.raw->ndim - 1;
  return integer ? check.indices(name, raw, ndim, x.raw->shape, tensor)
                 : check.shaped(name, raw, ndim, x.raw->shape, DType::F32, tensor);
}

bool fraction(Check &check, const char *name, double value) {
  if (!check.number(name, value, 0, "between 0 and 1")) return false;
  return value <= 1 || check.fail("`%s` must be between 0 and 1, got %g", name, value);
}

// What the CPU can see of a text, before anything is written.
bool text_of(Check &check, const hfp::Choice &choice) {
  for (int64_t row = 0; row < choice.rows; ++row) {
    if (choice.text[row] < 1 || choice.text[row] == INT64_MAX) {
      return check.fail("`text[%lld]` must be the number of a step, from 1 up, got %lld",
                        static_cast<long long>(row), static_cast<long long>(choice.text[row]));
    }
  }
  const char *const names[] = {"tokens", "`unfinished`", "report"};
  const uint64_t elements[] = {sizeof(int64_t), 1, sizeof(int64_t)};
  const bool needed[] = {true, choice.ends_count >= 0, false};
  for (int64_t i = 0; i < 3; ++i) {
    const uint64_t address = static_cast<uint64_t>(choice.text[choice.rows + i]);
    if ((address == 0 && needed[i]) || address % elements[i] != 0) {
      return check.fail("`text[%lld]` must be the aligned address of the text's %s, got %llu",
                        static_cast<long long>(choice.rows + i), names[i],
                        static_cast<unsigned long long>(address));
    }
  }
  return true;
}

}  // namespace

extern "C" {

int64_t hfp_row_workspace(int64_t rows, int64_t cols) {
  return hfp::split_rows(rows, cols) ? rows * hfp::row_parts(cols) : 0;
}

int32_t hfp_softmax(DLTensor *out, DLTensor *workspace, const DLTensor *x, const DLTensor *mask,
                    double scale, void *stream) {
  Check check("hfp_softmax");
  Tensor o, w, a, m;
  bool ok = check.input("x", x, &a) && check.number("scale", scale, -FLT_MAX, "finite");
  if (ok && mask) ok = check.modulation("mask", mask, a, &m);
  ok = ok && check.shaped("out", out, a.raw->ndim, a.raw->shape, a.type, &o) &&
       workspace_of(check, workspace, a, &w);
  if (!ok) return check.status();
  hfp::SoftmaxArgs args = {};
  args.out = o.data;
  args.workspace = reinterpret_cast<float *>(w.data);
  args.x = a.data;
  args.mask = m.data;
  args.type = a.type;
  args.mask_type = m.present ? m.type : a.type;
  args.x_rows = a.rows;
  args.mask_rows = m.present ? m.rows : a.rows;
  args.scale = static_cast<float>(scale);
  return check.run(o, args, &hfp::cpu::softmax, HFP_CUDA(softmax), stream);
}

int32_t hfp_softmax_backward(DLTensor *dx, DLTensor *workspace, const DLTensor *grad,
                             const DLTensor *y, double scale, void *stream) {
  Check check("hfp_softmax_backward");
  Tensor o, w, g, a;
  const bool ok = check.input("grad", grad, &g) && check.input("y", y, &a) &&
                  check.same_shape(a, g) && check.same_type(a, g) &&
                  check.number("scale", scale, -FLT_MAX, "finite") &&
                  check.shaped("dx", dx, a.raw->ndim, a.raw->shape, a.type, &o) &&
                  workspace_of(check, workspace, a, &w);
  if (!ok) return check.status();
  hfp::SoftmaxArgs args = {};
  args.out = o.data;
  args.workspace = reinterpret_cast<float *>(w.data);
  args.grad = g.data;
  args.y = a.data;
  args.type = a.type;
  args.grad_rows = g.rows;
  args.y_rows = a.rows;
  args.scale = static_cast<float>(scale);
  return check.run(o, args, &hfp::cpu::softmax_backward, HFP_CUDA(softmax_backward), stream);
}

int32_t hfp_argmax(DLTensor *out, DLTensor *workspace, const DLTensor *x, void *stream) {
  Check check("hfp_argmax");
  Tensor o, w, a;
  const bool ok = searched(check, "x", x, INT32_MAX, &a) &&
                  check.indices("out", out, a.raw->ndim - 1, a.raw->shape, &o) &&
                  workspace_of(check, workspace, a, &w);
  if (!ok) return check.status();
  hfp::ArgmaxArgs args = {};
  args.out = reinterpret_cast<int64_t *>(o.data);
  args.workspace = reinterpret_cast<uint64_t *>(w.data);
  args.x = a.data;
  args.type = a.type;
  args.rows = a.rows;
  return check.run(o, args, &hfp::cpu::argmax, HFP_CUDA(argmax), stream);
}

int32_t hfp_decode_choose(DLTensor *ids, DLTensor *counters, DLTensor *text, DLTensor *workspace,
                          const DLTensor *logits, const DLTensor *ends, int64_t pad, void *stream) {
  Check check("hfp_decode_choose");
  Tensor chosen, counted, table, w, a, e;
  if (!searched(check, "logits", logits, INT32_MAX, &a)) return check.status();
  if (logits->ndim != 2) {
    check.fail("`logits` must have 2 dimensions, got %d", logits->ndim);
    return check.status();
  }
  const int64_t rows = rows_of(a), entries = rows + 3;
  const auto count = [](const DLTensor *t) {  // of numbers that there may be any of
    return t != nullptr && t->ndim == 1 && t->shape ? t->shape[0] : 0;
  };
  const int64_t counts = count(counters), tokens = count(ends);
  const bool ok = check.indices_apart("ids", ids, 1, &rows, &chosen) &&
                  check.indices_apart("text", text, 1, &entries, &table) &&
                  workspace_of(check, workspace, a, &w) &&
                  (!counters || check.indices_apart("counters", counters, 1, &counts, &counted)) &&
                  (!ends || check.indices("ends", ends, 1, &tokens, &e));
  if (!ok) return check.status();
  hfp::ArgmaxArgs args = {};
  args.choice.ids = reinterpret_cast<int64_t *>(chosen.data);
  args.choice.counters = reinterpret_cast<int64_t *>(counted.data);
  args.choice.text = reinterpret_cast<int64_t *>(table.data);
  args.choice.ends = reinterpret_cast<const int64_t *>(e.data);
  args.choice.rows = rows;
  args.choice.counters_count = counts;
  args.choice.ends_count = ends ? tokens : -1;
  args.choice.pad = pad;
  args.workspace = reinterpret_cast<uint64_t *>(w.data);
  args.x = a.data;
  args.type = a.type;
  args.rows = a.rows;
  if (rows > 0 && ids->device.device_type == kDLCPU &&
      !(check.disjoint() && text_of(check, args.choice))) {
    return check.status();
  }
  return check.run(chosen, args, &hfp::cpu::argmax, HFP_CUDA(argmax), stream);
}

int32_t hfp_topk(DLTensor *values, DLTensor *indices, const DLTensor *x, int64_t k, void *stream) {
  Check check("hfp_topk");
  Tensor v, i, a;
  if (!searched(check, "x", x, INT32_MAX, &a)) return check.status();
  const int64_t most = a.last() < HFP_MAX_TOPK ? a.last() : HFP_MAX_TOPK;
  if (k < 1 || k > most) {
    check.fail("`k` must be between 1 and %lld, the smaller one of the number of columns and %d, "
               "got %lld",
               static_cast<long long>(most), HFP_MAX_TOPK, static_cast<long long>(k));
    return check.status();
  }
  int64_t shape[hfp::kMaxDims];
  for (int32_t d = 0; d + 1 < a.raw->ndim; ++d) shape[d] = a.raw->shape[d];
  shape[a.raw->ndim - 1] = k;
  const bool ok = check.shaped("values", values, a.raw->ndim, shape, a.type, &v) &&
                  check.indices("indices", indices, a.raw->ndim, shape, &i);
  if (!ok) return check.status();
  hfp::TopkArgs args = {};
  args.values = v.data;
  args.indices = reinterpret_cast<int64_t *>(i.data);
  args.x = a.data;
  args.type = a.type;
  args.rows = a.rows;
  args.k = static_cast<int>(k);
  return check.run(v, args, &hfp::cpu::topk, HFP_CUDA(topk), stream);
}

int32_t hfp_sample(DLTensor *out, const DLTensor *logits, const DLTensor *seeds,
                   const DLTensor *positions, const DLTensor *temperatures, const DLTensor *top_ks,
                   const DLTensor *top_ps, const DLTensor *min_ps, double temperature,
                   int64_t top_k, double top_p, double min_p, void *stream) {
  Check check("hfp_sample");
  Tensor o, a, s, at, t, k, p, m;
  const bool ok =
      searched(check, "logits", logits, hfp::kMaxSampleCols, &a) &&
      check.indices("seeds", seeds, a.raw->ndim - 1, a.raw->shape, &s) &&
      per_row(check, "positions", positions, a, true, &at) &&
      per_row(check, "temperatures", temperatures, a, false, &t) &&
      per_row(check, "top_ks", top_ks, a, true, &k) &&
      per_row(check, "top_ps", top_ps, a, false, &p) &&
      per_row(check, "min_ps", min_ps, a, false, &m) &&
      check.number("temperature", temperature, 0, "finite and >= 0 (0: the greatest logit)") &&
      check.in_range("top_k", top_k, INT64_MAX, ">= 0 (0: all)") &&
      fraction(check, "top_p", top_p) && fraction(check, "min_p", min_p) &&
      check.indices("out", out, a.raw->ndim - 1, a.raw->shape, &o);
  if (!ok) return check.status();
  hfp::SampleArgs args = {};
  args.out = reinterpret_cast<int64_t *>(o.data);
  args.logits = a.data;
  args.type = a.type;
  args.rows = a.rows;
  args.seeds = reinterpret_cast<const int64_t *>(s.data);
  args.positions = reinterpret_cast<const int64_t *>(at.data);
  args.top_ks = reinterpret_cast<const int64_t *>(k.data);
  args.temperatures = reinterpret_cast<const float *>(t.data);
  args.top_ps = reinterpret_cast<const float *>(p.data);
  args.min_ps = reinterpret_cast<const float *>(m.data);
  args.temperature = static_cast<float>(temperature);
  args.top_k = top_k;
  args.top_p = static_cast<float>(top_p);
  args.min_p = static_cast<float>(min_p);
  return check.run(o, args, &hfp::cpu::sample, HFP_CUDA(sample), stream);
}

}  // extern "C"
