// layer_norm.cu: out = (x - mean) * rsqrt(var + eps) * weight + bias over rows, in fp32 with one
// rounding; hfp_layer_norm on CUDA. Ba et al., arXiv:1607.06450.
//
// Mean and variance by one sum over the row's threads: layer_map.cuh.
#include "ordered.cuh"
#include "row_pairs.cuh"

namespace hfp::cuda {
namespace {

struct LayerNormParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *x, *weight, *bias;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;  // per row
  float inverse_cols, eps;
  DType weight_type, bias_type;
  uint32_t zero;  // 0; see Vec::stay_packed
};

// Of layer_norm_full_kernel: rows of one stride, in one launch, with weight and bias.
struct FullRowsParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *x, *weight, *bias;
  int64_t stride;
  uint32_t cols;
  RowsAhead ahead;
  float inverse_cols, eps;
  uint32_t zero, zeros[2];  // 0; see ordered.cuh
};

// ---------------------------------------------------------------------------------------------
// Kernels

template <class T, int N, class Map>
__device__ __forceinline__ void finish(void *out, const Vec<T, N> &v, const Map &map,
                                       const float (&w)[N], const float (&b)[N], int64_t at) {
  float y[N];
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = fmaf(map(y[i]), w[i], b[i]);
  store_as<T>(out, at, y);
}

// Whether weight and bias are asked for with the row, so that the latencies overlap, or each where it
// is used, so that a thread waits for them once a vector. On an H200, cold, in us, the two: 4096 x 1000
// in bf16 5.5, 7.2, in fp16 5.5, 7.1, in fp32 9.6, 10.9; 4096 x 4096, a CTA a row, in bf16 17.6, 18.5;
// 4096 x 8192 in fp32 66.3, 67.4.
template <class T, class W, int N>
constexpr bool hold_params(int row_threads, int vectors) {
  constexpr int kWords = Vec<T, N>::kWords + 2 * ParamVec<W, N>::kWords;
  if (std::is_same_v<W, AnyType> || (row_threads == kCta && vectors == 8)) return false;
  return vectors * kWords <= kHoldWords;
}

// Threads on an SM that the registers of four vectors a thread have to allow. Parameters with a dtype
// of their own leave none to save.
template <class T, class W>
constexpr int wanted_threads(int row_threads, int vectors, bool hold) {
  if (!std::is_same_v<T, W> || vectors != 4) return 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr bool kFits = false;
#else
  constexpr bool kFits = std::is_same_v<T, __nv_bfloat16>;
#endif
  // A warp a row: where 64 registers would spill, and for fp32 (4096 x 1000 9.9 us, so 9.5), one CTA less.
  if (row_threads != kCta && !kFits) return kSomeThreads - kRowThreads;
  return hold ? kSomeThreads : kManyThreads;
}

