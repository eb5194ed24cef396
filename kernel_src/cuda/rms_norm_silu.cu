// rms_norm_silu.cu: the bias of a convolution, rms norm, modulation and SiLU in one pass over the
// channels of each position; hfp_rms_norm_silu on CUDA.
#include "activations.cuh"
#include "ordered.cuh"
#include "rows.cuh"

namespace hfp::cuda {
namespace {

struct RmsNormSiluParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *x, *addend, *weight, *scale, *shift;
  Rows x_rows, scale_rows, shift_rows;
  int64_t first_row;
  int64_t vectors;  // per row
  float inverse_cols, eps;
  DType weight_type, modulation_type;
  uint32_t zero;  // 0; see keep_loads_above
};

// ---------------------------------------------------------------------------------------------
// Steps on one vector

// x + addend
template <class T, int N>
__device__ __forceinline__ void input(float (&y)[N], const Vec<T, N> &v, const Vec<T, N> &addend) {
  float a[N];
  v.get(y);
  addend.get(a);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] += a[i];
}

template <int N>
__device__ __forceinline__ float sum_of_squares(const float (&y)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(y[i], y[i], sum);
  return sum;
}

// y: the input. The row of scale and shift: where a row of theirs begins. kPlain: without weight
// and modulation.
template <bool kPlain, class T, int N>
__device__ __forceinline__ void finish(const RmsNormSiluParams &p, float (&y)[N], float rstd,
                                       int64_t scale_row, int64_t shift_row, int64_t col,
                                       int64_t at) {
  if constexpr (kPlain) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= rstd;
  } else {
    float w[N];
    load_param<AnyType>(w, p.weight, p.weight_type, col, 1.0f);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= rstd * w[i];
    if (p.scale != nullptr) {
      float scale[N], shift[N];
      load_any(scale, p.scale, p.modulation_type, scale_row + col);
      load_any(shift, p.shift, p.modulation_type, shift_row + col);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = fmaf(y[i], 1.0f + scale[i], shift[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = times_sigmoid<sizeof(T) == 4>(y[i], y[i]);
  store_as<T>(p.out, at, y);
}

// ---------------------------------------------------------------------------------------------
// Kernels

// Threads on an SM that the registers have to allow.
constexpr int wanted_threads(bool plain, int row_threads) {
  return !plain || row_threads == kCta ? 0 : row_threads == 8 ? kManyThreads : kSomeThreads;
}

// The row in registers.
template <bool kPlain, class T, int N, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors),
                                  resident_ctas(max_threads(kThreads, kVectors),
                                                wanted_threads(kPlain, kThreads)))
    rms_norm_silu_kernel(const __grid_constant__ RmsNormSiluParams p) {
  using G = Group<kThreads>;
  __shared__ float partial[kPartials];

  const int64_t row = G::row(p.first_row);
  const int first = G::index(), stride = G::stride();
  const int vectors = row < p.x_rows.rows ? static_cast<int>(p.vectors) - first : 0;  // left
  const int64_t known_row = row < p.x_rows.rows ? row : 0;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, known_row) + first * N;
  const T *a = static_cast<const T *>(p.addend) + first * N;
  int64_t to = row * p.x_rows.cols + first * N;
  settle(x, a, to);
  wait_for_previous();

  Vec<T, N> v[kVectors], addend[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    addend[i].zero();
    if (i * stride < vectors) v[i].template load<Cache::kStream>(x + i * stride * N);
  }
  load_early(addend, p.addend != nullptr, a, stride, vectors, 0.0f);
  keep_loads_above(p.zero);

  float y[kVectors][N], squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    input(y[i], v[i], addend[i]);
    squares[i] = sum_of_squares(y[i]);
  }
  const float rstd = rsqrtf(fmaf(G::sum(squares, partial), p.inverse_cols, p.eps));

  const bool modulated = !kPlain && p.scale != nullptr;
  const int64_t scale_row = modulated ? row_offset(p.scale_rows, known_row) : 0;
  const int64_t shift_row = modulated ? row_offset(p.shift_rows, known_row) : 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * stride >= vectors) break;
    finish<kPlain, T>(p, y[i], rstd, scale_row, shift_row, (first + i * stride) * N,
                      to + i * stride * N);
  }
}

