// norm_backward_row.cuh: what the kernels of the norms' gradients know of a row: its statistics, and
// what a thread holds of it and adds up for its columns.
#pragma once

#include "layer_map.cuh"
#include "partial_sums.cuh"

namespace hfp::cuda {

struct NormBackwardParams {
  static constexpr bool kStartsEarly = true;
  void *dx;
  float *partials;  // [gridDim.x, partial_cols]
  const void *grad, *x, *weight;
  Rows grad_rows, x_rows;
  int64_t vectors;  // per row
  int64_t partial_cols;
  float inverse_cols, eps, weight_offset;
  DType grad_type, weight_type, hat_type;
  bool need_weight, need_bias;
  uint32_t zero;  // 0; see Vec::stay_packed
};

// Sums over the threads of a row. `partial` must differ from that of the sum before: the barrier
// inside then is the only one needed.
template <class G, int K>
__device__ __forceinline__ void sum_each(float (&v)[K], float (*partial)[32]) {
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = G::sum_lanes(v[k]);
  if constexpr (G::kWholeCta) {
    const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) partial[k][warp] = v[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = G::sum_lanes(lane < warps ? partial[k][lane] : 0.0f);
  }
}

// Whether mean and variance of a layer norm come from one sum over the row, as in layer_map.cuh. Of half types,
// with a weight of the same, where a thread has no more than two vectors: else a sum of its own for the mean
// takes fewer registers.
template <bool kCentred, class T, class W, int kVectors>
inline constexpr bool kOneSum =
    kCentred && sizeof(T) == 2 && std::is_same_v<T, W> && kVectors <= 2;

// Sums over a row, of d^2, of h d and, for layer_norm, of h, with d = x - centre; where there is one sum, of
// d too, and the centre is 0 unless too much cancels.
template <bool kCentred, bool kOnce>
inline constexpr int kRowSums = kCentred ? (kOnce ? 4 : 3) : 2;

// Adds a vector of a row to its sums. kFrom0: the centre is 0.
template <bool kFrom0, int K, int N>
__device__ __forceinline__ void add_products(float (&v)[K], const float (&x)[N],
                                             const float (&g)[N], const float (&w)[N],
                                             float centre) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float h = g[j] * w[j], d = kFrom0 ? x[j] : x[j] - centre;
    v[0] = fmaf(d, d, v[0]);
    v[1] = fmaf(h, d, v[1]);
    if constexpr (K > 2) v[2] += h;
    if constexpr (K > 3) v[3] += d;
  }
}

// The statistics of a row that dx is made of: dx = scale * h - d * slope - shift; xhat = d * scale + at.
struct RowStats {
  float centre, scale, slope, shift, at;

  template <bool kOnce>
  __device__ __forceinline__ float hat(float d) const {
    return kOnce ? fmaf(d, scale, at) : d * scale;
  }
};

// mean(h xhat) r, times r for the factor d instead of xhat. In this order nothing overflows that does not
// have to: scale^3 would, for a row of zeros.
__device__ __forceinline__ float slope_of(const NormBackwardParams &p, float product, float scale) {
  return (product * p.inverse_cols * scale) * scale * scale;
}

// From the sums of a row; centre: its mean.
template <bool kCentred, int K>
__device__ __forceinline__ RowStats row_stats(const NormBackwardParams &p, float centre,
                                              const float (&v)[K]) {
  RowStats s;
  s.centre = centre;
  s.scale = rsqrtf(fmaf(v[0], p.inverse_cols, p.eps));
  s.slope = slope_of(p, v[1], s.scale);
  s.shift = 0.0f;
  if constexpr (kCentred) s.shift = v[2] * p.inverse_cols * s.scale;
  s.at = 0.0f;
  return s;
}

// The same where there is one sum. mean: of d. cancelled: as in first_map of layer_map.cuh.
template <class T>
__device__ __forceinline__ RowStats one_sum_stats(const NormBackwardParams &p, float centre,
                                                  const float (&v)[4], float &mean,
                                                  bool &cancelled) {
  RowStats s;
  s.centre = centre;
  mean = fmaf(v[3], p.inverse_cols, 0.0f);
  const float of_squares = __fmul_rn(v[0], p.inverse_cols);
  const float variance = fmaf(-mean, mean, of_squares);
  cancelled = too_much_cancels<T>(variance, of_squares);
  s.scale = rsqrtf((variance < 0.0f ? 0.0f : variance) + p.eps);  // NaN stays
  s.slope = slope_of(p, fmaf(-mean, v[2], v[1]), s.scale);
  s.shift = fmaf(-mean, s.slope, v[2] * p.inverse_cols * s.scale);
  s.at = -__fmul_rn(mean, s.scale);
  return s;
}

// sums(centre, v, first): the sums of the row. first: std::true_type in the first of two calls. Every thread
// that shares the row calls this, and where rows share a warp all of the warp.
template <class T, bool kSharedWarp, class Sums>
__device__ __forceinline__ RowStats one_sum_stats(const NormBackwardParams &p, const Sums &sums) {
  float v[4], mean, rest;
  bool cancelled, again;
  sums(0.0f, v, std::true_type{});
  RowStats s = one_sum_stats<T>(p, 0.0f, v, mean, cancelled);
  if (kSharedWarp ? __any_sync(~0u, cancelled) : cancelled) {
    sums(cancelled ? mean : 0.0f, v, std::false_type{});
    if (cancelled) s = one_sum_stats<T>(p, mean, v, rest, again);
  }
  return s;
}

