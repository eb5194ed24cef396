// attention.cpp: softmax(scale * q k^T + mask) v, blocks of keys at a time; see hfp_attention.
//
// The lanes of a register are queries: a panel of them, transposed, stays in the cache while keys and
// values pass by, so that maxima, sums and rescaling need no step across lanes, and keys and values are
// read as they lie. The heads that share keys and values fill a panel together. Online softmax: Milakov
// & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135. A query's result does not depend on the
// others, nor on the number of threads.
#if !defined(HFP_SIMD)

#include <cmath>

#include "../products.h"

#define HFP_SIMD_SOURCE "attention.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t attention(const AttentionArgs &args) {
  const int64_t panels = HFP_FOR_SIMD(attention_panels)(args);
  const int64_t work = args.keys * (args.dim + args.value_dim) + 1;
  parallel(HFP_FOR_SIMD(attention_kernel)(args), args, args.batch * args.kv_heads * panels,
           kGrainElements / work + 1, 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#include "any_type.h"
#include "micro_product.h"
#include "simd_math.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Keys of a block; with long heads fewer, so that a block stays in the cache.
constexpr int64_t kKeyFloats = 4096, kMostKeys = 64;
constexpr int64_t kWidestHead = kMaxHeadDim + kShortRows;

static int64_t attention_panels(const AttentionArgs &a) {
  const int64_t rows = a.heads / a.kv_heads * a.most_queries;
  const int64_t wide = kProductColumns;
  // One register of queries where they do not fill more.
  return rows <= kLanes ? 1 : (rows + wide - 1) / wide;
}

template <DType T>
HFP_INLINE void widen_row(const char *from, int64_t count, float *to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    store_up_to<DType::F32>(reinterpret_cast<char *>(to + i),
                            load_up_to<T>(from + i * size_of(T), n), n);
  }
}

HFP_INLINE float mask_value(const AttentionArgs &a, int64_t element) {
  if (a.mask_bits) {
    return static_cast<const uint8_t *>(a.mask)[element] ? 0.0f : -__builtin_inff();
  }
  return load_any(a.mask_type, at(a.mask, element, a.mask_type), 1)[0];
}

// sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
HFP_INLINE vf tanh_of(vf x) {
  const vf size = x < 0 ? -x : x;
  const vf e = exp_nonpositive(-2.0f * size);
  const vf y = (1.0f - e) / (1.0f + e);
  return x < 0 ? -y : y;
}

HFP_INLINE bool any_lane(vi v) {
  int32_t any = 0;
  for (int k = 0; k < kLanes; ++k) any |= v[k];
  return any != 0;
}

// The queries of one panel: row r of the sample's is query r % queries of head r / queries.
struct Panel {
  int64_t batch, kv_head, first, count;
  AttentionSample sample;
};

