// layer_map.cuh: how a layer norm changes the elements of a row, from one sum over its threads.
//
// The elements and their squares are added up at once, and the variance is E[x^2] - mean^2 where that
// cancels little. Where the mean is a few deviations or more, both sums are made again of x - mean, a
// second barrier later, but from registers still. They correct the mean too, so that such rows are
// more exact than a rounded mean allows. Which of the two a row takes depends on its sums alone, whose
// bits are the same in every layout.
#pragma once

#include "rows.cuh"

namespace hfp::cuda {

// xhat = (x - centre) * scale + shift; centre is 0 in most rows.
struct LayerMap {
  float centre, scale, shift;

  __device__ __forceinline__ float operator()(float x) const {
    return fmaf(x - centre, scale, shift);
  }
};

// Of a norm that subtracts no mean. -0: as kNoBias.
__device__ __forceinline__ LayerMap scale_map(float scale) { return {0.0f, scale, -0.0f}; }

// Shared memory of sum_twice: sums of 32 vectors each, then those of the squares, in other banks.
inline constexpr int kSquaresAt = kPartials + 16;
inline constexpr int kTwicePartials = kSquaresAt + kPartials;

// E[x^2] / variance up to which the variance is a difference, which multiplies its rounding by that.
template <class T>
inline constexpr float kMostCancelled = sizeof(T) == 4 ? 2.0f : 16.0f;

// Whether E[x^2] - mean^2 is not to be used: also where there is a NaN, or where squares are beyond fp32.
template <class T>
__device__ __forceinline__ bool too_much_cancels(float variance, float of_squares) {
  return !(fmaf(variance, -kMostCancelled<T>, of_squares) <= 0.0f);
}

template <int N>
__device__ __forceinline__ void sums_of(const float (&x)[N], float &sum, float &square) {
  sum = x[0], square = __fmul_rn(x[0], x[0]);  // not to melt into a sum over lanes
#pragma unroll
  for (int i = 1; i < N; ++i) sum += x[i], square = fmaf(x[i], x[i], square);
}

// G::sum of both, in its order. Half of the lanes add up the sums, and half the squares.
template <class G, int K>
__device__ __forceinline__ float2 sum_twice(const float (&sums)[K], const float (&squares)[K],
                                            float *partial) {
  constexpr bool kOwnFirst = G::kLanes < 32 || (G::kWholeCta && K == 8);
  constexpr int kEach = kOwnFirst ? 1 : K, kHalf = G::kLanes / 2, kLanesEach = kHalf / kEach;
  float v[2 * kEach];
  if constexpr (kOwnFirst) {
    v[0] = sums[0], v[1] = squares[0];
#pragma unroll
    for (int i = 1; i < K; ++i) v[0] += sums[i], v[1] += squares[i];
  } else {
#pragma unroll
    for (int i = 0; i < K; ++i) v[i] = sums[i], v[K + i] = squares[i];
  }
  float of = G::sum_lanes_of_each(v);
  const unsigned lane = threadIdx.x % static_cast<unsigned>(G::kLanes), g = lane % kHalf;
  const bool squared = lane >= kHalf;
  if constexpr (G::kWholeCta) {
    const unsigned groups = kEach * G::warps(), first = squared ? kSquaresAt : 0;
    if (g % kLanesEach == 0) G::put(partial, first + G::group(G::warp(), g / kLanesEach), of);
    G::meet(partial);
    const float *const mine = partial + first;
    of = g < groups ? mine[g] : 0.0f;
    if (groups > 16) {
      float upper = g + 16 < groups ? mine[g + 16] : 0.0f;
      if ((kEach > 2 || (kEach == 2 && G::kWholeWarps)) && groups > 32) {
        if (g + 32 < groups) of += mine[g + 32];
        if (g + 48 < groups) upper += mine[g + 48];
      }
      of += upper;
    }
#pragma unroll
    for (int bit = 8; bit > 0; bit /= 2) of += __shfl_xor_sync(~0u, of, bit);
  } else {
#pragma unroll
    for (int bit = kHalf / 2; bit >= kLanesEach; bit /= 2) of += __shfl_xor_sync(~0u, of, bit);
  }
  const float other = __shfl_xor_sync(~0u, of, kHalf);
  return squared ? make_float2(other, of) : make_float2(of, other);
}

// From the sums of a row's elements and of their squares; cancelled: to be corrected by sums of x - mean.
template <class T>
__device__ __forceinline__ LayerMap first_map(float2 total, float inverse_cols, float eps,
                                              float &mean, bool &cancelled) {
  // + 0: not -0, which zeros added in some layouts would make +0.
  mean = fmaf(total.x, inverse_cols, 0.0f);
  const float of_squares = __fmul_rn(total.y, inverse_cols);
  const float variance = fmaf(-mean, mean, of_squares);
  cancelled = too_much_cancels<T>(variance, of_squares);
  LayerMap map{0.0f, rsqrtf(variance + eps), 0.0f};
  map.shift = -__fmul_rn(mean, map.scale);
  return map;
}

// From the sums of x - centre and of their squares. kCentred: x is already without it.
template <bool kCentred>
__device__ __forceinline__ void correct_map(LayerMap &map, float2 again, float centre,
                                            float inverse_cols, float eps) {
  const float rest = __fmul_rn(again.x, inverse_cols);
  const float left = fmaf(-rest, rest, __fmul_rn(again.y, inverse_cols));
  if constexpr (!kCentred) map.centre = centre;
  map.scale = rsqrtf((left < 0.0f ? 0.0f : left) + eps);  // NaN stays
  map.shift = -__fmul_rn(rest, map.scale);
}

// sums(first, centre, sums, squares): those of x - centre and of its squares, of each of a thread's K
// vectors, inside the row alone; first: std::true_type where centre is 0. kCentres: it leaves x - centre
// in the place of x. Every thread of the CTA calls this.
template <class G, class T, int K, bool kCentres, class Sums>
__device__ __forceinline__ LayerMap layer_map(const Sums &sums, float inverse_cols, float eps,
                                              float *partial) {
  float sum[K], square[K], mean;
  bool cancelled;
  sums(std::true_type{}, 0.0f, sum, square);
  LayerMap map =
      first_map<T>(sum_twice<G>(sum, square, partial), inverse_cols, eps, mean, cancelled);
  // Rows that share a warp go through its shuffles together.
  if (G::kLanes < 32 ? __any_sync(~0u, cancelled) : cancelled) {
    if constexpr (G::kWholeCta) partial = G::next(partial);
    sums(std::false_type{}, cancelled ? mean : 0.0f, sum, square);
    const float2 again = sum_twice<G>(sum, square, partial);
    if (cancelled) correct_map<kCentres>(map, again, mean, inverse_cols, eps);
  }
  return map;
}

// The same for vectors as they lie in registers; inside(i): whether vector i is of the row. fp32 stays
// there as x - centre, which leaves no centre to subtract.
template <class G, class T, int N, int K, class Inside>
__device__ __forceinline__ LayerMap layer_map(Vec<T, N> (&v)[K], const Inside &inside,
                                              uint32_t zero, float inverse_cols, float eps,
                                              float *partial) {
  constexpr bool kCentres = sizeof(T) == 4;
  const auto sums = [&](auto first, float centre, float (&sum)[K], float (&square)[K]) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      if constexpr (!first.value && K >= 4) v[i].stay_packed(zero);
      float x[N];
      v[i].get(x);
      if constexpr (!first.value) {
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = inside(i) ? x[k] - centre : 0.0f;
        if constexpr (kCentres) v[i].set(x);
      }
      sums_of(x, sum[i], square[i]);
    }
  };
  return layer_map<G, T, K, kCentres>(sums, inverse_cols, eps, partial);
}

