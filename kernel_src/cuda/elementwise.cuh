// elementwise.cuh: out[i] = f(in0[i], ...) over one or two inputs, contiguous or strided by rows.
//
// A function F has: kInputs; name(); and apply<T, N>(a[kInputs][N]), which leaves the result, not
// yet rounded to T, in a[0]. Where it has kStreamed, the inputs from there on are parameters.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// A parameter that all rows share stays in L1: from L2, every SM would ask for the same few lines.
template <class F, class = void>
inline constexpr int kStreamedInputs = F::kInputs;
template <class F>
inline constexpr int kStreamedInputs<F, std::void_t<decltype(F::kStreamed)>> = F::kStreamed;

template <int kInputs>
struct ElementwiseParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *in[kInputs];
  Rows rows[kInputs];  // the same rows and cols; not used by the flat kernel
  int64_t vectors;     // in all
  int64_t row_vectors;
  int64_t tail;  // flat only: elements after the last whole vector
  FastDivisor divisor;
  bool fast_division;  // vectors < 2^31
};

// ---------------------------------------------------------------------------------------------
// Kernels

// Contiguous tensors.
template <class T, class F, int kUnroll>
__global__ void __launch_bounds__(kElementwiseThreads)
    flat_kernel(const __grid_constant__ ElementwiseParams<F::kInputs> p) {
  wait_for_previous();
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kElementwiseThreads * kUnroll) + threadIdx.x;

  Vec<T, N> v[kUnroll][F::kInputs];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
    if (at < p.vectors) {
#pragma unroll
      for (int k = 0; k < F::kInputs; ++k) {
        v[u][k].template load<Cache::kStream>(static_cast<const T *>(p.in[k]) + at * N);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
    if (at < p.vectors) {
      float a[F::kInputs][N];
#pragma unroll
      for (int k = 0; k < F::kInputs; ++k) v[u][k].get(a[k]);
      F::template apply<T, N>(a);
      store_as<T>(p.out, at * N, a[0]);
    }
  }

  if (blockIdx.x == 0 && threadIdx.x < p.tail) {
    const int64_t at = p.vectors * N + threadIdx.x;
    float a[F::kInputs][1];
#pragma unroll
    for (int k = 0; k < F::kInputs; ++k) {
      Vec<T, 1> one;
      one.template load<Cache::kStream>(static_cast<const T *>(p.in[k]) + at);
      one.get(a[k]);
    }
    F::template apply<T, 1>(a);
    store_as<T>(p.out, at, a[0]);
  }
}

