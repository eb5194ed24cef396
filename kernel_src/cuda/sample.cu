// sample.cu: one token of each row of logits, at random; hfp_sample on CUDA.
//
// Top-k and top-p are thresholds, found by radix select (row_select.cuh) over counts and over
// probabilities in fixed point; then the greatest of z - log(E) among what is kept is the token. So
// nothing is sorted, and no sum depends on its order.
#include "row_select.cuh"

namespace hfp::cuda {
namespace {

struct SampleParams {
  int64_t *out;
  const void *logits;
  Rows x_rows;
  int64_t first_row;
  const int64_t *seeds, *positions, *top_ks;
  const float *temperatures, *top_ps, *min_ps;
  float temperature, top_p, min_p;
  int64_t top_k;
};

constexpr int kSampleThreads = 512;  // with more, the registers would spill

// Kept: key > least, or key == least and index >= least_index, of the digits of the dtype.
struct Kept {
  uint32_t least = 0, least_index = 0;
};

// One thread's share of one row. Half types are ordered by their own few digits, not by those of
// z = logit / temperature, which has the same order.
template <class T, DType kType, bool kAligned, bool kCluster>
struct Row {
  static constexpr int kDigits = key_digits(kType);
  static constexpr uint32_t kMask = ~0u << (32 - 8 * kDigits);
  const T *x;
  uint32_t cols, first, step;
  float temperature;

  __device__ __forceinline__ float score(float value) const { return value / temperature; }
  __device__ __forceinline__ uint32_t key(float value) const {
    return key_of(sizeof(T) == 4 ? score(value) : value);
  }
  // z of a key whose low bits, which all values of the dtype share, are 0.
  __device__ __forceinline__ float score_of(uint32_t key) const {
    const float value = value_of(key >> 31 ? key : key | ~kMask);
    return sizeof(T) == 4 ? value : score(value);
  }

  template <class F>
  __device__ __forceinline__ void each(const F &f) const {
    each_element<T, kAligned>(x, cols, first, step, f);
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
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    Prefix last;  // of the last token that is kept
    uint64_t left = 0;
    for (int shift = 24; shift > 24 - 8 * kDigits; shift -= 8) {
      const Found found = next_digit<kCluster, true>(
          s, round++, left, top_p, bits, [&](uint32_t(&bins)[3][256]) {
            each([&](float value, uint32_t) {
              const uint32_t k = key(value);
              if ((k & kMask) < kept.least || !last.has(k)) return;
              const uint64_t w = weight_of(expf(score(value) - top), bits);
              const uint32_t digit = k >> shift & 255u;
              const uint32_t low = static_cast<uint32_t>(w & mask);
              const uint32_t middle = static_cast<uint32_t>(w >> bits & mask);
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

  __device__ __forceinline__ uint64_t draw(const Kept &kept, float top, float min_p, uint64_t seed,
                                           uint64_t position) const {
    constexpr int N = kVectorOf<T>;
    uint64_t best = 0;
    float most = minus_inf();
    each_vector<T, kAligned>(x, cols, first, step, [&](const float (&value)[N], uint32_t col) {
#pragma unroll
      for (int block = 0; block < N; block += 4) {
        float z[4];
        unsigned candidates = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float logit = value[block + i];
          const uint32_t index = col + block + i, k = key(logit) & kMask;
          z[i] = score(logit);
          bool has = k > kept.least || (k == kept.least && index >= kept.least_index);
          has = has && z[i] + kMostNoise >= most && (kAligned || index < cols);
          if (has && min_p > 0.0f) has = expf(z[i] - top) >= min_p;
          candidates |= static_cast<unsigned>(has) << i;
        }
        if (candidates == 0) continue;
        const Words words = philox(seed, (col + block) / 4, position);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(candidates >> i & 1u)) continue;
          const float noise = noisy(z[i], words.word[i]);
          const uint64_t pair = pair_of(key_of(noise), col + block + i);
          if (pair > best) best = pair, most = noise;
        }
      }
    });
    return best;
  }
};

template <class T, DType kType, bool kAligned, bool kCluster>
__global__ void __launch_bounds__(kSampleThreads, 1)
    sample_kernel(const __grid_constant__ SampleParams p) {
  __shared__ SelectShared s;
  using CTAs = Team<kCluster>;
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const SampleRow r = sample_row(p, row, cols);
  Row<T, kType, kAligned, kCluster> share{
      static_cast<const T *>(p.logits) + row_offset(p.x_rows, row), cols,
      CTAs::rank() * blockDim.x + threadIdx.x, CTAs::size() * blockDim.x,
      r.temperature > 0.0f ? r.temperature : 1.0f};

  uint64_t best = share.greatest(s, 0);
  const float top = share.score_of(static_cast<uint32_t>(best >> 32) & share.kMask);
  const bool finite = fabsf(top) < __int_as_float(0x7f800000);  // false for NaN
  if (r.temperature == 0.0f || !finite) {
    if (sizeof(T) == 4 && r.temperature > 0.0f) {  // temperature may have made infinities
      share.temperature = 1.0f;
      best = share.greatest(s, 1);
    }
  } else {
    Kept kept;
    int round = 0;
    if (r.top_k > 0) share.keep_top_k(s, round, r.top_k, kept);
    if (r.top_p < 1.0f) share.keep_top_p(s, round, top, r.top_p, kept);
    const uint64_t position = p.positions ? static_cast<uint64_t>(p.positions[row]) : 0;
    best = share.draw(kept, top, r.min_p, static_cast<uint64_t>(p.seeds[row]), position);
    best = max_over_team<kCluster>(s, 1, best);
  }
  if (CTAs::rank() == 0 && threadIdx.x == 0) p.out[row] = index_of(best);
  CTAs::sync();  // no CTA ends while another one reads its shared memory
}

template <class T, DType kType>
int32_t launch_for(SampleParams &p, int device, void *stream) {
  const int64_t vectors = (p.x_rows.cols + kVectorOf<T> - 1) / kVectorOf<T>;
  if (rows_of_vectors(p.x_rows, p.logits, sizeof(T))) {
    return launch_team(&sample_kernel<T, kType, true, false>, &sample_kernel<T, kType, true, true>,
                       p, vectors, kSampleThreads, device, stream, "sample");
  }
  return launch_team(&sample_kernel<T, kType, false, false>, &sample_kernel<T, kType, false, true>,
                     p, vectors, kSampleThreads, device, stream, "sample");
}

}  // namespace

int32_t sample(const SampleArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  SampleParams p{};
  p.out = a.out;
  p.logits = a.logits;
  p.x_rows = a.rows;
  p.seeds = a.seeds;
  p.positions = a.positions;
  p.top_ks = a.top_ks;
  p.temperatures = a.temperatures;
  p.top_ps = a.top_ps;
  p.min_ps = a.min_ps;
  p.temperature = a.temperature;
  p.top_p = a.top_p;
  p.min_p = a.min_p;
  p.top_k = a.top_k;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "sample");
  switch (a.type) {
    case DType::F32: return launch_for<float, DType::F32>(p, device, stream);
    case DType::F16: return launch_for<__half, DType::F16>(p, device, stream);
    default: return launch_for<__nv_bfloat16, DType::BF16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
