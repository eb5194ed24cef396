// api_rope.cpp: hfp_rope, hfp_rope_qk and hfp_qk_norm_rope: validate, fill in RopeArgs, dispatch.
#include <initializer_list>

#include "check.h"

HFP_BACKENDS(rope, RopeArgs)  // without norm, and on the CPU with it

namespace hfp::cuda {
int32_t qk_norm_rope(const RopeArgs &, int device, void *stream);  // with norm
}

using hfp::Check;
using hfp::DType;
using hfp::RopeArgs;
using hfp::ShapeText;
using hfp::Tensor;

namespace {

// heads * dim of one token, so that the kernels index a row with 32 bits.
constexpr int64_t kMaxRow = int64_t{1} << 30;

constexpr const char *kBool = "0 or 1";

// The integer arguments that the three functions share.
struct Options {
  int64_t seq_dim, interleaved, rotary_dim, round_products;
};

int64_t stride(const DLTensor &t, int32_t dim) {
  if (t.shape[dim] <= 1) return 0;  // never walked, and may be anything
  if (t.strides) return t.strides[dim];
  int64_t step = 1;
  for (int32_t i = t.ndim - 1; i > dim; --i) step *= t.shape[i];
  return step;
}

// Which dimensions of q or x are batch, sequence and heads; -1: there is none.
struct Dims {
  int32_t batch = -1, seq = -1, head = -1;

