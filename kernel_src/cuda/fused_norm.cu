// fused_norm.cu: norms with a residual sum before them, a modulation after them, or both, in one
// pass over memory; hfp_norm_modulate, hfp_gate_residual_norm_modulate, hfp_add_rms_norm and
// hfp_add_layer_norm on CUDA. AdaLN: Peebles & Xie, arXiv:2212.09748. Where it rounds: HFP_CAST_*
// in hfpatch.h.
//
// What a call asks for (which norm, which parameters, where it rounds) is decided at run time: such
// a branch is the same in the whole grid and costs an instruction, while each template parameter
// doubles the size of the library. Where all is of one half type, what models ask for has kernels of
// its own: fused_norm_half.cuh, and added_norm_full.cuh for a residual sum alone.
#include "added_norm_full.cuh"
#include "fused_norm.cuh"
#include "fused_norm_half.cuh"

namespace hfp::cuda {
namespace {

// ---------------------------------------------------------------------------------------------
// Kernels

// CTAs that an SM must take, 0 for as many as ptxas thinks. Of the longest rows of bf16 with a residual
// two, for which their parameters are left in memory: 64 registers do not hold them too. Of a warp a row
// one, since for more of them ptxas spills.
template <class T, class P, int kThreads, int kVectors, bool kSum>
inline constexpr int kFusedCtas =
    kThreads == 32 ? 1
    : kSum && kThreads == kCta && kVectors == 2 && std::is_same_v<T, __nv_bfloat16> &&
            std::is_same_v<T, P>
        ? 2
        : 0;

// The row in registers. kSum: residual is there.
template <class T, class P, int N, int kThreads, int kVectors, bool kSum>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors),
                                  (kFusedCtas<T, P, kThreads, kVectors, kSum>))
    fused_norm_kernel(const __grid_constant__ FusedNormParams p) {
  wait_for_previous();
  using G = Group<kThreads>;
  constexpr bool kTwoCtas = kFusedCtas<T, P, kThreads, kVectors, kSum> == 2;
  constexpr bool kHold =
      !kTwoCtas &&
      kHoldParams<P, kThreads, kVectors, Vec<T, N>::kWords + 2 * ParamVec<P, N>::kWords>;
  constexpr bool kTwos = std::is_same_v<T, P> && kInTwos<T, N> && kHold;
  constexpr bool kPacked = kVectors >= 4 || kTwoCtas;
  __shared__ float partial[kTwicePartials];

  const int64_t row = G::row(p.first_row);
  const int vectors = row < p.x_rows.rows ? static_cast<int>(p.vectors) : 0;
  const int64_t known_row = vectors > 0 ? row : 0;
  const int64_t to = known_row * p.x_rows.cols;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, known_row);

  Vec<T, N> v[kVectors], residual[kSum ? kVectors : 1];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    v[i].zero();
    if (at < vectors) v[i].template load<Cache::kStream>(x + at * N);
  }
  if constexpr (kSum) {
    const T *r = static_cast<const T *>(p.residual) + row_offset(p.residual_rows, known_row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = G::index() + i * G::stride();
      residual[i].zero();
      if (at < vectors) residual[i].template load<Cache::kStream>(r + at * N);
    }
  }
  // What the row meets last: scale and shift where there is a modulation, weight and bias
  // otherwise. Asked for before the sum waits for x, so that the latencies overlap.
  const bool modulated = p.scale != nullptr;
  const P *multiplier = static_cast<const P *>(p.weight), *addend = static_cast<const P *>(p.bias);
  if (modulated) {
    multiplier = static_cast<const P *>(p.scale) + row_offset(p.scale_rows, known_row);
    addend = static_cast<const P *>(p.shift) + row_offset(p.shift_rows, known_row);
  }
  ParamVec<P, N> m[kHold ? kVectors : 1], a[kHold ? kVectors : 1];
  if constexpr (kHold) {
    load_params<G>(m, multiplier, vectors, 1.0f);
    load_params<G>(a, addend, vectors, kNoBias);
  }

  if constexpr (kSum) {
    const P *gate = static_cast<const P *>(p.gate);
    if (gate != nullptr) gate += row_offset(p.gate_rows, known_row);
    T *sum = static_cast<T *>(p.sum) + to;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = G::index() + i * G::stride();
      if (at < vectors) {
        float g[N];
        load_param<P>(g, gate, p.modulation_type, at * N, 1.0f);
        add_residual(v[i], residual[i], g, gate != nullptr, p.eager);
        v[i].store(sum + at * N);
      }
    }
  }

  const auto inside = [=](int i) { return G::index() + i * G::stride() < vectors; };
  LayerMap map;
  if (p.layer) {
    map = layer_map<G>(v, inside, p.zero, p.inverse_cols, p.eps, partial);
  } else {
    float squares[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) squares[i] = sum_of_squares(v[i]);
    const float square = G::sum(squares, partial);
    map = scale_map(rsqrtf(fmaf(square, p.inverse_cols, p.eps)));
  }

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at >= vectors) break;
    if constexpr (kPacked) v[i].stay_packed(p.zero);
    float y[N], mul[N], add[N];
    v[i].get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = map(y[k]);
    if constexpr (kHold) {
      m[i].get(mul);
      a[i].get(add);
    } else {
      load_param<P>(mul, multiplier, DType::F32, at * N, 1.0f);
      load_param<P>(add, addend, DType::F32, at * N, kNoBias);
    }
    if (modulated) {
      if (p.weight != nullptr || p.bias != nullptr) {
        float w[N], b[N];
        load_param<P>(w, p.weight, p.weight_type, at * N, 1.0f);
        load_param<P>(b, p.bias, p.weight_type, at * N, kNoBias);
        affine(p, y, w, b);
      }
      if constexpr (kTwos) {
        if (p.eager) {
          finish_twos<T, N>(p, y, add_one(m[i]), a[i], to + at * N);
          continue;
        }
      }
      modulate<T, P>(p, y, mul, add, to + at * N);
    } else {
      if constexpr (kTwos) {
        if (p.two_step) {
          finish_twos<T, N>(p, y, m[i], a[i], to + at * N);
          continue;
        }
      }
      finish_affine<T, P>(p, y, mul, add, to + at * N);
    }
  }
}

