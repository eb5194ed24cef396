// sample_row.cuh: one row of logits, for sample.cu: its keys and scores, what top-k, top-p and min-p
// keep, and the draw; by passes over the row, or from a list of what can be kept.
#pragma once

#include "row_flow.cuh"
#include "row_top_cluster.cuh"

namespace hfp::cuda {

struct SampleParams {
  static constexpr bool kStartsEarly = true;
  int64_t *out;
  const void *logits;
  Rows x_rows;
  int64_t first_row;
  const int64_t *seeds, *positions, *top_ks;
  const float *temperatures, *top_ps, *min_ps;
  float temperature, top_p, min_p;
  int64_t top_k;
  FlowPlan plan;
};

__device__ __forceinline__ bool is_finite(float x) {  // false for NaN
  return fabsf(x) < __int_as_float(0x7f800000);
}

__device__ __forceinline__ unsigned long long sum_over_warp(unsigned long long v) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(~0u, v, by);
  return v;
}

// Kept: key > least, or key == least and index >= least_index, of the digits of the dtype.
struct Kept {
  uint32_t least = 0, least_index = 0;
};

// One thread's share of one row. Half types are ordered by their own few digits, not by those of
// z = logit / temperature, which has the same order.
template <class T, DType kType, bool kAligned, Share kShare>
struct LogitsRow {
  static constexpr bool kCluster = kShare == Share::kCluster;
  static constexpr int kDigits = key_digits(kType);
  static constexpr uint32_t kMask = ~0u << (32 - 8 * kDigits);
  const T *x;
  uint32_t cols, first, step;
  float temperature;

  __device__ __forceinline__ float score(float value) const { return value / temperature; }
  __device__ __forceinline__ uint32_t key(float value) const {
    return key_of(sizeof(T) == 4 ? score(value) : value);
  }
  __device__ __forceinline__ uint32_t of(uint32_t key) const {  // key(value) of key_of(value)
    return sizeof(T) == 4 ? this->key(value_of(key)) : key;
  }
  __device__ __forceinline__ bool reaches(float value, const Least &least) const {
    return sizeof(T) == 4 ? this->key(value) >= least.key : least.reached_by(value);
  }
  // z of a key whose low bits, which all values of the dtype share, are 0.
  __device__ __forceinline__ float score_of(uint32_t key) const {
    const float value = value_of(key >> 31 ? key : key | ~kMask);
    return sizeof(T) == 4 ? value : score(value);
  }

