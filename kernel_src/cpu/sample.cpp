// sample.cpp: one token of each row of logits, at random; see hfp_sample.
#include "row_select.h"

#define HFP_SIMD_SOURCE "row_top.h"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

// The tokens that are looked at, in ascending order: all of the row, or a list. Two types, so that
// the loops over all have no test in them.
struct AllTokens {
  int64_t count;
  int64_t operator[](int64_t j) const { return j; }
};

struct ListedTokens {
  int64_t count;
  const uint32_t *indices;
  int64_t operator[](int64_t j) const { return indices[j]; }
};

constexpr int64_t kMostListed = 4096;

// What a thread needs to sample its rows.
struct SampleMemory {
  TopPairs pairs;
  uint32_t listed[kMostListed];
};

namespace {

// z = x / temperature of the j-th token and its key.
template <DType T, class Tokens>
struct Scores {
  const char *x;
  float temperature;
  Tokens tokens;

  float score(int64_t j) const { return element<T>(x, tokens[j]) / temperature; }
  bool operator()(int64_t j, uint32_t *key) const {
    *key = key_of(score(j));
    return true;
  }
};

// The indices of those with that key, the highest one first.
template <DType T, class Tokens>
struct TiedIndices {
  Scores<T, Tokens> scores;
  uint32_t key;
  bool operator()(int64_t j, uint32_t *index) const {
    *index = static_cast<uint32_t>(scores.tokens[j]);
    return key_of(scores.score(j)) == key;
  }
};

// Kept: key > least, or key == least and index >= least_index.
struct Kept {
  uint32_t least = 0, least_index = 0;
  bool has(uint32_t key, int64_t i) const {
    return key > least || (key == least && i >= static_cast<int64_t>(least_index));
  }
};

// The digits of the last token that top-p keeps, by the weights of those from `kept.least` on.
template <DType T, class Tokens>
void keep_top_p(const Scores<T, Tokens> &scores, int64_t cols, float top, float top_p,
                Kept *kept) {
  const int bits = weight_bits(cols);
  const int64_t count = scores.tokens.count;
  Prefix found;
  uint64_t left = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t bins[256] = {};
    for (int64_t j = 0; j < count; ++j) {
      const float z = scores.score(j);
      const uint32_t key = key_of(z);
      if (key < kept->least || !found.has(key)) continue;
      bins[key >> shift & 255u] += weight_of(std::exp(z - top), bits);
    }
    if (shift == 24) {
      uint64_t total = 0;
      for (const uint64_t bin : bins) total += bin;
      left = weight_target(top_p, total);
    }
    found.prefix = found.prefix << 8 | digit_at(bins, &left);
    found.shift = shift;
  }
  // Of those that are equal, the last ones that it takes to reach the target.
  const uint64_t weight = weight_of(std::exp(value_of(found.prefix) - top), bits);
  kept->least = found.prefix;
  if (weight == 0) return;
  uint64_t ties = (left + weight - 1) / weight, all = 0;
  const int digits = index_digits(cols);
  kept->least_index = select_key(TiedIndices<T, Tokens>{scores, kept->least}, count, digits,
                                 8 * digits - 8, &ties, &all);
}

// Top-p, then the one of those kept whose z with noise is the greatest.
template <DType T, class Tokens>
int64_t draw(const SampleArgs &args, const Scores<T, Tokens> scores, int64_t row, Kept kept,
             float top, const SampleRow &r) {
  if (r.top_p < 1) keep_top_p(scores, args.rows.cols, top, r.top_p, &kept);
  const float min_p = r.min_p;
  const uint64_t seed = static_cast<uint64_t>(args.seeds[row]);
  const uint64_t position = args.positions ? static_cast<uint64_t>(args.positions[row]) : 0;
  Words words = {};
  int64_t block = -1;
  float most = -INFINITY;
  uint64_t best = 0;
  for (int64_t j = 0; j < scores.tokens.count; ++j) {
    const int64_t i = scores.tokens[j];
    const float z = scores.score(j);
    if (z + kMostNoise < most || !kept.has(key_of(z), i)) continue;
    if (min_p > 0 && std::exp(z - top) < min_p) continue;
    if (i / 4 != block) {
      block = i / 4;
      words = philox(seed, static_cast<uint32_t>(block), position);
    }
    const float noise = noisy(z, words.word[i % 4]);
    const uint64_t pair = pair_of(key_of(noise), static_cast<uint32_t>(i));
    if (pair > best) best = pair, most = noise;
  }
  return index_of(best);
}

// A value that is below every x whose z is that of `least_x` or greater; -inf if x cannot tell. What
// rounds to one z differs by less than 2^-22 of itself, except for subnormals.
inline float bar_below(float least_x, float least_z) {
  const float size = std::fabs(least_x);
  const bool normal = size > 1e-30f && size < 1e30f && std::fabs(least_z) > 1e-30f;
  return normal ? least_x - size * 4.76837158203125e-07f /* 2^-21 */ : -INFINITY;
}

template <DType T>
int64_t sample_one(const SampleArgs &args, const char *x, int64_t row,
                          SampleMemory *memory) {
  const int64_t cols = args.rows.cols;
  const SampleRow r = sample_row(args, row, cols);
  const bool few = r.temperature > 0 && r.top_k > 0 && r.top_k <= HFP_MAX_TOPK;
  const int k = few ? static_cast<int>(r.top_k) : 1;
  const uint64_t *found = memory->pairs.found;
  HFP_FOR_SIMD(top_of_row<T>)(x, cols, k, &memory->pairs);
  // Dividing by the temperature keeps the order, if not the distances.
  const uint64_t best = *std::max_element(found, found + k);
  const float top = value_of(static_cast<uint32_t>(best >> 32)) / r.temperature;
  const uint32_t top_key = key_of(top);
  if (r.temperature == 0 || top_key >= kKeyOfInfinity || top_key <= kKeyOfMinusInfinity) {
    return index_of(best);
  }
  Kept kept;
  const Scores<T, AllTokens> all_scores{x, r.temperature, {cols}};
  if (few) {
    const float least_x = value_of(static_cast<uint32_t>(found[k - 1] >> 32));
    const float least_z = least_x / r.temperature;
    kept.least = key_of(least_z);
    const float bar = bar_below(least_x, least_z);
    const int64_t count =
        HFP_FOR_SIMD(indices_above<T>)(x, cols, bar, kMostListed, memory->listed);
    if (count >= k) {  // all that are wanted: not too many, and none at -inf
      const ListedTokens listed = {count, memory->listed};
      return draw<T, ListedTokens>(args, {x, r.temperature, listed}, row, kept, top, r);
    }
  } else if (r.top_k > 0) {
    uint64_t n = static_cast<uint64_t>(r.top_k), all = 0;
    kept.least = select_key(all_scores, cols, 4, 24, &n, &all);
  }
  return draw(args, all_scores, row, kept, top, r);
}

template <DType T>
void sample_rows(const SampleArgs &args, int64_t begin, int64_t end) {
  SampleMemory memory;
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    args.out[row] = sample_one<T>(args, at(args.logits, cursor.offset(), T), row, &memory);
  }
}

}  // namespace

int32_t sample(const SampleArgs &args) {
  const auto rows = args.type == DType::F32   ? &sample_rows<DType::F32>
                    : args.type == DType::F16 ? &sample_rows<DType::F16>
                                              : &sample_rows<DType::BF16>;
  parallel(rows, args, args.rows.rows, rows_grain(args.rows.cols), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp
