// elementwise.cuh: out[i] = f(in0[i], ...) over one to three inputs, contiguous or strided by rows.
//
// A function F has: kInputs; name(); and operator()(const Vec<T, N> (&in)[kInputs]) for any T and N,
// which returns the results, a Vec<T, N>. Where it has kStreamed, the inputs from there on are
// parameters, which rows share; where it has kRows, they are the same for all rows, and a thread
// has so many rows.
#pragma once

#include "common.cuh"
#include "packed.cuh"
#include "row_split.cuh"

namespace hfp::cuda {

// A parameter that rows share stays in L1: from L2, every SM would ask for the same few lines.
template <class F, class = void>
inline constexpr int kStreamedInputs = F::kInputs;
template <class F>
inline constexpr int kStreamedInputs<F, std::void_t<decltype(F::kStreamed)>> = F::kStreamed;

template <class F, class = void>
inline constexpr int kThreadRows = 1;
template <class F>
inline constexpr int kThreadRows<F, std::void_t<decltype(F::kRows)>> = F::kRows;

// What a call is about; out is contiguous.
template <int kInputs>
struct Elementwise {
  void *out;
  const void *in[kInputs];
  Rows rows[kInputs];  // the same rows and cols

  // The inputs in the order of the kernel.
  template <class... Inputs>
  static Elementwise of(void *out, const Inputs &...inputs) {
    return {out, {inputs.data...}, {inputs.rows...}};
  }
};

template <class F>
struct FlatParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *in[F::kInputs];
  int64_t vectors;
  int64_t tail;  // elements after the last whole vector
  F f;
};

// Rows as in RowSplit, in a layout of fields for this kernel. Vectors are below 2^31.
template <class F>
struct RowsParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *in[F::kInputs];
  uint32_t s0[F::kInputs], s1[F::kInputs], s2[F::kInputs];
  uint32_t row_vectors, n1, n2;
  uint32_t tiles;    // of kThreadRows rows of i2, the last one perhaps of fewer
  uint32_t threads;  // in all
  FastDivisor by_row_vectors, by_tiles, by_n1;
  F f;
};

template <class F>
struct AnyRowsParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *in[F::kInputs];
  Rows rows[F::kInputs];
  int64_t elements;
  F f;
};

// ---------------------------------------------------------------------------------------------
// Arithmetic of vectors

template <class T, int N>
__device__ __forceinline__ Vec<T, N> rounded(const float (&value)[N]) {
  Vec<T, N> v;
  v.set(value);
  return v;
}

// a * b and a + b, rounded to T; in packed.cuh's words where there are any.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> multiply(const Vec<T, N> &a, const Vec<T, N> &b) {
  if constexpr (kInTwos<T, N> && kHasTwos<T>) return mul_twos(a, b);
  float x[N], y[N];
  a.get(x), b.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fmul_rn(x[i], y[i]);
  return rounded<T>(x);
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> add(const Vec<T, N> &a, const Vec<T, N> &b) {
  if constexpr (kInTwos<T, N> && kHasTwos<T>) return add_twos(a, b);
  float x[N], y[N];
  a.get(x), b.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fadd_rn(x[i], y[i]);
  return rounded<T>(x);
}

// ---------------------------------------------------------------------------------------------
// Kernels
// All compute their addresses, send away the threads that have nothing to do, and then wait for the
// kernel before. In this order: ptxas moves the wait up to the last branch, in front of the addresses
// if there is none between. A thread that leaves without waiting does nothing to wait for.

template <class T>
__device__ __forceinline__ void addresses_now(const T *(&from)[1]) {
  asm volatile("" : "+l"(from[0]));
}
template <class T>
__device__ __forceinline__ void addresses_now(const T *(&from)[2]) {
  compute_now(from[0], from[1]);
}
template <class T>
__device__ __forceinline__ void addresses_now(const T *(&from)[3]) {
  compute_now(from[0], from[1], from[2]);
}

// Contiguous tensors; any number of threads up to kElementwiseThreads.
template <class T, class F, int kUnroll>
__global__ void __launch_bounds__(kElementwiseThreads)
    flat_kernel(const __grid_constant__ FlatParams<F> p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x * kUnroll) + threadIdx.x;
  // The tail goes to the other end of the last CTA, where threads have no vector, unless it is full.
  const bool has_tail = blockIdx.x == gridDim.x - 1 && blockDim.x - 1 - threadIdx.x < p.tail;
  const T *from[F::kInputs];
#pragma unroll
  for (int k = 0; k < F::kInputs; ++k) from[k] = static_cast<const T *>(p.in[k]) + first * N;
  addresses_now(from);
  if (first >= p.vectors && !has_tail) return;
  wait_for_previous();

  Vec<T, N> v[kUnroll][F::kInputs];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t step = static_cast<int64_t>(u) * blockDim.x;
    if (first + step < p.vectors) {
#pragma unroll
      for (int k = 0; k < F::kInputs; ++k) {
        v[u][k].template load<Cache::kStream>(from[k] + step * N);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + static_cast<int64_t>(u) * blockDim.x;
    if (at < p.vectors) p.f(v[u]).store(static_cast<T *>(p.out) + at * N);
  }

  if (has_tail) {
    const int64_t at = p.vectors * N + (blockDim.x - 1 - threadIdx.x);
    Vec<T, 1> one[F::kInputs];
#pragma unroll
    for (int k = 0; k < F::kInputs; ++k) {
      one[k].template load<Cache::kStream>(static_cast<const T *>(p.in[k]) + at);
    }
    p.f(one).store(static_cast<T *>(p.out) + at);
  }
}

