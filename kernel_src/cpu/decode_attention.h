// decode_attention.h: a decoding step's attention over the cache. No include guard: included once per
// instruction set, inside decode_step.cpp's inner part.
//
// A unit is one head of keys of one row with all queries that share it, and one part of the keys. The
// parts' results are merged in their order. New keys are written by the unit in whose part they lie, which
// is the only one that reads them.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// The parts of the keys that any query of a step sees.
struct Parts {
  int64_t first, end;  // keys
  int64_t size, count;

  Parts(const DecodeArgs &args, const DecodeLayer &layer) {
    const int64_t length = args.cache[0];
    end = length + args.tokens;
    first = layer.window > 0 && length + 1 > layer.window ? length + 1 - layer.window : 0;
    const int64_t blocks = (end - first + kDecodePart - 1) / kDecodePart;
    size = (blocks + kDecodeParts - 1) / kDecodeParts * kDecodePart;
    count = (end - first + size - 1) / size;
  }
};

HFP_INLINE float largest_lane(vf v) {
  float most = v[0];
  for (int k = 1; k < kLanes; ++k) most = v[k] > most ? v[k] : most;
  return most;
}

// Dots of `count` keys with one query; out[j].
template <DType T>
HFP_INLINE void key_scores(const char *keys, int64_t step, int64_t count, const float *query,
                           int64_t dim, float *out) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    dot_block<Stored<T>, 4, 1>(keys + j * step, step, query, 0, dim, out + j, 0, 1);
  }
  for (; j < count; ++j) dot_block<Stored<T>, 1, 1>(keys + j * step, step, query, 0, dim, out + j, 0, 1);
}

// sums[d] = sums[d] * by + sum over j of weight[j] * values[j][d]
template <DType T>
HFP_INLINE void add_values(const char *values, int64_t step, int64_t count, const float *weight,
                           float by, float *sums, int64_t dim) {
  constexpr int kAtOnce = 4;
  int64_t d = 0;
  for (; d + kAtOnce * kLanes <= dim; d += kAtOnce * kLanes) {
    vf acc[kAtOnce];
#pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i) acc[i] = load_floats(sums + d + i * kLanes, kLanes) * by;
    for (int64_t j = 0; j < count; ++j) {
      const vf w = splat(weight[j]);
      const char *p = values + j * step + d * size_of(T);
  #pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i) acc[i] = fma(w, load<T>(p + i * kLanes * size_of(T)), acc[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i) store_floats(sums + d + i * kLanes, acc[i], kLanes);
  }
  for (; d < dim; d += kLanes) {
    const int64_t n = lanes_left(dim, d);
    vf acc = load_floats(sums + d, n) * by;
    for (int64_t j = 0; j < count; ++j) {
      acc = fma(splat(weight[j]), load_up_to<T>(values + j * step + d * size_of(T), n), acc);
    }
    store_floats(sums + d, acc, n);
  }
}

// `count` scores, of keys from `key` on, to weights exp(score - most); state: most and sum so far.
// Returns the factor of what was summed before. `keep`: this query's mask, or null.
HFP_INLINE float soften(const DecodeLayer &layer, float *scores, int64_t key, int64_t count,
                        int64_t first, int64_t end, const uint8_t *keep, float *state) {
  constexpr float kNone = -__builtin_inff();
  vf most_lanes = splat(kNone);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = lanes_left(count, j);
    vf s = load_floats(scores + j, n) * layer.scale;
    if (layer.softcap > 0.0f) {
      // tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
      const vf x = s / layer.softcap;
      const vf e = exp_nonpositive(magnitude(x) * -2.0f);
      const vf t = (1.0f - e) / (1.0f + e);
      s = (x < 0.0f ? -t : t) * layer.softcap;
    }
    store_floats(scores + j, s, n);
  }
  for (int64_t j = 0; j < count; ++j) {
    if (key + j < first || key + j >= end || (keep && keep[key + j] == 0)) scores[j] = kNone;
  }
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = lanes_left(count, j);
    vf s = load_floats(scores + j, n);
    if (n < kLanes) {
      for (int64_t k = n; k < kLanes; ++k) s[k] = kNone;
    }
    most_lanes = s > most_lanes ? s : most_lanes;
  }
  const float before = state[0], tile = largest_lane(most_lanes);
  const float most = tile > before ? tile : before;
  const float base = most == kNone ? 0.0f : most;
  vf sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = lanes_left(count, j);
    vf p = exp_nonpositive(load_floats(scores + j, n) - base);
    if (n < kLanes) {
      for (int64_t k = n; k < kLanes; ++k) p[k] = 0.0f;
    }
    sums += p;
    store_floats(scores + j, p, n);
  }
  const float by = exp_nonpositive(splat(before - base))[0];
  state[0] = most;
  state[1] = state[1] * by + sum_lanes(sums);
  return by;
}