// The row in registers. W: the dtype of weight and bias. kBoth: both are there, which nothing asks then.
template <class T, class W, int N, int kThreads, int kVectors, bool kHold, bool kBoth = false>
__global__ void __launch_bounds__(norm_threads(kThreads, kVectors),
                                  resident_ctas(norm_threads(kThreads, kVectors),
                                                wanted_threads<T, W>(kThreads, kVectors, kHold)))
    layer_norm_kernel(const __grid_constant__ LayerNormParams p) {
  using G = Group<kThreads, norm_threads(kThreads, kVectors)>;
  constexpr bool kAny = std::is_same_v<W, AnyType>;
  using Weight = std::conditional_t<kAny, char, W>;
  __shared__ float partial[kTwicePartials];

  const int64_t row = G::row(p.first_row);
  const bool known = row < p.x_rows.rows;
  const int first = G::index(), stride = G::stride();
  const int vectors = known ? static_cast<int>(p.vectors) - first : 0;  // left
  const T *x = static_cast<const T *>(p.x) + (known ? row_offset(p.x_rows, row) : 0) + first * N;
  const Weight *weight = static_cast<const Weight *>(p.weight) + first * N;
  const Weight *bias = static_cast<const Weight *>(p.bias) + first * N;
  int64_t to = row * p.x_rows.cols + first * N;
  if constexpr (kHold) {
    settle(x, weight, bias, to);
  } else {
    settle(x, to);
  }
  if constexpr (!kAny && !kHold) {
    bring_early<kVectors>(p.weight != nullptr, weight, stride * N, vectors * N);
    bring_early<kVectors>(p.bias != nullptr, bias, stride * N, vectors * N);
  }
  wait_for_previous();

  Vec<T, N> v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    if (i * stride < vectors) v[i].template load<Cache::kStream>(x + i * stride * N);
  }
  if constexpr (sizeof(T) == 2 && kVectors == 4) {
    // x first. Zero too, but of two exits on one condition ptxas drops the second.
    keep_loads_above(static_cast<uint32_t>(p.vectors >> 32));
  }
  constexpr int kHeld = kHold ? kVectors : 1;
  ParamVec<W, N> w[kHeld], b[kHeld];
  if constexpr (kHold) {
    load_early(w, kBoth || p.weight != nullptr, weight, stride, vectors, 1.0f);
    load_early(b, kBoth || p.bias != nullptr, bias, stride, vectors, kNoBias);
  }
  keep_loads_above(p.zero);

  const auto inside = [=](int i) { return i * stride < vectors; };
  const LayerMap map = layer_map<G>(v, inside, p.zero, p.inverse_cols, p.eps, partial);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * stride >= vectors) break;
    if constexpr (kVectors >= 4) v[i].stay_packed(p.zero);
    float scales[N], shifts[N];
    if constexpr (kAny) {
      const int col = (first + i * stride) * N;
      load_param<W>(scales, p.weight, p.weight_type, col, 1.0f);
      load_param<W>(shifts, p.bias, p.bias_type, col, kNoBias);
    } else {
      if constexpr (!kHold) {
        const int at = first + i * stride;
        load_params(w, p.weight, at, 0, at + 1, 1.0f);
        load_params(b, p.bias, at, 0, at + 1, kNoBias);
      }
      w[kHold ? i : 0].get(scales);
      b[kHold ? i : 0].get(shifts);
    }
    finish(p.out, v[i], map, scales, shifts, to + i * stride * N);
  }
}

// Threads of layer_norm_full_kernel, at most, and those that its registers have to allow on an SM.
constexpr int full_threads(int vectors, bool hold) {
  return vectors == 2 && !hold ? kMaxThreads : kMaxThreadsX4;
}
constexpr int full_resident(int vectors, bool hold) {
  if (vectors == 2) return hold ? kManyThreads : kAllThreads;
  return hold ? kSomeThreads : kManyThreads;
}

// Whether rows whose sums are corrected are finished apart, behind the others. fp16 takes more registers for
// it: ptxas then asks for three vectors of the bias below the sums of x. H200, us, 4096 x 2048, apart and
// not: fp16 10.9, 10.1, bf16 10.3, 10.4.
template <class T, int kVectors>
inline constexpr bool kCorrectedApart = !(std::is_same_v<T, __half> && kVectors == 4);

