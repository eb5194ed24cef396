// micro_product.h: the innermost part of a matrix product: kRows x (kVectors registers) of the result
// stay in registers while k runs. No include guard: included once per instruction set.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Rows that fit the registers beside two of b and one of a.
#if HFP_SIMD_LEVEL == 2
constexpr int kProductRows = 14;
constexpr int kShortRows = 8;  // a divisor of most head dimensions
#else
constexpr int kProductRows = 6;
constexpr int kShortRows = 4;
#endif
constexpr int kProductVectors = 2;
constexpr int kProductColumns = kProductVectors * kLanes;

// sum[r][v] += a[r] b[v] over k; a: [k][kRows], b: [k][kVectors registers].
template <int kRows, int kVectors>
HFP_INLINE void add_packed(const float *a, int64_t a_step, const float *b, int64_t k,
                           vf (&sum)[kRows][kVectors]) {
  for (int64_t i = 0; i < k; ++i, a += a_step, b += kVectors * kLanes) {
    vf right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      __builtin_memcpy(&right[v], b + v * kLanes, sizeof(vf));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const vf left = splat(a[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
}

// The same with the rows of a `row` apart, k contiguous.
template <int kRows, int kVectors>
HFP_INLINE void add_rows(const float *a, int64_t row, const float *b, int64_t k,
                         vf (&sum)[kRows][kVectors]) {
  const float *at[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) at[r] = a + r * row;
  for (int64_t i = 0; i < k; ++i, b += kVectors * kLanes) {
    vf right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      __builtin_memcpy(&right[v], b + v * kLanes, sizeof(vf));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const vf left = splat(at[r][i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
