// norm_backward.cuh: the gradients of rms_norm and layer_norm, which differ in the mean only. With
// r = rsqrt(mean square + eps), h = grad * weight and xhat the normalized row:
//   rms_norm:   dx = r (h - xhat mean(h xhat))
//   layer_norm: dx = r (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of grad * xhat, dbias = sum over rows of grad
//
// One pass over x and grad: a fixed number of CTAs walk the rows, each with the sums of its rows in
// registers, and asks for its next row before it reduces the present one. At the end a CTA writes
// its sums as one row of `partials`; a second, small launch adds those rows up. Few rows are one
// cluster's on sm_90: no second launch, and `partials` stays as it is. No atomics, and the number of
// CTAs depends on the shape only: same input, same bits.
#pragma once

#include "mailbox.cuh"
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

struct SumPartialsParams {
  static constexpr bool kStartsEarly = true;
  void *dweight, *dbias;
  const float *partials;
  int64_t rows, cols;  // of partials
  int64_t weight_cols;
  DType weight_type, bias_type;
};

// Adds up the rows of partials; defined in norm_backward.cu.
int32_t sum_partials(SumPartialsParams &p, void *stream, const char *op);

// ---------------------------------------------------------------------------------------------
// Kernels

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

// Rows in registers. Grad and W: the dtypes of grad and weight; W may be AnyType.
template <bool kCentred, class T, class Grad, class W, int N, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors))
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p) {
  wait_for_previous();
  using G = Group<kThreads>;
  constexpr int kGroups = G::kWholeCta ? 1 : kRowThreads / G::kLanes;
  // A second row in registers only where they are enough: not for layer_norm in fp16 with weights of
  // another dtype, where 1024 threads of 64 spill (fp16 takes more to unpack than bf16).
  constexpr bool kTight = kCentred && G::kWholeCta && std::is_same_v<W, AnyType> &&
                          std::is_same_v<T, __half>;
  constexpr bool kAhead = kVectors <= 2 && !kTight;
  constexpr int kSums = kCentred ? 2 : 1;
  __shared__ float partial[2][4][32];

  const int group = G::kWholeCta ? 0 : threadIdx.x / static_cast<unsigned>(G::kLanes);
  const Columns c = columns_of<G>(static_cast<int>(p.vectors));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  // The same number of rounds for all threads of the CTA: they meet at barriers and shuffles.
  int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups;

  ColumnSums<kVectors == 4 && !kFourFit<kCentred, T>, kSums, kVectors, N> sums;

  Held<T, Grad, N, kVectors> now;
  now.load(p, row, c);
  ParamVec<W, N> weight[kVectors];
  if constexpr (!std::is_same_v<W, AnyType>) load_params<G>(weight, p.weight, c.vectors, 1.0f);

  for (int round = 0; first < p.x_rows.rows; first += step, row += step, round ^= 1) {
    Held<T, Grad, N, kVectors> next;
    if constexpr (kAhead) next.load(p, row + step, c);

    float mean = 0.0f;
    if constexpr (kCentred) {
      float v[1] = {now.sum_x()};
      sum_each<G>(v, &partial[round][3]);
      mean = v[0] * p.inverse_cols;
    }
    float square = 0.0f, product = 0.0f, sum_h = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = c.index + i * c.stride;
      if (at >= c.vectors) break;
      now.x[i].stay_packed(p.zero);
      float x[N], g[N], w[N];
      now.x[i].get(x);
      now.grad[i].get(g);
      load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float h = g[j] * w[j], d = kCentred ? x[j] - mean : x[j];
        square = fmaf(d, d, square);
        product = fmaf(h, d, product);
        if constexpr (kCentred) sum_h += h;
      }
    }
    float v[kCentred ? 3 : 2] = {square, product};
    if constexpr (kCentred) v[2] = sum_h;
    sum_each<G>(v, &partial[round][0]);
    const RowStats s = row_stats<kCentred>(p, mean, v);

    if (row < p.x_rows.rows) {
      const int64_t to = row * p.x_rows.cols;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = c.index + i * c.stride;
        if (at >= c.vectors) break;
        now.x[i].stay_packed(p.zero);
        now.grad[i].stay_packed(p.zero);
        float x[N], g[N], w[N];
        now.x[i].get(x);
        now.grad[i].get(g);
        load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
        if constexpr (kCentred) {
#pragma unroll
          for (int j = 0; j < N; ++j) x[j] -= s.mean;
          sums.add(1, i, g);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
        }
        store_as<T>(p.dx, to + static_cast<int64_t>(at) * N, w);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] *= s.scale;
        if constexpr (!kCentred) round_any(x, p.hat_type);
        sums.add(0, i, g, x);
      }
    }
    if constexpr (kAhead) {
      now = next;
    } else {
      now.load(p, row + step, c);
    }
  }

  if (!p.need_weight && !p.need_bias) return;
  float *out = p.partials + static_cast<int64_t>(blockIdx.x) * p.partial_cols;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (k == 0 ? !p.need_weight : !p.need_bias) continue;
    if constexpr (G::kWholeCta) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = c.index + i * c.stride;
        float sum[N];
        sums.get(k, i, sum);
        if (at < c.vectors) store_as<float>(out, static_cast<int64_t>(at) * N, sum);
      }
    } else {
      // The rows that the groups of this CTA had, added up in order.
      __shared__ __align__(16) float all[kGroups][G::kLanes * kVectors * N];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float sum[N];
        sums.get(k, i, sum);
        store_as<float>(all[group], (c.index + i * c.stride) * N, sum);
      }
      __syncthreads();
      for (int col = threadIdx.x; col < p.x_rows.cols; col += kRowThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) sum += all[i][col];
        out[col] = sum;
      }
    }
    out += p.x_rows.cols;
  }
}