  template <class F>
  __device__ __forceinline__ void each(const F &f) const {
    if constexpr (kShare != Share::kSm) {
      each_element<T, kAligned>(x, cols, first, step, f);
    } else {  // with the fewest registers
      for (uint32_t block = first; block < (cols + 3) / 4; block += step) {
        float value[4];
        load_block(value, block);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          if (kAligned || block * 4 + i < cols) f(value[i], block * 4 + i);
        }
      }
    }
  }

  // The sum over this thread's share.
  __device__ __forceinline__ uint64_t weights(float top) const {
    const int bits = weight_bits(cols);
    uint64_t sum = 0;
    each([&](float value, uint32_t) { sum += weight_of(expf(score(value) - top), bits); });
    return sum;
  }

  // The greatest key and its first index.
  __device__ __forceinline__ uint64_t greatest(SelectShared &s, int slot) const {
    uint32_t best = 0, index = 0;
    each([&](float value, uint32_t i) {
      const uint32_t k = key(value);
      if (k > best) best = k, index = i;
    });
    return max_over_team<kCluster>(s, slot, best == 0 ? 0 : pair_of(best, index));
  }

  __device__ __forceinline__ void keep_top_k(SelectShared &s, int &round, int64_t k,
                                             Kept &kept) const {
    uint64_t left, all;
    const Prefix least = select_prefix<kCluster>(
        s, round, k, kDigits, 24, left, all, [&](const auto &f) {
          each([&](float value, uint32_t) { f(key(value)); });
        });
    kept.least = least.bits;  // with all that equal it
  }

  __device__ __forceinline__ void keep_top_p(SelectShared &s, int &round, float top, float top_p,
                                             Kept &kept) const {
    const int bits = weight_bits(cols);
    const uint32_t mask = (1u << bits) - 1;
    Prefix last;  // of the last token that is kept
    uint64_t left = 0;
#pragma unroll 1
    for (int shift = 24; shift > 24 - 8 * kDigits; shift -= 8) {
      const Found found = next_digit<kCluster, true>(
          s, round++, left, top_p, bits, [&](uint32_t(&bins)[3][256]) {
            each([&](float value, uint32_t) {
              const uint32_t k = key(value);
              if ((k & kMask) < kept.least || !last.has(k)) return;
              const uint64_t w = weight_of(expf(score(value) - top), bits);
              const uint32_t digit = k >> shift & 255u;
              const uint32_t low = static_cast<uint32_t>(w) & mask;
              const uint32_t middle = static_cast<uint32_t>(w >> bits) & mask;
              const uint32_t high = static_cast<uint32_t>(w >> (2 * bits));
              if (low) atomicAdd(&bins[0][digit], low);
              if (middle) atomicAdd(&bins[1][digit], middle);
              if (high) atomicAdd(&bins[2][digit], high);
            });
          });
      last.add(found.digit, shift);
      left = found.left;
      if (shift == 32 - 8 * kDigits) {
        kept.least = last.bits;
        keep_tied(s, round, weight_of(expf(score_of(last.bits) - top), bits), found, kept);
      }
    }
  }

  // Of those that are equal, the last ones that it takes to reach the target.
  __device__ __forceinline__ void keep_tied(SelectShared &s, int &round, uint64_t weight,
                                            const Found &found, Kept &kept) const {
    if (weight == 0) return;
    const uint64_t count = (found.left + weight - 1) / weight;
    if (count * weight >= found.all) return;
    const int digits = index_digits(cols);
    uint64_t left, all;
    const Prefix least_index = select_prefix<kCluster>(
        s, round, count, digits, 8 * digits - 8, left, all, [&](const auto &f) {
          each([&](float value, uint32_t i) {
            if ((key(value) & kMask) == kept.least) f(i);
          });
        });
    kept.least_index = least_index.bits;
  }

  // *most: the key of the greatest noisy score that a thread of this CTA has found.
  __device__ __forceinline__ uint64_t draw(const Kept &kept, float top, float min_p, uint64_t seed,
                                           uint64_t position, uint32_t *most) const {
    constexpr int kBlocks = kShare == Share::kSm ? 1 : 4;  // on their way
    uint64_t best = 0;
    for (uint32_t at = first; at < (cols + 3) / 4; at += step * kBlocks) {
      float value[kBlocks][4];
#pragma unroll
      for (int u = 0; u < kBlocks; ++u) {
        if (at + u * step < (cols + 3) / 4) load_block(value[u], at + u * step);
      }
      float least = value_of(*static_cast<volatile uint32_t *>(most));
#pragma unroll
      for (int u = 0; u < kBlocks; ++u) {
        const uint32_t block = at + u * step;
        if (block >= (cols + 3) / 4) continue;
        float z[4];
        unsigned candidates = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t index = block * 4 + i, k = key(value[u][i]) & kMask;
          z[i] = score(value[u][i]);
          bool has = k > kept.least || (k == kept.least && index >= kept.least_index);
          has = has && z[i] + kMostNoise >= least && (kAligned || index < cols);
          if (has && min_p > 0.0f) has = expf(z[i] - top) >= min_p;
          candidates |= static_cast<unsigned>(has) << i;
        }
        if (candidates == 0) continue;
        const Words words = philox(seed, block, position);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(candidates >> i & 1u) || below(z[i], words.word[i], least)) continue;
          const float noise = noisy(z[i], words.word[i]);
          const uint64_t pair = pair_of(key_of(noise), block * 4 + i);
          if (pair <= best) continue;
          best = pair;
          least = fmaxf(least, noise);
          atomicMax(most, key_of(noise));
        }
      }
    }
    return best;
  }

  // Four tokens, which share one call of philox; what lies past the end of the row is 0.
  __device__ __forceinline__ void load_block(float (&value)[4], uint32_t block) const {
    if constexpr (kAligned) {
      Vec<T, 4> v;
      v.template load<Cache::kReadOnly>(x + block * 4);
      v.get(value);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        value[i] = block * 4 + i < cols ? static_cast<float>(x[block * 4 + i]) : 0.0f;
      }
    }
  }

  // Whether the noisy score is surely less than that, without its logarithms: E > v. Rounding, here
  // and in noisy(), changes less than 2 in 1000 where z is not great.
  __device__ __forceinline__ static bool below(float z, uint32_t word, float least) {
    const float v = static_cast<float>(word) * 2.3283064365386963e-10f;
    return fabsf(z) < 4096.0f && v > 1.002f * fast_exp2((z - least) * 1.4426950408889634f);
  }
};

