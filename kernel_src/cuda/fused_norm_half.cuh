// fused_norm_half.cuh: the fused norms where all is of one half type, as models call them; the rest
// is fused_norm.cu's, which decides more at run time, in more registers and instructions.
//
// What it gains (figures at plan_fused_half): addresses before the wait for the kernel before, all
// loads of a thread on their way at once, no mean where the norm has none, and a gate and a sum of
// two elements in one instruction where they round after each step.
#pragma once

#include "fused_norm.cuh"
#include "ordered.cuh"

namespace hfp::cuda {

enum class HalfRow {
  kModulated,   // norm(x) * (1 + scale) + shift
  kGated,       // the same of residual + gate * x, rounded once
  kGatedEager,  // or after each step: one kernel for both takes 58 registers, each alone 48
  kAdded,       // norm(residual + x) with its weight and bias
};

// What HalfRow has not: a weight before the modulation; a residual with only one of gate and
// modulation; a layer norm that rounds before it multiplies.
inline bool is_half_row(const FusedNormParams &p) {
  const bool modulated = p.scale != nullptr, gated = p.gate != nullptr;
  if (modulated) {
    return p.weight == nullptr && p.bias == nullptr && gated == (p.sum != nullptr);
  }
  return p.sum != nullptr && !gated && !(p.layer && p.two_step);
}

// Registers for a residual's row and its parameters would leave an SM with one CTA of 512 threads:
// the parameters of the widest wait in memory.
template <HalfRow kRow, int kVectors>
inline constexpr bool kHoldHalf = !(kRow == HalfRow::kAdded && kVectors == 4);

template <int kThreads, int kVectors>
constexpr int half_threads() {
  return kThreads == 64 ? 64 : max_threads(kThreads, kVectors);
}

// CTAs that an SM must take. kAdded: 1024 threads, the most on compute capability 7.5, of 64
// registers each. The others: one, said for ptxas, which left to itself aims at two, and spills.
template <HalfRow kRow, int kThreads, int kVectors>
constexpr int half_ctas() {
  return kRow == HalfRow::kAdded ? 1024 / half_threads<kThreads, kVectors>() : 1;
}

// residual + gate * x, rounded once.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> add_gated(const Vec<T, N> &x, const Vec<T, N> &residual,
                                               const Vec<T, N> &gate) {
  float y[N], g[N];
  Vec<T, N> v = x;
  gate.get(g);
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fmul_rn(g[i], y[i]);
  residual.get(g);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(g[i], y[i]);
  v.set(y);
  return v;
}

// y * (1 + scale) + shift in fp32.
template <class T, int N>
__device__ __forceinline__ void modulate_once(float (&y)[N], const Vec<T, N> &scale,
                                              const Vec<T, N> &shift) {
  float by[N], plus[N];
  scale.get(by);
  shift.get(plus);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(__fmul_rn(y[i], by[i] + 1.0f), plus[i]);
}

