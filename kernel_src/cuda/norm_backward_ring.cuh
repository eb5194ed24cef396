// norm_backward_ring.cuh: the gradients of the norms of many rows in a half type, on sm_90: see
// norm_backward.cuh.
//
// A CTA takes kRows rows at once: their sums share shuffles and barriers. Rows wait in shared memory, in
// a ring of kStages times kRows, where each thread copies (cp.async) what it will read itself: no barrier
// is needed for that. Its vectors lie at one distance there whatever the row's length, so that addresses
// take no instructions. The sums over a row are added up in the order of norm_backward_kernel:
// the bits of dx are the same.
#pragma once

#include "async_copy.cuh"
#include "cluster.cuh"
#include "norm_backward_row.cuh"

namespace hfp::cuda {

#if __CUDA_ARCH__ >= 900
// As a predicated instruction: a branch would have the compiler compute in it again what it can.
__device__ __forceinline__ void store_if(bool yes, void *to, const uint32_t (&v)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n"
      "@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(static_cast<uint32_t>(yes)),
      "l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// Sums of K values over a CTA of up to kWarps warps, K and kWarps powers of two. `partial`: K * kWarps
// floats of shared memory that the sum before does not use; 0 for warps that there are not.
template <int kWarps, int K>
__device__ __forceinline__ void sum_together(float (&v)[K], float *partial) {
  constexpr int kPerLane = K * kWarps > 32 ? K * kWarps / 32 : 1;
  static_assert(kPerLane <= kWarps, "a lane keeps one of its values");
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const float of_warp = Group<32>::sum_lanes_of_each(v);
  if (lane % (32 / K) == 0) partial[lane / (32 / K) * kWarps + warp] = of_warp;
  __syncthreads();
  float x[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = partial[(lane + 32 * i) % (K * kWarps)];
  // As sum_lanes_of_each, over kWarps lanes.
#pragma unroll
  for (int half = kPerLane / 2, bit = kWarps / 2; half > 0; half /= 2, bit /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? x[i + half] : x[i], give = upper ? x[i] : x[i + half];
      x[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
  }
#pragma unroll
  for (int bit = kWarps / 2 / kPerLane; bit > 0; bit /= 2) {
    x[0] += __shfl_xor_sync(~0u, x[0], bit);
  }
  constexpr int kAtOnce = K / kPerLane;  // values in the lanes of one x[i]
#pragma unroll
  for (int k = 0; k < K; ++k) {
    v[k] = __shfl_sync(~0u, x[0], k % kAtOnce * kWarps + k / kAtOnce * (kWarps / kPerLane));
  }
}
#endif

// kWarps: of a CTA, at most. kFloats: the weight is in registers, as fp32; else packed in shared memory.
template <bool kCentred, class T, int kVectors, int kRows, int kWarps, int kStages, bool kFloats>
__global__ void __launch_bounds__(32 * kWarps, kWarps < 16 ? 16 / kWarps : 1)
    norm_backward_ring_kernel(const __grid_constant__ NormBackwardParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = 8, kSums = kCentred ? 2 : 1, kStats = kCentred ? 4 : 2, K = kStats * kRows;
  constexpr int kStride = 32 * kWarps;                     // between the vectors of a thread
  constexpr int kStage = kRows * 2 * kVectors * kStride;  // x and grad
  extern __shared__ uint4 ring[];
  __shared__ float partial[2][K * kWarps];

  const int thread = threadIdx.x, threads = blockDim.x, vectors = static_cast<int>(p.vectors);
  for (int i = thread; i < 2 * K * kWarps; i += threads) partial[0][i] = 0.0f;
  const auto place = [&](uint4 *stage, int r, int i, int of_grad) {
    return stage + ((r * 2 + of_grad) * kVectors + i) * kStride;
  };
  // Only a thread's last vector may be past the end: it is 0, read from the first one's place.
  constexpr int kLast = kVectors - 1;
  const bool inside = thread + kLast * threads < vectors;
  const int last = inside ? kLast * threads * N : 0;
  const uint32_t last_bytes = inside ? sizeof(uint4) : 0;
  const bool any = inside || kVectors > 1;
  // dx has all rows, each of more than 1 KB: fewer than 2^31.
  const int rows = static_cast<int>(p.x_rows.rows), step = static_cast<int>(gridDim.x) * kRows;
  int row = static_cast<int>(blockIdx.x) * kRows, asked = row;
  const int64_t col = any ? thread * N : 0, x_step = step * p.x_rows.s2;
  const int64_t grad_step = step * p.grad_rows.s2, dx_step = step * p.x_rows.cols;
  const T *x_at = static_cast<const T *>(p.x) + row * p.x_rows.s2 + col;
  const T *grad_at = static_cast<const T *>(p.grad) + row * p.grad_rows.s2 + col;
  T *dx_at = static_cast<T *>(p.dx) + row * p.x_rows.cols + thread * N;
  uint4 *const own = ring + thread, *const end = own + kStages * kStage;
  uint4 *stage = own, *next = own;
  __syncthreads();
  wait_for_previous();

  const auto ask_for_next = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (asked + r >= rows) break;
      const T *x = x_at + r * p.x_rows.s2, *grad = grad_at + r * p.grad_rows.s2;
#pragma unroll
      for (int i = 0; i < kLast; ++i) {
        copy_later(place(next, r, i, 0), x + i * threads * N);
        copy_later(place(next, r, i, 1), grad + i * threads * N);
      }
      copy_later(place(next, r, kLast, 0), x + last, last_bytes);
      copy_later(place(next, r, kLast, 1), grad + last, last_bytes);
    }
    end_copies();
    asked += step, x_at += x_step, grad_at += grad_step;
    next += kStage;
    if (next == end) next = own;
  };
  const auto get = [&](float (&to)[N], const uint4 *from) {
    const uint4 v = *from;
    Vec<T, N> packed;
    packed.word[0] = v.x, packed.word[1] = v.y, packed.word[2] = v.z, packed.word[3] = v.w;
    packed.get(to);
  };
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) ask_for_next();

  ParamVec<T, N> packed[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) packed[i].zero();
  load_params(packed, p.weight, thread, threads, vectors, 1.0f);
  float held[kVectors][N];
  uint4 *const weights = end;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kFloats) {
      packed[i].get(held[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        held[i][j] += p.weight_offset;
        asm volatile("" : "+f"(held[i][j]));  // else it is added again and again
      }
    } else {
      const uint32_t(&word)[4] = packed[i].word;
      weights[i * kStride] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  const auto factor = [&](float (&w)[N], int i) {
    if constexpr (kFloats) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = held[i][j];
    } else {
      get(w, weights + i * kStride);
      if constexpr (!kCentred) {
#pragma unroll
        for (int j = 0; j < N; ++j) w[j] += p.weight_offset;
      }
    }
  };

  ColumnSums<false, kSums, kVectors, N> sums;
  int parity = 0;
#pragma unroll 1
  for (; row < rows; row += step, parity ^= 1) {
    ask_for_next();
    wait_for_copies<kStages - 1>();

    float mean[kRows], v[K];
    if constexpr (kCentred) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mean[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          float x[N];
          get(x, place(stage, r, i, 0));
#pragma unroll
          for (int j = 0; j < N; ++j) mean[r] += x[j];
        }
      }
      sum_together<kWarps>(mean, partial[0]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float square = 0.0f, product = 0.0f, sum_h = 0.0f;
      if constexpr (kCentred) mean[r] *= p.inverse_cols;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[N], g[N], w[N];
        get(x, place(stage, r, i, 0));
        get(g, place(stage, r, i, 1));
        factor(w, i);
        const float before = square;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float h = g[j] * w[j], d = kCentred ? x[j] - mean[r] : x[j];
          square = fmaf(d, d, square);
          product = fmaf(h, d, product);
          if constexpr (kCentred) sum_h += h;
        }
        // Of columns that there are not, d is not 0.
        if (kCentred && i == kLast && !inside) square = before;
      }
      v[kStats * r] = square, v[kStats * r + 1] = product;
      if constexpr (kCentred) v[kStats * r + 2] = sum_h, v[kStats * r + 3] = 0.0f;
    }
    sum_together<kWarps>(v, partial[kCentred ? 1 : parity]);

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= rows) break;
      float of_row[kCentred ? 3 : 2];
