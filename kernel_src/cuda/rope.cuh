// rope.cuh: what rope and qk_norm_rope share: where a thread's elements lie, and what is done to
// them. Su et al., arXiv:2104.09864.
//
// A head is cut into units: the 2 N elements that one thread moves at once, as the vectors A and B.
// In the rotated part B lies R / 2 columns after A, so that each load of a warp is contiguous; in
// the half style A and B are the two sides of N pairs; interleaved, each holds N / 2 whole pairs.
// The columns that are not rotated make units of their own. With N == 1 an interleaved unit is one
// pair, so that the arithmetic is that of the half style.
#pragma once

#include "ordered.cuh"
#include "packed.cuh"
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
  uint32_t groups, q_groups;  // of heads: all, q's; the heads of a group are of one tensor, as far
                              // apart as that has groups
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
  FastDivisor by_groups, by_batches;
  uint32_t zero;  // 0; see Vec::stay_packed
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
  const uint32_t seq = p.by_batches.divide(token);
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

// index * stride, where both are below 2^32.
__device__ __forceinline__ int64_t narrow_product(int64_t index, int64_t stride) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(index)) *
                              static_cast<uint32_t>(stride));
}

// Where head `head` of a token begins, with strides below 2^32.
__device__ __forceinline__ int64_t narrow_offset(const Token &token, uint32_t head, int64_t batch,
                                                 int64_t seq, int64_t of_head) {
  return narrow_product(token.batch, batch) + narrow_product(token.seq, seq) +
         narrow_product(head, of_head);
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
  __device__ __forceinline__ void stay_packed(uint32_t zero) {
    a.stay_packed(zero), b.stay_packed(zero);
  }
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

// Whether the tables may be two, of which each holds every value twice, as kernels of their own have it.
template <class Tab, int N, bool kInterleaved>
inline constexpr bool kCanBeWide = kInterleaved && N == 8 && std::is_same_v<Tab, float>;

// N of the values at every second place from `from` on. Whole vectors, said in assembly: the compiler
// would load each value by itself, where two heads share them 2 % slower.
template <int N>
__device__ __forceinline__ void load_every_second(float *value, const float *from) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float between[2];
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value[i]), "=f"(between[0]), "=f"(value[i + 1]), "=f"(between[1])
                 : "l"(from + 2 * i));
  }
}

// cos and sin of a unit. Tables of the dtype of x stay packed where the pairs lie as their angles
// do: then the rotation itself can be done on two elements at once.
template <class T, class Tab, int N, bool kInterleaved>
inline constexpr bool kPackedAngles =
    std::is_same_v<T, Tab> && kInTwos<T, N> && !kInterleaved;

template <class Tab, int N, bool kInterleaved, bool kPacked>
struct Angles {
  float cos[N] = {}, sin[N] = {};

  __device__ __forceinline__ void load(const RopeParams &p, int64_t cos_at, int64_t sin_at,
                                       uint32_t u) {
    load_table<Tab, N, kInterleaved>(cos, p, p.cos.data, cos_at, u, false);
    load_table<Tab, N, kInterleaved>(sin, p, p.sin.data, sin_at, u, p.paired);
  }
};

template <class Tab, int N>
struct Angles<Tab, N, false, true> {
  Vec<Tab, N> cos, sin;

  __device__ __forceinline__ Angles() { cos.zero(), sin.zero(); }
  __device__ __forceinline__ void load(const RopeParams &p, int64_t cos_at, int64_t sin_at,
                                       uint32_t u) {
    cos.template load<Cache::kReadOnly>(static_cast<const Tab *>(p.cos.data) + cos_at + u * N);
    sin.template load<Cache::kReadOnly>(static_cast<const Tab *>(p.sin.data) + sin_at + u * N);
  }
};

// The angles of a unit at column `col`, where kCanBeWide, by whole vectors.
template <int N>
__device__ __forceinline__ void load_wide(Angles<float, N, true, false> &angles,
                                          const RopeParams &p, int64_t cos_at, int64_t sin_at,
                                          uint32_t col) {
  const float *cos = static_cast<const float *>(p.cos.data) + cos_at + col;
  const float *sin = static_cast<const float *>(p.sin.data) + sin_at + col;
  load_every_second<N / 2>(angles.cos, cos);
  load_every_second<N / 2>(angles.cos + N / 2, cos + p.half);
  load_every_second<N / 2>(angles.sin, sin);
  load_every_second<N / 2>(angles.sin + N / 2, sin + p.half);
}