template <class T, HalfRow kRow, bool kLayer, int kThreads, int kVectors>
__global__ void __launch_bounds__((half_threads<kThreads, kVectors>()),
                                  (half_ctas<kRow, kThreads, kVectors>()))
    fused_norm_half_kernel(const __grid_constant__ FusedNormParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  using G = Group<kThreads>;
  using V = Vec<T, N>;
  constexpr bool kSum = kRow != HalfRow::kModulated;
  constexpr bool kModulated = kRow != HalfRow::kAdded;
  constexpr bool kGated = kSum && kModulated;
  constexpr bool kHold = kHoldHalf<kRow, kVectors>;
  constexpr bool kPacked = kVectors >= 4;
  __shared__ __align__(16) float partial_sum[kPartials], partial_square[kPartials];

  const int64_t row = G::row(p.first_row);
  const int64_t known_row = row < p.x_rows.rows ? row : 0;
  const int vectors = row < p.x_rows.rows ? static_cast<int>(p.vectors) : 0;
  const int index = G::index(), stride = G::stride(), step = stride * N;
  const auto inside = [=](int i) { return index + i * stride < vectors; };
  int64_t to = known_row * p.x_rows.cols + index * N;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, known_row) + index * N;
  const T *residual = nullptr, *gate = nullptr, *scale = nullptr, *shift = nullptr;
  if constexpr (kSum) {
    residual = static_cast<const T *>(p.residual) + row_offset(p.residual_rows, known_row);
    residual += index * N;
  }
  if constexpr (kModulated) {
    scale = static_cast<const T *>(p.scale) + row_offset(p.scale_rows, known_row) + index * N;
    shift = static_cast<const T *>(p.shift) + row_offset(p.shift_rows, known_row) + index * N;
  }
  if constexpr (kRow == HalfRow::kModulated) {
    compute_now(x, scale, shift, to);
  } else if constexpr (kRow == HalfRow::kAdded) {
    compute_now(x, residual, to);
  } else {
    gate = static_cast<const T *>(p.gate) + row_offset(p.gate_rows, known_row) + index * N;
    compute_now(x, residual, gate, scale, shift, to);
  }
  // A warp without rows. The branch also keeps ptxas from computing the addresses behind the wait.
  if (row - threadIdx.x % 32u / G::kLanes >= p.x_rows.rows) return;
  wait_for_previous();

  V v[kVectors], r[kSum ? kVectors : 1], g[kGated ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    if (inside(i)) v[i].template load<Cache::kStream>(x + i * step);
    if constexpr (kGated) {
      g[i].zero();
      if (inside(i)) g[i].template load<Cache::kReadOnly>(gate + i * step);
    }
    if constexpr (kSum) {
      r[i].zero();
      if (inside(i)) r[i].template load<Cache::kStream>(residual + i * step);
    }
  }
  // What the row meets last, asked for before the sum waits for x, so that the latencies overlap.
  // ptxas moves loads of Cache::kReadOnly behind the first sum all the same: without a residual that
  // costs layer_norm 2 to 7 %, with one (and a gate) it changes nothing.
  constexpr Cache kModulation = kSum ? Cache::kReadOnly : Cache::kTwice;
  ParamVec<T, N> m[kHold ? kVectors : 1], a[kHold ? kVectors : 1];
  if constexpr (kModulated) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (inside(i)) {
        m[i].template load<kModulation>(scale + i * step);
        a[i].template load<kModulation>(shift + i * step);
      }
    }
  } else if constexpr (kHold) {
    load_params<T, N, kVectors>(m, p.weight, index, stride, vectors, 1.0f);
    load_params<T, N, kVectors>(a, p.bias, index, stride, vectors, kNoBias);
  }

  if constexpr (kSum) {
    T *sum = static_cast<T *>(p.sum) + to;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kRow == HalfRow::kGatedEager) v[i] = mul_twos(g[i], v[i]);
      if constexpr (kRow == HalfRow::kGated) v[i] = add_gated(v[i], r[i], g[i]);
      else v[i] = add_twos(r[i], v[i]);
      if (inside(i)) v[i].store(sum + i * step);
    }
  }

  float sums[kVectors], mean = 0.0f;
  if constexpr (kLayer) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) sums[i] = sum_of(v[i]);
    mean = __fmul_rn(G::sum(sums, partial_sum), p.inverse_cols);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kPacked) v[i].stay_packed(p.zero);
    sums[i] = inside(i) ? sum_of_squared_deviations(v[i], mean) : 0.0f;
  }
  const float square = G::sum(sums, partial_square);
  const float inverse = rsqrtf(fmaf(square, p.inverse_cols, p.eps));

  const auto finish_each = [&](auto finish) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!inside(i)) break;
      if constexpr (kPacked) v[i].stay_packed(p.zero);
      float y[N];
      v[i].get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = (y[k] - mean) * inverse;
      if constexpr (kHold) {
        finish(y, m[i], a[i], to + i * step);
      } else {
        load_params<T, N, 1>(m, p.weight, index + i * stride, stride, vectors, 1.0f);
        load_params<T, N, 1>(a, p.bias, index + i * stride, stride, vectors, kNoBias);
        finish(y, m[0], a[0], to + i * step);
      }
    }
  };
  using Y = float[N];
  const bool each_step = kRow == HalfRow::kGatedEager ||
                         (kRow == HalfRow::kModulated && p.eager) ||
                         (kRow == HalfRow::kAdded && !kLayer && p.two_step);
  if (each_step) {
    finish_each([&](const Y &y, const V &mul, const V &add, int64_t at) {
      if constexpr (kModulated) finish_twos<T, N>(p, y, add_one(mul), add, at);
      else finish_twos<T, N>(p, y, mul, add, at);
    });
  } else {
    finish_each([&](Y &y, const V &mul, const V &add, int64_t at) {
      if constexpr (kModulated) {
        modulate_once(y, mul, add);
      } else {
        float by[N], plus[N];
        mul.get(by);
        add.get(plus);
        affine<kLayer>(y, by, plus, p.weight_offset);
      }
      store_as<T>(p.out, at, y);
    });
  }
}

