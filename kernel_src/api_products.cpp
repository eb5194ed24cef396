// api_products.cpp: matrix products and attention: validate (check.h), fill in a backend's arguments
// (products.h), dispatch on the device.
#include "products.h"

#include "check.h"

using hfp::AttentionArgs;
using hfp::Check;
using hfp::DType;
using hfp::GemmArgs;
using hfp::Tensor;

namespace {

// In elements; of a size of 1 it does not matter.
int64_t stride_of(const DLTensor &t, int32_t dimension) {
  if (t.strides) return t.strides[dimension];
  int64_t stride = 1;
  for (int32_t i = t.ndim - 1; i > dimension; --i) stride *= t.shape[i];
  return stride;
}

bool flag(Check &check, const char *name, int64_t value) {
  return check.in_range(name, value, 2, "0 or 1");
}

bool dimensions(Check &check, const Tensor &t, int32_t ndim, const char *shape) {
  if (t.raw->ndim == ndim) return true;
  return check.fail("`%s` must have %d dimensions, %s, got shape %s", t.name, ndim, shape,
                    hfp::ShapeText(*t.raw).text);
}

// Whether no element of a view is another one: each dimension, from the smallest stride up, steps over
// all that lies inside it. True of all that slicing, splitting and permuting make.
bool rows_apart(const DLTensor &t) {
  int64_t sizes[4], steps[4];
  int32_t count = 0;
  for (int32_t i = 0; i + 1 < t.ndim; ++i) {
    if (t.shape[i] == 1) continue;
    const int64_t given = stride_of(t, i), step = given < 0 ? -given : given;
    int32_t at = count++;
    for (; at > 0 && steps[at - 1] > step; --at) steps[at] = steps[at - 1], sizes[at] = sizes[at - 1];
    steps[at] = step;
    sizes[at] = t.shape[i];
  }
  int64_t reach = t.shape[t.ndim - 1];
  for (int32_t i = 0; i < count; ++i) {
    if (steps[i] < reach) return false;
    reach += (sizes[i] - 1) * steps[i];
  }
  return true;
}

// A result of that shape, whose rows may be apart but not lie on each other.
bool strided_result(Check &check, const char *name, DLTensor *raw, const int64_t *shape, int32_t ndim,
                    DType type, Tensor *t) {
  if (!check.parsed(name, raw, t)) return false;
  if (t->type != type) {
    return check.fail("`%s` must be %s, got %s", name, hfp::name_of(type), hfp::name_of(t->type));
  }
  bool same = raw->ndim == ndim;
  for (int32_t i = 0; same && i < ndim; ++i) same = raw->shape[i] == shape[i];
  if (!same) {
    DLTensor expected = *raw;
    expected.ndim = ndim;
    expected.shape = const_cast<int64_t *>(shape);
    return check.fail("`%s` must have shape %s, got %s", name, hfp::ShapeText(expected).text,
                      hfp::ShapeText(*raw).text);
  }
  if (t->numel > 0 && !rows_apart(*raw)) {
    return check.fail("`%s` must have rows that share no memory, got strides that lay them over each"
                      " other; copy it", name);
  }
  return check.writes(*t);
}

// The two sizes of a matrix, and its strides; broadcast: a batch of 1 serves all.
bool matrix(Check &check, const Tensor &t, int32_t first, int64_t rows, int64_t cols, int64_t batch,
            const char *shape, int64_t *row, int64_t *step) {
  const DLTensor &raw = *t.raw;
  const bool fits = raw.shape[first] == rows && raw.shape[first + 1] == cols &&
                    (first == 0 || raw.shape[0] == batch || raw.shape[0] == 1);
  if (!fits) {
    const int64_t wanted[3] = {batch, rows, cols};
    DLTensor expected = raw;
    expected.shape = const_cast<int64_t *>(wanted + (1 - first));
    return check.fail("`%s` must have shape %s = %s, got %s", t.name, shape,
                      hfp::ShapeText(expected).text, hfp::ShapeText(raw).text);
  }
  // Of one row the stride is never used; a BLAS wants a sensible one.
  *row = rows > 1 ? stride_of(raw, first) : cols;
  *step = first == 0 || raw.shape[0] == 1 ? 0 : stride_of(raw, 0);
  return true;
}

// What cuBLASLt takes: rows that lie one after the other. Of expanded rows of a single product's `a` and
// `c` gemm.cu makes products of their own.
bool rows_for_cublas(Check &check, const GemmArgs &g, const Tensor &out, const Tensor &a, const Tensor &b,
                     const Tensor &c) {
  if (g.k == 0) return true;
  const bool single = g.batch == 1 && !g.a_transposed && (g.a_row < g.k || (g.c && g.c_row < g.n));
  const auto apart = [&](const Tensor &t, int64_t row, int64_t columns) {
    if (row >= columns) return true;
    return check.fail("`%s` must have rows that lie one after the other on CUDA, got a stride of %lld for"
                      " %lld columns; copy it", t.name, static_cast<long long>(row),
                      static_cast<long long>(columns));
  };
  const int64_t batch = single ? g.m : g.batch;
  if (batch > INT32_MAX) {
    return check.fail("`a` must have fewer than 2^31 batches, or expanded rows, on CUDA, got %lld",
                      static_cast<long long>(batch));
  }
  return apart(b, g.b_row, g.b_transposed ? g.k : g.n) &&
         (single || (apart(a, g.a_row, g.a_transposed ? g.m : g.k) && apart(out, g.out_row, g.n) &&
                     (!g.c || apart(c, g.c_row, g.n))));
}

int32_t gemm(const char *function, int32_t first, DLTensor *out, DLTensor *workspace,
             const DLTensor *a, const DLTensor *b, const DLTensor *c, double alpha, double beta,
             int64_t transpose_a, int64_t transpose_b, void *stream) {
  Check check(function);
  Tensor o, w, left, right, added;
  bool ok = check.input("a", a, &left, nullptr) && check.input("b", b, &right, nullptr) &&
            check.same_type(left, right) && flag(check, "transpose_a", transpose_a) &&
            flag(check, "transpose_b", transpose_b) &&
            check.number("alpha", alpha, -FLT_MAX, "finite") &&
            check.number("beta", beta, -FLT_MAX, "finite") &&
            dimensions(check, left, first + 2, first ? "[batch, rows, columns]" : "[rows, columns]") &&
            dimensions(check, right, first + 2, first ? "[batch, rows, columns]" : "[rows, columns]");
  if (ok && c) {
    ok = check.input("c", c, &added, "out") && check.same_type(left, added) &&
         dimensions(check, added, first + 2, first ? "[batch, rows, columns]" : "[rows, columns]");
  }
  if (!ok) return check.status();
  GemmArgs args = {};
  args.batch = 1;
  if (first) {
    args.batch = a->shape[0] != 1 ? a->shape[0] : b->shape[0];
    if (c && args.batch == 1) args.batch = c->shape[0];
  }
  args.m = a->shape[first + (transpose_a ? 1 : 0)];
  args.k = a->shape[first + (transpose_a ? 0 : 1)];
  args.n = b->shape[first + (transpose_b ? 0 : 1)];
  const int64_t shape[3] = {args.batch, args.m, args.n};
  ok = matrix(check, left, first, transpose_a ? args.k : args.m, transpose_a ? args.m : args.k,
              args.batch, first ? "[B, M, K], or [B, K, M] transposed," : "[M, K]", &args.a_row,
              &args.a_batch) &&
       matrix(check, right, first, transpose_b ? args.n : args.k, transpose_b ? args.k : args.n,
              args.batch, transpose_b ? first ? "[B, N, K]" : "[N, K]" : first ? "[B, K, N]" : "[K, N]",
              &args.b_row, &args.b_batch) &&
       (!c || matrix(check, added, first, args.m, args.n, args.batch, first ? "[B, M, N]" : "[M, N]",
                     &args.c_row, &args.c_batch)) &&
       strided_result(check, "out", out, shape + (1 - first), first + 2, left.type, &o) &&
       check.parsed("workspace", workspace, &w);
  if (!ok) return check.status();
  const bool on_cpu = a->device.device_type == kDLCPU;
  const int64_t needed = hfp_gemm_workspace(args.batch, args.m, args.n, args.k, kDLCPU);
  if (w.type != DType::F32 || workspace->ndim != 1 || !w.contiguous ||
      (on_cpu && w.numel < needed)) {
    check.fail("`workspace` must be contiguous float32 of one dimension%s%lld elements, got %s of "
               "shape %s", on_cpu ? " and at least " : "; on the CPU at least ",
               static_cast<long long>(needed), hfp::name_of(w.type),
               hfp::ShapeText(*workspace).text);
    return check.status();
  }
  check.writes(w);
  args.out = o.data;
  args.workspace = reinterpret_cast<float *>(w.data);
  args.workspace_bytes = w.numel * 4;
  args.a = left.data;
  args.b = right.data;
  args.c = beta != 0 ? added.data : nullptr;
  args.type = left.type;
  args.out_row = args.m > 1 ? stride_of(*out, first) : args.n;
  args.out_batch = first && args.batch > 1 ? stride_of(*out, 0) : 0;
  args.a_transposed = transpose_a != 0;
  args.b_transposed = transpose_b != 0;
  args.alpha = static_cast<float>(alpha);
  args.beta = static_cast<float>(beta);
  if (!on_cpu && !rows_for_cublas(check, args, o, left, right, added)) return check.status();
  return check.run(o, args, &hfp::cpu::gemm, HFP_CUDA(gemm), stream);
}

// q, k, v or out.
struct Strides {
  int64_t batch, head, row;
};

Strides strides_of(const DLTensor &t) {
  return {t.shape[0] > 1 ? stride_of(t, 0) : 0, stride_of(t, 1), stride_of(t, 2)};
}

// The memory of a mask of bytes: that there is such memory, and that no result lies in it, where the
// mask has no gaps.
bool bytes_of(Check &check, const DLTensor &t, const int64_t *shape, const int64_t *strides) {
  int64_t low = 0, high = 0, count = 1;
  const uint64_t start = reinterpret_cast<uint64_t>(t.data);
  bool there = t.byte_offset <= static_cast<uint64_t>(INT64_MAX) && start + t.byte_offset >= start;
  for (int i = 0; there && i < 4; ++i) {
    int64_t reach;
    if (shape[i] == 0) return true;
    int64_t &end = strides[i] < 0 ? low : high;
    there = !hfp::mul_overflows(shape[i] - 1, strides[i], &reach) &&
            !hfp::add_overflows(end, reach, &end) &&
            !hfp::mul_overflows(count, strides[i] != 0 ? shape[i] : 1, &count);
  }
  int64_t last;
  if (!there || hfp::add_overflows(high, -(low + 1), &last) || hfp::add_overflows(last, 2, &last)) {
    return check.fail("`mask` must span fewer than 2^63 bytes, got shape %s",
                      hfp::ShapeText(t).text);
  }
  const char *data = static_cast<const char *>(t.data) + t.byte_offset;
  if (last == count) check.reads_bytes("mask", data + low, count);
  return true;
}

// One of [B, H, S, L], broadcast. bool and uint8 are bytes: no other function takes them, so they are
// looked at here.
bool mask_of(Check &check, const DLTensor *raw, const Tensor &like, AttentionArgs *args) {
  if (!raw) return true;
  const int64_t sizes[4] = {args->batch, args->heads, args->queries, args->keys};
  const DLTensor &t = *raw;
  constexpr uint8_t kDLBool = 6;
  args->mask_bits = (t.dtype.code == kDLBool || t.dtype.code == kDLUInt) && t.dtype.bits == 8 &&
                    t.dtype.lanes == 1;
  Tensor m;
  if (args->mask_bits) {
    const DLDevice &device = like.raw->device;
    if (t.device.device_type != device.device_type ||
        (device.device_type == kDLCUDA && t.device.device_id != device.device_id)) {
      return check.fail("`mask` must be on the device of `q`, got %s:%d; move it there",
                        hfp::device_name(t.device.device_type), t.device.device_id);
    }
  }
  bool fits = (t.ndim == 4 || t.ndim == 2) && t.shape;
  int64_t shape[4] = {1, 1, 1, 1}, strides[4] = {0, 0, 0, 0};
  for (int32_t i = 0; fits && i < t.ndim; ++i) {
    const int32_t at = 4 - t.ndim + i;
    shape[at] = t.shape[i];
    fits = t.shape[i] == sizes[at] || t.shape[i] == 1;
    strides[at] = t.shape[i] == 1 ? 0 : stride_of(t, i);
  }
  if (!fits) {
    const bool shown = t.ndim > 0 && t.shape;
    return check.fail("`mask` must have shape [%lld, %lld, %lld, %lld], sizes 1 where it is broadcast,"
                      " or its last two, got %s", static_cast<long long>(sizes[0]),
                      static_cast<long long>(sizes[1]), static_cast<long long>(sizes[2]),
                      static_cast<long long>(sizes[3]), shown ? hfp::ShapeText(t).text : "another");
  }
  DLTensor broadcast = t;
  broadcast.ndim = 4;
  broadcast.shape = shape;
  broadcast.strides = strides;
  if (args->mask_bits) {
    if (!t.data && args->queries > 0 && args->keys > 0) {
      return check.fail("`mask` must point to data, got data == NULL");
    }
    if (!bytes_of(check, t, shape, strides)) return false;
    args->mask = static_cast<const char *>(t.data) + t.byte_offset;
    if (t.data && !check.pointer("mask", args->mask, t.device)) return false;
  } else {
    if (shape[3] == 1) strides[3] = 1;  // of a size of 1 it does not matter
    if (!check.input("mask", &broadcast, &m, nullptr)) return false;
    args->mask = m.data;
    args->mask_type = m.type;
    if (shape[3] == 1) strides[3] = 0;
  }
  args->mask_batch = strides[0];
  args->mask_head = strides[1];
  args->mask_row = strides[2];
  args->mask_col = strides[3];
  return true;
}

bool same_size(Check &check, const Tensor &t, int32_t dimension, const char *what, int64_t size) {
  if (t.raw->shape[dimension] == size) return true;
  return check.fail("`%s` must have %lld %s, got shape %s", t.name, static_cast<long long>(size), what,
                    hfp::ShapeText(*t.raw).text);
}

bool head_dim(Check &check, const Tensor &t) {
  const int64_t size = t.raw->shape[3];
  if (size >= 1 && size <= HFP_MAX_HEAD_DIM) return true;
  return check.fail("`%s` must have heads of 1 to %d columns, got shape %s", t.name, HFP_MAX_HEAD_DIM,
                    hfp::ShapeText(*t.raw).text);
}

}  // namespace

