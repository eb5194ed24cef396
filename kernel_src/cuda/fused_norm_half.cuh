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

// CTAs that an SM must take. kAdded, and layer norms of four vectors a thread of a CTA: 1024 threads, the
// most on compute capability 7.5, of 64 registers each (norm_modulate 2 x 2688 x 2048 12.1 us, of 80
// 12.4). The others: one, said for ptxas, which left to itself aims at two, and spills.
template <HalfRow kRow, bool kLayer, int kThreads, int kVectors>
constexpr int half_ctas() {
  constexpr int kOf = half_threads<kThreads, kVectors>();
  if (kVectors == 1) return resident_ctas(kOf, 2048);
  const bool most = kRow == HalfRow::kAdded || (kLayer && kThreads == kCta && kVectors == 4);
  return most ? 1024 / kOf : 1;
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
                                  (half_ctas<kRow, kLayer, kThreads, kVectors>()))
    fused_norm_half_kernel(const __grid_constant__ FusedNormParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  using G = Group<kThreads>;
  using V = Vec<T, N>;
  constexpr bool kSum = kRow != HalfRow::kModulated;
  constexpr bool kModulated = kRow != HalfRow::kAdded;
  constexpr bool kGated = kSum && kModulated;
  constexpr bool kHold = kHoldHalf<kRow, kVectors>;
  constexpr bool kPacked = kVectors >= 4;
  // Rms norms without a gate lose by what the others gain from, division and order of loads: one sum,
  // which ptxas keeps all loads above. norm_modulate 4608 x 3072 14.8 us, as the others 15.4.
  constexpr bool kPlain = !kLayer && !kGated;
  __shared__ __align__(16) float partial[kTwicePartials];

  const int64_t row = G::row(p.first_row);
  const int64_t known_row = row < p.x_rows.rows ? row : 0;
  const int index = G::index(), stride = G::stride(), step = stride * N;
  const int left = row < p.x_rows.rows ? static_cast<int>(p.vectors) - index : 0;
  const auto inside = [=](int i) { return i * stride < left; };
  const auto place = p.split.row(static_cast<uint32_t>(known_row));
  const auto start = [&](const void *tensor, const Rows &rows, int k) {
    const T *from = static_cast<const T *>(tensor);
    if constexpr (kPlain) return from + row_offset(rows, known_row) + index * N;
    else return from + static_cast<int64_t>(p.split.start(place, k) + index) * N;
  };
  const uint32_t to = static_cast<uint32_t>(known_row) * static_cast<uint32_t>(p.vectors) + index;
  const T *x = start(p.x, p.x_rows, 0), *residual = nullptr, *gate = nullptr;
  if constexpr (kSum) residual = start(p.residual, p.residual_rows, 1);
  if constexpr (kGated) gate = start(p.gate, p.gate_rows, 2);
  const T *scale = static_cast<const T *>(p.weight) + index * N;
  const T *shift = static_cast<const T *>(p.bias) + index * N;
  if constexpr (kModulated) {
    scale = start(p.scale, p.scale_rows, 3);
    shift = start(p.shift, p.shift_rows, 4);
  }
  if constexpr (kGated) {
    compute_now(x, residual, gate, scale, shift);
    settle(x, residual, gate, scale);
  } else if constexpr (kModulated) {
    if constexpr (kPlain) compute_now(x, scale, shift);
    else settle(x, scale, shift);
  } else {
    if constexpr (kPlain) compute_now(x, residual);
    else settle(x, residual);
  }
  // A warp without rows. The branch also keeps ptxas from computing the addresses behind the wait.
  if (row - threadIdx.x % 32u / G::kLanes >= p.x_rows.rows) return;
  if constexpr (!kHold) {
    bring_early<kVectors>(p.weight != nullptr, scale, step, left * N);
    bring_early<kVectors>(p.bias != nullptr, shift, step, left * N);
  }
  wait_for_previous();

  V v[kVectors], r[kSum ? kVectors : 1], g[kGated ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    if (inside(i)) v[i].template load<Cache::kStream>(x + i * step);
    if constexpr (kGated) {
      g[i].zero();
      if (inside(i)) g[i].template load<Cache::kTwice>(gate + i * step);
    }
    if constexpr (kSum) {
      r[i].zero();
      if (inside(i)) r[i].template load<Cache::kStream>(residual + i * step);
    }
  }
  // x first, which is summed first. Zero too, but ptxas drops the second exit on one condition.
  if constexpr (kLayer) keep_loads_above(static_cast<uint32_t>(p.vectors >> 32));
  // What the row meets last, asked for before the sum waits for x, so that the latencies overlap.
  const bool multiplied = kModulated || p.weight != nullptr;
  const bool shifted = kModulated || p.bias != nullptr;
  ParamVec<T, N> m[kHold ? kVectors : 1], a[kHold ? kVectors : 1];
  if constexpr (kPlain && kModulated) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (inside(i)) {
        m[i].template load<Cache::kTwice>(scale + i * step);
        a[i].template load<Cache::kTwice>(shift + i * step);
      }
    }
  } else if constexpr (kPlain && kHold) {
    load_params<T, N, kVectors>(m, p.weight, index, stride, left + index, 1.0f);
    load_params<T, N, kVectors>(a, p.bias, index, stride, left + index, kNoBias);
  } else if constexpr (kHold) {
    load_early(m, multiplied, scale, stride, left, 1.0f);
    load_early(a, shifted, shift, stride, left, kNoBias);
  }
  if constexpr (!kPlain) keep_loads_above(p.zero);

  if constexpr (kSum) {
    T *sum = static_cast<T *>(p.sum) + static_cast<int64_t>(to) * N;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kRow == HalfRow::kGatedEager) v[i] = mul_twos(g[i], v[i]);
      if constexpr (kRow == HalfRow::kGated) v[i] = add_gated(v[i], r[i], g[i]);
      else v[i] = add_twos(r[i], v[i]);
      if (inside(i)) v[i].store(sum + i * step);
    }
  }

  LayerMap map;
  if constexpr (kLayer) {
    map = layer_map<G>(v, inside, p.zero, p.inverse_cols, p.eps, partial);
  } else {
    float squares[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kPacked) v[i].stay_packed(p.zero);
      squares[i] = inside(i) ? sum_of_squares(v[i]) : 0.0f;
    }
    const float square = G::sum(squares, partial);
    map = scale_map(rsqrtf(fmaf(square, p.inverse_cols, p.eps)));
  }

  const auto finish_each = [&](auto finish) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!inside(i)) break;
      if constexpr (kPacked) v[i].stay_packed(p.zero);
      float y[N];
      v[i].get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = kLayer ? map(y[k]) : y[k] * map.scale;
      if constexpr (!kHold) {
        load_early(m, multiplied, scale + i * step, 0, 1, 1.0f);
        load_early(a, shifted, shift + i * step, 0, 1, kNoBias);
      }
      finish(y, m[kHold ? i : 0], a[kHold ? i : 0], static_cast<int64_t>(to + i * stride) * N);
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
auto select_half_kernel(const FusedNormParams &p, Shape shape) {
  if (p.scale == nullptr) return select_half_kernel<T, HalfRow::kAdded>(shape, p.layer);
  if (p.sum == nullptr) return select_half_kernel<T, HalfRow::kModulated>(shape, p.layer);
  if (p.eager) return select_half_kernel<T, HalfRow::kGatedEager>(shape, p.layer);
  return select_half_kernel<T, HalfRow::kGated>(shape, p.layer);
}

}  // namespace hfp::cuda
