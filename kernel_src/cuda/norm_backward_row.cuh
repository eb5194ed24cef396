// norm_backward_row.cuh: what the kernels of the norms' gradients know of a row: its statistics, and
// what a thread holds of it and adds up for its columns.
#pragma once

#include "partial_sums.cuh"
#include "rows.cuh"

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

// The statistics of a row that dx is made of: dx = scale * h - (x - mean) * slope - shift.
struct RowStats {
  float mean, scale, slope, shift;
};

// v: the sums over the row of d^2, h d and, for layer_norm, h, with d = x - mean.
template <bool kCentred, int K>
__device__ __forceinline__ RowStats row_stats(const NormBackwardParams &p, float mean,
                                              const float (&v)[K]) {
  RowStats s;
  s.mean = mean;
  s.scale = rsqrtf(fmaf(v[0], p.inverse_cols, p.eps));
  // mean(h xhat) r, times r for the factor x - mean instead of xhat. In this order nothing
  // overflows that does not have to: scale^3 would, for a row of zeros.
  s.slope = (v[1] * p.inverse_cols * s.scale) * s.scale * s.scale;
  s.shift = 0.0f;
  if constexpr (kCentred) s.shift = v[2] * p.inverse_cols * s.scale;
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