template <class T, class Tab, int N, bool kInterleaved>
using AnglesFor = Angles<Tab, N, kInterleaved, kPackedAngles<T, Tab, N, kInterleaved>>;

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

// The same with kRound, two elements at a time: see packed.cuh.
template <class T, int N>
__device__ __forceinline__ void rotate_packed(Pair<T, N> &v, const Vec<T, N> &cos,
                                              const Vec<T, N> &sin) {
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kWords; ++i) {
    const uint32_t a = v.a.word[i], b = v.b.word[i];
    v.a.word[i] = sub_two<T>(mul_two<T>(a, cos.word[i]), mul_two<T>(b, sin.word[i]));
    v.b.word[i] = add_two<T>(mul_two<T>(b, cos.word[i]), mul_two<T>(a, sin.word[i]));
  }
}

template <class T, class Tab, int N, bool kInterleaved>
__device__ __forceinline__ void rotate(const RopeParams &p, Pair<T, N> &v,
                                       AnglesFor<T, Tab, N, kInterleaved> &angles, bool rounded) {
  if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
    if (rounded) {
      rotate_packed(v, angles.cos, angles.sin);
      return;
    }
    // Unpacked again for each head, and a word at a time: else the angles of all pairs stay in
    // registers as fp32.
    angles.cos.stay_packed(p.zero), angles.sin.stay_packed(p.zero);
#pragma unroll
    for (int i = 0; i < Vec<T, N>::kWords; ++i) {
      float2 a = unpack<T>(v.a.word[i]), b = unpack<T>(v.b.word[i]);
      const float2 cos = unpack<T>(angles.cos.word[i]), sin = unpack<T>(angles.sin.word[i]);
      rotate_pair<T, false>(a.x, b.x, cos.x, sin.x);
      rotate_pair<T, false>(a.y, b.y, cos.y, sin.y);
      v.a.word[i] = pack<T>(a.x, a.y), v.b.word[i] = pack<T>(b.x, b.y);
    }
  } else {
    float a[N], b[N];
    v.a.get(a), v.b.get(b);
    if (!std::is_same_v<T, float> && rounded) {
      rotate_pairs<T, N, kInterleaved, true>(a, b, angles.cos, angles.sin);
    } else {
      rotate_pairs<T, N, kInterleaved, false>(a, b, angles.cos, angles.sin);
    }
    v.a.set(a), v.b.set(b);
  }
}

// One vector of the weights, 1 where there are none.
template <class W, int N>
struct Weights : Vec<W, N> {
  __device__ __forceinline__ void load_from(const RopeParams &, const void *weight, int64_t at) {
    if (weight != nullptr) {
      this->template load<Cache::kReadOnly>(static_cast<const W *>(weight) + at);
    } else {
      float one[N];
#pragma unroll
      for (int i = 0; i < N; ++i) one[i] = 1.0f;
      this->set(one);
    }
  }
};

template <int N>
struct Weights<AnyType, N> {
  float value[N];

  __device__ __forceinline__ void load_from(const RopeParams &p, const void *weight, int64_t at) {
    load_param<AnyType>(value, weight, p.weight_type, at, 1.0f);
  }
  __device__ __forceinline__ void get(float (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = value[i];
  }
};

// One vector of the norm's result, rounded to T.
template <class T, class W, int N>
__device__ __forceinline__ void normalize(const RopeParams &p, Vec<T, N> &v, float scale,
                                          const Weights<W, N> &weight) {
  float y[N], w[N];
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  if (p.round_hat) {
    // w + 0 is w, except for the sign of -0, which is w's here as in eager PyTorch.
    if constexpr (std::is_same_v<T, W> && kInTwos<T, N>) {
      if (p.weight_offset == 0.0f) {
        v.set(y);
        v = mul_twos<T, N>(v, weight);
        return;
      }
    }
    round_to<T>(y);
  }
  weight.get(w);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= w[i] + p.weight_offset;
  v.set(y);
}

// Rotation of a unit, and its store. `rounded`: p.round_products, or what is known of it.
template <class T, class Tab, int N, bool kInterleaved>
__device__ __forceinline__ void finish_unit(const RopeParams &p, Pair<T, N> &v, const Unit &u,
                                            AnglesFor<T, Tab, N, kInterleaved> &angles,
                                            bool rounded, T *out) {
  if (u.rotated) rotate<T, Tab, N, kInterleaved>(p, v, angles, rounded);
  v.store(out, u);
}

}  // namespace hfp::cuda