// Rows with strides, and tensors too badly aligned for whole vectors. All rows are one sequence of
// vectors of N elements, so that narrow rows fill the CTAs as well as wide ones.
template <class T, class F, int N>
__global__ void __launch_bounds__(kElementwiseThreads)
    rows_kernel(const __grid_constant__ RowsParams<F> p) {
  constexpr int kRows = kThreadRows<F>;
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t tile = p.by_row_vectors.divide(at), col = at - tile * p.row_vectors;
  const uint32_t outer = p.by_tiles.divide(tile), i2 = (tile - outer * p.tiles) * kRows;
  const uint32_t i0 = p.by_n1.divide(outer), i1 = outer - i0 * p.n1;
  const T *from[F::kInputs];
#pragma unroll
  for (int k = 0; k < F::kInputs; ++k) {
    const uint32_t start = i0 * p.s0[k] + i1 * p.s1[k] + i2 * p.s2[k] + col;
    from[k] = static_cast<const T *>(p.in[k]) + static_cast<int64_t>(start) * N;
  }
  addresses_now(from);
  if (at >= p.threads) return;
  wait_for_previous();

  Vec<T, N> v[kRows][F::kInputs];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kRows == 1 || i2 + r < p.n2) {
#pragma unroll
      for (int k = 0; k < kStreamedInputs<F>; ++k) {
        v[r][k].template load<Cache::kStream>(from[k] + static_cast<int64_t>(r * p.s2[k]) * N);
      }
    }
  }
#pragma unroll
  for (int k = kStreamedInputs<F>; k < F::kInputs; ++k) {
    v[0][k].template load<Cache::kReadOnly>(from[k]);
#pragma unroll
    for (int r = 1; r < kRows; ++r) v[r][k] = v[0][k];
  }
  const uint32_t end = (outer * p.n2 + i2) * p.row_vectors + col;
  T *to = static_cast<T *>(p.out) + static_cast<int64_t>(end) * N;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kRows == 1 || i2 + r < p.n2) {
      p.f(v[r]).store(to + static_cast<int64_t>(r * p.row_vectors) * N);
    }
  }
}

// What the others do not take: rows without a common division, strides below 0, offsets beyond 32
// bits. Rare, so that one element a thread is enough.
template <class T, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    any_rows_kernel(const __grid_constant__ AnyRowsParams<F> p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= p.elements) return;
  wait_for_previous();
  const int64_t row = at / p.rows[0].cols, col = at - row * p.rows[0].cols;
  Vec<T, 1> v[F::kInputs];
#pragma unroll
  for (int k = 0; k < F::kInputs; ++k) {
    v[k].template load<Cache::kStream>(static_cast<const T *>(p.in[k]) +
                                       row_offset(p.rows[k], row) + col);
  }
  p.f(v).store(static_cast<T *>(p.out) + at);
}

// ---------------------------------------------------------------------------------------------
// Launchers

// No grid limit is in the way: 2^31 CTAs of 128 elements or more are beyond any memory.
inline int64_t ctas(int64_t items, int64_t per_cta) { return (items + per_cta - 1) / per_cta; }

template <class Params, class F>
Params params_of(const Elementwise<F::kInputs> &e, const F &f) {
  Params p{};
  p.out = e.out;
  for (int k = 0; k < F::kInputs; ++k) p.in[k] = e.in[k];
  p.f = f;
  return p;
}

template <class T, class F>
int32_t launch_flat(const Elementwise<F::kInputs> &e, const F &f, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  auto p = params_of<FlatParams<F>>(e, f);
  const int64_t elements = e.rows[0].rows * e.rows[0].cols;
  p.vectors = elements / N;
  p.tail = elements % N;
  const auto run = [&](auto *kernel, int threads, int unroll) {
    const int64_t grid = ctas(p.vectors, static_cast<int64_t>(threads) * unroll);
    // A tensor shorter than a vector still has its tail.
    return launch(kernel, grid > 0 ? grid : 1, threads, p, stream, F::name());
  };
  constexpr int kUnroll = kVectorsPerThread<F::kInputs>;
  if constexpr (kUnroll > 1) {
    if (p.vectors > kSmallVectors) {
      return run(&flat_kernel<T, F, kUnroll>, kElementwiseThreads / kUnroll, kUnroll);
    }
  }
  return run(&flat_kernel<T, F, 1>, elementwise_threads(p.vectors), 1);
}

