// rope_plan.cuh: what the launches of RoPE share: the vectors that fit, parameters, how many tokens at
// once.
#pragma once

#include <initializer_list>

#include "rope.cuh"

namespace hfp::cuda {

// Whether n elements at once fit everywhere in a tensor with these strides.
inline bool vector_fits(const void *data, int64_t strides, int n, int64_t element_bytes) {
  return data == nullptr || ((strides & (n - 1)) == 0 &&
                             narrow_to_pointer(n, data, element_bytes) == n);
}

inline bool units_fit(const RopeArgs &a, int n) {
  if (((a.rotary / 2) | (a.dim - a.rotary)) & (n - 1)) return false;
  for (const RopeTensor *t : {&a.q, &a.k}) {
    if (t->heads == 0) continue;
    if (!vector_fits(t->x, t->x_batch | t->x_seq | t->x_head, n, size_of(a.type)) ||
        !vector_fits(t->out, t->out_batch | t->out_seq | t->out_head, n, size_of(a.type)) ||
        !vector_fits(t->weight, 0, n, size_of(a.weight_type))) {
      return false;
    }
  }
  // Interleaved compact tables are read N / 2 at a time.
  const int table_n = a.interleaved && !a.wide && n > 1 ? n / 2 : n;
  for (const RopeTable *t : {&a.cos, &a.sin}) {
    const int64_t strides = t->batch | t->seq | t->head;
    if (!vector_fits(t->data, strides, table_n, size_of(a.table_type))) return false;
  }
  return true;
}

// What does not depend on the kernel, for vectors of n elements.
inline RopeParams rope_params(const RopeArgs &a, int n) {
  RopeParams p{};
  p.q = a.q, p.k = a.k, p.cos = a.cos, p.sin = a.sin;
  p.table_type = a.table_type, p.weight_type = a.weight_type;
  p.heads = static_cast<uint32_t>(a.q.heads + a.k.heads);
  p.half = static_cast<uint32_t>(a.rotary / 2);
  p.rest = static_cast<uint32_t>(a.rotary);
  p.dim = static_cast<uint32_t>(a.dim);
  p.rotary_units = p.half / n;
  p.rest_vectors = (p.dim - p.rest) / n;
  p.rest_units = (p.rest_vectors + 1) / 2;
  p.units = p.rotary_units + p.rest_units;
  p.interleaved = a.interleaved, p.wide = a.wide, p.paired = a.paired;
  p.round_products = a.round_products, p.round_hat = a.round_hat, p.across = a.across;
  p.eps = a.eps, p.weight_offset = a.weight_offset;
  const auto inverse = [&](const RopeTensor &t) {
    const int64_t heads = a.across ? t.heads : 1;
    return heads > 0 ? static_cast<float>(1.0 / static_cast<double>(heads * a.dim)) : 0.0f;
  };
  p.inverse_q = inverse(a.q), p.inverse_k = inverse(a.k);
  p.chunks = p.groups = p.lanes = 1;
  return p;
}

// Calls launch(tokens) for so few tokens at a time that every index but an offset in memory fits
// 32 bits; `per_token` of them are needed for each.
template <class Launch>
int32_t each_token_range(const RopeArgs &a, RopeParams &p, int64_t per_token, Launch launch) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t total = a.batch * a.seq;
  const int64_t most = kMost / per_token > 0 ? kMost / per_token : 1;
  if (total <= kMost) {
    p.batches = static_cast<uint32_t>(a.batch);
    p.by_batches = FastDivisor(p.batches);
    for (int64_t first = 0; first < total; first += most) {
      const int64_t here = total - first < most ? total - first : most;
      p.first_token = static_cast<uint32_t>(first);
      p.end_token = static_cast<uint32_t>(first + here);
      const int32_t status = launch(here);
      if (status != HFP_OK) return status;
    }
    return HFP_OK;
  }
  // More than 2^30 tokens: batch by batch, and a long sequence in parts.
  const RopeParams whole = p;
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    for (int64_t first = 0; first < a.seq; first += most) {
      const int64_t here = a.seq - first < most ? a.seq - first : most;
      p = whole;
      p.batches = 1, p.end_token = static_cast<uint32_t>(here);
      for (RopeTensor *t : {&p.q, &p.k}) {
        const int64_t bytes = size_of(a.type);
        t->x = static_cast<const char *>(t->x) + (batch * t->x_batch + first * t->x_seq) * bytes;
        t->out = static_cast<char *>(t->out) + (batch * t->out_batch + first * t->out_seq) * bytes;
      }
      for (RopeTable *t : {&p.cos, &p.sin}) {
        if (t->data == nullptr) continue;
        t->data = static_cast<const char *>(t->data) +
                  (batch * t->batch + first * t->seq) * size_of(a.table_type);
      }
      const int32_t status = launch(here);
      if (status != HFP_OK) return status;
    }
  }
  return HFP_OK;
}

// Whether every stride is below 2^32.
inline bool narrow_strides(const RopeArgs &a) {
  int64_t strides = 0;
  for (const RopeTable *t : {&a.cos, &a.sin}) strides |= t->batch | t->seq | t->head;
  for (const RopeTensor *t : {&a.q, &a.k}) {
    strides |= t->x_batch | t->x_seq | t->x_head | t->out_batch | t->out_seq | t->out_head;
  }
  return strides >> 32 == 0;
}

// Whether the tables are the same for all heads, and nothing is too wide for offsets of 32-bit products.
inline bool angles_shared(const RopeArgs &a, const RopeParams &p) {
  return a.cos.head == 0 && a.sin.head == 0 && p.chunks == 1 && narrow_strides(a);
}

// Whether heads are rotated wholly, with a unit for each lane.
inline bool heads_whole(const RopeParams &p) { return p.rest == p.dim && p.units == p.lanes; }

// Whether the types and the vectors are those that have kernels of their own.
template <class T, class Tab, int N>
inline constexpr bool kFastUnits =
    N * sizeof(T) == kVectorBytes && !std::is_same_v<Tab, AnyType>;

// Heads of one tensor in each thread, `each` at most.
inline void share_heads(RopeParams &p, int64_t each) {
  p.q_groups = static_cast<uint32_t>((p.q.heads + each - 1) / each);
  p.groups = p.q_groups + static_cast<uint32_t>((p.k.heads + each - 1) / each);
  p.by_groups = FastDivisor(p.groups);
}

}  // namespace hfp::cuda
