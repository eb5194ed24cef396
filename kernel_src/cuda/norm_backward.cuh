// norm_backward.cuh: the gradients of rms_norm and layer_norm, which differ in the mean only. With
// r = rsqrt(mean square + eps), h = grad * weight and xhat the normalized row:
//   rms_norm:   dx = r (h - xhat mean(h xhat))
//   layer_norm: dx = r (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of grad * xhat, dbias = sum over rows of grad
//
// One pass over x and grad: a fixed number of CTAs walk the rows, each with the sums of its rows in
// registers, and asks for its next row before it reduces the present one. At the end a CTA writes
// its sums as one row of `partials`; a second, small launch adds those rows up (partial_sums.cu).
// Few rows are one cluster's on sm_90 (norm_backward_few.cuh): no second launch, and `partials`
// stays as it is. Many rows of a half type wait in shared memory there (norm_backward_ring.cuh). No
// atomics, and the number of CTAs depends on the shape only: same input, same bits.
#pragma once

#include "norm_backward_few.cuh"
#include "norm_backward_ring.cuh"
#include "norm_backward_row.cuh"

namespace hfp::cuda {

// ---------------------------------------------------------------------------------------------
// Kernels

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
  constexpr bool kOnce = kOneSum<kCentred, T, W, kVectors>;
  __shared__ float partial[kOnce ? 3 : 2][4][32];

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

    const auto add_up = [&](auto from_0, float centre, auto &v) {
      sum_products<W>(from_0, v, p, now, weight, c, centre);
    };
    RowStats s;
    if constexpr (kOnce) {
      s = one_sum_stats<T, (G::kLanes < 32)>(p, [&](float centre, float (&v)[4], auto first) {
        add_up(first, centre, v);
        sum_each<G>(v, partial[first.value ? round : 2]);
      });
    } else {
      float mean = 0.0f, v[kRowSums<kCentred, false>];
      if constexpr (kCentred) {
        float sum[1] = {now.sum_x()};
        sum_each<G>(sum, &partial[round][3]);
        mean = sum[0] * p.inverse_cols;
      }
      add_up(std::bool_constant<!kCentred>{}, mean, v);
      sum_each<G>(v, partial[round]);
      s = row_stats<kCentred>(p, mean, v);
    }

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
          for (int j = 0; j < N; ++j) x[j] -= s.centre;
          sums.add(1, i, g);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
        }
        store_as<T>(p.dx, to + static_cast<int64_t>(at) * N, w);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = s.template hat<kOnce>(x[j]);
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
        x[j] -= s.centre;
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
  constexpr bool kOneType = std::is_same_v<T, W>;
  constexpr int kVectors = kCentred && N == 8 && kOneType ? 2 : 1;
  if (vectors <= kMaxThreads) {
    int32_t status;
    if (launch_few<kCentred, T, Grad, W, kVectors>(p, sums, device, stream, op, &status)) {
      sums.cols = 0;  // all done
      return status;
    }
    if constexpr (kOneType) {
      if (launch_ring<kCentred, T>(p, sums, device, stream, op, &status)) return status;
    }
    return launch(&norm_backward_kernel<kCentred, T, Grad, W, N, kCta, kVectors>, grid,
                  cta_threads(vectors, kVectors), p, stream, op);
  }
  if constexpr (kOneType) {
    int32_t status;
    if (launch_ring<kCentred, T>(p, sums, device, stream, op, &status)) return status;
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
  sums.first = a.dweight;
  sums.second = a.dbias;
  sums.partials = a.partials;
  sums.sums = 1;
  sums.rows = a.x_rows.rows > 0 ? a.partial_rows : 0;
  sums.cols = wanted * a.x_rows.cols;
  sums.first_cols = a.dweight != nullptr ? a.x_rows.cols : 0;
  sums.first_type = a.weight_type;
  sums.second_type = a.bias_type;

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