extern "C" {

int64_t hfp_gemm_backend(int64_t device_type) {
  if (device_type == kDLCPU) return hfp::cpu::gemm_backend();
#if defined(CUDA_KERNEL)
  if (device_type == kDLCUDA) return hfp::cuda::gemm_backend();
#endif
  return HFP_GEMM_NONE;
}

int64_t hfp_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k, int64_t device_type) {
  if (batch <= 0 || m <= 0 || n <= 0) return 0;
  if (device_type == kDLCUDA) return hfp::kCudaGemmWorkspace / 4;
  const int64_t depth = k > 0 ? k : 1;
  return hfp::gemm_group(batch, n, k) * hfp::gemm_columns(n, k) * depth;
}

int32_t hfp_gemm(DLTensor *out, DLTensor *workspace, const DLTensor *a, const DLTensor *b,
                 const DLTensor *c, double alpha, double beta, int64_t transpose_a,
                 int64_t transpose_b, void *stream) {
  return gemm("hfp_gemm", 0, out, workspace, a, b, c, alpha, beta, transpose_a, transpose_b, stream);
}

int32_t hfp_gemm_batched(DLTensor *out, DLTensor *workspace, const DLTensor *a, const DLTensor *b,
                         const DLTensor *c, double alpha, double beta, int64_t transpose_a,
                         int64_t transpose_b, void *stream) {
  return gemm("hfp_gemm_batched", 1, out, workspace, a, b, c, alpha, beta, transpose_a, transpose_b,
              stream);
}