// False where split_rows is, or 32 bits do not hold the vectors of n elements.
template <class F>
bool plan_rows_kernel(const Elementwise<F::kInputs> &e, int n, RowsParams<F> *p) {
  const int64_t rows = e.rows[0].rows, row_vectors = e.rows[0].cols / n;
  RowSplit<F::kInputs> split;
  if (rows >= (int64_t{1} << 31) / row_vectors || !split_rows(e.rows, n, &split)) return false;
  for (int k = 0; k < F::kInputs; ++k) {
    p->s0[k] = split.s0[k], p->s1[k] = split.s1[k], p->s2[k] = split.s2[k];
  }
  p->n1 = split.n1, p->n2 = split.n2, p->by_n1 = split.by_n1;
  const int64_t n2 = split.n2, tiles = ctas(n2, kThreadRows<F>);
  p->row_vectors = static_cast<uint32_t>(row_vectors);
  p->tiles = static_cast<uint32_t>(tiles);
  p->threads = static_cast<uint32_t>(rows / n2 * tiles * row_vectors);
  p->by_row_vectors = FastDivisor(row_vectors);
  p->by_tiles = FastDivisor(tiles);
  return true;
}

template <class T, class F>
int32_t launch_any_rows(const Elementwise<F::kInputs> &e, const F &f, void *stream) {
  auto p = params_of<AnyRowsParams<F>>(e, f);
  for (int k = 0; k < F::kInputs; ++k) p.rows[k] = e.rows[k];
  p.elements = e.rows[0].rows * e.rows[0].cols;
  return launch(&any_rows_kernel<T, F>, ctas(p.elements, kElementwiseThreads), kElementwiseThreads,
                p, stream, F::name());
}

// In vectors of n elements.
template <class T, class F>
int32_t launch_rows(const Elementwise<F::kInputs> &e, const F &f, int n, void *stream) {
  auto p = params_of<RowsParams<F>>(e, f);
  if (!plan_rows_kernel<F>(e, n, &p)) return launch_any_rows<T>(e, f, stream);
  constexpr int kRows = kThreadRows<F>;
  const int threads =
      kRows > 1 && p.n2 > 1 ? kElementwiseThreads / kRows : elementwise_threads(p.threads);
  const int64_t grid = ctas(p.threads, threads);
  if constexpr (sizeof(T) == 2) {
    if (n == 8) return launch(&rows_kernel<T, F, 8>, grid, threads, p, stream, F::name());
  }
  if (n == 4) return launch(&rows_kernel<T, F, 4>, grid, threads, p, stream, F::name());
  if (n == 2) return launch(&rows_kernel<T, F, 2>, grid, threads, p, stream, F::name());
  return launch(&rows_kernel<T, F, 1>, grid, threads, p, stream, F::name());
}

template <class T, class F>
int32_t launch_elementwise(const Elementwise<F::kInputs> &e, const F &f, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  bool flat = true;
  int n = kWidest, pointer_n = narrow_to_pointer(kWidest, e.out, sizeof(T));
  for (int k = 0; k < F::kInputs; ++k) {
    const Rows &r = e.rows[k];
    flat = flat && (r.rows == 1 || (r.uniform() && r.s2 == r.cols));
    const int rows_n = widest_vector(r, sizeof(T));
    n = rows_n < n ? rows_n : n;
    pointer_n = narrow_to_pointer(pointer_n, e.in[k], sizeof(T));
  }
  n = pointer_n < n ? pointer_n : n;
  // With parameters one row is all that could be flat.
  if constexpr (kStreamedInputs<F> == F::kInputs) {
    if (flat && pointer_n == kWidest) return launch_flat<T>(e, f, stream);
  }
  return launch_rows<T>(e, f, n, stream);
}

template <template <int> class F, class T, int kInputs>
int32_t launch_activation(const Elementwise<kInputs> &e, int activation, void *stream) {
  switch (activation) {
    case HFP_ACT_GELU_ERF: return launch_elementwise<T>(e, F<HFP_ACT_GELU_ERF>{}, stream);
    case HFP_ACT_GELU_TANH: return launch_elementwise<T>(e, F<HFP_ACT_GELU_TANH>{}, stream);
    case HFP_ACT_GELU_SIGMOID: return launch_elementwise<T>(e, F<HFP_ACT_GELU_SIGMOID>{}, stream);
    case HFP_ACT_SILU: return launch_elementwise<T>(e, F<HFP_ACT_SILU>{}, stream);
    default: return launch_elementwise<T>(e, F<HFP_ACT_RELU>{}, stream);
  }
}

// F<HFP_ACT_*> over tensors of `type`, on `device`.
template <template <int> class F, int kInputs>
int32_t launch_activation(const Elementwise<kInputs> &e, DType type, int activation, int device,
                          void *stream) {
  if (e.rows[0].rows <= 0 || e.rows[0].cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), F<HFP_ACT_RELU>::name());
  switch (type) {
    case DType::F32: return launch_activation<F, float>(e, activation, stream);
    case DType::F16: return launch_activation<F, __half>(e, activation, stream);
    default: return launch_activation<F, __nv_bfloat16>(e, activation, stream);
  }
}

}  // namespace hfp::cuda