  Dims(int32_t ndim, int64_t seq_dim) : seq(static_cast<int32_t>(seq_dim)) {
    if (ndim == 4) batch = 0, head = 3 - seq;
    if (ndim == 3) (seq == 1 ? batch : head) = 1 - seq;
  }
};

int64_t size_at(const DLTensor &t, int32_t dim) { return dim < 0 ? 1 : t.shape[dim]; }
int64_t stride_at(const DLTensor &t, int32_t dim) { return dim < 0 ? 0 : stride(t, dim); }

bool same_but(const DLTensor &a, const DLTensor &b, int32_t skipped) {
  if (a.ndim != b.ndim) return false;
  for (int32_t i = 0; i < a.ndim; ++i)
    if (i != skipped && a.shape[i] != b.shape[i]) return false;
  return true;
}

// The shape, dtype and device of `like`; any strides that do not repeat an element.
bool output(Check &check, const char *name, DLTensor *raw, const Tensor &like, Tensor *out) {
  if (!check.parsed(name, raw, out)) return false;
  if (out->type != like.type) {
    return check.fail("`%s` must be %s, got %s", name, hfp::name_of(like.type),
                      hfp::name_of(out->type));
  }
  if (!same_but(*raw, *like.raw, -1)) {
    return check.fail("`%s` must have shape %s to match `%s`, got %s", name,
                      ShapeText(*like.raw).text, like.name, ShapeText(*raw).text);
  }
  for (int32_t i = 0; out->numel > 0 && i < raw->ndim; ++i) {
    if (raw->shape[i] > 1 && stride(*raw, i) == 0) {
      return check.fail("`%s` must not repeat elements, got stride 0 in dimension %d of shape %s",
                        name, i, ShapeText(*raw).text);
    }
  }
  return check.writes(*out);
}

bool check_options(Check &check, const Options &o) {
  return check.in_range("interleaved", o.interleaved, 2, kBool) &&
         check.in_range("round_products", o.round_products, 2, kBool);
}

bool check_dims(Check &check, const Tensor &x, int64_t seq_dim) {
  const int32_t ndim = x.raw->ndim;
  if (ndim < 2 || ndim > 4) {
    return check.fail("`%s` must have 2 to 4 dimensions, batch, sequence, heads and the head's,"
                      " got %d", x.name, ndim);
  }
  const int64_t low = ndim == 4 ? 1 : 0;
  if (seq_dim < low || seq_dim >= ndim - 1) {
    return check.fail("`seq_dim` must be %lld to %d for a `%s` of %d dimensions, got %lld",
                      static_cast<long long>(low), ndim - 2, x.name, ndim,
                      static_cast<long long>(seq_dim));
  }
  const int64_t heads = size_at(*x.raw, Dims(ndim, seq_dim).head);
  int64_t row;
  if (x.numel > 0 && (hfp::mul_overflows(heads, x.last(), &row) || row > kMaxRow)) {
    return check.fail("`%s` must have at most 2^30 elements per token, got shape %s", x.name,
                      ShapeText(*x.raw).text);
  }
  return true;
}

// rotary_dim; 0 on failure.
int64_t rotary(Check &check, const Tensor &x, int64_t rotary_dim) {
  const int64_t dim = x.last(), r = rotary_dim == 0 ? dim : rotary_dim;
  if (r > 0 && r <= dim && r % 2 == 0) return r;
  if (rotary_dim == 0) {
    check.fail("`%s` must have an even last dimension, got %lld; or pass `rotary_dim`", x.name,
               static_cast<long long>(dim));
  } else {
    check.fail("`rotary_dim` must be even and 2 to %lld, the last dimension of `%s`, or 0 for all"
               " of it, got %lld",
               static_cast<long long>(dim), x.name, static_cast<long long>(rotary_dim));
  }
  return 0;
}

// Whether `table` fits `x`; fills in its strides over x's batch, sequence and heads.
bool table_strides(Check &check, const Tensor &table, const Tensor &x, const Dims &dims,
                   int64_t r, hfp::RopeTable *to) {
  const DLTensor &t = *table.raw, &like = *x.raw;
  const int64_t width = t.shape[t.ndim - 1];
  bool fits = width == r || 2 * width == r;
  Dims own = dims;
  if (t.ndim == like.ndim) {
    for (int32_t i = 0; i + 1 < t.ndim; ++i) {
      fits = fits && (t.shape[i] == like.shape[i] || t.shape[i] == 1);
    }
  } else if (t.ndim == 3 && like.ndim == 4) {
    own.batch = 0, own.seq = 1, own.head = -1;
    fits = fits && (t.shape[0] == like.shape[0] || t.shape[0] == 1) &&
           t.shape[1] == like.shape[dims.seq];
  } else {
    own.batch = -1, own.seq = 0, own.head = -1;
    fits = fits && t.ndim == 2 && t.shape[0] == like.shape[dims.seq];
  }
  if (!fits) {
    return check.fail(
        "`%s` must have the shape of `%s` %s or size 1 in its leading dimensions, or shape"
        " [batch or 1, sequence, *] or [sequence, *], with %lld or %lld columns, got %s",
        table.name, x.name, ShapeText(like).text, static_cast<long long>(r / 2),
        static_cast<long long>(r), ShapeText(t).text);
  }
  to->data = table.data;
  to->batch = stride_at(t, own.batch);
  to->seq = stride_at(t, own.seq);
  to->head = stride_at(t, own.head);
  return true;
}

bool check_table_types(Check &check, const Tensor &cos, const Tensor &sin, const Tensor &x) {
  if (cos.type != DType::F32 && cos.type != x.type) {
    return check.fail("`cos` must be float32 or have the dtype of `%s` (%s), got %s; convert it",
                      x.name, hfp::name_of(x.type), hfp::name_of(cos.type));
  }
  return check.same_shape(cos, sin) && check.same_type(cos, sin);
}

void fill_tensor(hfp::RopeTensor *to, const Tensor &x, const Tensor &out, const Tensor &weight,
                 const Dims &dims) {
  to->x = x.data;
  to->out = out.data;
  to->weight = weight.data;
  to->x_batch = stride_at(*x.raw, dims.batch);
  to->x_seq = stride_at(*x.raw, dims.seq);
  to->x_head = stride_at(*x.raw, dims.head);
  to->out_batch = stride_at(*out.raw, dims.batch);
  to->out_seq = stride_at(*out.raw, dims.seq);
  to->out_head = stride_at(*out.raw, dims.head);
  to->heads = size_at(*x.raw, dims.head);
}

// Batch and sequence become one dimension where every stride allows; so may a sequence of 1.
void merge_tokens(RopeArgs *a) {
  RopeArgs &r = *a;
  if (r.seq == 1) {
    r.seq = r.batch;
    r.batch = 1;
    for (hfp::RopeTensor *t : {&r.q, &r.k}) t->x_seq = t->x_batch, t->out_seq = t->out_batch;
    for (hfp::RopeTable *t : {&r.cos, &r.sin}) t->seq = t->batch;
  }
  if (r.batch == 1) return;
  bool even = true;
  for (const hfp::RopeTensor *t : {&r.q, &r.k}) {
    even = even && t->x_batch == r.seq * t->x_seq && t->out_batch == r.seq * t->out_seq;
  }
  for (const hfp::RopeTable *t : {&r.cos, &r.sin}) even = even && t->batch == r.seq * t->seq;
  if (even) r.seq *= r.batch, r.batch = 1;
}

// cos and sin; or, without sin, one complex table, given as its real view [..., R / 2, 2], which is
// read as a table of R columns. `shape` and `strides` are room for that.
struct Tables {
  Tensor cos, sin;
  bool paired = false;
  DLTensor merged;
  int64_t shape[8], strides[8];