int32_t hfp_attention(DLTensor *out, DLTensor *lse, const DLTensor *q, const DLTensor *k,
                      const DLTensor *v, const DLTensor *mask, const DLTensor *q_starts,
                      const DLTensor *k_starts, const DLTensor *k_lengths, double scale,
                      int64_t causal, int64_t most_queries, int64_t window, double softcap,
                      void *stream) {
  Check check("hfp_attention");
  Tensor o, l, query, key, value, starts, key_starts, lengths;
  bool ok = check.input("q", q, &query, nullptr) && check.input("k", k, &key, nullptr) &&
            check.input("v", v, &value, nullptr) && check.same_type(query, key) &&
            check.same_type(query, value) && dimensions(check, query, 4, "[B, H, S, D]") &&
            dimensions(check, key, 4, "[B, G, L, D]") && dimensions(check, value, 4, "[B, G, L, E]") &&
            check.number("scale", scale, -FLT_MAX, "finite") && flag(check, "causal", causal) &&
            check.number("softcap", softcap, 0.0, ">= 0 (0: none)") && head_dim(check, query) && head_dim(check, value) &&
            same_size(check, key, 3, "columns, as `q`,", q->shape[3]) &&
            same_size(check, key, 0, "samples, as `q`,", q->shape[0]) &&
            same_size(check, value, 0, "samples, as `q`,", q->shape[0]) &&
            same_size(check, value, 1, "heads, as `k`,", k->shape[1]) &&
            same_size(check, value, 2, "keys, as `k`,", k->shape[2]);
  if (!ok) return check.status();
  AttentionArgs args = {};
  args.batch = q->shape[0];
  args.heads = q->shape[1];
  args.kv_heads = k->shape[1];
  args.queries = q->shape[2];
  args.keys = k->shape[2];
  args.dim = q->shape[3];
  args.value_dim = v->shape[3];
  args.most_queries = args.queries;
  if (args.kv_heads < 1 ? args.heads > 0 : args.heads % args.kv_heads != 0) {
    check.fail("`k` must have a number of heads that divides the %lld of `q`, got shape %s",
               static_cast<long long>(args.heads), hfp::ShapeText(*k).text);
    return check.status();
  }
  if (args.keys > INT32_MAX || args.queries > INT32_MAX) {
    check.fail("`q` and `k` must have fewer than 2^31 positions, got shapes %s and %s",
               hfp::ShapeText(*q).text, hfp::ShapeText(*k).text);
    return check.status();
  }
  if (!q_starts != !k_starts) {
    check.fail("`q_starts` and `k_starts` must be given together, got `%s` alone",
               q_starts ? "q_starts" : "k_starts");
    return check.status();
  }
  if (most_queries < 0 || (most_queries != 0 && !q_starts)) {
    check.fail("`most_queries` must be >= 0, and 0 without `q_starts`, got %lld",
               static_cast<long long>(most_queries));
    return check.status();
  }
  if (window < 0 || (window != 0 && !causal)) {
    check.fail("`window` must be >= 0, and 0 without `causal`, got %lld",
               static_cast<long long>(window));
    return check.status();
  }
  int64_t samples = args.batch;
  if (q_starts) {
    if (mask) {
      check.fail("`mask` must be NULL with `q_starts`: samples of different lengths share no mask");
      return check.status();
    }
    if (args.batch != 1) {
      check.fail("`q` must have a first dimension of 1 with `q_starts`, got shape %s",
                 hfp::ShapeText(*q).text);
      return check.status();
    }
    if (q_starts->ndim != 1 || !q_starts->shape || q_starts->shape[0] < 1) {
      check.fail("`q_starts` must have shape [N + 1], got %s",
                 q_starts->ndim > 0 && q_starts->shape ? hfp::ShapeText(*q_starts).text : "another");
      return check.status();
    }
    ok = check.indices("q_starts", q_starts, 1, q_starts->shape, &starts) &&
         check.indices("k_starts", k_starts, 1, q_starts->shape, &key_starts);
    if (!ok) return check.status();
    samples = q_starts->shape[0] - 1;
    if (most_queries > 0 && most_queries < args.most_queries) args.most_queries = most_queries;
  }
  const int64_t shape[4] = {args.batch, args.heads, args.queries, args.value_dim};
  ok = (!k_lengths || check.indices("k_lengths", k_lengths, 1, &samples, &lengths)) &&
       mask_of(check, mask, query, &args) &&
       strided_result(check, "out", out, shape, 4, query.type, &o) &&
       check.shaped("lse", lse, 3, shape, DType::F32, &l);
  if (!ok) return check.status();
  args.batch = samples;
  if (samples == 0) return HFP_OK;
  const Strides of_q = strides_of(*q), of_k = strides_of(*k), of_v = strides_of(*v);
  const Strides of_out = strides_of(*out);
  args.out = o.data;
  args.lse = reinterpret_cast<float *>(l.data);
  args.q = query.data;
  args.k = key.data;
  args.v = value.data;
  args.type = query.type;
  args.q_batch = of_q.batch, args.q_head = of_q.head, args.q_row = of_q.row;
  args.k_batch = of_k.batch, args.k_head = of_k.head, args.k_row = of_k.row;
  args.v_batch = of_v.batch, args.v_head = of_v.head, args.v_row = of_v.row;
  args.out_batch = of_out.batch, args.out_head = of_out.head, args.out_row = of_out.row;
  args.q_starts = reinterpret_cast<const int64_t *>(starts.data);
  args.k_starts = reinterpret_cast<const int64_t *>(key_starts.data);
  args.k_lengths = reinterpret_cast<const int64_t *>(lengths.data);
  args.scale = static_cast<float>(scale);
  args.causal = causal != 0;
  args.window = window < args.keys ? window : 0;
  args.softcap = static_cast<float>(softcap);
  return check.run(o, args, &hfp::cpu::attention, HFP_CUDA(attention), stream);
}

}  // extern "C"