// What is made of each of the n tokens that are listed, descending, by so many threads: the weights
// in `upto`, the noisy scores in `noisy_of`.
template <class Row>
__device__ __forceinline__ void weigh_listed(const Row &row, const uint64_t *tokens, unsigned n,
                                             uint64_t *upto, uint64_t *noisy_of, float min_p,
                                             float top, uint64_t seed, uint64_t position,
                                             unsigned thread, unsigned threads) {
  const int bits = weight_bits(row.cols);
  for (unsigned i = thread; i < n; i += threads) {
    const float z = row.score_of(static_cast<uint32_t>(tokens[i] >> 32));
    const float e = expf(z - top);
    const uint32_t index = static_cast<uint32_t>(tokens[i]);
    const Words words = philox(seed, index / 4, position);
    const uint32_t low = index & 1u ? words.word[1] : words.word[0];
    const uint32_t high = index & 1u ? words.word[3] : words.word[2];
    const uint32_t noise = key_of(noisy(z, index & 2u ? high : low));
    noisy_of[i] = min_p > 0.0f && !(e >= min_p) ? 0 : pair_of(noise, index);
    upto[i] = weight_of(e, bits);
  }
}

// By one warp, the token of those that are listed, descending, where no others can be kept. What has
// been made of token i is at place(i). upto: room for n. total: the sum of all weights, 0 for that of
// what is kept.
template <class Place>
__device__ __forceinline__ uint32_t draw_listed(const uint64_t *tokens, unsigned n,
                                                const uint64_t *weight_of, const uint64_t *noisy_of,
                                                const Place &place, uint64_t *upto,
                                                const SampleRow &r, uint64_t total) {
  const unsigned lane = threadIdx.x % 32u;
  // The first ones are kept: up to the last for which keeps(i).
  const auto keep = [&](const auto &keeps) {
    unsigned kept = 0;
    for (unsigned i = lane; i < n; i += 32) kept = keeps(i) ? i + 1 : kept;
    n = max_over_warp(kept);
  };
  if (r.top_k > 0 && r.top_k < n) {
    const uint64_t least = tokens[r.top_k - 1] >> 32;
    keep([&](unsigned i) { return tokens[i] >> 32 >= least; });
  }
  if (r.top_p < 1.0f) {
    uint64_t sum = 0;
    constexpr unsigned kOwn = 4;  // of a lane, one after the other
    for (unsigned first = 0; first < n; first += 32 * kOwn) {
      const unsigned at = first + lane * kOwn;
      uint64_t weight[kOwn], own = 0;
#pragma unroll
      for (unsigned i = 0; i < kOwn; ++i) own += weight[i] = at + i < n ? weight_of[place(at + i)] : 0;
      uint64_t before = own;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, before, by);
        if (lane >= by) before += other;
      }
      const uint64_t all = __shfl_sync(~0u, before, 31);
      before += sum - own;
      sum += all;
#pragma unroll
      for (unsigned i = 0; i < kOwn; ++i) {
        before += weight[i];
        if (at + i < n) upto[at + i] = before;
      }
    }
    __syncwarp();
    const uint64_t target = weight_target(r.top_p, total == 0 ? sum : total);
    keep([&](unsigned i) { return i == 0 || upto[i - 1] < target; });
  }
  uint64_t best = 0;
  for (unsigned i = lane; i < n; i += 32) {
    const uint64_t noise = noisy_of[place(i)];
    best = noise > best ? noise : best;
  }
  return index_of(max_over_warp(best));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// By one warp, the token where the n that are listed, descending, are kept and what equals `tied`, below