// All other rows: too wide for registers, badly aligned, mixed dtypes. A CTA per row; the sums are
// kept in the CTA's row of partials, where a column is always the same thread's.
template <bool kCentred, class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_loop_kernel(const __grid_constant__ NormBackwardParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[2][4][32];
  ParamVec<AnyType, N> none;
  float *weight_sums = p.partials + static_cast<int64_t>(blockIdx.x) * p.partial_cols;
  float *bias_sums = weight_sums + (p.need_weight ? p.x_rows.cols : 0);

  int round = 0;
  for (int64_t row = blockIdx.x; row < p.x_rows.rows; row += gridDim.x, round ^= 1) {
    const T *x_row = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
    const int64_t grad_row = row_offset(p.grad_rows, row);
    float mean = 0.0f;
    if constexpr (kCentred) {
      float v[1] = {0.0f};
      for (int64_t at = threadIdx.x; at < p.vectors; at += blockDim.x) {
        Vec<T, N> vec;
        vec.template load<Cache::kStream>(x_row + at * N);
        float x[N];
        vec.get(x);
#pragma unroll
        for (int j = 0; j < N; ++j) v[0] += x[j];
      }
      sum_each<G>(v, &partial[round][3]);
      mean = v[0] * p.inverse_cols;
    }
    float v[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll 2
    for (int64_t at = threadIdx.x; at < p.vectors; at += blockDim.x) {
      Vec<T, N> vec;
      vec.template load<Cache::kStream>(x_row + at * N);
      float x[N], g[N], w[N];
      load_any(g, p.grad, p.grad_type, grad_row + at * N);
      load_factor<AnyType>(w, p, none, at * N);
      vec.get(x);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float h = g[j] * w[j], d = x[j] - mean;
        v[0] = fmaf(d, d, v[0]);
        v[1] = fmaf(h, d, v[1]);
        v[2] += h;
      }
    }
    sum_each<G>(v, &partial[round][0]);
    const RowStats s = row_stats<kCentred>(p, mean, v);

    const bool fresh = row == static_cast<int64_t>(blockIdx.x);
    for (int64_t at = threadIdx.x; at < p.vectors; at += blockDim.x) {
      Vec<T, N> vec;
      vec.template load<Cache::kStream>(x_row + at * N);
      float x[N], g[N], w[N];
      load_any(g, p.grad, p.grad_type, grad_row + at * N);
      load_factor<AnyType>(w, p, none, at * N);
      vec.get(x);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        x[j] -= s.mean;
        w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
        x[j] *= s.scale;
      }
      store_as<T>(p.dx, row * p.x_rows.cols + at * N, w);
      round_any(x, p.hat_type);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t col = at * N + j;
        if (p.need_weight) weight_sums[col] = fmaf(g[j], x[j], fresh ? 0.0f : weight_sums[col]);
        if (p.need_bias) bias_sums[col] = g[j] + (fresh ? 0.0f : bias_sums[col]);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Few rows: one launch
//
// A cluster has all rows: a CTA has the columns of some warps of norm_backward_kernel's CTA, in as
// many rows as it has room for at once, with one group of warps for each. The warps send each other
// the sums of their parts of a row, which are added up in the order of norm_backward_kernel: the
// bits of dx are the same. What is summed over the rows stays within a CTA.

struct FewRowsParams : NormBackwardParams {
  void *dweight, *dbias;
  DType bias_type;
  int warps;    // of a row
  int per_cta;  // of these
  int ctas;     // that have any
  int groups;   // rows at once
};

// These two are loops of norm_backward_kernel, to the bit. It does not call them: as functions they
// cost it registers (fp32 layer_norm 58 instead of 56, hence one of three CTAs of 1536 columns).
//
// Of a thread's part of a row: the sums of the squares of d = x - mean (x for rms_norm), of h d, and,
// for layer_norm, of h.
template <bool kCentred, class W, class T, class Grad, int N, int kVectors>
__device__ __forceinline__ void sum_products(float (&v)[kCentred ? 3 : 2],
                                             const NormBackwardParams &p,
                                             Held<T, Grad, N, kVectors> &row,
                                             const ParamVec<W, N> (&weight)[kVectors],
                                             const Columns &c, float mean) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = c.index + i * c.stride;
    if (at >= c.vectors) break;
    row.x[i].stay_packed(p.zero);
    float x[N], g[N], w[N];
    row.x[i].get(x);
    row.grad[i].get(g);
    load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float h = g[j] * w[j], d = kCentred ? x[j] - mean : x[j];
      v[0] = fmaf(d, d, v[0]);
      v[1] = fmaf(h, d, v[1]);
      if constexpr (kCentred) v[2] += h;
    }
  }
}

