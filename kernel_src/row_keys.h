// row_keys.h: what CPU and CUDA must compute alike in argmax, topk and sample: the order of values,
// the weights of top-p, the random numbers and what becomes of a greedy token.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__CUDACC__)
#define HFP_BOTH __host__ __device__ __forceinline__
#else
#define HFP_BOTH inline
#endif

namespace hfp {

HFP_BOTH uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

HFP_BOTH float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// An unsigned integer that is ordered as torch orders values: NaN above +inf, -0 equal to 0.
HFP_BOTH uint32_t key_of(float x) {
  const uint32_t bits = bits_of(x + 0.0f);  // -0 becomes 0
  const uint32_t key = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return x != x ? 0xffffffffu : key;
}

// The value of that key, -0 as 0.
HFP_BOTH float value_of(uint32_t key) {
  return float_of(key >> 31 ? key ^ 0x80000000u : ~key);
}

inline constexpr uint32_t kKeyOfInfinity = 0xff800000u, kKeyOfMinusInfinity = 0x007fffffu;

// Digits of 8 bits, the leading ones, in which the keys of a dtype differ. fp16 becomes fp32 with
// 10 bits of significand.
HFP_BOTH constexpr int key_digits(DType type) {
  return type == DType::F32 ? 4 : type == DType::F16 ? 3 : 2;
}

// A key and an index in one: the greatest value first, then the lowest index.
HFP_BOTH uint64_t pair_of(uint32_t key, uint32_t index) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~index);
}
HFP_BOTH uint32_t index_of(uint64_t pair) { return ~static_cast<uint32_t>(pair); }

// --- top-p ------------------------------------------------------------------------------------

// Probabilities are added up as integers, so that the sum does not depend on the order: exp(z -
// max) in units of 2^-(3 b), in three parts of b bits, each of which adds up to less than 2^32.
inline constexpr int64_t kMaxSampleCols = int64_t{1} << 23;

HFP_BOTH int weight_bits(int64_t cols) {
  int log = 0;
  while ((int64_t{1} << log) < cols) ++log;
  const int bits = 31 - log;
  return bits < 14 ? bits : 14;
}

// e <= 1. A power of two scales exactly.
HFP_BOTH uint64_t weight_of(float e, int bits) {
  const uint64_t one = uint64_t{1} << (3 * bits);
  const uint64_t w = static_cast<uint64_t>(e * static_cast<float>(one) + 0.5f);
  return w < one ? w : one - 1;  // in three parts of `bits` bits
}

// The tokens are kept before which the weights add up to less than this.
HFP_BOTH uint64_t weight_target(float top_p, uint64_t total) {
  const double limit = static_cast<double>(top_p) * static_cast<double>(total);
  const uint64_t target = static_cast<uint64_t>(ceil(limit));
  return target < 1 ? 1 : target < total ? target : total;
}

// --- random numbers ---------------------------------------------------------------------------

struct Words {
  uint32_t word[4];
};

// Philox-4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
HFP_BOTH Words philox(uint64_t key, uint32_t block, uint64_t position) {
  uint32_t c0 = block, c1 = 0, c2 = static_cast<uint32_t>(position),
           c3 = static_cast<uint32_t>(position >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xd2511f53u;
    const uint64_t b = static_cast<uint64_t>(c2) * 0xcd9e8d57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// No -log(E) is greater: E >= 2^-33.
inline constexpr float kMostNoise = 22.9f;

// z - log(E), E = -log(1 - v) exponentially distributed. The token with the greatest one is drawn
// with probability proportional to exp(z). Small E, which win, have the full precision of a float.
HFP_BOTH float noisy(float z, uint32_t word) {
  float v = static_cast<float>(word) * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
  v = v < 0.99999994f ? v : 0.99999994f;
  return z - logf(-log1pf(-v));
}

// --- greedy tokens ------------------------------------------------------------------------------

// What a row's token depends on beside its logits, to be read while those are.
struct ChoiceRow {
  int64_t number;
  int64_t *tokens, *report;
  uint8_t *unfinished;
  bool open;
};

HFP_BOTH ChoiceRow choice_row(const Choice &c, int64_t row) {
  ChoiceRow r;
  r.number = c.text[row];
  r.tokens = reinterpret_cast<int64_t *>(c.text[c.rows]);
  r.unfinished = reinterpret_cast<uint8_t *>(c.text[c.rows + 1]);
  r.report = reinterpret_cast<int64_t *>(c.text[c.rows + 2]);
  r.open = c.ends_count < 0 ||
           r.unfinished[(r.number + HFP_DECODE_SLOTS - 1) % HFP_DECODE_SLOTS * c.rows + row] != 0;
  return r;
}

// Writes all of one row.
HFP_BOTH void choose(const Choice &c, const ChoiceRow &r, int64_t row, int64_t greatest) {
  const int64_t to = r.number % HFP_DECODE_SLOTS * c.rows + row;
  const int64_t token = r.open ? greatest : c.pad;
  c.ids[row] = token;
  r.tokens[to] = token;
  if (r.report != nullptr) r.report[to] = token;
  if (c.ends_count >= 0) {
    bool open = r.open;
    for (int64_t i = 0; i < c.ends_count; ++i) open = open && token != c.ends[i];
    r.unfinished[to] = open ? 1 : 0;
  }
  c.text[row] = r.number + 1;
  for (int64_t i = row; i < c.counters_count; i += c.rows) ++c.counters[i];
}

// --- the parameters of a row --------------------------------------------------------------------

struct SampleRow {
  float temperature;  // 0: argmax
  int64_t top_k;      // 0: all
  float top_p, min_p;
};

HFP_BOTH float to_fraction(float x, float otherwise) {
  return x != x ? otherwise : x < 0.0f ? 0.0f : x < 1.0f ? x : 1.0f;
}

// Args: SampleArgs, or a struct with the same members.
template <class Args>
HFP_BOTH SampleRow sample_row(const Args &args, int64_t row, int64_t cols) {
  const float t = args.temperatures ? args.temperatures[row] : args.temperature;
  const int64_t k = args.top_ks ? args.top_ks[row] : args.top_k;
  SampleRow r;
  r.temperature = t > 0.0f ? t : 0.0f;
  r.top_k = k > 0 && k < cols ? k : 0;
  r.top_p = to_fraction(args.top_ps ? args.top_ps[row] : args.top_p, 1.0f);
  r.min_p = to_fraction(args.min_ps ? args.min_ps[row] : args.min_p, 0.0f);
  return r;
}

}  // namespace hfp
