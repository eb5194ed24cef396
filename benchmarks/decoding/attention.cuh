// attention.cuh: one new token's attention in each of a batch's rows: norm of q and k by head, RoPE,
// the new key and value into the cache, attention over the cache, by parts of its length.
//
// A CTA takes one head of keys, with all heads of queries that share it, and one part of the keys.
// Scores are an mma with the queries as A and eight keys as B, each thread's elements eight neighbours
// as in product.cuh; values are summed by fma, a lane having dim / 32 of a head. Of the CTAs of a
// head the one that ends last puts the parts together, in their order.
#pragma once

#include "product.cuh"

namespace decoding {

inline constexpr int kAttentionWarps = 8;
inline constexpr int kTile = 8;  // keys that a warp takes at a time
inline constexpr int kPart = kAttentionWarps * kTile;
inline constexpr int kMaxParts = 16;

// Written by begin_step at the start of a step, so that one graph serves all lengths.
struct State {
  int length;    // keys in the cache, the new one among them
  int capacity;  // keys that a head's memory holds
};

struct Attention {
  const void *qkv;  // [rows, (query heads + 2 key heads) * dim]
  void *out;        // [rows, query heads * dim]
  void *const *cache;  // on the device: [layers][keys, values], each [rows, key heads, capacity, dim]
  int layer;
  const State *state;
  const float *table;  // [rows, 2, dim / 2]: cosines, sines
  const unsigned char *mask;  // [rows, mask_stride], 0: a key that is not there; or null
  int mask_stride;
  const void *q_norm, *k_norm;  // [dim], or null
  float eps, norm_offset;
  int round_normed;
  float scale, softcap;  // softcap 0: none
  int window;            // keys that are seen, or 0 for all
  int key_heads, parts;
  float *partial;  // [rows, key heads, parts, heads of a group, 2 + dim]
  unsigned int *arrived;  // [rows, key heads], 0
};

struct Begin {
  const int64_t *ids, *positions;
  const void *embedding;
  void *hidden;
  int columns, half_dim;
  float embedding_scale, table_scale;
  const float *frequencies;  // [half_dim]
  float *table;
  State *state;
};

// A row's embedding and its cosines and sines, rounded as the model's dtype rounds them; one key more.
template <class T>
__global__ void __launch_bounds__(256) begin_step(const __grid_constant__ Begin p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x;
  const auto *from = static_cast<const T *>(p.embedding) + p.ids[row] * p.columns;
  T *const to = static_cast<T *>(p.hidden) + static_cast<int64_t>(row) * p.columns;
  for (int i = threadIdx.x; i < p.columns; i += blockDim.x) {
    to[i] = p.embedding_scale == 1.0f ? from[i] : from_float<T>(to_float(from[i]) * p.embedding_scale);
  }
  const float position = static_cast<float>(p.positions[row]);
  for (int i = threadIdx.x; i < p.half_dim; i += blockDim.x) {
    float s, c;
    sincosf(position * p.frequencies[i], &s, &c);
    p.table[row * 2 * p.half_dim + i] = rounded<T>(c * p.table_scale);
    p.table[(row * 2 + 1) * p.half_dim + i] = rounded<T>(s * p.table_scale);
  }
  if (row == 0 && threadIdx.x == 0) ++p.state->length;
}

template <class T, int kDim, int kHeads>
struct AttentionShared {
  alignas(16) T q[kHeads][kDim];
  alignas(16) T k[kDim];
  alignas(16) float p[kAttentionWarps][kTile][8];
  float rescale[kAttentionWarps][8];
  float most[kAttentionWarps][8], sum[kAttentionWarps][8], by[kAttentionWarps][8];
  alignas(16) float o[kAttentionWarps][kHeads][kDim];
  float share[8][kMaxParts];  // of each part in a head's result
  int last;
};

// A head's norm and RoPE (halves), by one warp.
template <class T, int kDim>
struct NormWeights {  // what of a head's norm a lane needs
  static constexpr int kHalf = kDim / 2, kPairs = (kHalf + 31) / 32;
  T low[kPairs], high[kPairs];
  __device__ __forceinline__ void load(const void *norm, int lane) {
    if (norm == nullptr) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = min(lane + 32 * i, kHalf - 1);
      low[i] = static_cast<const T *>(norm)[d], high[i] = static_cast<const T *>(norm)[d + kHalf];
    }
  }
};