// Rows with strides, and tensors too badly aligned for whole vectors. All rows are one sequence of
// vectors of N elements, so that narrow rows fill the CTAs as well as wide ones.
template <class T, class F, int N>
__global__ void __launch_bounds__(kElementwiseThreads)
    strided_kernel(const __grid_constant__ ElementwiseParams<F::kInputs> p) {
  wait_for_previous();
  constexpr int kUnroll = kVectorsPerThread<F::kInputs>;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kElementwiseThreads * kUnroll) + threadIdx.x;

  Vec<T, N> v[kUnroll][F::kInputs];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
    if (at < p.vectors) {
      const int64_t row = p.fast_division
                              ? static_cast<int64_t>(p.divisor.divide(static_cast<uint32_t>(at)))
                              : at / p.row_vectors;
      const int64_t col = (at - row * p.row_vectors) * N;
#pragma unroll
      for (int k = 0; k < F::kInputs; ++k) {
        const int64_t from = row_offset(p.rows[k], row) + col;
        if (k < kStreamedInputs<F>) {
          v[u][k].template load<Cache::kStream>(static_cast<const T *>(p.in[k]) + from);
        } else {
          v[u][k].template load<Cache::kReadOnly>(static_cast<const T *>(p.in[k]) + from);
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
    if (at < p.vectors) {
      float a[F::kInputs][N];
#pragma unroll
      for (int k = 0; k < F::kInputs; ++k) v[u][k].get(a[k]);
      F::template apply<T, N>(a);
      store_as<T>(p.out, at * N, a[0]);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

// No grid limit is in the way: 2^31 CTAs of 128 elements or more are beyond any memory.
template <int kInputs>
int32_t launch_elementwise(void (*kernel)(ElementwiseParams<kInputs>), int unroll,
                           ElementwiseParams<kInputs> &p, void *stream, const char *op) {
  const int64_t per_cta = static_cast<int64_t>(kElementwiseThreads) * unroll;
  const int64_t grid = (p.vectors + per_cta - 1) / per_cta;
  // A flat tensor shorter than a vector still has its tail.
  return launch(kernel, grid > 0 ? grid : 1, kElementwiseThreads, p, stream, op);
}

template <class T, class F, int N>
int32_t launch_strided(ElementwiseParams<F::kInputs> &p, void *stream) {
  p.row_vectors = p.rows[0].cols / N;
  p.vectors = p.rows[0].rows * p.row_vectors;
  p.fast_division = p.vectors < (int64_t{1} << 31);
  if (p.fast_division) p.divisor = FastDivisor(p.row_vectors);
  return launch_elementwise(&strided_kernel<T, F, N>, kVectorsPerThread<F::kInputs>, p, stream,
                            F::name());
}

// p.out, p.in and p.rows are given; the rest is filled in here.
template <class T, class F>
int32_t launch_elementwise(ElementwiseParams<F::kInputs> &p, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  bool flat = true;
  int n = kWidest, pointer_n = narrow_to_pointer(kWidest, p.out, sizeof(T));
  for (int k = 0; k < F::kInputs; ++k) {
    const Rows &r = p.rows[k];
    flat = flat && (r.rows == 1 || (r.uniform() && r.s2 == r.cols));
    const int rows_n = widest_vector(r, sizeof(T));
    n = rows_n < n ? rows_n : n;
    pointer_n = narrow_to_pointer(pointer_n, p.in[k], sizeof(T));
  }
  n = pointer_n < n ? pointer_n : n;

  if (flat && pointer_n == kWidest) {
    const int64_t elements = p.rows[0].rows * p.rows[0].cols;
    p.vectors = elements / kWidest;
    p.tail = elements % kWidest;
    if (p.vectors <= kSmallVectors) {
      return launch_elementwise(&flat_kernel<T, F, 1>, 1, p, stream, F::name());
    }
    constexpr int kUnroll = kVectorsPerThread<F::kInputs>;
    return launch_elementwise(&flat_kernel<T, F, kUnroll>, kUnroll, p, stream, F::name());
  }
  if (n == kWidest) return launch_strided<T, F, kWidest>(p, stream);
  if constexpr (kWidest == 8) {
    if (n == 4) return launch_strided<T, F, 4>(p, stream);
  }
  if (n == 2) return launch_strided<T, F, 2>(p, stream);
  return launch_strided<T, F, 1>(p, stream);
}

template <template <int> class F, class T, int kInputs>
int32_t launch_activation(ElementwiseParams<kInputs> &p, int activation, void *stream) {
  switch (activation) {
    case HFP_ACT_GELU_ERF: return launch_elementwise<T, F<HFP_ACT_GELU_ERF>>(p, stream);
    case HFP_ACT_GELU_TANH: return launch_elementwise<T, F<HFP_ACT_GELU_TANH>>(p, stream);
    case HFP_ACT_GELU_SIGMOID: return launch_elementwise<T, F<HFP_ACT_GELU_SIGMOID>>(p, stream);
    case HFP_ACT_SILU: return launch_elementwise<T, F<HFP_ACT_SILU>>(p, stream);
    default: return launch_elementwise<T, F<HFP_ACT_RELU>>(p, stream);
  }
}

// F<HFP_ACT_*> over tensors of `type`, on `device`.
template <template <int> class F, int kInputs>
int32_t launch_activation(ElementwiseParams<kInputs> &p, DType type, int activation, int device,
                          void *stream) {
  if (p.rows[0].rows <= 0 || p.rows[0].cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), F<HFP_ACT_RELU>::name());
  switch (type) {
    case DType::F32: return launch_activation<F, float>(p, activation, stream);
    case DType::F16: return launch_activation<F, __half>(p, activation, stream);
    default: return launch_activation<F, __nv_bfloat16>(p, activation, stream);
  }
}

}  // namespace hfp::cuda
