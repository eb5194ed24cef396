// norm_backward.cuh: the gradients of rms_norm and layer_norm, which differ in the mean only. With
// r = rsqrt(mean square + eps), h = grad * weight and xhat the normalized row:
//   rms_norm:   dx = r (h - xhat mean(h xhat))
//   layer_norm: dx = r (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of grad * xhat, dbias = sum over rows of grad
//
// One pass over x and grad: a fixed number of CTAs walk the rows, each with the sums of its rows in
// registers, and asks for its next row before it reduces the present one. At the end a CTA writes
// its sums as one row of `partials`; a second, small launch adds those rows up. No atomics, and the
// number of CTAs depends on the shape only: same input, same bits.
#pragma once

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

template <bool kCentred>
__device__ __forceinline__ RowStats row_stats(const NormBackwardParams &p, float mean, float square,
                                              float sum_h, float product) {
  RowStats s;
  s.mean = mean;
  s.scale = rsqrtf(fmaf(square, p.inverse_cols, p.eps));
  // mean(h xhat) r, times r for the factor x - mean instead of xhat. In this order nothing
  // overflows that does not have to: scale^3 would, for a row of zeros.
  s.slope = (product * p.inverse_cols * s.scale) * s.scale * s.scale;
  s.shift = kCentred ? sum_h * p.inverse_cols * s.scale : 0.0f;
  return s;
}

// What a thread holds of one row, as it lies in memory.
template <class T, class Grad, int N, int kVectors>
struct Held {
  Vec<T, N> x[kVectors];
  Vec<Grad, N> grad[kVectors];

  template <class G>
  __device__ __forceinline__ void load(const NormBackwardParams &p, int64_t row, int vectors) {
    const bool inside = row < p.x_rows.rows;
    const T *x_row = static_cast<const T *>(p.x) + (inside ? row_offset(p.x_rows, row) : 0);
    const Grad *grad_row =
        static_cast<const Grad *>(p.grad) + (inside ? row_offset(p.grad_rows, row) : 0);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = G::index() + i * G::stride();
      x[i].zero();
      grad[i].zero();
      if (inside && at < vectors) {
        x[i].template load<Cache::kStream>(x_row + at * N);
        grad[i].template load<Cache::kStream>(grad_row + at * N);
      }
    }
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
  const int vectors = static_cast<int>(p.vectors);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  // The same number of rounds for all threads of the CTA: they meet at barriers and shuffles.
  int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups;

  ColumnSums<kVectors == 4 && !kFourFit<kCentred, T>, kSums, kVectors, N> sums;

  Held<T, Grad, N, kVectors> now;
  now.template load<G>(p, row, vectors);
  ParamVec<W, N> weight[kVectors];
  if constexpr (!std::is_same_v<W, AnyType>) load_params<G>(weight, p.weight, vectors, 1.0f);

  for (int round = 0; first < p.x_rows.rows; first += step, row += step, round ^= 1) {
    Held<T, Grad, N, kVectors> next;
    if constexpr (kAhead) next.template load<G>(p, row + step, vectors);

    float mean = 0.0f, square = 0.0f, sum_h = 0.0f, product = 0.0f;
    if constexpr (kCentred) {
      float v[1] = {0.0f};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[N];
        now.x[i].get(x);
#pragma unroll
        for (int j = 0; j < N; ++j) v[0] += x[j];
      }
      sum_each<G>(v, &partial[round][3]);
      mean = v[0] * p.inverse_cols;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = G::index() + i * G::stride();
      if (at >= vectors) break;
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
    if constexpr (kCentred) {
      float v[3] = {square, product, sum_h};
      sum_each<G>(v, &partial[round][0]);
      square = v[0], product = v[1], sum_h = v[2];
    } else {
      float v[2] = {square, product};
      sum_each<G>(v, &partial[round][0]);
      square = v[0], product = v[1];
    }
    const RowStats s = row_stats<kCentred>(p, mean, square, sum_h, product);

    if (row < p.x_rows.rows) {
      const int64_t to = row * p.x_rows.cols;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = G::index() + i * G::stride();
        if (at >= vectors) break;
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
      now.template load<G>(p, row + step, vectors);
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
        const int at = G::index() + i * G::stride();
        float sum[N];
        sums.get(k, i, sum);
        if (at < vectors) store_as<float>(out, static_cast<int64_t>(at) * N, sum);
      }
    } else {
      // The rows that the groups of this CTA had, added up in order.
      __shared__ __align__(16) float all[kGroups][G::kLanes * kVectors * N];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float sum[N];
        sums.get(k, i, sum);
        store_as<float>(all[group], (G::index() + i * G::stride()) * N, sum);
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
    const RowStats s = row_stats<kCentred>(p, mean, v[0], v[2], v[1]);

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
// Launchers

template <bool kCentred, class T, int N>
int32_t launch_loop(NormBackwardParams &p, int64_t grid, void *stream, const char *op) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch(&norm_backward_loop_kernel<kCentred, T, N>, grid, threads, p, stream, op);
}

template <bool kCentred, class T, class Grad, class W>
int32_t launch_held(NormBackwardParams &p, int64_t grid, void *stream, const char *op) {
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
int32_t launch_norm_backward(NormBackwardParams &p, DType type, int64_t grid, void *stream,
                             const char *op) {
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
      return launch_held<kCentred, T, T, T>(p, grid, stream, op);
    }
    if (p.grad_type == type) return launch_held<kCentred, T, T, AnyType>(p, grid, stream, op);
    if constexpr (!kCentred && !std::is_same_v<T, float>) {
      if (p.grad_type == DType::F32) {
        return launch_held<kCentred, T, float, AnyType>(p, grid, stream, op);
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
        status = launch_norm_backward<kCentred, float>(p, a.x_type, a.partial_rows, stream, op);
        break;
      case DType::F16:
        status = launch_norm_backward<kCentred, __half>(p, a.x_type, a.partial_rows, stream, op);
        break;
      default:
        status =
            launch_norm_backward<kCentred, __nv_bfloat16>(p, a.x_type, a.partial_rows, stream, op);
    }
    if (status != HFP_OK) return status;
  }
  if (wanted == 0) return HFP_OK;
  SumPartialsParams sums{};
  sums.dweight = a.dweight;
  sums.dbias = a.dbias;
  sums.partials = a.partials;
  sums.rows = a.x_rows.rows > 0 ? a.partial_rows : 0;
  sums.cols = wanted * a.x_rows.cols;
  sums.weight_cols = a.dweight != nullptr ? a.x_rows.cols : 0;
  sums.weight_type = a.weight_type;
  sums.bias_type = a.bias_type;
  return sum_partials(sums, stream, op);
}

}  // namespace hfp::cuda