template <DType T, int kVectors>
static void attention_panel(const AttentionArgs &a, const Panel &p) {
  constexpr int kWidth = kVectors * kLanes;
  constexpr int64_t kSize = size_of(T);
  const float low = -__builtin_inff();
  const AttentionSample &sample = p.sample;
  const int64_t group = a.heads / a.kv_heads, dim = a.dim, value_dim = a.value_dim;
  const int64_t padded = (value_dim + kShortRows - 1) / kShortRows * kShortRows;
  const int64_t widest = dim > padded ? dim : padded;
  int64_t most = kKeyFloats / widest / kShortRows * kShortRows;
  most = most < kShortRows ? kShortRows : most < kMostKeys ? most : kMostKeys;
  alignas(64) float q[kMaxHeadDim * kWidth];         // [dim][width]
  alignas(64) float sum[kWidestHead * kWidth];       // [value_dim][width]
  alignas(64) float weights[kMostKeys * kWidth];     // [keys][width]
  // Rows a little more than a power of two apart: else they share the sets of a cache.
  alignas(64) float keys[kKeyFloats + kMostKeys * 16 + kWidestHead * kShortRows];
  alignas(64) float values[kKeyFloats + kMostKeys * 16 + kWidestHead * kShortRows];
  const int64_t key_row = dim + 16, value_row = padded + 16;
  int32_t seen[kWidth], lows[kWidth];  // a query sees the keys from its low on, before its seen
  int64_t masks[kWidth];
  const char *k = at(a.k, p.batch * a.k_batch + p.kv_head * a.k_head + sample.k_begin * a.k_row, T);
  const char *v = at(a.v, p.batch * a.v_batch + p.kv_head * a.v_head + sample.k_begin * a.v_row, T);

  int32_t all = 0, begin = INT32_MAX;
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    const bool inside = lane < p.count;
    const int64_t row = p.first + (inside ? lane : 0);
    const int64_t head = p.kv_head * group + row / sample.queries, query = row % sample.queries;
    int64_t visible = sample.keys;
    if (a.causal) {
      visible = query + 1 + sample.keys - sample.queries;
      visible = visible < 0 ? 0 : visible < sample.keys ? visible : sample.keys;
    }
    if (!inside) visible = 0;
    seen[lane] = static_cast<int32_t>(visible);
    all = seen[lane] > all ? seen[lane] : all;
    const int64_t hidden = a.window > 0 && visible > a.window ? visible - a.window : 0;
    lows[lane] = static_cast<int32_t>(hidden);
    if (inside) begin = lows[lane] < begin ? lows[lane] : begin;
    masks[lane] = p.batch * a.mask_batch + head * a.mask_head + query * a.mask_row;
    const char *from = at(a.q, p.batch * a.q_batch + head * a.q_head +
                                   (sample.q_begin + query) * a.q_row, T);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t n = dim - d < kLanes ? dim - d : kLanes;
      vf x = {};
      if (inside) x = load_up_to<T>(from + d * kSize, n) * a.scale;
      for (int64_t j = 0; j < n; ++j) q[(d + j) * kWidth + lane] = x[j];
    }
  }
  vi limit[kVectors], low_key[kVectors];
  __builtin_memcpy(limit, seen, sizeof limit);
  __builtin_memcpy(low_key, lows, sizeof low_key);
  for (int64_t i = 0; i < padded * kWidth; ++i) sum[i] = 0;
  vf top[kVectors], total[kVectors];
  for (int x = 0; x < kVectors; ++x) top[x] = splat(low), total[x] = vf{};

  // From a whole block on: then a query's bits do not depend on which others share its panel.
  for (int64_t first = begin / most * most; first < all; first += most) {
    const int64_t count = all - first < most ? all - first : most;
    const int64_t whole = (count + kShortRows - 1) / kShortRows * kShortRows;
    for (int64_t n = 0; n < whole; ++n) {
      float *to = keys + n * key_row, *value = values + n * value_row;
      if (n < count) {
        widen_row<T>(k + (first + n) * a.k_row * kSize, dim, to);
        widen_row<T>(v + (first + n) * a.v_row * kSize, value_dim, value);
        for (int64_t d = value_dim; d < padded; ++d) value[d] = 0;
      } else {
        for (int64_t d = 0; d < dim; ++d) to[d] = 0;
      }
    }
    vf highest[kVectors];
    for (int x = 0; x < kVectors; ++x) highest[x] = top[x];
    for (int64_t n = 0; n < whole; n += kShortRows) {
      vf s[kShortRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kShortRows; ++r) {
#pragma GCC unroll 2
        for (int x = 0; x < kVectors; ++x) s[r][x] = vf{};
      }
      add_rows<kShortRows, kVectors>(keys + n * key_row, key_row, q, dim, s);
#pragma GCC unroll 16
      for (int r = 0; r < kShortRows; ++r) {
        const int32_t key = static_cast<int32_t>(first + n) + r;
#pragma GCC unroll 2
        for (int x = 0; x < kVectors; ++x) {
          vf score = s[r][x];
          if (a.softcap > 0) score = a.softcap * tanh_of(score * (1.0f / a.softcap));
          if (a.mask && key < all) {
            if (a.mask_row == 0 && a.mask_head == 0) {
              score += mask_value(a, masks[0] + key * a.mask_col);
            } else {
              vf m;
              for (int j = 0; j < kLanes; ++j)
                m[j] = mask_value(a, masks[x * kLanes + j] + key * a.mask_col);
              score += m;
            }
          }
          score = limit[x] > key ? score : splat(low);
          if (a.window > 0) score = low_key[x] > key ? splat(low) : score;
          highest[x] = score > highest[x] ? score : highest[x];
          __builtin_memcpy(weights + (n + r) * kWidth + x * kLanes, &score, sizeof score);
        }
      }
    }
    for (int x = 0; x < kVectors; ++x) {
      // A query that has seen nothing yet: exp(-inf - 0) is 0, exp(-inf + inf) would not be.
      const vf shift = highest[x] == low ? vf{} : highest[x];
      const vf factor = exp_nonpositive(top[x] - shift);
      vf added = {};
      for (int64_t n = 0; n < count; ++n) {
        float *place = weights + n * kWidth + x * kLanes;
        vf w;
        __builtin_memcpy(&w, place, sizeof w);
        w = exp_nonpositive(w - shift);
        added += w;
        __builtin_memcpy(place, &w, sizeof w);
      }
      total[x] = total[x] * factor + added;
      if (any_lane(highest[x] != top[x])) {
        for (int64_t d = 0; d < value_dim; ++d) {
          float *place = sum + d * kWidth + x * kLanes;
          vf y;
          __builtin_memcpy(&y, place, sizeof y);
          y *= factor;
          __builtin_memcpy(place, &y, sizeof y);
        }
      }
      top[x] = highest[x];
    }
    for (int64_t d = 0; d < padded; d += kShortRows) {
      vf s[kShortRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kShortRows; ++r)
        __builtin_memcpy(s[r], sum + (d + r) * kWidth, sizeof s[r]);
      add_packed<kShortRows, kVectors>(values + d, value_row, weights, count, s);
#pragma GCC unroll 16
      for (int r = 0; r < kShortRows; ++r)
        __builtin_memcpy(sum + (d + r) * kWidth, s[r], sizeof s[r]);
    }
  }

  float whole[kWidth], highest[kWidth];
  __builtin_memcpy(whole, total, sizeof total);
  __builtin_memcpy(highest, top, sizeof top);
  for (int64_t lane = 0; lane < p.count; ++lane) {
    const int64_t row = p.first + lane;
    const int64_t head = p.kv_head * group + row / sample.queries;
    const int64_t query = sample.q_begin + row % sample.queries;
    const bool nothing = highest[lane] == low && whole[lane] == 0;
    const float share = nothing ? 0.0f : 1.0f / whole[lane];
    const int64_t heads_before = (a.q_starts ? 0 : p.batch * a.heads) + head;
    a.lse[heads_before * a.queries + query] = nothing ? low : highest[lane] + std::log(whole[lane]);
    char *out = at(a.out, p.batch * a.out_batch + head * a.out_head + query * a.out_row, T);
    for (int64_t d = 0; d < value_dim; d += kLanes) {
      const int64_t n = value_dim - d < kLanes ? value_dim - d : kLanes;
      vf y = {};
      for (int64_t j = 0; j < n; ++j) y[j] = sum[(d + j) * kWidth + lane];
      store_up_to<T>(out + d * kSize, y * share, n);
    }
  }
}

