// rms_norm.cu: out = x * rsqrt(mean(x^2) + eps) * weight + bias over rows; hfp_rms_norm on CUDA.
// Zhang & Sennrich, arXiv:1910.07467. Where it rounds: HFP_CAST_* in hfpatch.h.
#include "ordered.cuh"
#include "packed.cuh"
#include "row_pairs.cuh"

namespace hfp::cuda {
namespace {

struct RmsNormParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *x, *weight, *bias;
  Rows x_rows;
  int64_t first_row;
  int64_t vectors;  // per row
  float inverse_cols, eps, weight_offset;
  DType out_type, weight_type;
  bool two_step;     // HFP_CAST_INPUT, _WEIGHT: round xhat, multiply, round, add
  DType round_type;  // of xhat if two_step; F32: not at all
  uint32_t zero;     // 0; see Vec::stay_packed
  RowsAhead ahead;   // of rms_norm_full_kernel's pairs
};

// ---------------------------------------------------------------------------------------------
// Kernels

// Where the fast kernels round; the grid has one mode, so a kernel branches once.
enum class Mode {
  kOnce,       // at the end, to T
  kRoundXhat,  // xhat to T, then the product to the dtype of the weight
  kProduct     // the product only, to the dtype of the weight
};

// One vector of the result; W is T or float. No bias: that is rare, and left to finish_any.
template <Mode kMode, class T, class W, int N>
__device__ __forceinline__ void finish(const RmsNormParams &p, const Vec<T, N> &v, float scale,
                                       const float (&w)[N], int64_t at) {
  float y[N];
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  if constexpr (kMode == Mode::kRoundXhat) round_to<T>(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= kMode == Mode::kOnce ? w[i] + p.weight_offset : w[i];
  store_as<std::conditional_t<kMode == Mode::kOnce, T, W>>(p.out, at, y);
}

// The same for all dtypes, and with a bias. __fmul_rn and __fadd_rn: each has its own rounding, so
// no fused multiply-add.
template <class T, int N>
__device__ __forceinline__ void finish_any(const RmsNormParams &p, const Vec<T, N> &v, float scale,
                                           int64_t col, int64_t at) {
  float y[N], w[N];
  v.get(y);
  load_param<AnyType>(w, p.weight, p.weight_type, col, 1.0f);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  if (p.two_step) {
    round_any(y, p.round_type);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], w[i]);
    round_any(y, p.out_type);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], w[i] + p.weight_offset);
  }
  if (p.bias != nullptr) {
    float b[N];
    load_param<AnyType>(b, p.bias, p.weight_type, col, 0.0f);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fadd_rn(y[i], b[i]);
  }
  store_any(p.out, p.out_type, at, y);
}

// Mode::kRoundXhat with weights of the dtype of x: the product is rounded to that, two at a time.
template <class T, int N>
__device__ __forceinline__ void finish_twos(const RmsNormParams &p, const Vec<T, N> &v,
                                            float scale, const Vec<T, N> &w, int64_t at) {
  float y[N];
  v.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  Vec<T, N> hat;
  hat.set(y);
  mul_twos(hat, w).store(static_cast<T *>(p.out) + at);
}

// Where one thread's share of a row lies; vector i is i * stride vectors on.
struct Share {
  int first, stride, vectors;  // of a row; vectors: left from the first one on
  int64_t to;                  // of the first one, in out
};

template <Mode kMode, bool kHold, class T, class W, int N, int kVectors, int kParams>
__device__ __forceinline__ void finish_share(const RmsNormParams &p, Vec<T, N> (&v)[kVectors],
                                             const ParamVec<W, N> (&w)[kParams], float scale,
                                             const Share &share) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int skipped = i * share.stride;
    if (skipped >= share.vectors) break;
    const int64_t to = share.to + skipped * N;
    const int col = (share.first + skipped) * N;
    if constexpr (kVectors >= 4) v[i].stay_packed(p.zero);
    if constexpr (std::is_same_v<W, AnyType>) {
      finish_any(p, v[i], scale, col, to);
    } else if constexpr (kMode == Mode::kRoundXhat && std::is_same_v<T, W> && kInTwos<T, N>) {
      Vec<W, N> weight;
      if constexpr (kHold) {
        weight = w[i];
      } else {  // there is one in this mode
        weight.template load<Cache::kReadOnly>(static_cast<const W *>(p.weight) + col);
      }
      finish_twos(p, v[i], scale, weight, to);
    } else {
      float weight[N];
      if constexpr (kHold) {
        w[i].get(weight);
      } else {
        load_param<W>(weight, p.weight, p.weight_type, col, 1.0f);
      }
      finish<kMode, T, W>(p, v[i], scale, weight, to);
    }
  }
}

