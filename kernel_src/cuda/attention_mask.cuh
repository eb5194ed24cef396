// attention_mask.cuh: what the kernels of hfp_attention for half types know of a mask before they begin.
#pragma once

#include "attention.cuh"

namespace hfp::cuda {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Of eight keys, a bit each: whether a mask shows them, and whether it changes their scores.
struct MaskBits {
  static constexpr float kHidden = -1e30f;  // what models add to hide a key, or less
  uint32_t shown = 0, changed = 0;

  __device__ __forceinline__ void put(int i, float value) {
    shown |= !(value <= kHidden) ? 1u << i : 0u;
    changed |= value != 0.0f ? 1u << i : 0u;
  }
};

template <class T>
__device__ __forceinline__ MaskBits bits_of(const uint4 &words, bool of_bytes) {
  MaskBits bits;
  if (of_bytes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = (i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0xffu;
      bits.shown |= byte != 0 ? 1u << i : 0u;
    }
    bits.changed = ~bits.shown & 0xffu;
    return bits;
  }
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack<T>(word[i]);
    bits.put(2 * i, both.x);
    bits.put(2 * i + 1, both.y);
  }
  return bits;
}

// The same of all eight keys together, for which less is worked out: a bit each is for some of them.
template <class T>
__device__ __forceinline__ MaskBits any_of(const uint4 &words, bool of_bytes) {
  MaskBits bits;
  if (of_bytes) {
    bits.shown = (words.x | words.y) != 0;
    bits.changed = __vcmpeq4(words.x, 0u) != 0 || __vcmpeq4(words.y, 0u) != 0;
    return bits;
  }
  uint32_t hidden = 0xffffffffu;
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162 *>(&word[i]);
      hidden &= __hle2_mask(pair, __float2bfloat162_rn(MaskBits::kHidden));
    } else {
      const __half2 pair = *reinterpret_cast<const __half2 *>(&word[i]);
      hidden &= __hle2_mask(pair, __float2half2_rn(MaskBits::kHidden));  // -infinity
    }
  }
  bits.shown = hidden != 0xffffffffu;
  bits.changed = ((word[0] | word[1] | word[2] | word[3]) & 0x7fff7fffu) != 0;
  return bits;
}

// What a mask does to each block of keys, for all queries of a CTA. A mask that says what is causal, or
// which keys are padding, hides whole blocks and leaves others alone: the first are not computed, and of
// the others the mask is not read again.
template <int kQueries, int kKeys, int kWarps>
struct MaskBlocks {
  static constexpr int kWords = 128, kMost = kWords * 32;  // blocks; of more keys nothing is known
  int64_t row[kQueries];  // where a row of the mask begins
  int limit[kQueries];
  uint32_t shown[kWords], changed[kWords];  // a bit for each block
  int blind;  // a query to which all keys are hidden weighs them the same: then none is left out

  __device__ bool is_set(const uint32_t (&bits)[kWords], int block) const {
    return bits[block / 32] >> (block % 32) & 1u;
  }

  // A few blocks are sooner computed than looked at.
  static __device__ bool looks_at(int steps) { return steps > 4 && steps <= kMost; }

  // The block from `block` on that is computed next.
  __device__ int next(int block, int steps) const {
    if (!blind) {
      while (block < steps && !is_set(shown, block)) ++block;
    }
    return block;
  }

  // By all threads of a CTA.
  template <class T>
  __device__ void begin(const AttentionArgs &a, const AttentionUnit &unit, int first, int end,
                        bool known, bool chunks) {
    for (int r = threadIdx.x; r < kQueries; r += blockDim.x) {
      const bool there = unit.first + r < unit.rows;
      row[r] = there ? unit.mask_offset(a, unit.first + r) : 0;
      limit[r] = there ? unit.limit(a, unit.first + r) : 0;
    }
    for (int i = threadIdx.x; i < kWords; i += blockDim.x) shown[i] = changed[i] = 0;
    if (threadIdx.x == 0) blind = 0;
    __syncthreads();
    if (known) {
      read<T>(a, unit, first, end, chunks);
      __syncthreads();
    }
  }

