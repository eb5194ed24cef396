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
#include <utility>

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
    // w + 0 is w, but for the sign of -0, which is w's here as in eager PyTorch.
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

// CTAs on an SM, said for ptxas: left to itself it aims at six where bf16 is emulated, and before
// sm_90 at twelve of fp32, and spills.
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kHeadCtas = sizeof(T) == 4 ? 5 : kHasTwos<T> ? 0 : 1;
#else
inline constexpr int kHeadCtas = kHasTwos<T> ? 0 : 1;
#endif

// ---------------------------------------------------------------------------------------------
// Kernel: `lanes` threads per head, kHeads heads of one token per thread
//
// cos and sin are loaded once for all of them; with kHeads > 1 they must be the same for all heads.
// With a norm, the lanes hold one head wholly (chunks == 1). kRounded: p.round_products where the
// angles are packed, which else would cost the registers of both ways; elsewhere that is asked.
template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm, int kHeads,
          bool kRounded>
__global__ void __launch_bounds__(kHeadThreads, kHeadCtas<T>)
    rope_heads_kernel(const __grid_constant__ RopeParams p) {
  wait_for_previous();
  const uint32_t lane = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot);
  uint32_t group = slot - outer * p.groups;
  uint32_t token = outer, chunk = 0;
  if (!kNorm && p.chunks > 1) token = outer / p.chunks, chunk = outer - token * p.chunks;
  token += p.first_token;
  const uint32_t unit = chunk * p.lanes + lane;
  // No early return: every lane takes part in the sums.
  const bool active = token < p.end_token && unit < p.units;
  const Unit u = unit_at<N>(p, unit);
  const Token where = token_at(p, active ? token : 0);

  // Each number is chosen by itself: a choice between q and k would be one between addresses.
  const bool second = group >= p.q_groups;
  uint32_t step = p.q_groups;
  if (second) group -= p.q_groups, step = p.groups - p.q_groups;
  const uint32_t heads = static_cast<uint32_t>(second ? p.k.heads : p.q.heads);
  const int64_t x_head = second ? p.k.x_head : p.q.x_head;
  const int64_t out_head = second ? p.k.out_head : p.q.out_head;
  const T *x = static_cast<const T *>(second ? p.k.x : p.q.x) + group * x_head +
               where.batch * (second ? p.k.x_batch : p.q.x_batch) +
               where.seq * (second ? p.k.x_seq : p.q.x_seq);

  Pair<T, N> v[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if constexpr (kNorm) v[j].zero();
    if (active && group + j * step < heads) v[j].load(x + j * step * x_head, u);
  }

  AnglesFor<T, Tab, N, kInterleaved> angles;
  if (active && u.rotated) {
    const uint32_t head = kHeads == 1 ? group : 0;
    angles.load(p, table_at(p.cos, where, head), table_at(p.sin, where, head), unit);
  }

  // Asked for before the sum waits for x, so that the latencies overlap.
  Weights<W, N> weight_a, weight_b;
  if constexpr (kNorm) {
    const void *weight = second ? p.k.weight : p.q.weight;
    if (active) weight_a.load_from(p, weight, u.a);
    if (active && u.has_b) weight_b.load_from(p, weight, u.b);
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

  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
  T *out = static_cast<T *>(second ? p.k.out : p.q.out) + group * out_head +
           where.batch * (second ? p.k.out_batch : p.q.out_batch) +
           where.seq * (second ? p.k.out_seq : p.q.out_seq);
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (!active || group + j * step >= heads) continue;
    if constexpr (kNorm) {
      if constexpr (kHeads > 1) v[j].stay_packed(p.zero);
      normalize<T, W>(p, v[j].a, scale[j], weight_a);
      if (u.has_b) normalize<T, W>(p, v[j].b, scale[j], weight_b);
    }
    finish_unit<T, Tab, N, kInterleaved>(p, v[j], u, angles, rounded, out + j * step * out_head);
  }
}