// Threads on an SM that the registers have to allow. A weight with a dtype of its own leaves none to
// save.
template <class T, class W>
constexpr int wanted_threads(int row_threads, int vectors, bool hold) {
  if (!std::is_same_v<T, W> || vectors == 8) return 0;
  if (row_threads == kCta) return vectors == 1 ? 0 : hold ? kSomeThreads : kManyThreads;
  return vectors == 4 ? kSomeThreads : kManyThreads;
}

// Threads of rms_norm_full_kernel, at most, and those that its registers have to allow on an SM.
constexpr int full_threads(int vectors) { return vectors == 2 ? 256 : kMaxThreads / vectors; }
constexpr int full_resident(int vectors) { return vectors == 2 ? kManyThreads : kSomeThreads; }

// The row in registers. W: the dtype of the weight. kHold: it is asked for before the sum, so that
// the two latencies overlap.
template <class T, class W, int N, int kThreads, int kVectors, bool kHold>
__global__ void __launch_bounds__(norm_threads(kThreads, kVectors),
                                  resident_ctas(norm_threads(kThreads, kVectors),
                                                wanted_threads<T, W>(kThreads, kVectors, kHold)))
    rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  using G = Group<kThreads, norm_threads(kThreads, kVectors)>;
  constexpr bool kAny = std::is_same_v<W, AnyType>;
  using Weight = std::conditional_t<kAny, char, W>;
  __shared__ float partial[kPartials];

  const int64_t row = G::row(p.first_row);
  const bool known = row < p.x_rows.rows;
  Share share{G::index(), G::stride(), 0, row * p.x_rows.cols + G::index() * N};
  if (known) share.vectors = static_cast<int>(p.vectors) - share.first;
  const T *x =
      static_cast<const T *>(p.x) + (known ? row_offset(p.x_rows, row) : 0) + share.first * N;
  const Weight *weight = static_cast<const Weight *>(p.weight) + share.first * N;
  settle(x, weight, share.to);
  wait_for_previous();

  Vec<T, N> v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    if (i * share.stride < share.vectors) {
      v[i].template load<Cache::kStream>(x + i * share.stride * N);
    }
  }
  ParamVec<W, N> w[kHold ? kVectors : 1];
  if constexpr (kHold) {
    load_early(w, p.weight != nullptr, weight, share.stride, share.vectors, 1.0f);
  }
  keep_loads_above(p.zero);

  float squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) squares[i] = sum_of_squares(v[i]);
  const float sum = G::sum(squares, partial);
  const float scale = rsqrtf(fmaf(sum, p.inverse_cols, p.eps));

  if (kAny || !p.two_step) {
    finish_share<Mode::kOnce, kHold>(p, v, w, scale, share);
  } else if (!std::is_same_v<T, float> &&
             (std::is_same_v<T, W> || p.round_type != DType::F32)) {
    finish_share<Mode::kRoundXhat, kHold>(p, v, w, scale, share);
  } else {
    finish_share<Mode::kProduct, kHold>(p, v, w, scale, share);
  }
}

// The row in registers, whole: kVectors vectors in every thread, without one left over, so that nothing
// asks whether a vector is inside. kSize: CTAs that share it. kAhead: they bring a later row to L2.
template <class T, int kVectors, int kSize = 1, bool kAhead = false>
__global__ void __launch_bounds__(full_threads(kVectors),
                                  resident_ctas(full_threads(kVectors), full_resident(kVectors)))
    rms_norm_full_kernel(const __grid_constant__ RmsNormParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr bool kPair = kSize > 1;
  using Pair = PairGroup<kVectors>;
  using G = std::conditional_t<kPair, Pair, Group<kCta, kRowThreads, kVectors>>;
  __shared__ __align__(8) float partial[kPair ? Pair::kShared : kPartials];
  if constexpr (kPair && !kRowPairs) return;
  if constexpr (kPair) G::begin(partial, 1, 1);
  const int first = G::index();
  const int64_t row = p.first_row + blockIdx.x / kSize;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row) + first * N;
  const T *weight = static_cast<const T *>(p.weight) + first * N;
  Share share{first, 32, kVectors * 32, row * p.x_rows.cols + first * N};
  settle(x, weight, share.to);
  wait_for_previous();

  Vec<T, N> v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i].template load<Cache::kStream>(x + i * 32 * N);
  ParamVec<T, N> w[kVectors];
  load_early(w, p.weight != nullptr, weight, 32, share.vectors, 1.0f);
  if constexpr (kAhead) {
    const uint32_t half = static_cast<uint32_t>(p.x_rows.cols) / kSize;
    bring_ahead<T>(p.ahead, p.x, p.x_rows.s2, blockIdx.x / kSize, blockIdx.x % kSize * half, half / N);
  }
  keep_loads_above(p.zero);
  if constexpr (kPair) G::join();

  float squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) squares[i] = sum_of_squares(v[i]);
  const float scale = rsqrtf(fmaf(G::sum(squares, partial), p.inverse_cols, p.eps));
  if (p.two_step) {
    finish_share<Mode::kRoundXhat, true>(p, v, w, scale, share);
  } else {
    finish_share<Mode::kOnce, true>(p, v, w, scale, share);
  }
}

