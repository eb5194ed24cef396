// decode_step.cpp: a decoding step on the CPU: all layers in one parallel region, a barrier between a
// product and what needs all of it. What is small against a product, norms and residual sums, every
// thread computes for itself.
#if !defined(HFP_SIMD)

#include "decode_team.h"
#define HFP_SIMD_SOURCE "decode_step.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

static int64_t threads_of(const DecodeArgs &args) {
#if defined(_OPENMP)
  if (omp_in_parallel()) return 1;
  return args.threads > 0 ? args.threads : omp_get_max_threads();
#else
  (void)args;
  return 1;
#endif
}

int64_t decode_workspace(const DecodeArgs &args) {
  return DecodeBuffers(args, threads_of(args)).total;
}

int32_t decode_step(const DecodeArgs &args) {
  const auto step = HFP_FOR_SIMD(decode_step_of)(args.type);
  const int64_t threads = threads_of(args);
  const DecodeBuffers buffers(args, threads);
  DecodeTeam team = {};
  const uintptr_t past = reinterpret_cast<uintptr_t>(args.workspace) % 64;
  DecodeThread of_all = {&args, &buffers, &team, args.workspace + (64 - past) % 64 / 4, 0, 1};
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
#pragma omp single
      team.size = omp_get_num_threads();  // may be fewer than asked for
      DecodeThread own = of_all;
      own.index = omp_get_thread_num();
      own.size = team.size;
      step(own);
    }
    return HFP_OK;
  }
#endif
  team.size = 1;
  step(of_all);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"
#include "simd_math.h"
#include "decode_products.h"
#include "decode_rows.h"
#include "decode_attention.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// The residual stream's first value and this thread's share of the rotations' tables.
template <DType T>
static void begin(const DecodeThread &t, float *stream) {
  const DecodeArgs &args = *t.args;
  const int64_t width = args.width;
  for (int64_t m = 0; m < args.queries(); ++m) {
    const char *from = args.embeds ? static_cast<const char *>(args.embeds) + m * width * size_of(T)
                                   : static_cast<const char *>(args.embedding) +
                                         args.ids[m] * width * size_of(T);
    const bool scaled = !args.embeds && args.embedding_scale != 1.0f;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t n = lanes_left(width, i);
      vf v = load_up_to<T>(from + i * size_of(T), n);
      if (scaled) v = round_to<T>(v * args.embedding_scale);
      store_floats(stream + m * width + i, v, n);
    }
  }
  float *table = t.base + t.buffers->tables;
  for (int64_t r = 0; r < args.ropes; ++r) {
    const DecodeRope rope = args.rope(r);
    const Share share(args.queries() * rope.half, t.index, t.size, 1);
    for (int64_t u = share.begin; u < share.end; ++u) {
      const int64_t m = u / rope.half, i = u % rope.half;
      const float angle = static_cast<float>(args.positions[m]) * rope.inv_freq[i];
      float c = __builtin_cosf(angle) * rope.scaling, s = __builtin_sinf(angle) * rope.scaling;
      if (rope.rounded) c = rounded_one(T, c), s = rounded_one(T, s);
      table[m * 2 * rope.half + i] = c;
      table[m * 2 * rope.half + rope.half + i] = s;
    }
    table += args.queries() * 2 * rope.half;
  }
}

// What a product is given: x, or its norm in the thread's own buffer.
template <DType T>
HFP_INLINE const float *normed(const DecodeArgs &args, const DecodeNorm &norm, const float *x,
                               float *to) {
  if (!norm.present()) return x;
  norm_rows<T>(norm, x, to, args.queries(), args.width);
  return to;
}

// gate and up, then the activation of the thread's own columns; then all of down.
template <DType T>
static void mlp(const DecodeThread &t, const DecodeLayer &layer, const float *x) {
  const DecodeArgs &args = *t.args;
  const DecodeBuffers &b = *t.buffers;
  const int64_t rows = args.queries(), width = args.width, inner = layer.up.out;
  float *gate = t.base + b.gate, *up = t.base + b.up;
  const Share columns(inner, t.index, t.size, kShareOfRows);
  const bool gated = layer.gate.weight != nullptr;
  if (gated) {
    product_rows<T>(layer.gate, x, width, rows, 0.0f, gate, inner, columns.begin, columns.end);
  }
  product_rows<T>(layer.up, x, width, rows, 0.0f, up, inner, columns.begin, columns.end);
  for (int64_t m = 0; m < rows; ++m) {
    activate_row<T>(layer.activation, gated ? gate + m * inner : nullptr, up + m * inner,
                    columns.begin, columns.end);
  }
  wait_for_team(*t.team);
  const Share out(width, t.index, t.size, kShareOfRows);
  product_rows<T>(layer.down, up, inner, rows, 0.0f, t.base + b.mlp_out, width, out.begin, out.end);
}