  bool parse(Check &check, const DLTensor *c, const DLTensor *s, int64_t interleaved) {
    if (s) {
      return check.input("cos", c, &cos, nullptr) && check.input("sin", s, &sin, nullptr);
    }
    if (!check.input("cos", c, &sin, nullptr)) return false;  // finds what is wrong with it
    const int32_t n = c->ndim;
    const bool pairs = n >= 3 && n <= 5 && c->shape[n - 1] == 2 &&
                       (!c->strides || c->shape[n - 2] <= 1 || c->strides[n - 2] == 2);
    if (!pairs) {
      return check.fail("`cos` must be the real view [..., %s, 2] of a complex table where there is"
                        " no `sin`, its last two dimensions contiguous, got shape %s; or pass"
                        " `sin`",
                        "rotary_dim / 2", ShapeText(*c).text);
    }
    if (!interleaved) {
      return check.fail("`interleaved` must be 1 for a complex table, got 0; pass its real and"
                        " imaginary parts as `cos` and `sin`");
    }
    merged = *c;
    merged.ndim = n - 1;
    for (int32_t i = 0; i + 1 < n; ++i) {
      shape[i] = c->shape[i];
      strides[i] = c->strides ? c->strides[i] : 0;
    }
    shape[n - 2] *= 2;
    strides[n - 2] = 1;
    merged.shape = shape;
    merged.strides = c->strides ? strides : nullptr;
    paired = true;
    if (!check.input("cos", &merged, &cos, nullptr)) return false;
    sin = cos;
    return true;
  }
};

// All arguments but the norm's; the tensors of k are absent for hfp_rope.
bool fill(Check &check, RopeArgs *args, const Tensor &q, const Tensor &k, const Tensor &q_out,
          const Tensor &k_out, const Tensor &q_weight, const Tensor &k_weight,
          const Tables &tables, const Options &o) {
  const Tensor &cos = tables.cos, &sin = tables.sin;
  const Dims dims(q.raw->ndim, o.seq_dim);
  args->type = q.type;
  args->batch = size_at(*q.raw, dims.batch);
  args->seq = q.raw->shape[dims.seq];
  args->dim = q.last();
  fill_tensor(&args->q, q, q_out, q_weight, dims);
  if (k.present) fill_tensor(&args->k, k, k_out, k_weight, dims);
  if (cos.present) {
    const int64_t width = cos.last();
    const bool empty = q.numel == 0 && !(k.present && k.numel > 0);
    if (!empty) args->rotary = rotary(check, q, o.rotary_dim);
    if (!empty && args->rotary == 0) return false;
    if (!empty && tables.paired && width != args->rotary) {
      return check.fail("`cos`, a complex table, must have %lld columns, got %lld",
                        static_cast<long long>(args->rotary / 2),
                        static_cast<long long>(width / 2));
    }
    if (!empty && !(table_strides(check, cos, q, dims, args->rotary, &args->cos) &&
                    table_strides(check, sin, q, dims, args->rotary, &args->sin) &&
                    (!k.present || table_strides(check, cos, k, dims, args->rotary, &args->cos)))) {
      return false;
    }
    args->table_type = cos.type;
    args->interleaved = o.interleaved != 0;
    args->wide = args->interleaved && width == args->rotary;
    args->paired = tables.paired;
    args->round_products = o.round_products != 0 && cos.type == q.type && q.type != DType::F32;
  }
  if (q.numel > 0 || (k.present && k.numel > 0)) merge_tokens(args);
  return true;
}

bool check_qk(Check &check, const Tensor &q, const Tensor &k, int64_t seq_dim) {
  if (!check.same_type(q, k)) return false;
  const int32_t head = Dims(q.raw->ndim, seq_dim).head;
  if (same_but(*q.raw, *k.raw, head)) return true;
  return check.fail("`k` must have the shape of `q` %s except for the number of heads, got %s",
                    ShapeText(*q.raw).text, ShapeText(*k.raw).text);
}

// A norm weight of `size` elements, or NULL.
bool weight(Check &check, const char *name, const DLTensor *raw, const Tensor &like, int64_t size,
            Tensor *tensor) {
  if (!raw) return true;
  if (!check.input(name, raw, tensor, nullptr)) return false;
  if (raw->ndim == 1 && raw->shape[0] == size) return true;
  return check.fail("`%s` must have shape [%lld] to match `%s`, got %s", name,
                    static_cast<long long>(size), like.name, ShapeText(*raw).text);
}

bool both_or_none(Check &check, const Tensor &a, const Tensor &b, const char *a_name,
                  const char *b_name) {
  if (a.present == b.present) return true;
  return check.fail("`%s` must be NULL exactly when `%s` is; pass both or neither",
                    a.present ? b_name : a_name, a.present ? a_name : b_name);
}

const Tensor &filled(const Tensor &a, const Tensor &b) { return a.numel > 0 ? a : b; }

}  // namespace

