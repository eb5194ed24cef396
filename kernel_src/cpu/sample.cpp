// sample.cpp: one token of each row of logits, at random; see hfp_sample.
#include "row_select.h"

namespace hfp {
namespace cpu {
namespace {

// z = x / temperature and its key.
template <DType T>
struct Scores {
  const char *x;
  float temperature;
  float score(int64_t i) const { return element<T>(x, i) / temperature; }
  bool operator()(int64_t i, uint32_t *key) const {
    *key = key_of(score(i));
    return true;
  }
};

// The indices of those with that key, the highest one first.
template <DType T>
struct TiedIndices {
  Scores<T> scores;
  uint32_t key;
  bool operator()(int64_t i, uint32_t *index) const {
    *index = static_cast<uint32_t>(i);
    return key_of(scores.score(i)) == key;
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
template <DType T>
void keep_top_p(const Scores<T> &scores, int64_t cols, float top, float top_p, Kept *kept) {
  const int bits = weight_bits(cols);
  Prefix found;
  uint64_t left = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t bins[256] = {};
    for (int64_t i = 0; i < cols; ++i) {
      const float z = scores.score(i);
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
  uint64_t count = (left + weight - 1) / weight, all = 0;
  const int digits = index_digits(cols);
  kept->least_index = select_key(TiedIndices<T>{scores, kept->least}, cols, digits,
                                 8 * digits - 8, &count, &all);
}

// The pair of the greatest one.
template <DType T>
uint64_t greatest(const Scores<T> &scores, int64_t cols) {
  uint64_t best = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const uint64_t pair = pair_of(key_of(scores.score(i)), static_cast<uint32_t>(i));
    if (pair > best) best = pair;
  }
  return best;
}

template <DType T>
int64_t sample_one(const SampleArgs &args, const char *x, int64_t row) {
  const int64_t cols = args.rows.cols;
  const SampleRow r = sample_row(args, row, cols);
  const Scores<T> scores{x, r.temperature > 0 ? r.temperature : 1.0f};
  uint64_t best = greatest(scores, cols);
  const uint32_t top_key = static_cast<uint32_t>(best >> 32);
  if (r.temperature == 0 || top_key >= kKeyOfInfinity || top_key <= kKeyOfMinusInfinity) {
    return index_of(greatest(Scores<T>{x, 1.0f}, cols));
  }
  const float top = value_of(top_key);
  Kept kept;
  if (r.top_k > 0) {
    uint64_t n = static_cast<uint64_t>(r.top_k), all = 0;
    kept.least = select_key(scores, cols, 4, 24, &n, &all);
  }
  if (r.top_p < 1) keep_top_p(scores, cols, top, r.top_p, &kept);

  const uint64_t seed = static_cast<uint64_t>(args.seeds[row]);
  const uint64_t position = args.positions ? static_cast<uint64_t>(args.positions[row]) : 0;
  Words words = {};
  int64_t block = -1;
  float most = -INFINITY;
  best = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const float z = scores.score(i);
    if (z + kMostNoise < most || !kept.has(key_of(z), i)) continue;
    if (r.min_p > 0 && std::exp(z - top) < r.min_p) continue;
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

template <DType T>
void sample_rows(const SampleArgs &args, int64_t begin, int64_t end) {
  RowCursor cursor(args.rows, begin);
  for (int64_t row = begin; row < end; ++row, cursor.next()) {
    args.out[row] = sample_one<T>(args, at(args.logits, cursor.offset(), T), row);
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
