// rope.cuh: what rope and qk_norm_rope share: where a thread's elements lie, and what is done to
// them. Su et al., arXiv:2104.09864.
//
// A head is cut into units: the 2 N elements that one thread moves at once, as the vectors A and B.
// In the rotated part B lies R / 2 columns after A, so that each load of a warp is contiguous; in
// the half style A and B are the two sides of N pairs; interleaved, each holds N / 2 whole pairs.
// The columns that are not rotated make units of their own. With N == 1 an interleaved unit is one
// pair, so that the arithmetic is that of the half style.
#pragma once

#include <initializer_list>

#include "rows.cuh"

namespace hfp::cuda {

struct RopeParams {
  static constexpr bool kStartsEarly = true;
  RopeTensor q, k;
  RopeTable cos, sin;
  DType table_type, weight_type;
  uint32_t batches;
  uint32_t first_token, end_token;   // of this launch
  uint32_t heads;           // of q and k
  uint32_t groups;          // of heads; a thread takes heads group, group + groups, ...
  uint32_t chunks;          // of units, where they are more than the lanes
  uint32_t lanes, lane_bits;  // threads that share a head; 1 << lane_bits
  uint32_t rotary_units, units;  // per head; all
  uint32_t rest_units, rest_vectors;  // of the columns that are not rotated
  uint32_t rest;            // their first column: R
  uint32_t half;            // R / 2
  uint32_t dim;
  bool interleaved;  // counts for N == 1; else the template says it
  bool wide, round_products, round_hat, across;
  bool paired;  // one table, cos and sin in turns
  float eps, weight_offset, inverse_q, inverse_k;  // 1 / elements of a norm
};

// ---------------------------------------------------------------------------------------------
// Where things are

// Columns of a unit's vectors within its head.
struct Unit {
  uint32_t a, b;
  bool rotated, has_b;
};

template <int N>
__device__ __forceinline__ Unit unit_at(const RopeParams &p, uint32_t u) {
  if (u < p.rotary_units) {
    if (N == 1 && p.interleaved) return {2 * u, 2 * u + 1, true, true};
    return {u * N, p.half + u * N, true, true};
  }
  const uint32_t v = u - p.rotary_units;
  return {p.rest + v * N, p.rest + (v + p.rest_units) * N, false,
          v + p.rest_units < p.rest_vectors};
}

struct Token {
  int64_t batch, seq;
};

// All batches of one position come one after the other: where they share the tables, as they do
// mostly, a row of those is read from memory once, and from L2 for the other batches.
__device__ __forceinline__ Token token_at(const RopeParams &p, uint32_t token) {
  if (p.batches == 1) return {0, token};
  const uint32_t seq = token / p.batches;
  return {token - seq * p.batches, seq};
}

// One row of q or k: `heads` heads of one token.
struct HeadRow {
  const char *x;
  char *out;
  const void *weight;
  int64_t x_head, out_head;
};

template <class T>
__device__ __forceinline__ HeadRow head_row(const RopeTensor &t, const Token &token,
                                            uint32_t head) {
  HeadRow row;
  row.x = reinterpret_cast<const char *>(static_cast<const T *>(t.x) + token.batch * t.x_batch +
                                         token.seq * t.x_seq + head * t.x_head);
  row.out = reinterpret_cast<char *>(static_cast<T *>(t.out) + token.batch * t.out_batch +
                                     token.seq * t.out_seq + head * t.out_head);
  row.weight = t.weight;
  row.x_head = t.x_head;
  row.out_head = t.out_head;
  return row;
}

__device__ __forceinline__ int64_t table_at(const RopeTable &t, const Token &token,
                                            uint32_t head) {
  return token.batch * t.batch + token.seq * t.seq + head * t.head;
}

// ---------------------------------------------------------------------------------------------
// One unit

// Two vectors as they lie in memory.
template <class T, int N>
struct Pair {
  Vec<T, N> a, b;

