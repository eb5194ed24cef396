// decode_attention.cuh: the new tokens' attention in each of a batch's rows, half types: norm of q and k by
// head, rotation, the new keys and values into the cache, attention over the cache, by parts of its length.
//
// A CTA takes one head of keys, a block of the queries that share it (heads and tokens), and one part of the
// keys. Scores are an mma with the queries as A and eight keys as B, each thread's elements eight
// neighbours as in decode_product.cuh. Sums of values are one with 16 elements of a head as A, 16 keys' values
// of each, and the weights as B: where the scores' mma leaves them. The parts of a block are put together, in their
// order, by the CTA of theirs that ends last. Behind few keys they are a cluster: then by its first one, which they
// send their results to.
#pragma once

#include "decode_product.cuh"
#include "mailbox.cuh"

namespace hfp::cuda::decode {

inline constexpr int kTile = 16;  // keys that a warp takes at a time
inline constexpr int kClusterKeys = 1024;  // at most, for parts that a cluster puts together
inline constexpr int kNewKeys = 16;  // of one step
static_assert(kMostParts == 32, "a lane has a part's sum");

// The parts' results, in the shared memory of a cluster's first CTA.
template <int kDim, int kQueries, int kParts>
struct PartResults {
  alignas(16) float y[kParts][kQueries][kDim];
  alignas(8) float sums[kParts][kQueries][2];  // the greatest score and the sum
  Mailbox mailbox;
};

// kDim: at least a head's elements, a multiple of 32. kQueries: at least the queries of a block.
template <class T, int kDim, int kQueries, int kAttentionWarps>
struct AttentionShared {
  // Parts whose warps' results are kept, to be put together at once.
  static constexpr int kFit = (4 << 10) / (kQueries * kDim * 4), kKept = kFit < 1 ? 1 : kFit > 4 ? 4 : kFit;
  static constexpr int kClusterParts = kClusterKeys / (kAttentionWarps * kTile);

  alignas(16) T q[kQueries][kDim];
  alignas(16) T k[kNewKeys][kDim], v[kNewKeys][kDim];
  float scratch[kAttentionWarps][kDim];
  float most[kKept][8][kAttentionWarps], sum[kKept][8][kAttentionWarps];
  alignas(16) float o[kKept][kAttentionWarps][kQueries][kDim];
  float share[8][kMostParts];  // of each part in a query's result
  int last;
  PartResults<kDim, kQueries, kClusterParts> results;  // last: there in clusters alone

  static constexpr int bytes(bool clusters) {
    return static_cast<int>(sizeof(AttentionShared) - (clusters ? 0 : sizeof(results)));
  }
};

// Two weights as the halves of a word, the first one low.
template <class T>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    memcpy(&word, &two, 4);
  } else {
    const __half2 two = __floats2half2_rn(low, high);
    memcpy(&word, &two, 4);
  }
  return word;
}

// What a multiprocessor has registers for.
constexpr int ctas_of_processor(int dim, int warps) { return (dim <= 64 ? 2 : 1) * 8 / warps; }

