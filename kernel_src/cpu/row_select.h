// row_select.h: the greatest of a row without sorting it, for topk and sample. The n-th one digit by
// digit of row_keys.h's keys (radix select), and what row_top.h needs. Plain C++: compiled once.
#pragma once

#include <algorithm>
#include <functional>

#include "../row_keys.h"
#include "common.h"

namespace hfp {
namespace cpu {

inline float half_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t fields = static_cast<uint32_t>(h & 0x7fffu) << 13;
  if ((fields & 0x0f800000u) == 0x0f800000u) return float_of(sign | (fields + (224u << 23)));
  if ((fields & 0x0f800000u) == 0) {  // subnormal: m 2^-24
    const float size = static_cast<float>(h & 0x03ffu) * 5.9604645e-08f;
    return sign ? -size : size;
  }
  return float_of(sign | (fields + (112u << 23)));
}

template <DType T>
inline float element(const char *x, int64_t i) {
  if constexpr (T == DType::F32) {
    return reinterpret_cast<const float *>(x)[i];
  } else {
    const uint16_t h = reinterpret_cast<const uint16_t *>(x)[i];
    return T == DType::F16 ? half_value(h) : float_of(static_cast<uint32_t>(h) << 16);
  }
}

// What is selected by its digits: elements whose key, without its `shift` low bits, is `prefix`.
struct Prefix {
  uint32_t prefix = 0;
  int shift = 32;  // 32: all

  bool has(uint32_t key) const { return shift == 32 || key >> shift == prefix; }
  // The least key of those.
  uint32_t least() const { return shift == 32 ? 0 : prefix << shift; }
};

// The digit, from the greatest down, at which the sums of `bins` reach `wanted` (which they do);
// `wanted` becomes what is left of it at that digit.
inline uint32_t digit_at(const uint64_t (&bins)[256], uint64_t *wanted) {
  uint32_t digit = 255;
  while (digit > 0 && bins[digit] < *wanted) *wanted -= bins[digit--];
  return digit;
}

// The key such that those above it are fewer than n and those from it on at least n, by
// keys(i, &key) for 0 <= i < cols, which says whether i counts. Returns the least key that is selected, and in *n how many of the
// elements with the prefix of the result belong to the n, in *all how many there are.
template <class Keys>
uint32_t select_key(const Keys &keys, int64_t cols, int digits, int first_shift, uint64_t *n,
                    uint64_t *all) {
  Prefix found;
  if (first_shift < 24) {  // the digits above are 0
    found.shift = first_shift + 8;
  }
  for (int d = 0; d < digits; ++d) {
    const int shift = first_shift - 8 * d;
    uint64_t bins[256] = {};
    for (int64_t i = 0; i < cols; ++i) {
      uint32_t key;
      if (keys(i, &key) && found.has(key)) ++bins[key >> shift & 255u];
    }
    const uint32_t digit = digit_at(bins, n);
    found.prefix = found.prefix << 8 | digit;
    found.shift = shift;
    *all = bins[digit];
    if (*n == *all) break;  // the whole of it: no further digit decides
  }
  return found.least();
}

inline int index_digits(int64_t cols) {
  int digits = 1;
  while (digits < 4 && (cols - 1) >> (8 * digits) != 0) ++digits;
  return digits;
}

// --- for row_top.h ----------------------------------------------------------------------------

// Room besides 2 k pairs: few cuts where k is small.
constexpr int kMoreThanK = 512, kMostAppended = 64;

struct TopPairs {
  uint64_t found[2 * HFP_MAX_TOPK + kMoreThanK + kMostAppended];
};

// Moves the k greatest to the front, the least of them last, and returns that one's key.
inline uint32_t cut(uint64_t *pairs, int count, int k) {
  std::nth_element(pairs, pairs + k - 1, pairs + count, std::greater<uint64_t>());
  return static_cast<uint32_t>(pairs[k - 1] >> 32);
}

}  // namespace cpu
}  // namespace hfp