  __device__ __forceinline__ void zero() { a.zero(), b.zero(); }
  __device__ __forceinline__ void load(const T *head, const Unit &u) {
    a.template load<Cache::kStream>(head + u.a);
    if (u.has_b) b.template load<Cache::kStream>(head + u.b);
  }
  __device__ __forceinline__ void store(T *head, const Unit &u) const {
    a.store(head + u.a);
    if (u.has_b) b.store(head + u.b);
  }
  __device__ __forceinline__ float sum_of_squares() const {
    float x[N], y[N], sum = 0.0f;
    a.get(x), b.get(y);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(y[i], y[i], sum);
    return sum;
  }
};

// cos or sin of a unit's N pairs, the pairs of A before those of B if they are apart. `odd`: the
// second of two columns, the sin of a paired table.
template <class Tab, int N, bool kInterleaved>
__device__ __forceinline__ void load_table(float (&value)[N], const RopeParams &p,
                                           const void *table, int64_t at, uint32_t u, bool odd) {
  if constexpr (kInterleaved && N > 1) {
    if (p.wide && odd) {  // a branch of its own: selecting would keep both columns in registers
      float a[N];
      load_param<Tab>(a, table, p.table_type, at + u * N, 0.0f);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[i] = a[2 * i + 1];
      load_param<Tab>(a, table, p.table_type, at + p.half + u * N, 0.0f);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[N / 2 + i] = a[2 * i + 1];
    } else if (p.wide) {
      float a[N], b[N];
      load_param<Tab>(a, table, p.table_type, at + u * N, 0.0f);
      load_param<Tab>(b, table, p.table_type, at + p.half + u * N, 0.0f);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[i] = a[2 * i], value[N / 2 + i] = b[2 * i];
    } else {
      float a[N / 2], b[N / 2];
      load_param<Tab>(a, table, p.table_type, at + u * (N / 2), 0.0f);
      load_param<Tab>(b, table, p.table_type, at + p.half / 2 + u * (N / 2), 0.0f);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[i] = a[i], value[N / 2 + i] = b[i];
    }
  } else {
    load_param<Tab>(value, table, p.table_type, at + odd + (p.wide ? 2 * u : u * N), 0.0f);
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin). Each product and sum has its own rounding to fp32, as
// in eager PyTorch: no fused multiply-add.
template <class T, bool kRound>
__device__ __forceinline__ void rotate_pair(float &a, float &b, float cos, float sin) {
  float product[4] = {__fmul_rn(a, cos), __fmul_rn(b, sin), __fmul_rn(b, cos), __fmul_rn(a, sin)};
  if constexpr (kRound) round_to<T>(product);
  a = __fsub_rn(product[0], product[1]);
  b = __fadd_rn(product[2], product[3]);
}

template <class T, int N, bool kInterleaved, bool kRound>
__device__ __forceinline__ void rotate_pairs(float (&a)[N], float (&b)[N], const float (&cos)[N],
                                             const float (&sin)[N]) {
  if constexpr (kInterleaved && N > 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      rotate_pair<T, kRound>(a[2 * i], a[2 * i + 1], cos[i], sin[i]);
      rotate_pair<T, kRound>(b[2 * i], b[2 * i + 1], cos[N / 2 + i], sin[N / 2 + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_pair<T, kRound>(a[i], b[i], cos[i], sin[i]);
  }
}

template <class T, int N, bool kInterleaved>
__device__ __forceinline__ void rotate(const RopeParams &p, float (&a)[N], float (&b)[N],
                                       const float (&cos)[N], const float (&sin)[N]) {
  if (!std::is_same_v<T, float> && p.round_products) {
    rotate_pairs<T, N, kInterleaved, true>(a, b, cos, sin);
  } else {
    rotate_pairs<T, N, kInterleaved, false>(a, b, cos, sin);
  }
}

// One vector of the norm's result, rounded to T.
template <class T, class W, int N>
__device__ __forceinline__ void normalize(const RopeParams &p, float (&y)[N], float scale,
                                          const void *weight, int64_t at) {
  float w[N];
  load_param<W>(w, weight, p.weight_type, at, 1.0f);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  if (p.round_hat) round_to<T>(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= w[i] + p.weight_offset;
  round_to<T>(y);
}

// Norm (if kNorm) and rotation of a unit that was loaded, and its store. `weight_at`: of the head.
template <class T, class W, int N, bool kInterleaved, bool kNorm>
__device__ __forceinline__ void finish_unit(const RopeParams &p, Pair<T, N> &v, const Unit &u,
                                            float scale, const void *weight, int64_t weight_at,
                                            const float (&cos)[N], const float (&sin)[N],
                                            T *out) {
  float a[N], b[N];
  v.a.get(a), v.b.get(b);
  if constexpr (kNorm) {
    normalize<T, W>(p, a, scale, weight, weight_at + u.a);
    if (u.has_b) normalize<T, W>(p, b, scale, weight, weight_at + u.b);
  }
  if (u.rotated) rotate<T, N, kInterleaved>(p, a, b, cos, sin);
  v.a.set(a), v.b.set(b);
  v.store(out, u);
}

// ---------------------------------------------------------------------------------------------
// Kernel: `lanes` threads per head, kHeads heads of one token per thread
//
// cos and sin are loaded once for all of them; with kHeads > 1 they must be the same for all heads.
// With a norm, the lanes hold one head wholly (chunks == 1).
template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm, int kHeads>
__global__ void __launch_bounds__(kHeadThreads)
    rope_heads_kernel(const __grid_constant__ RopeParams p) {
  wait_for_previous();
  const uint32_t lane = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = slot / p.groups;
  const uint32_t group = slot - outer * p.groups;
  uint32_t token = outer, chunk = 0;
  if (!kNorm && p.chunks > 1) token = outer / p.chunks, chunk = outer - token * p.chunks;
  token += p.first_token;
  const uint32_t unit = chunk * p.lanes + lane;
  // No early return: every lane takes part in the sums.
  const bool active = token < p.end_token && unit < p.units;
  const Unit u = unit_at<N>(p, unit);
  const Token where = token_at(p, active ? token : 0);

  Pair<T, N> v[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const uint32_t head = group + j * p.groups;
    v[j].zero();
    if (!active || head >= p.heads) continue;
    const bool second = head >= p.q.heads;
    const HeadRow row =
        second ? head_row<T>(p.k, where, head - static_cast<uint32_t>(p.q.heads))
               : head_row<T>(p.q, where, head);
    v[j].load(reinterpret_cast<const T *>(row.x), u);
  }

  float cos[N] = {}, sin[N] = {};
  if (active && u.rotated) {
    uint32_t head = 0;
    if constexpr (kHeads == 1) {
      head = group >= p.q.heads ? group - static_cast<uint32_t>(p.q.heads) : group;
    }
    load_table<Tab, N, kInterleaved>(cos, p, p.cos.data, table_at(p.cos, where, head), unit, false);
    load_table<Tab, N, kInterleaved>(sin, p, p.sin.data, table_at(p.sin, where, head), unit,
                                     p.paired);
  }

  float scale[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) scale[j] = kNorm ? v[j].sum_of_squares() : 1.0f;
  if constexpr (kNorm) {
    for (uint32_t m = p.lanes / 2; m > 0; m /= 2) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) scale[j] += __shfl_xor_sync(~0u, scale[j], m);
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = rsqrtf(fmaf(scale[j], p.inverse_q, p.eps));
  }

#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const uint32_t head = group + j * p.groups;
    if (!active || head >= p.heads) continue;
    const bool second = head >= p.q.heads;
    const HeadRow row =
        second ? head_row<T>(p.k, where, head - static_cast<uint32_t>(p.q.heads))
               : head_row<T>(p.q, where, head);
    finish_unit<T, W, N, kInterleaved, kNorm>(p, v[j], u, scale[j], row.weight, 0, cos, sin,
                                              reinterpret_cast<T *>(row.out));
  }
}

// ---------------------------------------------------------------------------------------------
// Planning

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

template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm>
int32_t launch_heads(const RopeArgs &a, void *stream, const char *op) {
  RopeParams p = rope_params(a, N);
  p.inverse_q = p.inverse_k = static_cast<float>(1.0 / static_cast<double>(a.dim));
  while (p.lanes < p.units && p.lanes < 32) p.lanes *= 2, ++p.lane_bits;
  p.chunks = (p.units + p.lanes - 1) / p.lanes;
  constexpr bool kFast = N * sizeof(T) == kVectorBytes && !std::is_same_v<Tab, AnyType>;
  bool four = false;
  if constexpr (kFast) {
    const int64_t threads = a.batch * a.seq * p.heads * p.chunks * p.lanes;
    four = p.heads >= 4 && threads >= kFullThreads && p.cos.head == 0 && p.sin.head == 0;
  }
  p.groups = four ? (p.heads + 3) / 4 : p.heads;
  const int64_t slots = kHeadThreads / p.lanes;
  const int64_t per_token = static_cast<int64_t>(p.chunks) * p.groups;
  return each_token_range(a, p, per_token, [&](int64_t tokens) {
    const int64_t grid = (tokens * per_token + slots - 1) / slots;
    if constexpr (kFast) {
      if (four) {
        return launch(&rope_heads_kernel<T, Tab, W, N, kInterleaved, kNorm, 4>, grid,
                      kHeadThreads, p, stream, op);
      }
    }
    return launch(&rope_heads_kernel<T, Tab, W, N, kInterleaved, kNorm, 1>, grid, kHeadThreads, p,
                  stream, op);
  });
}

// Picks the types and the vector: Launch::run<T, Tab, W, N, kInterleaved>(...). The fast kernels
// have 16-byte vectors, weights of the dtype of x and tables of that or fp32; the general ones
// vectors of 4 elements or 1, and any dtypes.
template <class Launch, class T, class Tab, class W, int N>
int32_t dispatch_style(const RopeArgs &a, void *stream) {
  if constexpr (N > 1) {
    if (a.interleaved) return Launch::template run<T, Tab, W, N, true>(a, stream);
  }
  return Launch::template run<T, Tab, W, N, false>(a, stream);
}

template <class Launch, class T>
int32_t dispatch_vector(const RopeArgs &a, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  if (a.weight_type == a.type && units_fit(a, kWidest)) {
    if constexpr (!std::is_same_v<T, float>) {
      if (a.table_type == a.type) return dispatch_style<Launch, T, T, T, kWidest>(a, stream);
    }
    return dispatch_style<Launch, T, float, T, kWidest>(a, stream);
  }
  if (units_fit(a, 4)) return dispatch_style<Launch, T, AnyType, AnyType, 4>(a, stream);
  return dispatch_style<Launch, T, AnyType, AnyType, 1>(a, stream);
}

template <class Launch>
int32_t dispatch_rope(const RopeArgs &a, int device, void *stream, const char *op) {
  if (a.batch <= 0 || a.seq <= 0 || a.dim <= 0 || a.q.heads + a.k.heads <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), op);
  switch (a.type) {
    case DType::F32: return dispatch_vector<Launch, float>(a, stream);
    case DType::F16: return dispatch_vector<Launch, __half>(a, stream);
    default: return dispatch_vector<Launch, __nv_bfloat16>(a, stream);
  }
}

}  // namespace hfp::cuda