// The vectors of a row that a thread has: every stride-th from index on.
struct Columns {
  int index, stride, vectors;
};

template <class G>
__device__ __forceinline__ Columns columns_of(int vectors) {
  return {G::index(), G::stride(), vectors};
}

// What a thread holds of one row, as it lies in memory.
template <class T, class Grad, int N, int kVectors>
struct Held {
  Vec<T, N> x[kVectors];
  Vec<Grad, N> grad[kVectors];

  __device__ __forceinline__ static const T *x_row(const NormBackwardParams &p, int64_t row) {
    return static_cast<const T *>(p.x) + (row < p.x_rows.rows ? row_offset(p.x_rows, row) : 0);
  }
  __device__ __forceinline__ static const Grad *grad_row(const NormBackwardParams &p,
                                                         int64_t row) {
    return static_cast<const Grad *>(p.grad) +
           (row < p.x_rows.rows ? row_offset(p.grad_rows, row) : 0);
  }

  // Zeros where the row is not `inside`.
  __device__ __forceinline__ void load(const T *x_row, const Grad *grad_row, bool inside,
                                       const Columns &c) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = c.index + i * c.stride;
      x[i].zero();
      grad[i].zero();
      if (inside && at < c.vectors) {
        x[i].template load<Cache::kStream>(x_row + at * N);
        grad[i].template load<Cache::kStream>(grad_row + at * N);
      }
    }
  }
  __device__ __forceinline__ void load(const NormBackwardParams &p, int64_t row,
                                       const Columns &c) {
    load(x_row(p, row), grad_row(p, row), row < p.x_rows.rows, c);
  }

  __device__ __forceinline__ float sum_x() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float value[N];
      x[i].get(value);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += value[j];
    }
    return sum;
  }
};

// 1 for no weight; + weight_offset otherwise.
template <class W, int N>
__device__ __forceinline__ void load_factor(float (&w)[N], const NormBackwardParams &p,
                                            const ParamVec<W, N> &held, int64_t at) {
  if constexpr (std::is_same_v<W, AnyType>) {
    load_param<AnyType>(w, p.weight, p.weight_type, at, 1.0f);
  } else {
    held.get(w);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] += p.weight_offset;  // 0 without a weight
}

// What a thread adds up for its columns: kSums values a column.
template <bool kShared, int kSums, int kVectors, int N>
struct ColumnSums {
  float v[kSums][kVectors][N];

  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int k = 0; k < kSums; ++k)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) v[k][i][j] = 0.0f;
  }
  // sum k of vector i += a * b
  __device__ __forceinline__ void add(int k, int i, const float (&a)[N], const float (&b)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[k][i][j] = fmaf(a[j], b[j], v[k][i][j]);
  }
  __device__ __forceinline__ void add(int k, int i, const float (&a)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[k][i][j] += a[j];
  }
  __device__ __forceinline__ void get(int k, int i, float (&to)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = v[k][i][j];
  }
};

// The same in shared memory, for rows whose sums are more than the registers: a place is its
// thread's alone, so there is nothing to wait for. A warp's places are next to each other.
template <int kSums, int kVectors, int N>
struct ColumnSums<true, kSums, kVectors, N> {
  static_assert(N % 4 == 0, "16 bytes at a time");
  static constexpr int kFloats = kSums * kVectors * N;  // of a thread
  float4 *place;

  __device__ __forceinline__ ColumnSums() {
    extern __shared__ float4 all[];
    place = all + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kFloats / 4; ++i) place[i * blockDim.x] = make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ float4 *at(int k, int i) const {
    return place + (k * kVectors + i) * (N / 4) * blockDim.x;
  }
  __device__ __forceinline__ void put(int k, int i, const float (&from)[N]) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      at(k, i)[j / 4 * blockDim.x] = make_float4(from[j], from[j + 1], from[j + 2], from[j + 3]);
    }
  }
  __device__ __forceinline__ void add(int k, int i, const float (&a)[N], const float (&b)[N]) {
    float sum[N];
    get(k, i, sum);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = fmaf(a[j], b[j], sum[j]);
    put(k, i, sum);
  }
  __device__ __forceinline__ void add(int k, int i, const float (&a)[N]) {
    float sum[N];
    get(k, i, sum);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += a[j];
    put(k, i, sum);
  }
  __device__ __forceinline__ void get(int k, int i, float (&to)[N]) const {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 four = at(k, i)[j / 4 * blockDim.x];
      to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
    }
  }
};

// Whether four vectors of row, weight and sums fit in the 128 registers of kMaxThreadsX4.
template <bool kCentred, class T, int N = kVectorBytes / static_cast<int>(sizeof(T))>
inline constexpr bool kFourFit = 4 * (3 * Vec<T, N>::kWords + (kCentred ? 2 : 1) * N) <= 80;

}  // namespace hfp::cuda
