// decode_attention.cuh: the new tokens' attention in each of a batch's rows, half types: norm of q and k by
// head, rotation, the new keys and values into the cache, attention over the cache, by parts of its length.
//
// A CTA takes one head of keys, a block of the queries that share it (heads and tokens), and one part of the
// keys. Scores are an mma with the queries as A and eight keys as B, each thread's elements eight
// neighbours as in decode_product.cuh; values are summed by fma, a lane having some neighbouring elements of
// a head. Of the CTAs of a block the one that ends last puts the parts together, in their order.
#pragma once

#include "decode_product.cuh"

namespace hfp::cuda::decode {

inline constexpr int kAttentionWarps = 8;
inline constexpr int kAttentionThreads = kAttentionWarps * 32;
inline constexpr int kTile = 8;  // keys that a warp takes at a time
inline constexpr int kPart = kAttentionWarps * kTile;
inline constexpr int kNewKeys = 16;  // of one step

// kDim: at least a head's elements, a multiple of 32. kQueries: at least the queries of a block.
template <class T, int kDim, int kQueries>
struct AttentionShared {
  alignas(16) T q[kQueries][kDim];
  alignas(16) T k[kNewKeys][kDim];
  float scratch[kAttentionWarps][kDim];
  alignas(16) float p[kAttentionWarps][kTile][8];
  float rescale[kAttentionWarps][8];
  float most[kAttentionWarps][8], sum[kAttentionWarps][8], by[kAttentionWarps][8];
  alignas(16) float o[kAttentionWarps][kQueries][kDim];
  float share[8][kParts];  // of each part in a query's result
  int last;
};

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&to)[kWords], const void *from) {
  if constexpr (kWords == 1) {
    to[0] = __ldcg(static_cast<const unsigned int *>(from));
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcg(static_cast<const uint2 *>(from));
    to[0] = v.x, to[1] = v.y;
  } else {
    static_assert(kWords == 4, "a lane has 2, 4 or 8 elements of a head");
    const uint4 v = __ldcg(static_cast<const uint4 *>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

// kCtas: of them a multiprocessor must have room for. One leaves a thread the registers that it wants, two are
// faster where there is more than one for each multiprocessor.
template <class T, int kDim, int kQueries, int kCtas>
__global__ void __launch_bounds__(kAttentionThreads, kCtas)
    decode_attention_kernel(const __grid_constant__ Attention a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kLoads = kDim / 32, kOwn = kDim <= 64 ? 2 : kDim <= 128 ? 4 : 8, kWords = kOwn / 2;
  constexpr float kLog2E = 1.44269504f;
  using Shared = AttentionShared<T, kDim, kQueries>;
  extern __shared__ __align__(128) char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int part = blockIdx.x;
  const int row = blockIdx.z;
  const int key_head = blockIdx.y / a.blocks, block = blockIdx.y % a.blocks;
  const int heads = a.group(), dim = a.dim, width = a.width(), tokens = a.tokens;
  // Queries of the block: number q is head q % heads of token q / heads.
  const int first_query = block * kQueries, queries = min(kQueries, heads * tokens - first_query);

  let_next_start();
  // Before the wait: what no kernel of this step writes. The table and the keys of earlier steps are such, since the
  // step's first kernel has waited for all that was before it.
  const int length = static_cast<int>(__ldcg(a.cache)), end = length + tokens;
  const int64_t *const entry = a.cache + 1 + 3 * a.layer;
  const int64_t capacity = __ldcg(entry + 2);
  const int64_t memory_of_head = (static_cast<int64_t>(row) * a.key_heads + key_head) * capacity * dim;
  T *const keys = reinterpret_cast<T *>(__ldcg(entry)) + memory_of_head;
  T *const values = reinterpret_cast<T *>(__ldcg(entry + 1)) + memory_of_head;
  HeadNorm<T, kDim> q_norm, k_norm;
  if (!a.across) q_norm.load(a.q_norm, 0, dim, lane), k_norm.load(a.k_norm, 0, dim, lane);
  const int first = a.window > 0 && length + 1 > a.window ? static_cast<int>(length + 1 - a.window) : 0;
  // Blocks of kPart keys are dealt out to the parts in turn: the same for every batch, so that a
  // row's bits are. A CTA has one part or, in large grids, several, one after the other.
  const int blocks = (end - first + kPart - 1) / kPart, active = min(blocks, a.parts);
  const int ctas = static_cast<int>(gridDim.x);

  const T *const qkv = static_cast<const T *>(a.qkv) + static_cast<int64_t>(row) * tokens * width;
  const T *const new_keys = qkv + a.heads * dim;
  const T *const new_values = new_keys + (a.key_heads + key_head) * dim;

  // What a warp reads of a tile is on its way before it is needed.
  uint4 key[kLoads];
  uint32_t value[kTile][kWords];
  const auto load_old = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = i * 32 + quarter * 8;
      key[i] = make_uint4(0, 0, 0, 0);
      if (tile + group < length && d < dim) {
        key[i] = __ldcg(reinterpret_cast<const uint4 *>(keys + static_cast<int64_t>(tile + group) * dim + d));
      }
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) value[k][i] = 0;
      if (tile + k < length && lane * kOwn < dim) {
        load_words(value[k], values + static_cast<int64_t>(tile + k) * dim + lane * kOwn);
      }
    }
  };
  const auto load_new = [&](int tile) {
    if (tile + kTile <= length) return;
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      if (tile + k >= length && tile + k < end && lane * kOwn < dim) {
        load_words(value[k], new_values + static_cast<int64_t>(tile + k - length) * width + lane * kOwn);
      }
    }
  };
  const int stride = a.parts * kPart;
  if (part < active) load_old(first + part * kPart + warp * kTile);
  wait_for_previous<false>();
  if (part >= active) return;

  // Whether new key t lies in one of this CTA's parts.
  // `ctas` is a power of two, as kParts is.
  const auto own_key = [&](int t) {
    return ((length + t - first) / kPart & (ctas - 1)) == static_cast<int>(blockIdx.x);
  };
  const float *const table = a.table != nullptr ? a.table + static_cast<int64_t>(row) * tokens * 2 * a.half : nullptr;
  const auto table_of = [&](int t) { return table != nullptr ? table + t * 2 * a.half : nullptr; };