template <class T, int kDim>
__device__ __forceinline__ void norm_rope(const Attention &a, const T *from, bool normed,
                                          const NormWeights<T, kDim> &w, const float *table, T *to, int lane) {
  constexpr int kHalf = kDim / 2, kPairs = (kHalf + 31) / 32;
  float low[kPairs], high[kPairs], cosine[kPairs], sine[kPairs], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int d = min(lane + 32 * i, kHalf - 1);
    low[i] = to_float(load_one(from + d));
    high[i] = to_float(load_one(from + d + kHalf));
    cosine[i] = __ldcg(table + d), sine[i] = __ldcg(table + kHalf + d);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (lane + 32 * i < kHalf) square = fmaf(low[i], low[i], fmaf(high[i], high[i], square));
  }
  if (normed) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
    const float scale = rsqrtf(square / kDim + a.eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = lane + 32 * i;
      if (d < kHalf) {
        low[i] *= scale, high[i] *= scale;
        if (a.round_normed) low[i] = rounded<T>(low[i]), high[i] = rounded<T>(high[i]);
        low[i] = rounded<T>(low[i] * (to_float(w.low[i]) + a.norm_offset));
        high[i] = rounded<T>(high[i] * (to_float(w.high[i]) + a.norm_offset));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int d = lane + 32 * i;
    if (d < kHalf) {
      const float c = cosine[i], s = sine[i];
      to[d] = from_float<T>(rounded<T>(low[i] * c) + rounded<T>(-high[i] * s));
      to[d + kHalf] = from_float<T>(rounded<T>(high[i] * c) + rounded<T>(low[i] * s));
    }
  }
}