// The row in registers, whole: kVectors vectors in every thread, without one left over, so that nothing
// asks whether a vector is inside. kHold: weight and bias are asked for with it. kSize: CTAs that share it.
// kAhead: they bring a later row to L2. Pairs without one have a kernel of their own: with that code, 512 x
// 16384 takes 12.2 us instead of 11.1, as ptxas then asks for x before the parameters.
template <class T, int kVectors, bool kHold, int kSize = 1, bool kAhead = kVectors == 4 && !kHold>
__global__ void __launch_bounds__(full_threads(kVectors, kHold) / kSize,
                                  resident_ctas(full_threads(kVectors, kHold) / kSize,
                                                full_resident(kVectors, kHold)))
    layer_norm_full_kernel(const __grid_constant__ FullRowsParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T)), kStep = 32 * N;
  constexpr bool kPair = kSize > 1;
  using Pair = PairGroup<kVectors>;
  using G = std::conditional_t<kPair, Pair, Group<kCta, kRowThreads, kVectors>>;
  __shared__ __align__(8) float partial[kPair ? 2 * Pair::kShared : kTwicePartials];
  if constexpr (kPair && !kRowPairs) return;
  if constexpr (kPair) G::begin(partial, 2, 2);
  const int first = G::index() * N;
  const T *x = static_cast<const T *>(p.x) + blockIdx.x / kSize * p.stride + first;
  const T *weight = static_cast<const T *>(p.weight) + first;
  const T *bias = static_cast<const T *>(p.bias) + first;
  settle(x, weight, bias);
  if constexpr (!kHold) {
    bring_early<kVectors>(true, weight, kStep, kVectors * kStep);
    bring_early<kVectors>(true, bias, kStep, kVectors * kStep);
  }
  wait_for_previous();

  Vec<T, N> v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i].template load<Cache::kStream>(x + i * kStep);
  Vec<T, N> w[kHold ? kVectors : 1], b[kHold ? kVectors : 1];
  const auto load_params = [&](int held, int i) {
    w[held].template load<Cache::kTwice>(weight + i * kStep);
    b[held].template load<Cache::kTwice>(bias + i * kStep);
  };
  if constexpr (kHold) {
    if constexpr (kVectors == 4) keep_loads_above(p.zeros[0]);
    load_in_place(p.zero, [&](int i) { load_params(i, i); }, w, b);
  }
  if constexpr (kAhead) {
    bring_ahead<T>(p.ahead, p.x, p.stride, blockIdx.x / kSize, blockIdx.x % kSize * (p.cols / kSize),
                   kVectors * blockDim.x);
  }
  keep_loads_above(p.zeros[1]);
  if constexpr (kPair) G::join();

  const auto finish_row = [&](const auto &map) {
    const int64_t to = static_cast<int64_t>(blockIdx.x / kSize) * p.cols + G::index() * N;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i].stay_packed(p.zero);
      if constexpr (!kHold) load_params(0, i);
      float scales[N], shifts[N];
      w[kHold ? i : 0].get(scales);
      b[kHold ? i : 0].get(shifts);
      finish(p.out, v[i], map, scales, shifts, to + i * kStep);
    }
  };
  if constexpr (kCorrectedApart<T, kVectors>) {
    with_layer_map<G>(v, p.zero, p.inverse_cols, p.eps, partial, finish_row);
  } else {
    const auto inside = [](int) { return true; };
    finish_row(layer_map<G>(v, inside, p.zero, p.inverse_cols, p.eps, partial));
  }
}

// A row too wide for the registers of a CTA is read again, from L2 mostly.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    layer_norm_loop_kernel(const __grid_constant__ LayerNormParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[kTwicePartials];
  const int64_t row = G::row(p.first_row);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);

  const LayerMap map = layer_map<G, T, N>(x, p.vectors, p.inverse_cols, p.eps, partial);

  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    float weight[N], bias[N];
    load_param<AnyType>(weight, p.weight, p.weight_type, at * N, 1.0f);
    load_param<AnyType>(bias, p.bias, p.bias_type, at * N, kNoBias);
    finish(p.out, v, map, weight, bias, row * p.x_rows.cols + at * N);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "layer_norm";

template <class T, class W, int N>
struct Kernels {
  static constexpr int words() { return Vec<T, N>::kWords + 2 * ParamVec<W, N>::kWords; }
  template <int kThreads, int kVectors>
  static auto kernel() {
    return &layer_norm_kernel<T, W, N, kThreads, kVectors, hold_params<T, W, N>(kThreads, kVectors)>;
  }
  static auto loop() { return &layer_norm_loop_kernel<T, N>; }
};

template <class T>
int32_t launch_full(const LayerNormParams &row, const FullPlan &plan, void *stream) {
  FullRowsParams p{};
  p.out = row.out;
  p.x = row.x;
  p.weight = row.weight;
  p.bias = row.bias;
  p.stride = row.x_rows.s2;
  p.cols = static_cast<uint32_t>(row.x_rows.cols);
  p.ahead = rows_ahead(row.vectors, row.x_rows.rows);
  p.inverse_cols = row.inverse_cols;
  p.eps = row.eps;
  const int threads = static_cast<int>(row.vectors) / plan.vectors;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // in fp16 that would spill
    if (layer_pairs(row.vectors, row.x_rows.rows, plan)) {
      constexpr int kSize = PairGroup<4>::kSize;
      auto *kernel = p.ahead.rows > 0 ? &layer_norm_full_kernel<T, 4, true, kSize, true>
                                      : &layer_norm_full_kernel<T, 4, true, kSize, false>;
      if (early_start_supported(reinterpret_cast<const void *>(kernel))) {
        return launch_clusters(kernel, row.x_rows.rows, threads / kSize, p, stream, kOp, 0, kSize);
      }
    }
  }
  const auto run = [&](auto *kernel) {
    return launch(kernel, row.x_rows.rows, threads, p, stream, kOp);
  };
  if (plan.vectors == 2) {
    return run(plan.hold ? &layer_norm_full_kernel<T, 2, true> : &layer_norm_full_kernel<T, 2, false>);
  }
  return run(plan.hold ? &layer_norm_full_kernel<T, 4, true> : &layer_norm_full_kernel<T, 4, false>);
}