#pragma unroll 1
  for (int i = warp; i < queries + tokens; i += kAttentionWarps) {
    const bool of_key = i >= queries;
    const int q = first_query + i, t = of_key ? i - queries : q / heads;
    if (of_key && !own_key(t)) continue;
    HeadNorm<T, kDim> norm = q_norm;
    if (of_key) norm = k_norm;
    const T *const from = (of_key ? new_keys : qkv) + static_cast<int64_t>(t) * width;
    prepare_head<T, kDim>(a, of_key ? a.k_norm : a.q_norm, norm, from, (of_key ? a.key_heads : a.heads) * dim,
                          (of_key ? key_head : key_head * heads + q - t * heads) * dim, table_of(t),
                          of_key ? shared.k[t] : shared.q[i], shared.scratch[warp], lane);
  }
  __syncthreads();
  if (block == 0) {
    for (int t = 0; t < tokens; ++t) {
      const int d = static_cast<int>(threadIdx.x);  // kDim is no more than there are threads
      if (!own_key(t) || d >= dim) continue;
      const int64_t at = static_cast<int64_t>(length + t) * dim + d;
      keys[at] = shared.k[t][d];
      values[at] = from_float<T>(load_one(new_values + static_cast<int64_t>(t) * width + d));
    }
  }

  uint4 query[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int d = i * 32 + quarter * 8;
    query[i] = make_uint4(0, 0, 0, 0);
    if (group < queries && d < dim) query[i] = *reinterpret_cast<const uint4 *>(&shared.q[group][d]);
  }
  // What query `group` sees: [sees_from, sees_to).
  const auto token_of = [&](int i) { return tokens == 1 ? 0 : (first_query + i) / heads; };
  const int own_token = token_of(min(group, queries - 1));
  const int sees_to = length + own_token + 1;
  const int64_t sees_from = a.window > 0 ? sees_to - a.window : 0;

  const auto out_of = [&](int i) {
    const int token = token_of(i), head = first_query + i - token * heads;
    return static_cast<T *>(a.out) + (static_cast<int64_t>(row) * tokens + token) * a.heads * dim +
           (key_head * heads + head) * dim;
  };
  // A thread's elements of the result: number `own` of every kAtOnce-th query from `own_query` on.
  constexpr int kAtOnce = kAttentionThreads / kDim, kRounds = (kQueries + kAtOnce - 1) / kAtOnce;
  const int own_query = static_cast<int>(threadIdx.x) / kDim, own = static_cast<int>(threadIdx.x) % kDim;
  const auto has = [&](int round) {
    return own_query < kAtOnce && own < dim && own_query + round * kAtOnce < queries;
  };
  // One more score, of the sink, beside those that have `all` as their greatest and the sum `total`.
  const auto whole_sum = [&](int i, float all, float total, float *by) {
    if (a.sinks != nullptr) {
      const int head = key_head * heads + (first_query + i) % heads;
      const float sink = parameter<T>(a.sinks, head) * kLog2E;
      const float top = fmaxf(all, sink);
      const float turned = all == -INFINITY ? 0.0f : exp2f(all - top);
      total = total * turned + exp2f(sink - top);
      *by *= turned;
    }
    return total;
  };
  const int64_t head_at = (static_cast<int64_t>(row) * a.key_heads + key_head) * a.blocks + block;
  float *const partial = a.partial + head_at * a.parts * kQueries * (2 + dim);

  for (; part < active; part += ctas) {
  int tile = first + part * kPart + warp * kTile;
  const int next_part = part + ctas < active ? tile + ctas * kPart : end;
  float most = -INFINITY, sum = 0.0f;  // of query `group`; sum: this lane's keys alone
  float o[kQueries][kOwn] = {};
  for (; tile < end; tile += stride) {
    load_new(tile);
    if (tile + group >= length && tile + group < end) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int d = i * 32 + quarter * 8;
        if (d < dim) key[i] = *reinterpret_cast<const uint4 *>(&shared.k[tile + group - length][d]);
      }
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
      const bool there = at < sees_to && at >= sees_from &&
                         (a.mask == nullptr || __ldcg(a.mask + row * a.mask_width + at) != 0);
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
        const float2 pair = unpack<T>(value[k][i]);
        v[k][2 * i] = pair.x, v[k][2 * i + 1] = pair.y;
      }
    }
    const int next = tile + stride < end ? tile + stride : next_part;
    if (next < end) load_old(next);
