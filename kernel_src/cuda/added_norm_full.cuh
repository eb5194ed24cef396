// added_norm_full.cuh: norm(residual + x) of rows that a CTA holds without a vector left over, in one half
// type, with a weight and, in a layer norm, a bias.
//
// Like layer_norm_full_kernel: nothing asks whether a vector is inside, and a warp's vectors lie one after
// the other. For how many vectors a thread, see plan_added_full.
#pragma once

#include "fused_norm.cuh"
#include "ordered.cuh"

namespace hfp::cuda {

// Rows of one stride, in one launch.
struct AddedRowsParams {
  static constexpr bool kStartsEarly = true;
  void *out, *sum;
  const void *x, *residual, *weight, *bias;
  int64_t x_stride, residual_stride;
  uint32_t cols;
  RowsAhead ahead;
  float inverse_cols, eps, weight_offset;
  bool two_step;            // round xhat, then multiply
  uint32_t zero, zeros[2];  // 0; see ordered.cuh
};

// Threads of a CTA, at most, and those that registers have to allow on an SM.
constexpr int added_threads(int vectors, bool hold) {
  return vectors == 4 && hold ? kMaxHoldThreads : kMaxThreadsX4;
}
constexpr int added_resident(int vectors, bool hold) {
  return vectors == 4 && hold ? kSomeThreads - kMaxHoldThreads : kSomeThreads;
}

// kAhead: CTAs bring later rows to L2.
template <class T, bool kLayer, int kVectors, bool kHold, bool kAhead>
__global__ void __launch_bounds__(added_threads(kVectors, kHold),
                                  resident_ctas(added_threads(kVectors, kHold),
                                                added_resident(kVectors, kHold)))
    added_norm_full_kernel(const __grid_constant__ AddedRowsParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T)), kStep = 32 * N;
  using G = Group<kCta, kRowThreads, kVectors>;
  __shared__ float partial[kLayer ? kTwicePartials : kPartials];
  const int first = G::index() * N;
  const T *x = static_cast<const T *>(p.x) + blockIdx.x * p.x_stride + first;
  const T *residual = static_cast<const T *>(p.residual) + blockIdx.x * p.residual_stride + first;
  const T *weight = static_cast<const T *>(p.weight) + first;
  const T *bias = static_cast<const T *>(p.bias) + first;
  int64_t to = static_cast<int64_t>(blockIdx.x) * p.cols + first;
  settle(x, residual, weight, to);
  if constexpr (!kHold) {
    bring_early<kVectors>(true, weight, kStep, kVectors * kStep);
    if constexpr (kLayer) bring_early<kVectors>(true, bias, kStep, kVectors * kStep);
  }
  wait_for_previous();

  Vec<T, N> v[kVectors], r[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i].template load<Cache::kStream>(x + i * kStep);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) r[i].template load<Cache::kStream>(residual + i * kStep);
  Vec<T, N> w[kHold ? kVectors : 1], b[kHold ? kVectors : 1];
  const auto load_params = [&](int held, int i) {
    w[held].template load<Cache::kTwice>(weight + i * kStep);
    if constexpr (kLayer) b[held].template load<Cache::kTwice>(bias + i * kStep);
  };
  if constexpr (kHold) {
    keep_loads_above(p.zeros[0]);
    load_in_place(p.zero, [&](int i) { load_params(i, i); }, w, b);
  }
  if constexpr (kAhead) {
    bring_ahead<T>(p.ahead, p.x, p.x_stride, blockIdx.x, 0, kVectors * blockDim.x);
    bring_ahead<T>(p.ahead, p.residual, p.residual_stride, blockIdx.x, 0, kVectors * blockDim.x);
  }
  keep_loads_above(p.zeros[1]);

  T *sum = static_cast<T *>(p.sum) + to;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i] = add_twos(r[i], v[i]);
    v[i].store(sum + i * kStep);
  }

  const auto finish_each = [&](const auto &map, const auto &finish) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i].stay_packed(p.zero);
      if constexpr (!kHold) load_params(0, i);
      float y[N];
      v[i].get(y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = map(y[k]);
      constexpr int kLast = kHold ? kVectors - 1 : 0;
      const int held = i < kLast ? i : kLast;
      finish(y, w[held], b[held], static_cast<T *>(p.out) + to + i * kStep);
    }
  };
  using Y = float[N];
  using V = Vec<T, N>;
  const auto finish_once = [&](Y &y, const V &mul, const V &add, T *out) {
    float by[N], plus[N];
    mul.get(by);
    if constexpr (kLayer) {
      add.get(plus);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) plus[k] = kNoBias;
    }
    affine<kLayer>(y, by, plus, p.weight_offset);
    store_as<T>(out, 0, y);
  };
  if constexpr (kLayer) {
    with_layer_map<G>(v, p.zero, p.inverse_cols, p.eps, partial,
                      [&](const auto &map) { finish_each(map, finish_once); });
  } else {
    float squares[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kVectors >= 4) v[i].stay_packed(p.zero);
      squares[i] = sum_of_squares(v[i]);
    }
    const float scale = rsqrtf(fmaf(G::sum(squares, partial), p.inverse_cols, p.eps));
    const auto map = [=](float x) { return x * scale; };
    if (p.two_step) {
      finish_each(map, [](const Y &y, const V &mul, const V &, T *out) {
        V hat;
        hat.set(y);
        mul_twos(hat, mul).store(out);
      });
    } else {
      finish_each(map, finish_once);
    }
  }
}

// False where another kernel takes the row.
template <class T>
bool launch_added_full(const FusedNormParams &row, void *stream, const char *op, int32_t *status) {
  const int64_t rows = row.x_rows.rows;
  const FullPlan plan = plan_added_full(row.vectors, rows, row.layer);
  const bool known = row.weight != nullptr && (row.bias != nullptr) == row.layer;
  const bool uniform = row.x_rows.uniform() && row.residual_rows.uniform();
  if (plan.vectors == 0 || !known || !uniform || rows > kMaxGrid) return false;
  AddedRowsParams p{};
  p.out = row.out;
  p.sum = row.sum;
  p.x = row.x;
  p.residual = row.residual;
  p.weight = row.weight;
  p.bias = row.bias;
  p.x_stride = row.x_rows.s2;
  p.residual_stride = row.residual_rows.s2;
  p.cols = static_cast<uint32_t>(row.x_rows.cols);
  p.ahead = added_rows_ahead(row.vectors, rows);
  p.inverse_cols = row.inverse_cols;
  p.eps = row.eps;
  p.weight_offset = row.weight_offset;
  p.two_step = row.two_step;
  const int threads = static_cast<int>(row.vectors) / plan.vectors;
  const auto run = [&](auto *ahead, auto *alone) {
    *status = launch(p.ahead.rows > 0 ? ahead : alone, rows, threads, p, stream, op);
  };
  if (row.layer) {
    if (plan.hold) {
      run(&added_norm_full_kernel<T, true, 2, true, true>, &added_norm_full_kernel<T, true, 2, true, false>);
    } else {
      run(&added_norm_full_kernel<T, true, 4, false, true>,
          &added_norm_full_kernel<T, true, 4, false, false>);
    }
  } else if (plan.hold) {
    run(&added_norm_full_kernel<T, false, 4, true, true>, &added_norm_full_kernel<T, false, 4, true, false>);
  } else {
    run(&added_norm_full_kernel<T, false, 4, false, true>,
        &added_norm_full_kernel<T, false, 4, false, false>);
  }
  return true;
}

}  // namespace hfp::cuda