// kUsual: for what `is_usual` (decode_attention.cu) finds, in half the code: between a layer's products it is fetched
// anew. The same arithmetic, so the same bits. kAttentionWarps: 8, or 4, whose registers a multiprocessor has beside a
// short layer's products (Share): such a CTA has asked for its keys before the products are there.
template <class T, int kDim, int kQueries, int kAttentionWarps, bool kUsual>
__global__ void __launch_bounds__(kAttentionWarps * 32, ctas_of_processor(kDim, kAttentionWarps))
    decode_attention_kernel(const __grid_constant__ Attention a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kAttentionThreads = kAttentionWarps * 32, kPart = kAttentionWarps * kTile;
  constexpr int kLoads = kDim / 32, kSixties = (kDim + 63) / 64;  // 64 elements are eight of each group of lanes
  constexpr float kLog2E = 1.44269504f;
#if __CUDA_ARCH__ >= 900
  constexpr bool kClusters = kUsual;
#else
  constexpr bool kClusters = false;
#endif
  using Shared = AttentionShared<T, kDim, kQueries, kAttentionWarps>;
  extern __shared__ __align__(128) char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int part = blockIdx.x;
  const int row = blockIdx.z;
  const int key_head = kUsual ? blockIdx.y : blockIdx.y / a.blocks, block = kUsual ? 0 : blockIdx.y % a.blocks;
  const int heads = a.group(), dim = kUsual ? kDim : a.dim, tokens = kUsual ? 1 : a.tokens;
  const int width = (a.heads + 2 * a.key_heads) * dim;
  const int64_t window = kUsual ? 0 : a.window;
  const uint8_t *const mask = kUsual ? nullptr : a.mask;
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
  if (kUsual || !a.across) {
    // Where heads have their own: that of the first query which this warp prepares.
    const int head = kUsual ? 0 : key_head * heads + (first_query + warp) % heads;
    q_norm.template load_head<kUsual>(a.q_norm, head, dim, lane);
    k_norm.template load_head<kUsual>(a.k_norm, key_head, dim, lane);
  }
  const int first = window > 0 && length + 1 > window ? static_cast<int>(length + 1 - window) : 0;
  // Blocks of kPart keys are dealt out to the parts in turn: the same for every batch, so that a
  // row's bits are. A CTA has one part or, in large grids, several, one after the other.
  const int blocks = (end - first + kPart - 1) / kPart, parts = a.parts;
  const int active = min(blocks, parts);
  const int ctas = static_cast<int>(gridDim.x);
  // Whether this cluster, which has all of them, puts them together.
  const bool in_cluster = kClusters && a.clusters && active <= Shared::kClusterParts;
  auto &results = shared.results;
  if constexpr (kClusters) {
    if (in_cluster && blockIdx.x == 0) {
      const int own = (active + ctas - 1) / ctas;
      results.mailbox.begin((active - own) * queries * (kDim + 2) * 4);
    }
    if (in_cluster) Team<true>::leave();
  }

  const T *const qkv = static_cast<const T *>(a.qkv) + static_cast<int64_t>(row) * tokens * width;
  const T *const new_keys = qkv + a.heads * dim;
  const T *const new_values = new_keys + (a.key_heads + key_head) * dim;

  // What a warp reads of a tile is on its way before it is needed: of keys number `group` and `group` + 8 the
  // elements that a thread has of a query; of the values of four keys eight elements of each 64.
  uint4 key[2][kLoads], value[kSixties][4];
  const auto value_row = [&](int r) { return 2 * quarter + r % 2 + r / 2 * 8; };
  const auto load_keys = [&](int tile) {
    const bool whole = tile + kTile <= length;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = tile + 8 * s + group;
      const T *const from = keys + static_cast<int64_t>(at) * dim + quarter * 8;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        key[s][i] = make_uint4(0, 0, 0, 0);
        if ((whole || at < length) && i * 32 + quarter * 8 < dim) {
          key[s][i] = __ldcg(reinterpret_cast<const uint4 *>(from + i * 32));
        }
      }
    }
  };
  const auto load_values = [&](int tile) {
    const bool whole = tile + kTile <= length;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = tile + value_row(r);
      const T *const from = values + static_cast<int64_t>(at) * dim + group * 8;
#pragma unroll
      for (int h = 0; h < kSixties; ++h) {
        value[h][r] = make_uint4(0, 0, 0, 0);
        if ((whole || at < length) && h * 64 + group * 8 < dim) {
          value[h][r] = __ldcg(reinterpret_cast<const uint4 *>(from + h * 64));
        }
      }
    }
  };
  // This step's keys and values among them.
  const auto load_new = [&](int tile) {
    if (tile + kTile <= length) return;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = tile + 8 * s + group;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int d = i * 32 + quarter * 8;
        if (at >= length && at < end && d < dim) {
          key[s][i] = *reinterpret_cast<const uint4 *>(&shared.k[at - length][d]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = tile + value_row(r);
#pragma unroll
      for (int h = 0; h < kSixties; ++h) {
        const int d = h * 64 + group * 8;
        if (at >= length && at < end && d < dim) {
          value[h][r] = *reinterpret_cast<const uint4 *>(&shared.v[at - length][d]);
        }
      }
    }
  };
  const int stride = parts * kPart;
  if (part >= active) return;  // the grid ends no earlier: its first CTAs wait
  load_keys(first + part * kPart + warp * kTile);
  load_values(first + part * kPart + warp * kTile);
  if constexpr (kClusters) {
    __syncwarp();
    if (in_cluster) Team<true>::left();  // the first one's mailbox is there
  }
  wait_for_previous<false>();

  // Whether new key t lies in one of this CTA's parts.
  // `ctas` is a power of two, as `parts` is.
  const auto own_key = [&](int t) {
    return (((length + t - first) / kPart) & (ctas - 1)) == static_cast<int>(blockIdx.x);
  };
  const int half = kUsual ? kDim / 2 : a.half;
  const bool turned = kUsual || a.table != nullptr;
  const float *const table = turned ? a.table + static_cast<int64_t>(row) * tokens * 2 * half : nullptr;
  const auto table_of = [&](int t) { return turned ? table + t * 2 * half : nullptr; };
#pragma unroll 1
  for (int i = warp; i < queries + 2 * tokens; i += kAttentionWarps) {
    if (i >= queries + tokens) {
      const int t = i - queries - tokens, d = lane * 8;
      if (d >= dim || !own_key(t)) continue;
      const T *const from = new_values + static_cast<int64_t>(t) * width + d;
      *reinterpret_cast<uint4 *>(&shared.v[t][d]) = __ldcg(reinterpret_cast<const uint4 *>(from));
      continue;
    }
    const bool of_key = i >= queries;
    const int q = first_query + i, t = of_key ? i - queries : kUsual ? 0 : q / heads;
    if (of_key && !own_key(t)) continue;
    HeadNorm<T, kDim> norm = q_norm;
    if (of_key) norm = k_norm;
    const T *const from = (of_key ? new_keys : qkv) + static_cast<int64_t>(t) * width;
    const bool held = kUsual || of_key || i == warp || a.q_norm.heads == OfHeads::kTheSame;
    prepare_head<T, kDim, kUsual>(a, of_key ? a.k_norm : a.q_norm, norm, held, from,
                          (of_key ? a.key_heads : a.heads) * dim,
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
      values[at] = shared.v[t][d];
    }
  }

  const auto read_query = [&](int i) {
    const int d = i * 32 + quarter * 8;
    if (group >= queries || d >= dim) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4 *>(&shared.q[group][d]);
  };
  constexpr bool kQueryHeld = kDim <= 128;  // wider ones would take registers that tiles need
  uint4 query[kQueryHeld ? kLoads : 1];
  if constexpr (kQueryHeld) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) query[i] = read_query(i);
  }
  // What query `group` sees: [sees_from, sees_to).
  const auto token_of = [&](int i) { return kUsual || tokens == 1 ? 0 : (first_query + i) / heads; };
  const int own_token = token_of(min(group, queries - 1));
  const int sees_to = length + own_token + 1;
  const int64_t sees_from = window > 0 ? sees_to - window : 0;

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
  // One more score, of the sink, beside those that have `all` as their greatest and the sum `total`. The factor by
  // which the sums of values become the result.
  const auto whole_factor = [&](int i, float all, float total) {
    float turned = 1.0f;
    if (!kUsual && a.sinks != nullptr) {
      const int head = key_head * heads + (first_query + i) % heads;
      const float sink = parameter<T>(a.sinks, head) * kLog2E;
      const float top = fmaxf(all, sink);
      turned = all == -INFINITY ? 0.0f : exp2f(all - top);
      total = total * turned + exp2f(sink - top);
    }
    return total > 0.0f ? turned / total : 0.0f * total;  // nothing is seen: 0; NaN stays
  };
  // Of all parts: the sums of values, then of each the greatest score and the sum of weights.
  const int64_t head_at = (static_cast<int64_t>(row) * a.key_heads + key_head) * (kUsual ? 1 : a.blocks) + block;
  float *const partial = a.partial + head_at * a.parts * kQueries * (2 + dim);
  float *const partial_sums = partial + a.parts * kQueries * dim;
  // Four elements of a query's result, from number d on.
  const auto store_four = [&](int h, int d, const float (&y)[4]) {
    uint2 four;
    four.x = packed<T>(y[0], y[1]), four.y = packed<T>(y[2], y[3]);
    *reinterpret_cast<uint2 *>(out_of(h) + d) = four;
  };
  constexpr int kFours = kDim / 4;

  int kept = 0;  // of this CTA's parts
  for (; part < active; part += ctas) {
  int tile = first + part * kPart + warp * kTile;
  const int next_part = part + ctas < active ? tile + ctas * kPart : end;
  float most = -INFINITY, sum = 0.0f;  // of query `group`; sum: this lane's keys alone
  // Of elements 8 `group` + 2 i and the one behind it of each 64: [0], [2] of query 2 `quarter`, [1], [3] of the next.
  float o[kSixties][4][4] = {};
  for (; tile < end; tile += stride) {
    load_new(tile);
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint4 q;
      if constexpr (kQueryHeld) q = query[i];
      else q = read_query(i);
      const uint32_t even[4] = {q.x, 0, q.y, 0}, odd[4] = {q.z, 0, q.w, 0};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        mma<T>(d[s], even, key[s][i].x, key[s][i].y);
        mma<T>(d[s], odd, key[s][i].z, key[s][i].w);
      }
    }
    const int next = tile + stride < end ? tile + stride : next_part;
    if (next < end) load_keys(next);

    float p[2][2], tile_most = -INFINITY;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = tile + 8 * s + quarter * 2 + i;
        float score = d[s][i] * a.scale;
        if (!kUsual && a.softcap > 0.0f) score = a.softcap * tanhf(score / a.softcap);
        const bool there = at < sees_to && at >= sees_from &&
                           (mask == nullptr || __ldcg(mask + row * a.mask_width + at) != 0);
        p[s][i] = there ? score * kLog2E : -INFINITY;
        tile_most = fmaxf(tile_most, p[s][i]);
      }
    }
    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 1));
    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 2));
    const float now = fmaxf(most, tile_most), base = now == -INFINITY ? 0.0f : now;
    const float rescale = exp2f(most - base);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) p[s][i] = exp2f(p[s][i] - base);
    }
    sum = fmaf(sum, rescale, (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
    most = now;
    if (__any_sync(0xffffffffu, rescale != 1.0f)) {
      const float by[2] = {__shfl_sync(0xffffffffu, rescale, quarter * 8),
                           __shfl_sync(0xffffffffu, rescale, quarter * 8 + 4)};
#pragma unroll
      for (int h = 0; h < kSixties; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) o[h][i][j] *= by[j % 2];
        }
      }
    }
    const uint32_t weights[2] = {packed<T>(p[0][0], p[0][1]), packed<T>(p[1][0], p[1][1])};