// Stores a thread's part of row `to` of dx, and adds the row to the sums of its columns.
template <bool kCentred, class W, class T, class Grad, int N, int kVectors, class Sums>
__device__ __forceinline__ void finish_row(const NormBackwardParams &p,
                                           Held<T, Grad, N, kVectors> &row,
                                           const ParamVec<W, N> (&weight)[kVectors],
                                           const Columns &c, const RowStats &s, int64_t to,
                                           Sums &sums) {
  const int64_t start = to * p.x_rows.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = c.index + i * c.stride;
    if (at >= c.vectors) break;
    row.x[i].stay_packed(p.zero);
    row.grad[i].stay_packed(p.zero);
    float x[N], g[N], w[N];
    row.x[i].get(x);
    row.grad[i].get(g);
    load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
    if constexpr (kCentred) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] -= s.mean;
      sums.add(1, i, g);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
    }
    store_as<T>(p.dx, start + static_cast<int64_t>(at) * N, w);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] *= s.scale;
    if constexpr (!kCentred) round_any(x, p.hat_type);
    sums.add(0, i, g, x);
  }
}

#if __CUDA_ARCH__ >= 900
// sum_each over the warps of a row, `warp` of them this one. The first of a CTA's warps is `leader`.
// parity: of the uses of `box`, which is this group's, as is `inbox`.
template <int K>
__device__ __forceinline__ void sum_each_by_mail(float (&v)[K], float4 *inbox, Mailbox &box,
                                                 uint32_t parity, const FewRowsParams &p, int warp,
                                                 bool leader) {
  if (warp >= p.warps) return;  // who waits has sent too, so none falls two uses behind
  constexpr int kFloats = K == 3 ? 4 : K;
  const int lane = threadIdx.x % 32u;
  float sent[kFloats] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) sent[k] = Group<32>::sum_lanes(v[k]);
  if (leader && lane == 0) box.announce(p.warps * static_cast<int>(sizeof sent));
  if (lane < p.ctas) box.send(reinterpret_cast<float *>(inbox + warp), sent, lane);
  __syncwarp();
  box.wait(parity);
  const volatile float *from = reinterpret_cast<const volatile float *>(inbox + lane);
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = Group<32>::sum_lanes(lane < p.warps ? from[k] : 0.0f);
}
#endif

