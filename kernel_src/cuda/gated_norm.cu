// gated_norm.cu: rms norm of groups of columns with a gate, act(gate) before or after the norm;
// hfp_gated_rms_norm on CUDA. Dao & Gu, arXiv:2405.21060 (Mamba-2).
#include "activations.cuh"
#include "rows.cuh"

namespace hfp::cuda {
namespace {

struct GatedNormParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *x, *gate, *weight;
  Rows x_rows, gate_rows, weight_rows;  // a row is one group
  int64_t first_row;
  int64_t vectors;  // per row
  float inverse_cols, eps;
  bool norm_first, once, sigmoid;
  DType weight_type;
  uint32_t zero;  // 0; see Vec::stay_packed
};

// ---------------------------------------------------------------------------------------------
// Steps on one vector

template <class T, int N>
__device__ __forceinline__ void times_gate(const GatedNormParams &p, float (&y)[N],
                                           const Vec<T, N> &gate) {
  float g[N];
  gate.get(g);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= times_sigmoid<sizeof(T) == 4>(p.sigmoid ? 1.0f : g[i], g[i]);
}

// What is normalized: x, or x * act(gate) in fp32.
template <class T, int N>
__device__ __forceinline__ void input(const GatedNormParams &p, float (&y)[N], const Vec<T, N> &v,
                                      const Vec<T, N> &gate) {
  v.get(y);
  if (!p.norm_first) times_gate(p, y, gate);
}

template <int N>
__device__ __forceinline__ float sum_of_squares(const float (&y)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(y[i], y[i], sum);
  return sum;
}

// y: the input.
template <class T, int N>
__device__ __forceinline__ void finish(const GatedNormParams &p, float (&y)[N],
                                       const Vec<T, N> &gate, float scale, int64_t weight_row,
                                       int64_t col, int64_t at) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  const bool weighted = p.weight != nullptr;
  if (!p.once && (weighted || p.norm_first)) round_to<T>(y);
  if (weighted) {
    float w[N];
    load_any(w, p.weight, p.weight_type, weight_row + col);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= w[i];
    if (!p.once && p.norm_first) round_to<T>(y);
  }
  if (p.norm_first) times_gate(p, y, gate);
  store_as<T>(p.out, at, y);
}

// ---------------------------------------------------------------------------------------------
// Kernels

// The row in registers.
template <class T, int N, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors))
    gated_norm_kernel(const __grid_constant__ GatedNormParams p) {
  wait_for_previous();
  using G = Group<kThreads>;
  __shared__ float partial[kPartials];

  const int64_t row = G::row(p.first_row);
  const int vectors = row < p.x_rows.rows ? static_cast<int>(p.vectors) : 0;
  const int64_t known_row = vectors > 0 ? row : 0;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, known_row);
  const T *g = static_cast<const T *>(p.gate) + row_offset(p.gate_rows, known_row);

  Vec<T, N> v[kVectors], gate[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    v[i].zero();
    gate[i].zero();
    if (at < vectors) {
      v[i].template load<Cache::kStream>(x + at * N);
      gate[i].template load<Cache::kStream>(g + at * N);
    }
  }
  // Kept in fp32: the gate's exponential and reciprocal are worth more than the registers.
  float y[kVectors][N], squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    input(p, y[i], v[i], gate[i]);
    squares[i] = sum_of_squares(y[i]);
  }
  const float scale = rsqrtf(fmaf(G::sum(squares, partial), p.inverse_cols, p.eps));

  const int64_t weight_row = p.weight != nullptr ? row_offset(p.weight_rows, known_row) : 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at >= vectors) break;
    if constexpr (kVectors >= 4) v[i].stay_packed(p.zero), gate[i].stay_packed(p.zero);
    finish(p, y[i], gate[i], scale, weight_row, at * N, row * p.x_rows.cols + at * N);
  }
}

// Any width and alignment: the row is read twice, the second time from L2 mostly.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    gated_norm_loop_kernel(const __grid_constant__ GatedNormParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[kPartials];
  const int64_t row = G::row(p.first_row);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const T *g = static_cast<const T *>(p.gate) + row_offset(p.gate_rows, row);

  float own[1] = {0.0f};
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v, gate;
    v.template load<Cache::kStream>(x + at * N);
    gate.template load<Cache::kStream>(g + at * N);
    float y[N];
    input(p, y, v, gate);
    own[0] += sum_of_squares(y);
  }
  const float scale = rsqrtf(fmaf(G::sum(own, partial), p.inverse_cols, p.eps));

  const int64_t weight_row = p.weight != nullptr ? row_offset(p.weight_rows, row) : 0;
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v, gate;
    v.template load<Cache::kStream>(x + at * N);
    gate.template load<Cache::kStream>(g + at * N);
    float y[N];
    input(p, y, v, gate);
    finish(p, y, gate, scale, weight_row, at * N, row * p.x_rows.cols + at * N);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "gated_rms_norm";

template <class T, int N>
int32_t launch_fast(GatedNormParams &p, void *stream) {
  if (p.vectors <= 16) {
    return launch_rows(&gated_norm_kernel<T, N, 8, 2>,
                       {Shape::k8x2, kRowThreads, kRowThreads / 8}, p, stream, kOp);
  }
  if (p.vectors <= 64) {
    return launch_rows(&gated_norm_kernel<T, N, 32, 2>,
                       {Shape::k32x2, kRowThreads, kRowThreads / 32}, p, stream, kOp);
  }
  if (p.vectors <= kMaxThreads && p.x_rows.rows <= kLatencyFused / p.vectors) {
    return launch_rows(&gated_norm_kernel<T, N, kCta, 1>,
                       {Shape::kCtaX1, cta_threads(p.vectors, 1), 1}, p, stream, kOp);
  }
  if (p.vectors <= 2 * kMaxThreadsX4) {
    return launch_rows(&gated_norm_kernel<T, N, kCta, 2>,
                       {Shape::kCtaX2, cta_threads(p.vectors, 2), 1}, p, stream, kOp);
  }
  return launch_rows(&gated_norm_kernel<T, N, kCta, 4>,
                     {Shape::kCtaX4, cta_threads(p.vectors, 4), 1}, p, stream, kOp);
}

template <class T, int N>
int32_t launch_loop(GatedNormParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch_rows(&gated_norm_loop_kernel<T, N>, {Shape::kLoop, threads, 1}, p, stream, kOp);
}

template <class T>
int32_t launch_typed(GatedNormParams &p, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const bool aligned = p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
                       rows_aligned(p.gate_rows, p.gate, sizeof(T)) &&
                       rows_aligned(p.weight_rows, p.weight, size_of(p.weight_type)) &&
                       pointer_aligned(p.out);
  if (!aligned) return launch_loop<T, 1>(p, stream);
  p.vectors = p.x_rows.cols / N;
  if (p.vectors <= 4 * kMaxThreadsX4) return launch_fast<T, N>(p, stream);
  return launch_loop<T, N>(p, stream);
}

}  // namespace

int32_t gated_norm(const GatedNormArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  GatedNormParams p{};
  p.out = a.out;
  p.x = a.x;
  p.gate = a.gate;
  p.weight = a.weight;
  p.x_rows = a.x_rows;
  p.gate_rows = a.gate_rows;
  p.weight_rows = a.weight_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  p.norm_first = a.norm_before_gate;
  p.once = a.once;
  p.sigmoid = a.sigmoid;
  p.weight_type = a.weight_type;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, stream);
    case DType::F16: return launch_typed<__half>(p, stream);
    default: return launch_typed<__nv_bfloat16>(p, stream);
  }
}

}  // namespace hfp::cuda