#pragma unroll
    for (int h = 0; h < kSixties; ++h) {
      const auto word = [&](int r, int i) {
        const uint4 &v = value[h][r];
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t of_keys[4] = {
            __byte_perm(word(0, i), word(1, i), 0x5410), __byte_perm(word(0, i), word(1, i), 0x7632),
            __byte_perm(word(2, i), word(3, i), 0x5410), __byte_perm(word(2, i), word(3, i), 0x7632)};
        mma<T>(o[h][i], of_keys, weights[0], weights[1]);
      }
    }
    if (next < end) load_values(next);
  }

  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (quarter == 0) shared.most[kept][group][warp] = most, shared.sum[kept][group][warp] = sum;
#pragma unroll
  for (int h = 0; h < kSixties; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = h * 64 + group * 8 + i * 2;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (at >= kDim || quarter * 2 + j >= kQueries) continue;
        float *const to = &shared.o[kept][warp][quarter * 2 + j][at];
        *reinterpret_cast<float2 *>(to) = make_float2(o[h][i][j], o[h][i][2 + j]);
      }
    }
  }
  if (++kept < Shared::kKept && part + ctas < active) continue;
  __syncthreads();

  // Warps' results to the parts'.
  const int first_kept = part - (kept - 1) * ctas;
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < kept * kQueries * kFours; e += kAttentionThreads) {
    const int d = e % kFours * 4, h = e / kFours % kQueries, which = e / (kFours * kQueries);
    if (h >= queries || d >= dim) continue;
    float by[kAttentionWarps], all = -INFINITY, total = 0.0f, y[4] = {};
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) all = fmaxf(all, by[w] = shared.most[which][h][w]);
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      by[w] = exp2f(by[w] - (all == -INFINITY ? 0.0f : all));
      total = fmaf(shared.sum[which][h][w], by[w], total);
      const float4 o = *reinterpret_cast<const float4 *>(&shared.o[which][w][h][d]);
      y[0] = fmaf(o.x, by[w], y[0]), y[1] = fmaf(o.y, by[w], y[1]);
      y[2] = fmaf(o.z, by[w], y[2]), y[3] = fmaf(o.w, by[w], y[3]);
    }
    const int at = first_kept + which * ctas;
    if (active == 1) {
      const float factor = whole_factor(h, all, total);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] *= factor;
      store_four(h, d, y);
      continue;
    }
    const float sums[2] = {all, total};
    if constexpr (kClusters) {
      if (in_cluster && blockIdx.x > 0) {
        results.mailbox.send(&results.y[at][h][d], y, 0);
        if (d == 0) results.mailbox.send(results.sums[at][h], sums, 0);
        continue;
      }
    }
    float *const to = in_cluster ? &results.y[at][h][d] : partial + (at * kQueries + h) * dim + d;
    *reinterpret_cast<float4 *>(to) = make_float4(y[0], y[1], y[2], y[3]);
    if (d == 0) {
      float *const beside = in_cluster ? results.sums[at][h] : partial_sums + (at * kQueries + h) * 2;
      beside[0] = all, beside[1] = total;
    }
  }
  kept = 0;
  if (part + ctas < active) __syncthreads();  // before the next part's results come into the same memory
  }
  if (active == 1) return;

  if constexpr (kClusters) {
    if (in_cluster) {
      if (blockIdx.x > 0) return;
      __syncthreads();
      results.mailbox.wait(0);
#pragma unroll 1
      for (int e = static_cast<int>(threadIdx.x); e < queries * kFours; e += kAttentionThreads) {
        const int d = e % kFours * 4, h = e / kFours;
        constexpr int kParts = Shared::kClusterParts;
        float by[kParts], sums[kParts], all = -INFINITY, y[4] = {};
#pragma unroll
        for (int s = 0; s < kParts; ++s) {
          const float2 of_part = *reinterpret_cast<const float2 *>(results.sums[s][h]);
          by[s] = s < active ? of_part.x : -INFINITY, sums[s] = s < active ? of_part.y : 0.0f;
          all = fmaxf(all, by[s]);
        }
        const float base = all == -INFINITY ? 0.0f : all;
#pragma unroll
        for (int s = 0; s < kParts; ++s) by[s] = exp2f(by[s] - base), sums[s] = __fmul_rn(sums[s], by[s]);
        // As a warp's sum over all parts, below: in its order, and no product joined to a sum.
#pragma unroll
        for (int d = kParts / 2; d > 0; d /= 2) {
#pragma unroll
          for (int s = 0; s < kParts / 2; ++s) {
            if (s < d) sums[s] += sums[s + d];
          }
        }
        const float factor = whole_factor(h, all, sums[0]);
#pragma unroll
        for (int s = 0; s < kParts; ++s) {
          if (s >= active) continue;
          const float share = by[s] * factor;
          const float4 part_y = *reinterpret_cast<const float4 *>(&results.y[s][h][d]);
          y[0] = fmaf(share, part_y.x, y[0]), y[1] = fmaf(share, part_y.y, y[1]);
          y[2] = fmaf(share, part_y.z, y[2]), y[3] = fmaf(share, part_y.w, y[3]);
        }
        store_four(h, d, y);
      }
      return;
    }
  }

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

  // What a thread reads of the parts, so many at a time, is on its way at once, and a warp a query's sums.
  constexpr int kReads = kRounds <= 4 ? 16 : 8;
  float theirs[kRounds][kReads], y[kRounds] = {};
  const auto load_parts = [&](int begin) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int query = own_query + round * kAtOnce;
      const float *from = partial + (begin * kQueries + query) * dim + own;