// One CTA per SM is enough, and says so: else ptxas spills to fit two.
template <bool kCentred, class T, class Grad, class W, int N, int kVectors>
__global__ void __launch_bounds__(kNormClusterThreads, 1)
    norm_backward_few_kernel(const __grid_constant__ FewRowsParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSums = kCentred ? 2 : 1;
  // Two of each: who is ahead by one exchange has seen that the one before is over for all.
  __shared__ float4 inbox[2][kNormClusterGroups][32];
  __shared__ Mailbox box[2][kNormClusterGroups];
  extern __shared__ float4 all[];

  if (threadIdx.x < 2 * kNormClusterGroups) {
    box[threadIdx.x / kNormClusterGroups][threadIdx.x % kNormClusterGroups].init();
  }
  Team<true>::leave();
  const int lane = threadIdx.x % 32u, group = threadIdx.x / 32u / p.per_cta;
  const int first_warp = static_cast<int>(Team<true>::rank()) * p.per_cta;
  const int member = static_cast<int>(threadIdx.x / 32u) - group * p.per_cta;
  const int warp = first_warp + member;
  const bool leader = member == 0;
  const Columns c{warp * 32 + lane, p.warps * 32,
                  warp < p.warps ? static_cast<int>(p.vectors) : 0};
  const int rows = static_cast<int>(p.x_rows.rows);

  using Row = Held<T, Grad, N, kVectors>;
  const T *x_row = Row::x_row(p, group);
  const Grad *grad_row = Row::grad_row(p, group);
  compute_now(x_row, grad_row);
  wait_for_previous();
  Row now;
  now.load(x_row, grad_row, group < rows, c);
  ParamVec<W, N> weight[kVectors];
  if constexpr (!std::is_same_v<W, AnyType>) {
    load_params(weight, p.weight, c.index, c.stride, c.vectors, 1.0f);
  }
  ColumnSums<false, kSums, kVectors, N> sums;
  Team<true>::left();  // all have their mailboxes

  // The same number of rounds for all threads of the cluster.
  for (int first = 0, round = 0; first < rows; first += p.groups, ++round) {
    const int row = first + group;
    float mean = 0.0f;
    float v[kCentred ? 3 : 2] = {};
    if constexpr (kCentred) {
      float sum[1] = {now.sum_x()};
      sum_each_by_mail(sum, inbox[0][group], box[0][group], round & 1, p, warp, leader);
      mean = sum[0] * p.inverse_cols;
    }
    sum_products<kCentred, W>(v, p, now, weight, c, mean);
    // With one exchange a round, the rounds take turns.
    const int use = kCentred ? 1 : round & 1;
    const uint32_t parity = kCentred ? round & 1 : round >> 1 & 1;
    sum_each_by_mail(v, inbox[use][group], box[use][group], parity, p, warp, leader);
    const RowStats s = row_stats<kCentred>(p, mean, v);
    if (row < rows) finish_row<kCentred, W>(p, now, weight, c, s, row, sums);
    if (first + p.groups < rows) now.load(p, row + p.groups, c);
  }

  // Four columns of a thread in a float4; those of a warp lie next to each other.
  constexpr int kFours = N / 4;
  const int lanes = p.per_cta * 32, wide = kSums * kVectors * kFours * lanes;
  float4 *own = all + group * wide + member * 32 + lane;
#pragma unroll
  for (int k = 0; k < kSums; ++k)
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float sum[N];
      sums.get(k, i, sum);
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        own[((k * kVectors + i) * kFours + j) * lanes] =
            make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
      }
    }
  __syncthreads();
  for (int e = threadIdx.x; e < wide; e += blockDim.x) {
    const int of = e / lanes, thread = e - of * lanes;
    const int j = of % kFours, i = of / kFours % kVectors, k = of / kFours / kVectors;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int g = 0; g < p.groups; ++g) {
      const float4 four = all[g * wide + e];
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
    const int at = first_warp * 32 + thread + i * c.stride;
    if (first_warp + thread / 32 >= p.warps || at >= static_cast<int>(p.vectors)) continue;
    const int64_t col = static_cast<int64_t>(at) * N + 4 * j;
    if (k == 0 && p.need_weight) store_any(p.dweight, p.weight_type, col, sum);
    if (k == 1 && p.need_bias) store_any(p.dbias, p.bias_type, col, sum);
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <bool kCentred, class T, int N>
int32_t launch_loop(NormBackwardParams &p, int64_t grid, void *stream, const char *op) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch(&norm_backward_loop_kernel<kCentred, T, N>, grid, threads, p, stream, op);
}