// all of them. draw(total): the token if only some that are listed are kept.
template <class Row, class Draw>
__device__ __forceinline__ uint32_t draw_tied(FlowRow &s, const Row &row, int words, unsigned n,
                                              uint32_t tied, const SampleRow &r, float top,
                                              uint64_t seed, uint64_t position, const Draw &draw) {
  using T = std::remove_cv_t<std::remove_pointer_t<decltype(row.x)>>;
  constexpr int N = kVectorOf<T>;
  const unsigned lane = threadIdx.x % 32u;
  const int bits = weight_bits(row.cols);
  const float z = row.score_of(tied), e = expf(z - top);
  const auto each_tied = [&](const auto &take) {
    each_reaching(s, row.x, row.cols, words, row, tied, [&](const T *elements, uint32_t at) {
      take(at * N, bits_of_taken(elements, at, row.cols, [&](float value) {
             return row.key(value) == tied;
           }));
    });
  };
  unsigned skipped = 0;  // the first ones; top-p takes the last
  if (r.top_p < 1.0f) {
    unsigned count = 0;
    each_tied([&](uint32_t, uint32_t mask) { count += __popc(mask); });
    count = __reduce_add_sync(~0u, count);
    uint64_t listed = 0;
    for (unsigned i = lane; i < n; i += 32) listed += s.list[i];
    listed = sum_over_warp(listed);
    const uint64_t weight = weight_of(e, bits), total = listed + count * weight;
    const uint64_t target = weight_target(r.top_p, total);
    if (listed >= target) return draw(total);
    if (weight > 0) {
      const uint64_t kept = (target - listed + weight - 1) / weight;
      if (kept < count) skipped = count - static_cast<unsigned>(kept);
    }
  }
  uint64_t best = 0;
  for (unsigned i = lane; i < n; i += 32) best = s.room[i] > best ? s.room[i] : best;
  if (!(r.min_p > 0.0f) || e >= r.min_p) {
    each_tied([&](uint32_t col, uint32_t mask) {
      if (skipped > 0) {
        unsigned all;
        unsigned at = before_lane(__popc(mask), &all);
        for (; mask != 0 && at < skipped; ++at) mask &= mask - 1;
        skipped -= min(skipped, all);
      }
#pragma unroll 1
      for (int block = 0; mask != 0; ++block, mask >>= 4) {
        if ((mask & 15u) == 0) continue;
        const Words words = philox(seed, col / 4 + block, position);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = i & 1 ? words.word[1] : words.word[0];
          const uint32_t word = i & 2 ? (i & 1 ? words.word[3] : words.word[2]) : low;
          const float least = value_of(static_cast<uint32_t>(best >> 32));  // of nothing NaN
          if (!(mask >> i & 1u) || row.below(z, word, least)) continue;
          const uint64_t pair = pair_of(key_of(noisy(z, word)), col + 4 * block + i);
          best = pair > best ? pair : best;
        }
      }
    });
  }
  return index_of(max_over_warp(best));
}
#endif

// By passes over the row; what it needs it finds again, so that no register keeps it until here.
template <class T, DType kType, bool kAligned, Share kShare>
__device__ __forceinline__ uint64_t draw_row(const SampleParams &p, int64_t row, SelectShared &s,
                                             uint32_t *most) {
  using CTAs = Team<kShare == Share::kCluster>;
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const SampleRow r = sample_row(p, row, cols);
  LogitsRow<T, kType, kAligned, kShare> share{
      static_cast<const T *>(p.logits) + row_offset(p.x_rows, row), cols,
      CTAs::rank() * blockDim.x + threadIdx.x, CTAs::size() * blockDim.x,
      r.temperature > 0.0f ? r.temperature : 1.0f};
  const uint64_t best = share.greatest(s, 0);
  const float top = share.score_of(static_cast<uint32_t>(best >> 32) & share.kMask);
  if (r.temperature == 0.0f) return best;
  if (!is_finite(top)) {
    if (sizeof(T) != 4) return best;
    share.temperature = 1.0f;  // temperature may have made infinities
    return share.greatest(s, 1);
  }
  Kept kept;
  int round = 0;
  if (r.top_k > 0) share.keep_top_k(s, round, r.top_k, kept);
  if (r.top_p < 1.0f) share.keep_top_p(s, round, top, r.top_p, kept);
  const SampleRow again = sample_row(p, row, cols);
  return max_over_team<kShare == Share::kCluster>(
      s, 1, share.draw(kept, top, again.min_p, static_cast<uint64_t>(p.seeds[row]),
                       p.positions ? static_cast<uint64_t>(p.positions[row]) : 0, most));
}

}  // namespace hfp::cuda