 private:
  template <class T>
  __device__ void read(const AttentionArgs &a, const AttentionUnit &unit, int begin, int end,
                       bool chunks) {
    constexpr int kRows = kQueries / kWarps, kLanes = kKeys / 8;  // of a block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= kWarps) return;
    uint32_t saw = 0, must = 0;  // a bit for each row of the warp
    for (int r = 0; r < kRows; ++r) {
      const int most = limit[warp * kRows + r];
      if (most > AttentionUnit::floor_of(a, most)) must |= 1u << r;
    }
    const bool bytes = a.mask_bits;
    const int64_t width = bytes ? 1 : sizeof(T);
    for (int at = begin; at < end; at += 256) {
      const int key = at + lane * 8;
      bool any = false, other = false;
      const auto there = [&](int r) {  // a bit for each key that the row may see
        const int most = limit[warp * kRows + r], least = AttentionUnit::floor_of(a, most);
        const int from = min(max(least - key, 0), 8), to = min(max(most - key, 0), 8);
        return ((1u << to) - 1) & ~((1u << from) - 1);
      };
      const auto note = [&](int r, bool shown, bool changed) {
        any |= shown;
        other |= changed;
        saw |= shown ? 1u << r : 0u;
      };
      if (chunks) {
        constexpr int kAtOnce = 8;  // or their latencies add up
        for (int r = 0; r < kRows; r += kAtOnce) {
          uint4 words[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            words[i] = make_uint4(0, 0, 0, 0);
            const char *from = static_cast<const char *>(a.mask) + (row[warp * kRows + r + i] + key) * width;
            if (key + 8 <= end) {
              if (bytes) {
                const uint2 half = *reinterpret_cast<const uint2 *>(from);
                words[i].x = half.x, words[i].y = half.y;
              } else {
                words[i] = *reinterpret_cast<const uint4 *>(from);
              }
            }
          }
          if (key + 8 > end) continue;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const uint32_t those = there(r + i);
            const MaskBits bits = those == 0xffu ? any_of<T>(words[i], bytes) : bits_of<T>(words[i], bytes);
            note(r + i, (bits.shown & those) != 0, (bits.changed & those) != 0);
          }
        }
      }
      if (key < end && (!chunks || key + 8 > end)) {
#pragma unroll 2
        for (int r = 0; r < kRows; ++r) {
          MaskBits bits;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int64_t element = row[warp * kRows + r] + (key + i) * a.mask_col;
            if (key + i < end) bits.put(i, mask_value(a, element));
          }
          note(r, (bits.shown & there(r)) != 0, (bits.changed & there(r)) != 0);
        }
      }
      const uint32_t anys = __ballot_sync(0xffffffffu, any), others = __ballot_sync(0xffffffffu, other);
      if (lane == 0) {
        uint32_t first = 0, second = 0;
#pragma unroll
        for (int b = 0; b < 32 / kLanes; ++b) {
          const uint32_t lanes = ((1u << kLanes) - 1) << (b * kLanes);
          first |= anys & lanes ? 1u << b : 0u;
          second |= others & lanes ? 1u << b : 0u;
        }
        const int block = (at - begin) / kKeys;
        atomicOr(&shown[block / 32], first << (block % 32));
        atomicOr(&changed[block / 32], second << (block % 32));
      }
    }
    saw = __reduce_or_sync(0xffffffffu, saw);
    if (lane == 0 && (must & ~saw) != 0) blind = 1;
  }
};

// What is left to do to a thread's scores of a block: `at(n, i)` are those of keys first + 8 n (+ 1), i of two
// rows; the mask's of a row's two keys are `pair_of(n, row)`. Without branches between them: they would be
// half of the time.
template <int kN, class At, class PairOf>
__device__ __forceinline__ void finish_scores(At at, PairOf pair_of, int first, const int (&limit)[2],
                                              const int (&low)[2], float factor, bool changed,
                                              bool edges) {
  if (changed) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 both = pair_of(n, h);
        at(n, 2 * h) = masked(at(n, 2 * h) * factor, both.x);
        at(n, 2 * h + 1) = masked(at(n, 2 * h + 1) * factor, both.y);
      }
    }
  } else if (factor != 1.0f) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at(n, i) *= factor;
    }
  }
  if (edges) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + n * 8 + (i & 1);
        at(n, i) = key >= limit[i / 2] || key < low[i / 2] ? -INFINITY : at(n, i);
      }
    }
  }
}

// The values of a row of a mask for two keys; 0 for those that the row does not see anyway.
template <class T>
__device__ __forceinline__ float2 mask_pair(const AttentionArgs &a, int64_t row, int key, int limit,
                                            bool pairs) {
  float2 both = make_float2(0.0f, 0.0f);
  if (pairs) {
    const T *from = static_cast<const T *>(a.mask) + row + key;
    uint32_t word = 0;
    if (key < limit) word = *reinterpret_cast<const uint32_t *>(from);
    return unpack<T>(word);
  }
  if (key < limit) both.x = mask_value(a, row + key * a.mask_col);
  if (key + 1 < limit) both.y = mask_value(a, row + (key + 1) * a.mask_col);
  return both;
}

#endif

// How a mask may be read: eight keys at once, by what looks at it first, and two where it is added, which
// must have the dtype of q.
struct MaskReads {
  bool eight, pairs;
};

inline MaskReads mask_reads(const AttentionArgs &a) {
  if (a.mask == nullptr || a.mask_col != 1) return {false, false};
  const uint64_t steps = static_cast<uint64_t>(a.mask_row | a.mask_head | a.mask_batch);
  const uint64_t at = reinterpret_cast<uint64_t>(a.mask);
  if (a.mask_bits) return {(at | steps) % 8 == 0, false};
  if (a.mask_type != a.type) return {false, false};
  const uint64_t bytes = at | steps * static_cast<uint64_t>(size_of(a.type));
  return {bytes % 16 == 0, bytes % 4 == 0 && a.keys % 2 == 0};
}

}  // namespace
}  // namespace hfp::cuda