// q's or k's norm and rotation, of the head at column `from` of its row, to `to`.
template <DType T>
HFP_INLINE void prepare_head(const DecodeArgs &args, const DecodeLayer &layer, const DecodeNorm &of_all,
                             const float *row, int64_t width, int64_t from, const float *tables,
                             int64_t query, float *to) {
  const int64_t dim = layer.dim;
  const DecodeNorm norm = norm_of_head<T>(of_all, from / dim, dim);
  __builtin_memcpy(to, row + from, static_cast<std::size_t>(dim) * sizeof(float));
  const int64_t column = layer.norm_across ? from : 0;
  if (norm.present() && !layer.norm_after_rope) {
    const Moments by = layer.norm_across ? moments(norm, row, width) : moments(norm, to, dim);
    norm_row<T>(norm, by, to, to, dim, column);
  }
  if (layer.rope >= 0) {
    const float *table = tables;
    for (int64_t i = 0; i < layer.rope; ++i) table += args.queries() * 2 * args.rope(i).half;
    const DecodeRope rope = args.rope(layer.rope);
    rotate_head<T>(rope, table + query * 2 * rope.half, to);
  }
  if (norm.present() && layer.norm_after_rope) {
    norm_row<T>(norm, moments(norm, to, dim), to, to, dim, column);
  }
}

// The result of a query: its sums divided, rounded; the sink is one more score.
template <DType T>
HFP_INLINE void finish_query(const DecodeLayer &layer, int64_t head, float most, float sum,
                             const float *sums, float *out) {
  float by = 1.0f;
  if (layer.sinks) {
    const float sink = load_n<T>(static_cast<const char *>(layer.sinks) + head * size_of(T), 1)[0];
    const float top = sink > most ? sink : most;
    by = exp_nonpositive(splat(most - top))[0];
    sum = sum * by + exp_nonpositive(splat(sink - top))[0];
  }
  const float factor = sum > 0.0f ? by / sum : 0.0f;
  for (int64_t d = 0; d < layer.dim; d += kLanes) {
    const int64_t n = lanes_left(layer.dim, d);
    store_floats(out + d, round_to<T>(load_floats(sums + d, n) * factor), n);
  }
}