#pragma unroll
      for (int s = 0; s < kReads; ++s, from += kQueries * dim) {
        theirs[round][s] = begin + s < active && has(round) ? __ldcg(from) : 0.0f;
      }
    }
  };
  load_parts(0);
#pragma unroll 1
  for (int q = warp; q < queries; q += kAttentionWarps) {
    const float *const mine = partial_sums + (min(lane, active - 1) * kQueries + q) * 2;
    const float top = lane < active ? __ldcg(mine) : -INFINITY, total = lane < active ? __ldcg(mine + 1) : 0.0f;
    float all = top;
#pragma unroll
    for (int d = kMostParts / 2; d > 0; d /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, d));
    const float by = exp2f(top - (all == -INFINITY ? 0.0f : all));
    float sums = total * by;
#pragma unroll
    for (int d = kMostParts / 2; d > 0; d /= 2) sums += __shfl_xor_sync(0xffffffffu, sums, d);
    shared.share[q][lane] = by * whole_factor(q, all, sums);
  }
  __syncthreads();
#pragma unroll 1
  for (int begin = 0;;) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (!has(round)) break;
      const int query = own_query + round * kAtOnce;
#pragma unroll
      for (int s = 0; s < kReads; ++s) y[round] = fmaf(shared.share[query][begin + s], theirs[round][s], y[round]);
    }
    begin += kReads;
    if (begin >= active) break;
    load_parts(begin);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (!has(round)) break;
    out_of(own_query + round * kAtOnce)[own] = from_float<T>(y[round]);
  }
#endif
}

}  // namespace hfp::cuda::decode