// The same for a whole row of a half type in a CTA's registers, with what is done with it: finish(map),
// which most rows come to without a centre to subtract; those that have one come behind it in the code.
template <class G, class T, int N, int K, class Finish>
__device__ __forceinline__ void with_layer_map(Vec<T, N> (&v)[K], uint32_t zero, float inverse_cols,
                                               float eps, float *partial, const Finish &finish) {
  float sum[K], square[K], mean;
  bool cancelled;
  const auto sums = [&](auto centred, float *partial) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      float x[N];
      if constexpr (centred.value) v[i].stay_packed(zero);
      v[i].get(x);
      if constexpr (centred.value) {
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] -= mean;
      }
      sums_of(x, sum[i], square[i]);
    }
    return sum_twice<G>(sum, square, partial);
  };
  LayerMap map = first_map<T>(sums(std::false_type{}, partial), inverse_cols, eps, mean, cancelled);
  if (!cancelled) {
    finish([&](float x) { return fmaf(x, map.scale, map.shift); });
    return;
  }
  correct_map<false>(map, sums(std::true_type{}, G::next(partial)), mean, inverse_cols, eps);
  finish(map);
}

// Of one thread's share of a row in memory.
template <class T, int N, class G>
__device__ __forceinline__ void sums_of_row(const T *x, int64_t vectors, float centre, float &sum,
                                            float &square) {
  sum = square = 0.0f;
#pragma unroll 4
  for (int64_t at = G::index(); at < vectors; at += G::stride()) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    float y[N], of_vector, of_squares;
    v.get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] -= centre;
    sums_of(y, of_vector, of_squares);
    sum += of_vector, square += of_squares;
  }
}

// layer_map for a row in memory, which is read once, or twice.
template <class G, class T, int N>
__device__ __forceinline__ LayerMap layer_map(const T *x, int64_t vectors, float inverse_cols,
                                              float eps, float *partial) {
  const auto sums = [&](auto, float centre, float (&sum)[1], float (&square)[1]) {
    sums_of_row<T, N, G>(x, vectors, centre, sum[0], square[0]);
  };
  return layer_map<G, T, 1, false>(sums, inverse_cols, eps, partial);
}

}  // namespace hfp::cuda