// By norm_backward_few_kernel, where there are clusters and few enough rows; false where not.
template <bool kCentred, class T, class Grad, class W, int kVectors>
bool launch_few(const NormBackwardParams &rows, const SumPartialsParams &to, int device,
                void *stream, const char *op, int32_t *status) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  if (rows.x_rows.rows > kNormClusterRows || (!rows.need_weight && !rows.need_bias)) return false;
  if (!pointer_aligned(to.dweight) || !pointer_aligned(to.dbias)) return false;
  auto *kernel = &norm_backward_few_kernel<kCentred, T, Grad, W, N, kVectors>;
  if (!has_clusters(reinterpret_cast<const void *>(kernel), device)) return false;
  FewRowsParams p{};
  static_cast<NormBackwardParams &>(p) = rows;
  p.dweight = to.dweight;
  p.dbias = to.dbias;
  p.bias_type = to.bias_type;
  p.warps = cta_threads(p.vectors, kVectors) / 32;
  p.per_cta = (p.warps + kClusterSize - 1) / kClusterSize;
  p.ctas = (p.warps + p.per_cta - 1) / p.per_cta;
  p.groups = kNormClusterThreads / (32 * p.per_cta);
  if (p.groups > p.x_rows.rows) p.groups = static_cast<int>(p.x_rows.rows);
  const int threads = p.groups * p.per_cta * 32;
  const int bytes = threads * (kCentred ? 2 : 1) * kVectors * N * static_cast<int>(sizeof(float));
  // Together with the mailboxes it may be more than a kernel always has.
  const cudaError_t allowed =
      cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  *status = allowed != cudaSuccess ? check(allowed, op)
                                   : launch_clusters(kernel, 1, threads, p, stream, op, bytes);
  return true;
}

template <bool kCentred, class T, class Grad, class W>
int32_t launch_held(NormBackwardParams &p, SumPartialsParams &sums, int64_t grid, int device,
                    void *stream, const char *op) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t vectors = p.vectors;
  if (vectors <= 16) {
    return launch(&norm_backward_kernel<kCentred, T, Grad, W, N, 8, 2>, grid, kRowThreads, p,
                  stream, op);
  }
  if (vectors <= 64) {
    return launch(&norm_backward_kernel<kCentred, T, Grad, W, N, 32, 2>, grid, kRowThreads, p,
                  stream, op);
  }
  // With both sums of 8 columns, 1024 threads of 64 registers would spill.
  constexpr int kVectors = kCentred && N == 8 && std::is_same_v<T, W> ? 2 : 1;
  if (vectors <= kMaxThreads) {
    int32_t status;
    if (launch_few<kCentred, T, Grad, W, kVectors>(p, sums, device, stream, op, &status)) {
      sums.cols = 0;  // all done
      return status;
    }
    return launch(&norm_backward_kernel<kCentred, T, Grad, W, N, kCta, kVectors>, grid,
                  cta_threads(vectors, kVectors), p, stream, op);
  }
  if constexpr (std::is_same_v<T, W>) {
    auto *kernel = &norm_backward_kernel<kCentred, T, Grad, W, N, kCta, 4>;
    const int threads = cta_threads(vectors, 4);
    if constexpr (kFourFit<kCentred, T>) return launch(kernel, grid, threads, p, stream, op);
    else {
      const int bytes = ColumnSums<true, kCentred ? 2 : 1, 4, N>::kFloats * 4 * threads;
      if (bytes <= shared_memory_limit()) {
        return launch(kernel, grid, threads, p, stream, op, bytes);
      }
    }
  }
  return launch_loop<kCentred, T, N>(p, grid, stream, op);
}