// A row too wide for the registers of a CTA is read twice, the second time from L2 mostly.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_loop_kernel(const __grid_constant__ RmsNormParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[kPartials];
  const int64_t row = G::row(p.first_row);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);

  float own[1] = {0.0f};
#pragma unroll 4
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    own[0] += sum_of_squares(v);
  }
  const float sum = G::sum(own, partial);
  const float scale = rsqrtf(fmaf(sum, p.inverse_cols, p.eps));

  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    finish_any(p, v, scale, at * N, row * p.x_rows.cols + at * N);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "rms_norm";

template <class T, class W, int N>
struct Kernels {
  static constexpr int words() { return Vec<T, N>::kWords + ParamVec<W, N>::kWords; }
  template <int kThreads, int kVectors>
  static auto kernel() {
    return &rms_norm_kernel<T, W, N, kThreads, kVectors,
                            kHoldParams<W, kThreads, kVectors, words()>>;
  }
  static auto loop() { return &rms_norm_loop_kernel<T, N>; }
};

// Vectors of 16 bytes, a row that registers hold.
template <class T, class W>
int32_t launch_fast(RmsNormParams &p, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  using K = Kernels<T, W, N>;
  const RowPlan plan = plan_norm(p.vectors, p.x_rows.rows, kWarpOf8<K::words()>);
  const auto run = [&](auto *kernel) { return launch_rows(kernel, plan, p, stream, kOp); };
  if constexpr (std::is_same_v<T, W> && !std::is_same_v<T, float>) {
    if (rms_pairs(p.vectors, p.x_rows.rows)) {
      constexpr int kSize = PairGroup<4>::kSize;
      if (p.x_rows.uniform()) p.ahead = rows_ahead(p.vectors, p.x_rows.rows);
      auto *kernel = p.ahead.rows > 0 ? &rms_norm_full_kernel<T, 4, kSize, true>
                                      : &rms_norm_full_kernel<T, 4, kSize, false>;
      if (early_start_supported(reinterpret_cast<const void *>(kernel))) {
        const int threads = static_cast<int>(p.vectors) / (4 * kSize);
        return launch_clusters(kernel, p.x_rows.rows, threads, p, stream, kOp, 0, kSize);
      }
    }
    const int each = full_vectors(p.vectors, p.x_rows.rows);
    if (each > 0) {
      const RowPlan full{plan.shape, static_cast<int>(p.vectors) / each, 1};
      return launch_rows(each == 2 ? &rms_norm_full_kernel<T, 2> : &rms_norm_full_kernel<T, 4>, full,
                         p, stream, kOp);
    }
  }
  if (plan.shape == Shape::k8x1) return run(K::template kernel<8, 1>());
  if (plan.shape == Shape::k16x1) return run(K::template kernel<16, 1>());
  return run(select_kernel<K>(plan.shape));
}

template <class T, int N>
int32_t launch_general(RmsNormParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const RowPlan plan = plan_rows_general(p.vectors);
  return launch_rows(select_general_kernel<Kernels<T, AnyType, N>>(plan.shape), plan, p, stream,
                     kOp);
}

template <class T>
int32_t launch_typed(RmsNormParams &p, DType x_type, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  int n = widest_vector(p.x_rows, sizeof(T));
  n = narrow_to_pointer(n, p.x, sizeof(T));
  n = narrow_to_pointer(n, p.out, size_of(p.out_type));
  n = narrow_to_pointer(n, p.weight, size_of(p.weight_type));
  n = narrow_to_pointer(n, p.bias, size_of(p.weight_type));

  if (n == kWidest) {
    p.vectors = p.x_rows.cols / n;
    if (p.vectors <= kMaxHeldVectors && p.bias == nullptr) {
      if (p.weight_type == x_type && p.out_type == x_type) return launch_fast<T, T>(p, stream);
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

int32_t rms_norm(const RmsNormArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  const bool affine = a.weight != nullptr || a.bias != nullptr;
  RmsNormParams p{};
  p.out = a.out;
  p.x = a.x;
  p.weight = a.weight;
  p.bias = a.bias;
  p.x_rows = a.x_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  p.out_type = a.out_type;
  p.weight_type = affine ? a.weight_type : a.x_type;
  // Without a weight the kernels multiply by 1 + weight_offset, which then has to be 1.
  p.weight_offset = a.weight != nullptr ? a.weight_offset : 0.0f;
  p.two_step = a.weight != nullptr && a.cast != HFP_CAST_NONE;
  p.round_type = a.cast == HFP_CAST_INPUT ? a.x_type : p.weight_type;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.x_type) {
    case DType::F32: return launch_typed<float>(p, a.x_type, stream);
    case DType::F16: return launch_typed<__half>(p, a.x_type, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.x_type, stream);
  }
}

}  // namespace hfp::cuda