template <class T, int kWords>
__device__ __forceinline__ void load_words(uint32_t (&to)[kWords], const T *from) {
  if constexpr (kWords == 1) {
    to[0] = __ldcg(reinterpret_cast<const unsigned int *>(from));
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2 *>(from));
    to[0] = v.x, to[1] = v.y;
  } else {
    static_assert(kWords == 4, "a lane has 2, 4 or 8 elements of a head");
    const uint4 v = __ldcg(reinterpret_cast<const uint4 *>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

// kHeads: a power of two not below the number of query heads of a key head.
template <class T, int kDim, int kHeads>
__global__ void __launch_bounds__(kAttentionWarps * 32)
    attention(const __grid_constant__ Attention a, int heads) {
  constexpr int kLoads = kDim / 32, kOwn = kDim / 32, kWords = kOwn / 2;
  using Shared = AttentionShared<T, kDim, kHeads>;
  extern __shared__ __align__(128) char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int part = blockIdx.x, key_head = blockIdx.y, row = blockIdx.z;

  let_next_start();
  NormWeights<T, kDim> q_norm, k_norm;
  q_norm.load(a.q_norm, lane), k_norm.load(a.k_norm, lane);
  wait_for_previous();

  const int length = __ldcg(&a.state->length), capacity = __ldcg(&a.state->capacity);
  const int first = a.window > 0 && length > a.window ? length - a.window : 0;
  // Blocks of kPart keys are dealt out to the parts in turn: the same for every batch, so that a
  // row's bits are.
  const int blocks = (length - first + kPart - 1) / kPart, active = min(blocks, a.parts);
  if (part >= active) return;
  const bool has_new = (blocks - 1) % a.parts == part;

  T *const keys = static_cast<T *>(a.cache[2 * a.layer]) + (static_cast<int64_t>(row) * a.key_heads + key_head) * capacity * kDim;
  T *const values = static_cast<T *>(a.cache[2 * a.layer + 1]) + (static_cast<int64_t>(row) * a.key_heads + key_head) * capacity * kDim;
  const T *const qkv = static_cast<const T *>(a.qkv) + static_cast<int64_t>(row) * (heads + 2) * a.key_heads * kDim;
  const T *const new_key = qkv + static_cast<int64_t>(heads * a.key_heads + key_head) * kDim;
  const T *const new_value = new_key + static_cast<int64_t>(a.key_heads) * kDim;

  // What a warp reads of a tile is on its way before the queries are ready.
  uint4 key[kLoads];
  uint32_t value[kTile][kWords];
  const auto load_tile = [&](int tile) {
    if (tile + group < length) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        key[i] = __ldcg(reinterpret_cast<const uint4 *>(keys + static_cast<int64_t>(tile + group) * kDim + i * 32 + quarter * 8));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) key[i] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      if (tile + k < length) {
        const T *from = tile + k == length - 1 ? new_value : values + static_cast<int64_t>(tile + k) * kDim;
        load_words(value[k], from + lane * kOwn);
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) value[k][i] = 0;
      }
    }
  };
  const int stride = a.parts * kPart;
  int tile = first + part * kPart + warp * kTile;
  load_tile(tile);

  const float *const table = a.table + row * kDim;
  for (int h = warp; h < heads + 1; h += kAttentionWarps) {
    if (h < heads) norm_rope<T, kDim>(a, qkv + static_cast<int64_t>(key_head * heads + h) * kDim, a.q_norm != nullptr, q_norm, table, shared.q[h], lane);
    else if (has_new) norm_rope<T, kDim>(a, new_key, a.k_norm != nullptr, k_norm, table, shared.k, lane);
  }
  __syncthreads();
  if (has_new) {
    for (int d = threadIdx.x; d < kDim; d += kAttentionWarps * 32) {
      keys[static_cast<int64_t>(length - 1) * kDim + d] = shared.k[d];
      values[static_cast<int64_t>(length - 1) * kDim + d] = load_one(new_value + d);
    }
  }

  uint4 query[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    query[i] = group < heads ? *reinterpret_cast<const uint4 *>(&shared.q[group][i * 32 + quarter * 8]) : make_uint4(0, 0, 0, 0);
  }

  constexpr float kLog2E = 1.44269504f;
  float most = -INFINITY, sum = 0.0f;  // of head `group`; sum: this lane's keys alone
  float o[kHeads][kOwn] = {};
  for (; tile < length; tile += stride) {
    if (tile + group == length - 1) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) key[i] = *reinterpret_cast<const uint4 *>(&shared.k[i * 32 + quarter * 8]);
    }
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t even[4] = {query[i].x, 0, query[i].y, 0}, odd[4] = {query[i].z, 0, query[i].w, 0};
      mma<T>(d, even, key[i].x, key[i].y);
      mma<T>(d, odd, key[i].z, key[i].w);
    }
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = tile + quarter * 2 + i;
      float s = d[i] * a.scale;
      if (a.softcap > 0.0f) s = a.softcap * tanhf(s / a.softcap);
      const bool there = at < length && (a.mask == nullptr || __ldcg(a.mask + static_cast<int64_t>(row) * a.mask_stride + at) != 0);
      score[i] = there ? s * kLog2E : -INFINITY;
    }
    float tile_most = fmaxf(score[0], score[1]);
    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 1));
    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 2));
    const float now = fmaxf(most, tile_most), base = now == -INFINITY ? 0.0f : now;
    const float rescale = exp2f(most - base);
    const float p0 = exp2f(score[0] - base), p1 = exp2f(score[1] - base);
    sum = fmaf(sum, rescale, p0 + p1);
    most = now;
    shared.p[warp][quarter * 2][group] = p0;
    shared.p[warp][quarter * 2 + 1][group] = p1;
    if (quarter == 0) shared.rescale[warp][group] = rescale;
    __syncwarp();

    float v[kTile][kOwn];
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const T *pair = reinterpret_cast<const T *>(&value[k][i]);
        v[k][2 * i] = to_float(pair[0]), v[k][2 * i + 1] = to_float(pair[1]);
      }
    }
    if (tile + stride < length) load_tile(tile + stride);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float by = shared.rescale[warp][h];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) o[h][i] *= by;
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = shared.p[warp][k][h];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) o[h][i] = fmaf(weight, v[k][i], o[h][i]);
      }
    }
    __syncwarp();
  }

  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (quarter == 0) shared.most[warp][group] = most, shared.sum[warp][group] = sum;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) shared.o[warp][h][lane * kOwn + i] = o[h][i];
  }
  __syncthreads();

  T *const out = static_cast<T *>(a.out) + (static_cast<int64_t>(row) * a.key_heads + key_head) * heads * kDim;
  const int64_t head_at = static_cast<int64_t>(row) * a.key_heads + key_head;
  float *const partial = a.partial + head_at * a.parts * heads * (2 + kDim);
  // Warps' results to the CTA's: first each warp's share, by 64 threads, then the elements.
  if (threadIdx.x < kAttentionWarps * 8) {
    const int h = threadIdx.x / 8, w = threadIdx.x % 8;
    const float top = shared.most[w][h];
    float all = top;
#pragma unroll
    for (int d = 4; d > 0; d /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, d));
    const float by = exp2f(top - (all == -INFINITY ? 0.0f : all));
    float total = shared.sum[w][h] * by;