template <DType T>
static void attention_unit(const DecodeThread &t, const DecodeLayer &layer, int64_t index,
                           const Parts &parts, int64_t row, int64_t key_head, int64_t part) {
  const DecodeArgs &args = *t.args;
  const DecodeBuffers &b = *t.buffers;
  const int64_t dim = layer.dim, group = layer.group(), tokens = args.tokens;
  const int64_t *entry = args.cache + 1 + 3 * index;
  const int64_t length = args.cache[0], capacity = entry[2], step = dim * size_of(T);
  const int64_t offset = (row * layer.key_heads + key_head) * capacity * step;
  char *keys = reinterpret_cast<char *>(static_cast<uintptr_t>(entry[0])) + offset;
  char *values = reinterpret_cast<char *>(static_cast<uintptr_t>(entry[1])) + offset;
  float *own = t.base + b.own + t.index * b.own_size;
  float *queries = own + b.queries, *scores = own + b.scores, *key = own + b.key;
  const float *tables = t.base + b.tables;
  const int64_t begin = parts.first + part * parts.size;
  const int64_t end = begin + parts.size < parts.end ? begin + parts.size : parts.end;

  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t query = row * tokens + token;
    const float *qkv = t.base + b.qkv + query * layer.qkv_width();
    for (int64_t h = 0; h < group; ++h) {
      prepare_head<T>(args, layer, layer.q_norm, qkv, layer.q_width(), (key_head * group + h) * dim,
                      tables, query, queries + (token * group + h) * dim);
    }
    const int64_t at = length + token;
    if (at < begin || at >= end) continue;
    const float *k = qkv + layer.q_width(), *v = k + layer.k_width() + key_head * dim;
    prepare_head<T>(args, layer, layer.k_norm, k, layer.k_width(), key_head * dim, tables, query, key);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t n = lanes_left(dim, d);
      store_up_to<T>(keys + at * step + d * size_of(T), load_floats(key + d, n), n);
      store_up_to<T>(values + at * step + d * size_of(T), load_floats(v + d, n), n);
    }
  }
  // Keys that came before the window, in this step's first part, were never asked for: nothing is read
  // of them. New keys of another part are not read here either.
  const int64_t count = tokens * group;
  float *found = own + b.sums;
  if (parts.count > 1) {
    found = t.base + b.partial +
            ((row * layer.key_heads + key_head) * parts.count + part) * count * (dim + 2);
  }
  for (int64_t q = 0; q < count; ++q) {
    float *state = found + q * (dim + 2);
    state[0] = -__builtin_inff();
    for (int64_t d = 1; d < dim + 2; ++d) state[d] = 0.0f;
  }
  const uint8_t *keep = args.mask ? args.mask + row * args.mask_width : nullptr;
  for (int64_t from = begin; from < end; from += kDecodePart) {
    const int64_t n = end - from < kDecodePart ? end - from : kDecodePart;
    for (int64_t q = 0; q < count; ++q) {
      const int64_t last = length + q / group + 1;  // keys that this query sees end here
      const int64_t first = layer.window > 0 && last > layer.window ? last - layer.window : 0;
      if (from >= last || from + n <= first) continue;
      // Not past `last`: what lies there is another token's, or was never written.
      const int64_t seen = last - from < n ? last - from : n;
      float *state = found + q * (dim + 2), *score = scores + q * kDecodePart;
      key_scores<T>(keys + from * step, step, seen, queries + q * dim, dim, score);
      const float by = soften(layer, score, from, seen, first, last, keep, state);
      add_values<T>(values + from * step, step, seen, score, by, state + 2, dim);
    }
  }
  if (parts.count > 1) return;
  for (int64_t q = 0; q < count; ++q) {
    const float *state = found + q * (dim + 2);
    const int64_t head = key_head * group + q % group;
    float *out = t.base + b.attended + ((row * tokens + q / group) * layer.heads + head) * dim;
    finish_query<T>(layer, head, state[0], state[1], state + 2, out);
  }
}

template <DType T>
static void merge_query(const DecodeThread &t, const DecodeLayer &layer, const Parts &parts,
                        int64_t query, int64_t head) {
  const DecodeArgs &args = *t.args;
  const DecodeBuffers &b = *t.buffers;
  const int64_t dim = layer.dim, group = layer.group(), count = args.tokens * group;
  const int64_t row = query / args.tokens, key_head = head / group;
  const int64_t q = query % args.tokens * group + head % group;
  const float *found = t.base + b.partial +
                       (row * layer.key_heads + key_head) * parts.count * count * (dim + 2) +
                       q * (dim + 2);
  const int64_t step = count * (dim + 2);
  float most = -__builtin_inff();
  for (int64_t p = 0; p < parts.count; ++p) most = found[p * step] > most ? found[p * step] : most;
  const float base = most == -__builtin_inff() ? 0.0f : most;
  float *sums = t.base + b.own + t.index * b.own_size + b.sums;
  float sum = 0.0f;
  for (int64_t d = 0; d < dim; ++d) sums[d] = 0.0f;
  for (int64_t p = 0; p < parts.count; ++p) {
    const float *one = found + p * step;
    const float by = exp_nonpositive(splat(one[0] - base))[0];
    sum += one[1] * by;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t n = lanes_left(dim, d);
      store_floats(sums + d, fma(load_floats(one + 2 + d, n), splat(by), load_floats(sums + d, n)), n);
    }
  }
  finish_query<T>(layer, head, most, sum, sums,
                  t.base + b.attended + (query * layer.heads + head) * dim);
}

template <DType T>
static void attend(const DecodeThread &t, const DecodeLayer &layer, int64_t index) {
  const DecodeArgs &args = *t.args;
  const Parts parts(args, layer);
  const int64_t units = args.rows * layer.key_heads * parts.count;
  for (int64_t u = t.index; u < units; u += t.size) {
    attention_unit<T>(t, layer, index, parts, u / parts.count / layer.key_heads,
                      u / parts.count % layer.key_heads, u % parts.count);
  }
  if (parts.count == 1) return;
  wait_for_team(*t.team);
  const Share share(args.queries() * layer.heads, t.index, t.size, 1);
  for (int64_t i = share.begin; i < share.end; ++i) {
    merge_query<T>(t, layer, parts, i / layer.heads, i % layer.heads);
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