template <class T, int N>
__device__ __forceinline__ void load_input(const RmsNormSiluParams &p, float (&y)[N], const T *x,
                                           int64_t col) {
  Vec<T, N> v, addend;
  v.template load<Cache::kStream>(x + col);
  addend.zero();
  if (p.addend != nullptr) {
    addend.template load<Cache::kReadOnly>(static_cast<const T *>(p.addend) + col);
  }
  input(y, v, addend);
}

// Any width and alignment: the row is read twice, the second time from L2 mostly.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_silu_loop_kernel(const __grid_constant__ RmsNormSiluParams p) {
  wait_for_previous();
  using G = Group<kCta>;
  __shared__ float partial[kPartials];
  const int64_t row = G::row(p.first_row);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);

  float own[1] = {0.0f};
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    float y[N];
    load_input<T>(p, y, x, at * N);
    own[0] += sum_of_squares(y);
  }
  const float rstd = rsqrtf(fmaf(G::sum(own, partial), p.inverse_cols, p.eps));

  const bool modulated = p.scale != nullptr;
  const int64_t scale_row = modulated ? row_offset(p.scale_rows, row) : 0;
  const int64_t shift_row = modulated ? row_offset(p.shift_rows, row) : 0;
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    float y[N];
    load_input<T>(p, y, x, at * N);
    finish<false, T>(p, y, rstd, scale_row, shift_row, at * N, row * p.x_rows.cols + at * N);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "rms_norm_silu";

// bf16, plain, on an H200, before -> after: 153600 x 256 48.8 us -> 38.3 (16 threads of two vectors
// for 32; 32 of one 46.9, persistent CTAs 42.5), 1204224 x 128 154 -> 145.4 (16 threads of one vector
// 182), 22080 x 512 warm 12.0 -> 10.2.
template <bool kPlain, class T, int N>
int32_t launch_fast(RmsNormSiluParams &p, void *stream) {
  const auto run = [&](auto *kernel, RowPlan plan) {
    return launch_rows(kernel, plan, p, stream, kOp);
  };
  if (p.vectors <= 16) {
    return run(&rms_norm_silu_kernel<kPlain, T, N, 8, 2>,
               {Shape::k8x2, kRowThreads, kRowThreads / 8});
  }
  if (p.vectors <= 32) {
    return run(&rms_norm_silu_kernel<kPlain, T, N, 16, 2>,
               {Shape::k16x2, kRowThreads, kRowThreads / 16});
  }
  if (p.vectors <= 64) {
    return run(&rms_norm_silu_kernel<kPlain, T, N, 32, 2>,
               {Shape::k32x2, kRowThreads, kRowThreads / 32});
  }
  return run(&rms_norm_silu_kernel<kPlain, T, N, kCta, 1>,
             {Shape::kCtaX1, cta_threads(p.vectors, 1), 1});
}

template <class T, int N>
int32_t launch_loop(RmsNormSiluParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch_rows(&rms_norm_silu_loop_kernel<T, N>, {Shape::kLoop, threads, 1}, p, stream,
                     kOp);
}

template <class T>
int32_t launch_typed(RmsNormSiluParams &p, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const int64_t modulation = size_of(p.modulation_type);
  const bool aligned = p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
                       rows_aligned(p.scale_rows, p.scale, modulation) &&
                       rows_aligned(p.shift_rows, p.shift, modulation) &&
                       pointer_aligned(p.addend) && pointer_aligned(p.weight) &&
                       pointer_aligned(p.out);
  if (!aligned) return launch_loop<T, 1>(p, stream);
  p.vectors = p.x_rows.cols / N;
  if (p.vectors > kMaxThreads) return launch_loop<T, N>(p, stream);
  if constexpr (sizeof(T) == 2) {
    if (p.weight == nullptr && p.scale == nullptr) return launch_fast<true, T, N>(p, stream);
  }
  return launch_fast<false, T, N>(p, stream);
}

}  // namespace

int32_t rms_norm_silu(const RmsNormSiluArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  RmsNormSiluParams p{};
  p.out = a.out;
  p.x = a.x;
  p.addend = a.addend;
  p.weight = a.weight;
  p.scale = a.scale;
  p.shift = a.shift;
  p.x_rows = a.x_rows;
  p.scale_rows = a.scale_rows;
  p.shift_rows = a.shift_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  p.weight_type = a.weight_type;
  p.modulation_type = a.modulation_type;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, stream);
    case DType::F16: return launch_typed<__half>(p, stream);
    default: return launch_typed<__nv_bfloat16>(p, stream);
  }
}

}  // namespace hfp::cuda