#pragma unroll
      for (int i = 0; i < (kCentred ? 3 : 2); ++i) of_row[i] = v[kStats * r + i];
      const RowStats s = row_stats<kCentred>(p, kCentred ? mean[r] : 0.0f, of_row);
      T *const dx = dx_at + r * p.x_rows.cols;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[N], g[N], w[N];
        get(x, place(stage, r, i, 0));
        get(g, place(stage, r, i, 1));
        factor(w, i);
        if constexpr (kCentred) {
#pragma unroll
          for (int j = 0; j < N; ++j) x[j] -= s.mean;
          sums.add(1, i, g);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
        }
        Vec<T, N> out;
        out.set(w);
        store_if(i < kLast || inside, dx + i * threads * N, out.word);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] *= s.scale;
        if (!kCentred && p.hat_type != DType::F32) round_to<T>(x);
        sums.add(0, i, g, x);
      }
    }
    dx_at += dx_step;
    stage += kStage;
    if (stage == end) stage = own;
  }

  if (!p.need_weight && !p.need_bias) return;
  float *out = p.partials + static_cast<int64_t>(blockIdx.x) * p.partial_cols;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (k == 0 ? !p.need_weight : !p.need_bias) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float sum[N];
      sums.get(k, i, sum);
      if (i < kLast || inside) store_halves(out, thread + i * threads, p.x_rows.cols, sum);
    }
    out += p.x_rows.cols;
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launcher