// ---------------------------------------------------------------------------------------------
// Kernel: `lanes` threads per head, head h of q and head h of k of one token per thread; no norm
//
// cos and sin, the same for all heads, are loaded once for both. q has at least the heads of k. An
// address takes one multiply-add a stride, as strides are below 2^32, and is ready before the wait,
// which the exit of the threads past the end keeps behind it. kRounded: as above. In bf16 on an
// H200, warm and cold, against heads of one tensor in each thread: 2048 tokens of 32 + 8 heads of
// 128 in place 7.90 -> 7.51, 12.3 -> 11.8 us, to new tensors 9.02 -> 8.63, 12.2 -> 11.7; 4096 of 16
// + 8 heads of 64 in place 5.68 -> 5.25, 7.98 -> 7.56. Four heads of q and one of k win warm (7.51,
// 8.22) and lose cold (12.2, 11.9), two and one of 64 lose both (5.65, 8.12).
template <class T, class Tab, int N, bool kInterleaved, bool kRounded>
__global__ void __launch_bounds__(kHeadThreads, kHasTwos<T> ? 0 : 1)
    rope_joint_kernel(const __grid_constant__ RopeParams p) {
  const uint32_t unit = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot), head = slot - outer * p.groups;
  const uint32_t token = outer + p.first_token;
  const Token where = token_at(p, token);
  const auto offset = [&](int64_t batch, int64_t seq, int64_t of_head) {
    return narrow_offset(where, head, batch, seq, of_head);
  };
  const Unit u = unit_at<N>(p, unit);
  const T *q_x = static_cast<const T *>(p.q.x) + offset(p.q.x_batch, p.q.x_seq, p.q.x_head);
  const T *k_x = static_cast<const T *>(p.k.x) + offset(p.k.x_batch, p.k.x_seq, p.k.x_head);
  int64_t cos_at = offset(p.cos.batch, p.cos.seq, 0), sin_at = offset(p.sin.batch, p.sin.seq, 0);
  compute_now(q_x, k_x, cos_at, sin_at);
  if (token >= p.end_token || unit >= p.units) return;
  wait_for_previous();

  const bool both = head < static_cast<uint32_t>(p.k.heads);
  Pair<T, N> q, k;
  q.load(q_x, u);
  if (both) k.load(k_x, u);
  AnglesFor<T, Tab, N, kInterleaved> angles;
  if (u.rotated) angles.load(p, cos_at, sin_at, unit);
  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
  finish_unit<T, Tab, N, kInterleaved>(
      p, q, u, angles, rounded,
      static_cast<T *>(p.q.out) + offset(p.q.out_batch, p.q.out_seq, p.q.out_head));
  if (!both) return;
  finish_unit<T, Tab, N, kInterleaved>(
      p, k, u, angles, rounded,
      static_cast<T *>(p.k.out) + offset(p.k.out_batch, p.k.out_seq, p.k.out_head));
}

// ---------------------------------------------------------------------------------------------
// Kernel: heads that are rotated wholly, by tables that are the same for all of them
//
// As rope_heads_kernel, without what such heads do not ask: each lane has a whole unit, strides are
// below 2^32, and addresses are ready before the wait. Tables in fp32 are shared by kWholeHeads heads
// of one tensor; those that stay packed leave registers for more threads with one head each. bf16 on
// an H200, us, cold, before -> after: qk_norm_rope interleaved 2 x 2688 x 32 x 64 26.3 -> 24.2,
// 1 x 4608 x 24 x 128 33.0 -> 30.3, 512 tokens of it 6.4 -> 5.2; half 1 x 2048 x 32 x 8 x 128 12.5 ->
// 11.7, 8 tokens 1.86 -> 1.30; rope interleaved 2 x 2688 x 32 x 64 13.6 -> 12.7. What lost, in the
// first of these: a head of q and one of k 24.7, one head 26.4, three 24.8, four 26.1, tables and
// weights after the sum 25.4.
// kWide: the tables hold each value twice, and are two.
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

template <class T, class Tab, int N, bool kInterleaved>
inline constexpr int kWholeHeads = kPackedAngles<T, Tab, N, kInterleaved> ? 1 : 2;