template <bool kCentred, class T>
int32_t launch_norm_backward(NormBackwardParams &p, SumPartialsParams &sums, DType type,
                             int64_t grid, int device, void *stream, const char *op) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  int n = widest_vector(p.x_rows, sizeof(T));
  const int grad_n = widest_vector(p.grad_rows, sizeof(T));
  n = grad_n < n ? grad_n : n;
  n = narrow_to_pointer(n, p.x, sizeof(T));
  n = narrow_to_pointer(n, p.dx, sizeof(T));
  n = narrow_to_pointer(n, p.grad, size_of(p.grad_type));
  n = narrow_to_pointer(n, p.weight, size_of(p.weight_type));
  n = narrow_to_pointer(n, p.partials, sizeof(float));
  if (n < kWidest) return launch_loop<kCentred, T, 1>(p, grid, stream, op);

  p.vectors = p.x_rows.cols / kWidest;
  // The kernel that holds rows keeps the sums of a bias for layer_norm only: an rms_norm with a bias
  // is too rare for a shape of its own.
  const bool rare = !kCentred && p.need_bias;
  if (p.vectors <= 4 * kMaxThreadsX4 && !rare) {
    if (p.grad_type == type && p.weight_type == type) {
      return launch_held<kCentred, T, T, T>(p, sums, grid, device, stream, op);
    }
    if (p.grad_type == type) {
      return launch_held<kCentred, T, T, AnyType>(p, sums, grid, device, stream, op);
    }
    if constexpr (!kCentred && !std::is_same_v<T, float>) {
      if (p.grad_type == DType::F32) {
        return launch_held<kCentred, T, float, AnyType>(p, sums, grid, device, stream, op);
      }
    }
  }
  return launch_loop<kCentred, T, kWidest>(p, grid, stream, op);
}

template <bool kCentred>
int32_t norm_backward(const NormBackwardArgs &a, int device, void *stream, const char *op) {
  if (a.x_rows.cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), op);
  const int wanted = (a.dweight != nullptr) + (a.dbias != nullptr);

  SumPartialsParams sums{};
  sums.dweight = a.dweight;
  sums.dbias = a.dbias;
  sums.partials = a.partials;
  sums.rows = a.x_rows.rows > 0 ? a.partial_rows : 0;
  sums.cols = wanted * a.x_rows.cols;
  sums.weight_cols = a.dweight != nullptr ? a.x_rows.cols : 0;
  sums.weight_type = a.weight_type;
  sums.bias_type = a.bias_type;

  if (a.x_rows.rows > 0) {
    NormBackwardParams p{};
    p.dx = a.dx;
    p.partials = a.partials;
    p.grad = a.grad;
    p.x = a.x;
    p.weight = a.weight;
    p.grad_rows = a.grad_rows;
    p.x_rows = a.x_rows;
    p.partial_cols = wanted * a.x_rows.cols;
    p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
    p.eps = a.eps;
    p.weight_offset = a.weight != nullptr ? a.weight_offset : 0.0f;
    p.grad_type = a.grad_type;
    p.weight_type = a.weight != nullptr ? a.weight_type : a.x_type;
    p.hat_type = a.hat_type;
    p.need_weight = a.dweight != nullptr;
    p.need_bias = a.dbias != nullptr;
    int32_t status;
    switch (a.x_type) {
      case DType::F32:
        status = launch_norm_backward<kCentred, float>(p, sums, a.x_type, a.partial_rows, device,
                                                       stream, op);
        break;
      case DType::F16:
        status = launch_norm_backward<kCentred, __half>(p, sums, a.x_type, a.partial_rows, device,
                                                        stream, op);
        break;
      default:
        status = launch_norm_backward<kCentred, __nv_bfloat16>(p, sums, a.x_type, a.partial_rows,
                                                               device, stream, op);
    }
    if (status != HFP_OK) return status;
  }
  if (sums.cols == 0) return HFP_OK;  // none is wanted, or the first launch has done it all
  return sum_partials(sums, stream, op);
}

}  // namespace hfp::cuda