template <DType T>
static void attention_panels_of(const AttentionArgs &a, int64_t begin, int64_t end) {
  const int64_t panels = attention_panels(a);
  for (int64_t unit = begin; unit < end; ++unit) {
    // Panels of one sample and head are neighbours: they find its keys and values in the cache.
    Panel p;
    p.batch = unit / (panels * a.kv_heads);
    p.kv_head = unit / panels % a.kv_heads;
    p.sample = attention_sample(a, p.batch);
    const int64_t rows = a.heads / a.kv_heads * p.sample.queries;
    const bool narrow = a.heads / a.kv_heads * a.most_queries <= kLanes;
    const int64_t width = narrow ? kLanes : kProductColumns;
    p.first = unit % panels * width;
    if (p.first >= rows) continue;
    p.count = rows - p.first < width ? rows - p.first : width;
    if (narrow) attention_panel<T, 1>(a, p);
    else attention_panel<T, kProductVectors>(a, p);
  }
}

using AttentionKernel = void (*)(const AttentionArgs &, int64_t, int64_t);

static AttentionKernel attention_kernel(const AttentionArgs &a) {
  return a.type == DType::F32   ? attention_panels_of<DType::F32>
         : a.type == DType::F16 ? attention_panels_of<DType::F16>
                                : attention_panels_of<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