// Any width, any alignment, any mix of dtypes: the row is read two or three times, from L2 mostly
// after the first. A thread reads of `sum` what it wrote itself.
// At least one CTA per SM, said for ptxas: left to itself it aims at two on sm_80, and spills.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads, 1)
    fused_norm_loop_kernel(const __grid_constant__ FusedNormParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[kTwicePartials];
  const int64_t row = G::row(p.first_row);
  const int64_t to = row * p.x_rows.cols;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);

  if (p.sum != nullptr) {
    const T *residual = static_cast<const T *>(p.residual) + row_offset(p.residual_rows, row);
    const int64_t gate_row = p.gate != nullptr ? row_offset(p.gate_rows, row) : 0;
    T *sum = static_cast<T *>(p.sum) + to;
    for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
      Vec<T, N> v, r;
      v.template load<Cache::kStream>(x + at * N);
      r.template load<Cache::kStream>(residual + at * N);
      float g[N];
      load_param<AnyType>(g, p.gate, p.modulation_type, gate_row + at * N, 1.0f);
      add_residual(v, r, g, p.gate != nullptr, p.eager);
      v.store(sum + at * N);
    }
    x = sum;
  }

  LayerMap map;
  if (p.layer) {
    map = layer_map<G, T, N>(x, p.vectors, p.inverse_cols, p.eps, partial);
  } else {
    float sum, square[1];
    sums_of_row<T, N, G>(x, p.vectors, 0.0f, sum, square[0]);
    map = scale_map(rsqrtf(fmaf(G::sum(square, partial), p.inverse_cols, p.eps)));
  }

  const bool modulated = p.scale != nullptr;
  const int64_t scale_row = modulated ? row_offset(p.scale_rows, row) : 0;
  const int64_t shift_row = modulated ? row_offset(p.shift_rows, row) : 0;
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at * N);
    float y[N], w[N], b[N];
    v.get(y);
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = map(y[k]);
    load_param<AnyType>(w, p.weight, p.weight_type, at * N, 1.0f);
    load_param<AnyType>(b, p.bias, p.weight_type, at * N, kNoBias);
    if (modulated) {
      if (p.weight != nullptr || p.bias != nullptr) affine(p, y, w, b);
      float mul[N], add[N];
      load_param<AnyType>(mul, p.scale, p.modulation_type, scale_row + at * N, 0.0f);
      load_param<AnyType>(add, p.shift, p.modulation_type, shift_row + at * N, 0.0f);
      modulate<T, AnyType>(p, y, mul, add, to + at * N);
    } else {
      finish_affine<T, AnyType>(p, y, w, b, to + at * N);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "fused_norm";

// Whether all is of one half type: fused_norm_half.cuh has what models ask for.
template <class T, class P>
inline constexpr bool kIsHalf = std::is_same_v<T, P> && sizeof(T) == 2;

template <class T, class P, bool kSum>
auto select_fused_kernel(Shape shape) -> void (*)(FusedNormParams) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  if (shape == Shape::k32x2) return &fused_norm_kernel<T, P, N, 32, 2, kSum>;
  if constexpr (!kIsHalf<T, P>) {
    if constexpr (std::is_same_v<T, P>) {
      if (shape == Shape::k8x2) return &fused_norm_kernel<T, P, N, 8, 2, kSum>;
    }
    if constexpr (!kSum) {
      if (shape == Shape::k32x4) return &fused_norm_kernel<T, P, N, 32, 4, kSum>;
    }
    if (shape == Shape::kCtaX1) return &fused_norm_kernel<T, P, N, kCta, 1, kSum>;
  }
  if constexpr (!kIsHalf<T, P> || kSum) {
    if (shape == Shape::kCtaX2) return &fused_norm_kernel<T, P, N, kCta, 2, kSum>;
  }
  return &fused_norm_kernel<T, P, N, kCta, 4, kSum>;
}