// With these numbers, if the GPU has room for such a ring; false if not.
template <bool kCentred, class T, int kVectors, int kRows, int kWarps, int kStages, bool kFloats>
bool launch_ring_of(const NormBackwardParams &rows, SumPartialsParams &sums, int device,
                    void *stream, const char *op, int32_t *status) {
  auto *kernel =
      &norm_backward_ring_kernel<kCentred, T, kVectors, kRows, kWarps, kStages, kFloats>;
  if (!has_clusters(reinterpret_cast<const void *>(kernel), device)) return false;
  if (shared_memory_limit() < kRingMemory) return false;
  constexpr int kPlaces = 2 * kRows * kStages + (kFloats ? 0 : 1);  // of a vector of columns
  constexpr int kBytes = 32 * kWarps * kVectors * kPlaces * static_cast<int>(sizeof(uint4));
  constexpr int kFixed = 2 * (kCentred ? 4 : 2) * kRows * kWarps * 4;
  NormBackwardParams p = rows;
  const int ctas = ring_ctas(kCentred, p.vectors);
  const int bytes = shared_memory_of_wave(kBytes, kFixed, ctas);
  const int64_t most = (p.x_rows.rows + kRows - 1) / kRows, wave = kFullSms * ctas;
  const int64_t wanted = most < wave ? most : wave;
  if (wanted < sums.rows) sums.rows = wanted;
  sums.halves = true;
  *status = launch(kernel, sums.rows, cta_threads(p.vectors, kVectors), p, stream, op, bytes);
  return true;
}

// By norm_backward_ring_kernel, where grad and weight have the dtype of x; false where not. A thread
// has as many vectors as in norm_backward_kernel, which adds up its sums in this order.
template <bool kCentred, class T>
bool launch_ring(const NormBackwardParams &p, SumPartialsParams &sums, int device, void *stream,
                 const char *op, int32_t *status) {
  if constexpr (sizeof(T) != 2) return false;
  else {
    if (p.vectors < kMinRingVectors || p.x_rows.rows * p.vectors < kRingVectors) return false;
    if (!p.x_rows.uniform() || !p.grad_rows.uniform()) return false;
    const auto by = [&](auto of) { return of(p, sums, device, stream, op, status); };
    if constexpr (kCentred) {
      if (p.vectors > kMaxThreads) return by(&launch_ring_of<true, T, 4, 1, 16, 2, false>);
      if (p.vectors <= 256) return by(&launch_ring_of<true, T, 2, 2, 4, 3, true>);
      if (p.vectors <= 512) return by(&launch_ring_of<true, T, 2, 2, 8, 3, true>);
      return by(&launch_ring_of<true, T, 2, 2, 16, 2, true>);
    } else {
      if (p.vectors > kMaxThreads) return by(&launch_ring_of<false, T, 4, 1, 16, 2, true>);
      if (p.vectors <= 128) return by(&launch_ring_of<false, T, 1, 2, 4, 3, true>);
      if (p.vectors <= 256) return by(&launch_ring_of<false, T, 1, 2, 8, 2, true>);
      if (p.vectors <= 512) return by(&launch_ring_of<false, T, 1, 4, 16, 2, true>);
      return by(&launch_ring_of<false, T, 1, 2, 32, 2, true>);
    }
  }
}

}  // namespace hfp::cuda