template <class T, class Tab, int N, bool kInterleaved, bool kNorm, bool kRounded, bool kWide>
__global__ void __launch_bounds__(kHeadThreads, kHasTwos<T> ? resident_ctas(kHeadThreads, 768) : 1)
    rope_whole_kernel(const __grid_constant__ RopeParams p) {
  constexpr int kHeads = kWholeHeads<T, Tab, N, kInterleaved>;
  const uint32_t unit = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot), token = outer + p.first_token;
  uint32_t group = slot - outer * p.groups;
  // No early return: every lane takes part in the sums.
  const bool active = token < p.end_token;
  const Token where = token_at(p, active ? token : 0);
  // Each number is chosen by itself, as in rope_heads_kernel.
  const bool second = group >= p.q_groups;
  uint32_t step = p.q_groups;
  if (second) group -= p.q_groups, step = p.groups - p.q_groups;
  const int64_t x_head = second ? p.k.x_head : p.q.x_head;
  const int64_t out_head = second ? p.k.out_head : p.q.out_head;
  const uint32_t col = unit * N;
  const T *x = static_cast<const T *>(second ? p.k.x : p.q.x) +
               narrow_offset(where, group, second ? p.k.x_batch : p.q.x_batch,
                             second ? p.k.x_seq : p.q.x_seq, x_head) +
               col;
  T *out = static_cast<T *>(second ? p.k.out : p.q.out) +
           narrow_offset(where, group, second ? p.k.out_batch : p.q.out_batch,
                         second ? p.k.out_seq : p.q.out_seq, out_head) +
           col;
  int64_t cos_at = narrow_offset(where, 0, p.cos.batch, p.cos.seq, 0);
  int64_t sin_at = narrow_offset(where, 0, p.sin.batch, p.sin.seq, 0);
  const void *weight = second ? p.k.weight : p.q.weight;
  const uint32_t heads =
      !active ? 0 : static_cast<uint32_t>(second ? p.k.heads : p.q.heads);
  settle(x, out, cos_at, sin_at);
  wait_for_previous();

  const Unit u{0, p.half, true, true};
  Pair<T, N> v[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if constexpr (kNorm) v[j].zero();
    if (group + j * step < heads) v[j].load(x + j * step * x_head, u);
  }
  AnglesFor<T, Tab, N, kInterleaved> angles;
  if constexpr (kWide) {
    const float *cos = static_cast<const float *>(p.cos.data) + cos_at + col;
    const float *sin = static_cast<const float *>(p.sin.data) + sin_at + col;
    load_every_second<N / 2>(angles.cos, cos);
    load_every_second<N / 2>(angles.cos + N / 2, cos + p.half);
    load_every_second<N / 2>(angles.sin, sin);
    load_every_second<N / 2>(angles.sin + N / 2, sin + p.half);
  } else {
    angles.load(p, cos_at, sin_at, unit);
  }
  Weights<T, N> weight_a, weight_b;
  float scale[kHeads];
  if constexpr (kNorm) {
    weight_a.load_from(p, weight, col);
    weight_b.load_from(p, weight, p.half + col);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = v[j].sum_of_squares();
    for (uint32_t m = p.lanes / 2; m > 0; m /= 2) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) scale[j] += __shfl_xor_sync(~0u, scale[j], m);
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = rsqrtf(fmaf(scale[j], p.inverse_q, p.eps));
  }
  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (group + j * step >= heads) continue;
    if constexpr (kNorm) {
      if constexpr (kHeads > 1) v[j].stay_packed(p.zero);
      normalize<T, T>(p, v[j].a, scale[j], weight_a);
      normalize<T, T>(p, v[j].b, scale[j], weight_b);
    }
    finish_unit<T, Tab, N, kInterleaved>(p, v[j], u, angles, rounded, out + j * step * out_head);
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

// Whether rope_joint_kernel can do it: the tables are the same for all heads, and nothing is too
// wide for it.
inline bool joint_fits(const RopeArgs &a, const RopeParams &p) {
  return a.cos.head == 0 && a.sin.head == 0 && p.chunks == 1 && narrow_strides(a);
}

// Whether rope_whole_kernel can do it.
inline bool whole_fits(const RopeArgs &a, const RopeParams &p) {
  return joint_fits(a, p) && p.rest == p.dim && p.units == p.lanes;
}

// Heads of one tensor in each thread, `each` at most.
inline void share_heads(RopeParams &p, int64_t each) {
  p.q_groups = static_cast<uint32_t>((p.q.heads + each - 1) / each);
  p.groups = p.q_groups + static_cast<uint32_t>((p.k.heads + each - 1) / each);
  p.by_groups = FastDivisor(p.groups);
}