#pragma unroll
    for (int d = 4; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
    shared.by[w][h] = active == 1 ? by / total : by;
    if (w == 0 && h < heads && active > 1) {
      float *const mine = partial + (part * heads + h) * (2 + kDim);
      mine[0] = all, mine[1] = total;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < heads * kDim; e += kAttentionWarps * 32) {
    const int h = e / kDim, d = e % kDim;
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) y = fmaf(shared.o[w][h][d], shared.by[w][h], y);
    if (active == 1) out[e] = from_float<T>(y);
    else partial[(part * heads + h) * (2 + kDim) + 2 + d] = y;
  }
  if (active == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // Counts to `active` and is 0 again, for the next layer.
    shared.last = atomicInc(a.arrived + head_at, static_cast<unsigned>(active - 1)) == static_cast<unsigned>(active - 1);
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();

  // All that a thread reads is on its way at once: a warp has a head's parts, a thread its elements'.
  constexpr int kEach = (kHeads * kDim + kAttentionWarps * 32 - 1) / (kAttentionWarps * 32);
  float theirs[kEach][kMaxParts];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int e = threadIdx.x + n * kAttentionWarps * 32, h = e / kDim, d = e % kDim;
#pragma unroll
    for (int s = 0; s < kMaxParts; ++s) {
      theirs[n][s] = s < active && h < heads ? __ldcg(partial + (s * heads + h) * (2 + kDim) + 2 + d) : 0.0f;
    }
  }
  if (warp < heads) {
    const float *const mine = partial + (min(lane, active - 1) * heads + warp) * (2 + kDim);
    const float top = lane < active ? __ldcg(mine) : -INFINITY, total = lane < active ? __ldcg(mine + 1) : 0.0f;
    float all = top;
#pragma unroll
    for (int d = kMaxParts / 2; d > 0; d /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, d));
    const float by = exp2f(top - (all == -INFINITY ? 0.0f : all));
    float sums = total * by;
#pragma unroll
    for (int d = kMaxParts / 2; d > 0; d /= 2) sums += __shfl_xor_sync(0xffffffffu, sums, d);
    if (lane < kMaxParts) shared.share[warp][lane] = by / sums;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int e = threadIdx.x + n * kAttentionWarps * 32, h = e / kDim;
    if (h < heads) {
      float y = 0.0f;
#pragma unroll
      for (int s = 0; s < kMaxParts; ++s) y = fmaf(shared.share[h][s], theirs[n][s], y);
      out[e] = from_float<T>(y);
    }
  }
}

}  // namespace decoding