template <class T, class P, bool kSum>
int32_t launch_fast(FusedNormParams &p, void *stream) {
  RowPlan plan;
  if constexpr (kIsHalf<T, P>) {
    constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
    if constexpr (kSum) {
      int32_t status = HFP_OK;
      const bool added = is_half_row(p) && p.scale == nullptr;
      if (added && launch_added_full<T>(p, stream, kOp, &status)) return status;
    }
    const Rows tensors[] = {p.x_rows, p.residual_rows, p.gate_rows, p.scale_rows, p.shift_rows};
    if (is_half_row(p) && split_rows(tensors, N, &p.split)) {
      plan = plan_fused_half(p.vectors, p.x_rows.rows, kSum, p.scale != nullptr);
      if (plan.shape != Shape::kLoop) {
        return launch_rows(select_half_kernel<T>(p, plan.shape), plan, p, stream, kOp);
      }
    }
    plan = plan_fused_rest(p.vectors, kSum);
  } else {
    plan = plan_fused(p.vectors, p.x_rows.rows, std::is_same_v<T, P>, kSum);
  }
  return launch_rows(select_fused_kernel<T, P, kSum>(plan.shape), plan, p, stream, kOp);
}

template <class T, class P>
int32_t launch_fast(FusedNormParams &p, void *stream) {
  return p.sum != nullptr ? launch_fast<T, P, true>(p, stream)
                          : launch_fast<T, P, false>(p, stream);
}

template <class T, int N>
int32_t launch_loop(FusedNormParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch_rows(&fused_norm_loop_kernel<T, N>, {Shape::kLoop, threads, 1}, p, stream, kOp);
}

template <class T>
int32_t launch_typed(FusedNormParams &p, DType type, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t parameter = size_of(p.modulation_type);
  const bool aligned =
      p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
      rows_aligned(p.residual_rows, p.residual, sizeof(T)) &&
      rows_aligned(p.gate_rows, p.gate, parameter) &&
      rows_aligned(p.scale_rows, p.scale, parameter) &&
      rows_aligned(p.shift_rows, p.shift, parameter) && pointer_aligned(p.weight) &&
      pointer_aligned(p.bias) && pointer_aligned(p.out) && pointer_aligned(p.sum);
  if (!aligned) return launch_loop<T, 1>(p, stream);
  p.vectors = p.x_rows.cols / N;
  if (p.vectors <= kMaxFusedVectors && p.weight_type == p.modulation_type) {
    if (p.weight_type == type) return launch_fast<T, T>(p, stream);
    if constexpr (!std::is_same_v<T, float>) {
      if (p.weight_type == DType::F32) return launch_fast<T, float>(p, stream);
    }
  }
  return launch_loop<T, N>(p, stream);
}

}  // namespace

int32_t fused_norm(const FusedNormArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  FusedNormParams p{};
  p.out = a.out;
  p.sum = a.sum;
  p.x = a.x;
  p.residual = a.residual;
  p.gate = a.gate;
  p.weight = a.weight;
  p.bias = a.bias;
  p.scale = a.scale;
  p.shift = a.shift;
  p.x_rows = a.x_rows;
  p.residual_rows = a.residual_rows;
  p.gate_rows = a.gate_rows;
  p.scale_rows = a.scale_rows;
  p.shift_rows = a.shift_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  // Without a weight the kernels multiply by 1 + weight_offset, which then has to be 1.
  p.weight_offset = a.weight != nullptr ? a.weight_offset : 0.0f;
  p.out_type = a.out_type;
  // Absent parameters take the dtype of the others, so that they do not ask for the general kernel.
  const bool affine = a.weight != nullptr || a.bias != nullptr;
  const bool modulation = a.scale != nullptr || a.gate != nullptr;
  p.weight_type = affine ? a.weight_type : modulation ? a.modulation_type : a.type;
  p.modulation_type = modulation ? a.modulation_type : p.weight_type;
  p.layer = a.norm_type == HFP_NORM_LAYER;
  p.two_step = a.cast != HFP_CAST_NONE;
  p.round_type = a.cast == HFP_CAST_INPUT ? a.type : p.weight_type;
  p.eager = a.eager;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.type, stream);
    case DType::F16: return launch_typed<__half>(p, a.type, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.type, stream);
  }
}

}  // namespace hfp::cuda