// Vectors of 16 bytes, a row that registers hold.
template <class T, class W>
int32_t launch_fast(LayerNormParams &p, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  using K = Kernels<T, W, N>;
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, W>) {
    const FullPlan full = plan_full(p.vectors, p.x_rows.rows);
    const bool both = p.weight != nullptr && p.bias != nullptr;
    if (full.vectors > 0 && both && p.x_rows.uniform() && p.x_rows.rows <= kMaxGrid) {
      return launch_full<T>(p, full, stream);
    }
  }
  const RowPlan plan = plan_norm(p.vectors, p.x_rows.rows, kWarpOf8<K::words()>);
  const auto run = [&](auto *kernel) { return launch_rows(kernel, plan, p, stream, kOp); };
  if (plan.shape == Shape::k8x1) return run(K::template kernel<8, 1>());
  if (plan.shape == Shape::k16x1) return run(K::template kernel<16, 1>());
  if constexpr (sizeof(T) == 2) {
    if (plan.shape == Shape::kCtaX4 && params_late(plan, p.vectors, p.x_rows.rows)) {
      return run(&layer_norm_kernel<T, W, N, kCta, 4, false>);
    }
  }
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, W>) {
    if (plan.shape == Shape::kCtaX4 && p.weight != nullptr && p.bias != nullptr) {
      return run(&layer_norm_kernel<T, W, N, kCta, 4, true, true>);
    }
  }
  return run(select_kernel<K>(plan.shape));
}

template <class T, int N>
int32_t launch_general(LayerNormParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const RowPlan plan = plan_rows_general(p.vectors);
  return launch_rows(select_general_kernel<Kernels<T, AnyType, N>>(plan.shape), plan, p, stream,
                     kOp);
}

template <class T>
int32_t launch_typed(LayerNormParams &p, DType type, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  int n = widest_vector(p.x_rows, sizeof(T));
  n = narrow_to_pointer(n, p.x, sizeof(T));
  n = narrow_to_pointer(n, p.out, sizeof(T));
  n = narrow_to_pointer(n, p.weight, size_of(p.weight_type));
  n = narrow_to_pointer(n, p.bias, size_of(p.bias_type));

  if (n == kWidest) {
    p.vectors = p.x_rows.cols / n;
    if (p.vectors <= kMaxHeldVectors && p.weight_type == p.bias_type) {
      if (p.weight_type == type) return launch_fast<T, T>(p, stream);
      if constexpr (!std::is_same_v<T, float>) {
        if (p.weight_type == DType::F32) return launch_fast<T, float>(p, stream);
      }
    }
    return launch_general<T, kWidest>(p, stream);
  }
  if constexpr (kWidest == 8) {
    if (n == 4) return launch_general<T, 4>(p, stream);
  }
  if (n == 2) return launch_general<T, 2>(p, stream);
  return launch_general<T, 1>(p, stream);
}

}  // namespace

int32_t layer_norm(const LayerNormArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  LayerNormParams p{};
  p.out = a.out;
  p.x = a.x;
  p.weight = a.weight;
  p.bias = a.bias;
  p.x_rows = a.x_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  // An absent parameter takes the other's dtype, so that it does not ask for the general kernel.
  const DType either = a.weight != nullptr ? a.weight_type
                       : a.bias != nullptr ? a.bias_type
                                           : a.type;
  p.weight_type = a.weight != nullptr ? a.weight_type : either;
  p.bias_type = a.bias != nullptr ? a.bias_type : either;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.type, stream);
    case DType::F16: return launch_typed<__half>(p, a.type, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.type, stream);
  }
}

}  // namespace hfp::cuda