template <DType T>
static void run_layer(const DecodeThread &t, int64_t index, float *stream, float *given) {
  const DecodeArgs &args = *t.args;
  const DecodeBuffers &b = *t.buffers;
  const DecodeLayer layer = args.layer(index);
  const int64_t rows = args.queries(), width = args.width;
  const float *x = normed<T>(args, layer.before_attention, stream, given);
  const DecodeProduct *const products[] = {&layer.q, &layer.k, &layer.v};
  const Share heads(layer.qkv_width(), t.index, t.size, kShareOfRows);
  products_share<T>(products, 3, x, width, rows, layer.clip, t.base + b.qkv, layer.qkv_width(),
                    heads.begin, heads.end);
  wait_for_team(*t.team);
  attend<T>(t, layer, index);
  wait_for_team(*t.team);
  const Share out(width, t.index, t.size, kShareOfRows);
  float *attention = t.base + b.attention_out;
  product_rows<T>(layer.o, t.base + b.attended, layer.q_width(), rows, 0.0f, attention, width,
                  out.begin, out.end);
  const bool half = layer.up.weight == nullptr;
  if (layer.parallel && !half) {
    if (layer.before_mlp.present()) x = normed<T>(args, layer.before_mlp, stream, given);
    mlp<T>(t, layer, x);
    wait_for_team(*t.team);
    add_rows<T>(stream, normed<T>(args, layer.after_attention, attention, given), layer.multiplier,
                rows * width);
  } else {
    wait_for_team(*t.team);
    add_rows<T>(stream, normed<T>(args, layer.after_attention, attention, given), layer.multiplier,
                rows * width);
    if (half) return;
    mlp<T>(t, layer, normed<T>(args, layer.before_mlp, stream, given));
    wait_for_team(*t.team);
  }
  add_rows<T>(stream, normed<T>(args, layer.after_mlp, t.base + b.mlp_out, given), layer.multiplier,
              rows * width);
}

template <DType T>
static void store_logits(const DecodeArgs &args, float *y, int64_t n, char *to) {
  for (int64_t i = 0; i < n; ++i) {
    float v = rounded_one(T, y[i]);
    if (args.logit_scale != 1.0f) v = rounded_one(T, v * args.logit_scale);
    if (args.logit_softcap > 0.0f) {
      v = rounded_one(T, __builtin_tanhf(rounded_one(T, v / args.logit_softcap)));
      v = rounded_one(T, v * args.logit_softcap);
    }
    y[i] = v;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = lanes_left(n, i);
    store_any(args.logits_type, to + i * size_of(args.logits_type), load_floats(y + i, count), count);
  }
}

// The final norm and the head, of all rows or of each row's last token.
template <DType T>
static void finish(const DecodeThread &t, const float *stream, float *given) {
  const DecodeArgs &args = *t.args;
  const int64_t width = args.width, vocab = args.vocab, queries = args.queries();
  const float *x = normed<T>(args, args.final_norm, stream, given);
  if (args.hidden && t.index == 0) {
    for (int64_t i = 0; i < queries * width; i += kLanes) {
      const int64_t n = lanes_left(queries * width, i);
      store_up_to<T>(static_cast<char *>(args.hidden) + i * size_of(T), load_floats(x + i, n), n);
    }
  }
  if (!args.logits) return;
  const int64_t step = args.last_only ? args.tokens : 1, rows = queries / step;
  const float *first = x + (step - 1) * width;
  const DecodeProduct &p = args.head;
  const char *bias = static_cast<const char *>(p.bias);
  constexpr int64_t kAtOnce = 4, kRows = 512;  // of x, of the head
  float y[kAtOnce * kRows];
  const Share share(vocab, t.index, t.size, kShareOfRows);
  for (int64_t n = share.begin; n < share.end; n += kRows) {
    const int64_t count = share.end - n < kRows ? share.end - n : kRows;
    for (int64_t m = 0; m < rows; m += kAtOnce) {
      const int64_t some = rows - m < kAtOnce ? rows - m : kAtOnce;
      dots<T>(p, n, count, first + m * step * width, step * width, some, y, kRows);
      for (int64_t r = 0; r < some; ++r) {
        float *row = y + r * kRows;
        for (int64_t i = 0; bias && i < count; ++i) {
          row[i] += load_n<T>(bias + (n + i) * size_of(T), 1)[0];
        }
        store_logits<T>(args, row, count,
                        static_cast<char *>(args.logits) +
                            ((m + r) * vocab + n) * size_of(args.logits_type));
      }
    }
  }
}

template <DType T>
static void decode_thread(const DecodeThread &t) {
  float *own = t.base + t.buffers->own + t.index * t.buffers->own_size;
  float *stream = own + t.buffers->stream, *given = own + t.buffers->normed;
  begin<T>(t, stream);
  for (int64_t i = 0; i < t.args->layers; ++i) run_layer<T>(t, i, stream, given);
  finish<T>(t, stream, given);
}

static void (*decode_step_of(DType type))(const DecodeThread &) {
  switch (type) {
    case DType::F32: return decode_thread<DType::F32>;
    case DType::F16: return decode_thread<DType::F16>;
    default: return decode_thread<DType::BF16>;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