extern "C" {

int32_t hfp_rope(DLTensor *out, const DLTensor *x, const DLTensor *cos, const DLTensor *sin,
                 int64_t seq_dim, int64_t interleaved, int64_t rotary_dim, int64_t round_products,
                 void *stream) {
  Check check("hfp_rope");
  const Options options = {seq_dim, interleaved, rotary_dim, round_products};
  Tensor a, o, none;
  Tables t;
  RopeArgs args = {};
  const bool ok = check_options(check, options) && check.input("x", x, &a) &&
                  check_dims(check, a, seq_dim) && t.parse(check, cos, sin, interleaved) &&
                  check_table_types(check, t.cos, t.sin, a) && output(check, "out", out, a, &o) &&
                  fill(check, &args, a, none, o, none, none, none, t, options);
  if (!ok) return check.status();
  return check.run(o, args, &hfp::cpu::rope, HFP_CUDA(rope), stream);
}

int32_t hfp_rope_qk(DLTensor *q_out, DLTensor *k_out, const DLTensor *q, const DLTensor *k,
                    const DLTensor *cos, const DLTensor *sin, int64_t seq_dim,
                    int64_t interleaved, int64_t rotary_dim, int64_t round_products,
                    void *stream) {
  Check check("hfp_rope_qk");
  const Options options = {seq_dim, interleaved, rotary_dim, round_products};
  Tensor a, b, a_out, b_out, none;
  Tables t;
  RopeArgs args = {};
  const bool ok =
      check_options(check, options) && check.input("q", q, &a, "q_out") &&
      check.input("k", k, &b, "k_out") && check_dims(check, a, seq_dim) &&
      check_qk(check, a, b, seq_dim) && check_dims(check, b, seq_dim) &&
      t.parse(check, cos, sin, interleaved) && check_table_types(check, t.cos, t.sin, a) &&
      output(check, "q_out", q_out, a, &a_out) && output(check, "k_out", k_out, b, &b_out) &&
      fill(check, &args, a, b, a_out, b_out, none, none, t, options);
  if (!ok) return check.status();
  return check.run(filled(a_out, b_out), args, &hfp::cpu::rope, HFP_CUDA(rope), stream);
}

int32_t hfp_qk_norm_rope(DLTensor *q_out, DLTensor *k_out, const DLTensor *q, const DLTensor *k,
                         const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos,
                         const DLTensor *sin, double eps, double weight_offset, int64_t cast,
                         int64_t norm_across_heads, int64_t seq_dim, int64_t interleaved,
                         int64_t rotary_dim, int64_t round_products, void *stream) {
  Check check("hfp_qk_norm_rope");
  const Options options = {seq_dim, interleaved, rotary_dim, round_products};
  Tensor a, b, a_out, b_out, a_weight, b_weight;
  Tables t;
  RopeArgs args = {};
  bool ok = check_options(check, options) &&
            check.in_range("norm_across_heads", norm_across_heads, 2, kBool) &&
            check.in_range("cast", cast, HFP_CAST_COUNT, "0 (none), 1 (input) or 2 (weight)") &&
            check.number("eps", eps, 0, "finite and >= 0") &&
            check.number("weight_offset", weight_offset, -FLT_MAX, "finite") &&
            check.input("q", q, &a, "q_out") && check.input("k", k, &b, "k_out") &&
            check_dims(check, a, seq_dim) && check_qk(check, a, b, seq_dim) &&
            check_dims(check, b, seq_dim);
  if (!ok) return check.status();
  if (cast != HFP_CAST_NONE && weight_offset != 0) {
    check.fail("`weight_offset` must be 0 unless `cast` is 0 (none), got %g with `cast` %lld",
               weight_offset, static_cast<long long>(cast));
    return check.status();
  }
  const int32_t head = Dims(a.raw->ndim, seq_dim).head;
  const int64_t q_size = (norm_across_heads ? size_at(*a.raw, head) : 1) * a.last();
  const int64_t k_size = (norm_across_heads ? size_at(*b.raw, head) : 1) * b.last();
  ok = weight(check, "q_weight", q_weight, a, q_size, &a_weight) &&
       weight(check, "k_weight", k_weight, b, k_size, &b_weight) &&
       both_or_none(check, a_weight, b_weight, "q_weight", "k_weight") &&
       check.same_type(a_weight, b_weight) &&
       (cos || !sin || check.fail("`cos` must be a tensor where `sin` is one, got NULL")) &&
       (!cos || (t.parse(check, cos, sin, interleaved) &&
                 check_table_types(check, t.cos, t.sin, a)));
  if (!ok) return check.status();
  if (cast != HFP_CAST_NONE && a_weight.present && a_weight.type != a.type) {
    check.fail("`q_weight` must have the dtype of `q` (%s) unless `cast` is 0 (none), got %s",
               hfp::name_of(a.type), hfp::name_of(a_weight.type));
    return check.status();
  }
  ok = output(check, "q_out", q_out, a, &a_out) && output(check, "k_out", k_out, b, &b_out) &&
       fill(check, &args, a, b, a_out, b_out, a_weight, b_weight, t, options);
  if (!ok) return check.status();
  args.weight_type = a_weight.present ? a_weight.type : a.type;
  args.norm = true;
  args.across = norm_across_heads != 0;
  args.round_hat = a_weight.present && cast != HFP_CAST_NONE;
  args.eps = static_cast<float>(eps);
  args.weight_offset = a_weight.present ? static_cast<float>(weight_offset) : 0.0f;
  return check.run(filled(a_out, b_out), args, &hfp::cpu::rope, HFP_CUDA(qk_norm_rope), stream);
}

}  // extern "C"