template <class T, class Tab, int N, bool kInterleaved, bool kNorm, bool kWide>
int32_t launch_whole(const RopeArgs &a, RopeParams &p, void *stream, const char *op) {
  share_heads(p, kWholeHeads<T, Tab, N, kInterleaved>);
  const int64_t slots = kHeadThreads / p.lanes;
  return each_token_range(a, p, p.groups, [&](int64_t tokens) {
    const int64_t grid = (tokens * p.groups + slots - 1) / slots;
    const auto run = [&](auto rounded) {
      return launch(&rope_whole_kernel<T, Tab, N, kInterleaved, kNorm, rounded(), kWide>, grid,
                    kHeadThreads, p, stream, op);
    };
    if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run(std::true_type());
    }
    return run(std::false_type());
  });
}

template <class T, class Tab, int N, bool kInterleaved>
int32_t launch_joint(const RopeArgs &a, RopeParams &p, void *stream, const char *op) {
  if (p.q.heads < p.k.heads) std::swap(p.q, p.k);
  p.groups = static_cast<uint32_t>(p.q.heads);
  p.by_groups = FastDivisor(p.groups);
  const int64_t slots = kHeadThreads / p.lanes;
  return each_token_range(a, p, p.groups, [&](int64_t tokens) {
    const int64_t grid = (tokens * p.groups + slots - 1) / slots;
    const auto run = [&](auto rounded) {
      return launch(&rope_joint_kernel<T, Tab, N, kInterleaved, rounded()>, grid, kHeadThreads, p,
                    stream, op);
    };
    if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run(std::true_type());
    }
    return run(std::false_type());
  });
}

template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm>
int32_t launch_heads(const RopeArgs &a, void *stream, const char *op) {
  RopeParams p = rope_params(a, N);
  p.inverse_q = p.inverse_k = static_cast<float>(1.0 / static_cast<double>(a.dim));
  while (p.lanes < p.units && p.lanes < 32) p.lanes *= 2, ++p.lane_bits;
  p.chunks = (p.units + p.lanes - 1) / p.lanes;
  constexpr bool kFast = N * sizeof(T) == kVectorBytes && !std::is_same_v<Tab, AnyType>;
  if constexpr (kFast && kCanBeWide<Tab, N, kInterleaved>) {
    // Without a norm, of one tensor: two heads share its angles.
    if (p.wide && !p.paired && (kNorm || a.k.heads == 0) && whole_fits(a, p)) {
      return launch_whole<T, Tab, N, kInterleaved, kNorm, true>(a, p, stream, op);
    }
  }
  if constexpr (kFast && kNorm) {
    if (whole_fits(a, p)) {
      return launch_whole<T, Tab, N, kInterleaved, true, false>(a, p, stream, op);
    }
  }
  if constexpr (kFast && !kNorm) {
    if (joint_fits(a, p)) return launch_joint<T, Tab, N, kInterleaved>(a, p, stream, op);
  }
  bool several = false;  // heads per thread
  if constexpr (kFast && kNorm) {
    const int64_t threads = a.batch * a.seq * p.heads * p.chunks * p.lanes;
    several = p.heads >= 4 && threads >= kFullThreads && p.cos.head == 0 && p.sin.head == 0;
  }
  const int64_t each = several ? kThreadHeads : 1;
  share_heads(p, each);
  const int64_t slots = kHeadThreads / p.lanes;
  const int64_t per_token = static_cast<int64_t>(p.chunks) * p.groups;
  return each_token_range(a, p, per_token, [&](int64_t tokens) {
    const int64_t grid = (tokens * per_token + slots - 1) / slots;
    const auto run = [&](auto heads, auto rounded) {
      return launch(&rope_heads_kernel<T, Tab, W, N, kInterleaved, kNorm, heads(), rounded()>, grid,
                    kHeadThreads, p, stream, op);
    };
    const auto run_heads = [&](auto rounded) {
      if constexpr (kFast && kNorm) {
        if (several) return run(std::integral_constant<int, kThreadHeads>(), rounded);
      }
      return run(std::integral_constant<int, 1>(), rounded);
    };
    if constexpr (kFast && kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run_heads(std::true_type());
    }
    return run_heads(std::false_type());
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