#pragma unroll
    for (int h = 0; h < kQueries; ++h) {
      const float by = shared.rescale[warp][h];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) o[h][i] *= by;
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
#pragma unroll
      for (int h = 0; h < kQueries; ++h) {
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
  if (lane * kOwn < kDim) {
#pragma unroll
    for (int h = 0; h < kQueries; ++h) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) shared.o[warp][h][lane * kOwn + i] = o[h][i];
    }
  }
  __syncthreads();

  // Warps' results to the CTA's: first each warp's share, by 64 threads, then the elements.
  if (threadIdx.x < kAttentionWarps * 8) {
    const int h = threadIdx.x / 8, w = threadIdx.x % 8;
    const float top = shared.most[w][h];
    float all = top;
#pragma unroll
    for (int d = 4; d > 0; d /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, d));
    float by = exp2f(top - (all == -INFINITY ? 0.0f : all));
    float total = shared.sum[w][h] * by;
#pragma unroll
    for (int d = 4; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
    if (h < queries) {
      if (active == 1) {
        const float sums = whole_sum(h, all, total, &by);
        by = sums > 0.0f ? by / sums : 0.0f * sums;  // nothing is seen: 0; NaN stays
      } else if (w == 0) {
        float *const mine = partial + (part * kQueries + h) * (2 + dim);
        mine[0] = all, mine[1] = total;
      }
    }
    shared.by[w][h] = by;
  }
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    if (!has(round)) break;
    const int h = own_query + round * kAtOnce;
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) y = fmaf(shared.o[w][h][own], shared.by[w][h], y);
    if (active == 1) out_of(h)[own] = from_float<T>(y);
    else partial[(part * kQueries + h) * (2 + dim) + 2 + own] = y;
  }
  if (part + ctas < active) __syncthreads();  // before the next part's results come into the same memory
  }
  if (active == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // CTAs that have a part count to their number; 0 again for the next layer.
    const unsigned last = static_cast<unsigned>(min(ctas, active) - 1);
    shared.last = atomicInc(a.arrived + head_at, last) == last;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();

  // All that a thread reads is on its way at once: its elements of the parts, and a warp a query's sums.
  float theirs[kRounds][kParts];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const float *from = partial + (own_query + round * kAtOnce) * (2 + dim) + 2 + own;
#pragma unroll
    for (int s = 0; s < kParts; ++s, from += kQueries * (2 + dim)) {
      theirs[round][s] = s < active && has(round) ? __ldcg(from) : 0.0f;
    }
  }
  if (warp < queries) {
    const float *const mine = partial + (min(lane, active - 1) * kQueries + warp) * (2 + dim);
    const float top = lane < active ? __ldcg(mine) : -INFINITY, total = lane < active ? __ldcg(mine + 1) : 0.0f;
    float all = top;
#pragma unroll
    for (int d = kParts / 2; d > 0; d /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, d));
    float by = exp2f(top - (all == -INFINITY ? 0.0f : all));
    float sums = total * by;
#pragma unroll
    for (int d = kParts / 2; d > 0; d /= 2) sums += __shfl_xor_sync(0xffffffffu, sums, d);
    sums = whole_sum(warp, all, sums, &by);
    if (lane < kParts) shared.share[warp][lane] = sums > 0.0f ? by / sums : 0.0f * sums;
  }
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (!has(round)) break;
    const int h = own_query + round * kAtOnce;
    float y = 0.0f;
#pragma unroll
    for (int s = 0; s < kParts; ++s) y = fmaf(shared.share[h][s], theirs[round][s], y);
    out_of(h)[own] = from_float<T>(y);
  }
#endif
}

}  // namespace hfp::cuda::decode