// norm(x) * (1 + scale) + shift for a layer norm whose rows fill their CTAs: see full_rows. The same
// bits.
template <class T>
__global__ void __launch_bounds__(kMaxHoldThreads, resident_ctas(kMaxHoldThreads, kSomeThreads))
    modulated_full_kernel(const __grid_constant__ FusedNormParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T)), kVectors = 4;
  using G = Group<kCta>;
  using V = Vec<T, N>;
  __shared__ float partial_sum[kPartials], partial_square[kPartials];
  const int64_t row = G::row(p.first_row);
  const int index = G::index(), step = G::stride() * N;
  int64_t to = row * p.x_rows.cols + index * N;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row) + index * N;
  const T *scale = static_cast<const T *>(p.scale) + row_offset(p.scale_rows, row) + index * N;
  const T *shift = static_cast<const T *>(p.shift) + row_offset(p.shift_rows, row) + index * N;
  settle(x, scale, shift, to);
  wait_for_previous();

  V v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i].template load<Cache::kStream>(x + i * step);
  keep_loads_above(p.zero);
  float sums[kVectors], d[kVectors][N];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sums[i] = sum_of(v[i]);
  const float mean = __fmul_rn(G::sum(sums, partial_sum), p.inverse_cols);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sums[i] = keep_deviations(d[i], v[i], mean);
  const float square = G::sum(sums, partial_square);
  const float inverse = rsqrtf(fmaf(square, p.inverse_cols, p.eps));

  const auto finish_each = [&](auto finish) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      V mul, add;
      mul.template load<Cache::kReadOnly>(scale + i * step);
      add.template load<Cache::kReadOnly>(shift + i * step);
#pragma unroll
      for (int k = 0; k < N; ++k) d[i][k] *= inverse;
      finish(d[i], mul, add, to + i * step);
    }
  };
  if (p.eager) {
    finish_each([&](float (&y)[N], const V &mul, const V &add, int64_t at) {
      finish_twos<T, N>(p, y, add_one(mul), add, at);
    });
  } else {
    finish_each([&](float (&y)[N], const V &mul, const V &add, int64_t at) {
      modulate_once(y, mul, add);
      store_as<T>(p.out, at, y);
    });
  }
}

template <class T, HalfRow kRow, bool kLayer>
auto select_half_kernel(Shape shape) -> void (*)(FusedNormParams) {
  if constexpr (kRow == HalfRow::kAdded) {
    if (shape == Shape::k8x1) return &fused_norm_half_kernel<T, kRow, kLayer, 8, 1>;
    if (shape == Shape::k16x1) return &fused_norm_half_kernel<T, kRow, kLayer, 16, 1>;
    if (shape == Shape::k64x2) return &fused_norm_half_kernel<T, kRow, kLayer, 64, 2>;
  }
  if constexpr (kRow == HalfRow::kModulated) {
    if (shape == Shape::k32x4) return &fused_norm_half_kernel<T, kRow, kLayer, 32, 4>;
  }
  if constexpr (kRow == HalfRow::kModulated || kRow == HalfRow::kAdded) {
    if (shape == Shape::kCtaX4) return &fused_norm_half_kernel<T, kRow, kLayer, kCta, 4>;
  }
  return &fused_norm_half_kernel<T, kRow, kLayer, kCta, 2>;
}

template <class T, HalfRow kRow>
auto select_half_kernel(Shape shape, bool layer) {
  return layer ? select_half_kernel<T, kRow, true>(shape)
               : select_half_kernel<T, kRow, false>(shape);
}

template <class T>
auto select_half_kernel(const FusedNormParams &p, const RowPlan &plan) {
  const Shape shape = plan.shape;
  if (p.scale == nullptr) return select_half_kernel<T, HalfRow::kAdded>(shape, p.layer);
  if (p.sum == nullptr) {
    if (p.layer && full_rows(plan, p.vectors)) return &modulated_full_kernel<T>;
    return select_half_kernel<T, HalfRow::kModulated>(shape, p.layer);
  }
  if (p.eager) return select_half_kernel<T, HalfRow::kGatedEager>(shape, p.layer);
  return select_half_kernel<T, HalfRow::kGated>(shape, p.layer);
}

}  // namespace hfp::cuda
