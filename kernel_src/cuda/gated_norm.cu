// gated_norm.cu: rms norm of groups of columns, with act(gate) before or after the norm, or without a
// gate; hfp_gated_rms_norm on CUDA. Dao & Gu, arXiv:2405.21060 (Mamba-2).
#include "activations.cuh"
#include "ordered.cuh"
#include "packed.cuh"
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
  bool gate_first, gate_last, once, sigmoid;
  DType weight_type;
  uint32_t zero;  // 0; see Vec::stay_packed
};

// What a kernel knows when it is compiled. kNormFirst, kNormLast, kNoGate: T is a half type and the dtype
// of the weight, and every step is rounded (not `once`); an absent weight is 1. kAny: p says it all; x is
// read where there is no gate.
enum class Order { kNormFirst, kNormLast, kNoGate, kAny };

template <Order kOrder>
__device__ __forceinline__ bool gate_first(const GatedNormParams &p) {
  return kOrder == Order::kAny ? p.gate_first : kOrder == Order::kNormLast;
}

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
template <Order kOrder, class T, int N>
__device__ __forceinline__ void input(const GatedNormParams &p, float (&y)[N], const Vec<T, N> &v,
                                      const Vec<T, N> &gate) {
  v.get(y);
  if (gate_first<kOrder>(p)) times_gate(p, y, gate);
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
__device__ __forceinline__ void finish_any(const GatedNormParams &p, float (&y)[N],
                                           const Vec<T, N> &gate, float scale, int64_t weight_at,
                                           int64_t at) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  const bool weighted = p.weight != nullptr;
  if (!p.once && (weighted || p.gate_last)) round_to<T>(y);
  if (weighted) {
    float w[N];
    load_any(w, p.weight, p.weight_type, weight_at);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= w[i];
    if (!p.once && p.gate_last) round_to<T>(y);
  }
  if (p.gate_last) times_gate(p, y, gate);
  store_as<T>(p.out, at, y);
}

// The same for the orders that are known.
template <Order kOrder, class T, int N>
__device__ __forceinline__ void finish(const GatedNormParams &p, float (&y)[N],
                                       const Vec<T, N> &gate, float scale, const Vec<T, N> &weight,
                                       int64_t at) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= scale;
  Vec<T, N> hat;
  hat.set(y);
  Vec<T, N> product = mul_twos(hat, weight);
  if constexpr (kOrder == Order::kNormFirst) {
    product.get(y);
    times_gate(p, y, gate);
    product.set(y);
  }
  product.store(static_cast<T *>(p.out) + at);
}

// ---------------------------------------------------------------------------------------------
// Kernels

// Threads on an SM that the registers of the known orders have to allow.
constexpr int wanted_threads(Order order, int vectors) {
  return order == Order::kAny ? 0 : vectors == 2 ? kManyThreads : kSomeThreads;
}

// The row in registers.
template <Order kOrder, class T, int N, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors),
                                  resident_ctas(max_threads(kThreads, kVectors),
                                                wanted_threads(kOrder, kVectors)))
    gated_norm_kernel(const __grid_constant__ GatedNormParams p) {
  using G = Group<kThreads>;
  constexpr bool kAny = kOrder == Order::kAny, kHold = !kAny && kVectors <= 2;
  constexpr bool kGate = kOrder != Order::kNoGate;
  __shared__ float partial[kPartials];

  const int64_t row = G::row(p.first_row);
  const int first = G::index(), stride = G::stride();
  const int vectors = row < p.x_rows.rows ? static_cast<int>(p.vectors) - first : 0;  // left
  const int64_t known_row = row < p.x_rows.rows ? row : 0;
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, known_row) + first * N;
  const T *g = static_cast<const T *>(p.gate) + row_offset(p.gate_rows, known_row) + first * N;
  int64_t to = row * p.x_rows.cols + first * N;
  int64_t weight_at = row_offset(p.weight_rows, known_row) + first * N;
  // Not where the order is not known: ptxas then puts the gate's last load behind the use of the first.
  // Once, norm last, 4096 x 8192: 55.9 us -> 68.2.
  if constexpr (!kAny) settle(x, g, to, weight_at);
  wait_for_previous();

  Vec<T, N> v[kVectors], gate[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].zero();
    gate[i].zero();
    if (i * stride < vectors) {
      v[i].template load<Cache::kStream>(x + i * stride * N);
      if constexpr (kGate) gate[i].template load<Cache::kStream>(g + i * stride * N);
    }
  }
  Vec<T, N> w[kHold ? kVectors : 1];
  const T *weight = static_cast<const T *>(p.weight) + weight_at;
  if constexpr (kHold) load_early(w, p.weight != nullptr, weight, stride, vectors, 1.0f);
  if constexpr (!kAny) keep_loads_above(p.zero);

  // Gated inputs are kept in fp32: the gate's exponential and reciprocal are worth more than the
  // registers.
  float y[kVectors][N], squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    input<kOrder>(p, y[i], v[i], gate[i]);
    squares[i] = sum_of_squares(y[i]);
  }
  const float scale = rsqrtf(fmaf(G::sum(squares, partial), p.inverse_cols, p.eps));

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * stride >= vectors) break;
    if constexpr (!kAny || kVectors >= 4) v[i].stay_packed(p.zero);
    if constexpr (kGate && (!kAny || kVectors >= 4)) gate[i].stay_packed(p.zero);
    if constexpr (kOrder == Order::kNormFirst || !kGate) v[i].get(y[i]);
    const int64_t at = to + i * stride * N;
    if constexpr (kAny) {
      finish_any(p, y[i], gate[i], scale, weight_at + i * stride * N, at);
    } else {
      if constexpr (!kHold) {
        load_early(w, p.weight != nullptr, weight + i * stride * N, 0, 1, 1.0f);
      }
      finish<kOrder>(p, y[i], gate[i], scale, w[kHold ? i : 0], at);
    }
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
    input<Order::kAny>(p, y, v, gate);
    own[0] += sum_of_squares(y);
  }
  const float scale = rsqrtf(fmaf(G::sum(own, partial), p.inverse_cols, p.eps));

  const int64_t weight_row = p.weight != nullptr ? row_offset(p.weight_rows, row) : 0;
  for (int64_t at = G::index(); at < p.vectors; at += G::stride()) {
    Vec<T, N> v, gate;
    v.template load<Cache::kStream>(x + at * N);
    gate.template load<Cache::kStream>(g + at * N);
    float y[N];
    input<Order::kAny>(p, y, v, gate);
    finish_any(p, y, gate, scale, weight_row + at * N, row * p.x_rows.cols + at * N);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "gated_rms_norm";

template <Order kOrder, class T, int N>
int32_t launch_fast(GatedNormParams &p, void *stream) {
  const RowPlan plan = plan_gated(p.vectors, p.x_rows.rows, kOrder != Order::kAny);
  const auto run = [&](auto *kernel) { return launch_rows(kernel, plan, p, stream, kOp); };
  switch (plan.shape) {
    case Shape::k8x2: return run(&gated_norm_kernel<kOrder, T, N, 8, 2>);
    case Shape::k16x2:
      if constexpr (kOrder != Order::kAny) return run(&gated_norm_kernel<kOrder, T, N, 16, 2>);
      break;
    case Shape::kCtaX1:
      if constexpr (kOrder == Order::kAny) return run(&gated_norm_kernel<kOrder, T, N, kCta, 1>);
      break;
    case Shape::kCtaX2: return run(&gated_norm_kernel<kOrder, T, N, kCta, 2>);
    case Shape::kCtaX4: return run(&gated_norm_kernel<kOrder, T, N, kCta, 4>);
    default: break;
  }
  return run(&gated_norm_kernel<kOrder, T, N, 32, 2>);
}

template <class T, int N>
int32_t launch_loop(GatedNormParams &p, void *stream) {
  p.vectors = p.x_rows.cols / N;
  const int threads = p.vectors < kMaxThreads ? cta_threads(p.vectors, 1) : kMaxThreads;
  return launch_rows(&gated_norm_loop_kernel<T, N>, {Shape::kLoop, threads, 1}, p, stream, kOp);
}

template <class T>
int32_t launch_typed(GatedNormParams &p, DType type, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const bool aligned = p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
                       rows_aligned(p.gate_rows, p.gate, sizeof(T)) &&
                       rows_aligned(p.weight_rows, p.weight, size_of(p.weight_type)) &&
                       pointer_aligned(p.out);
  if (!aligned) return launch_loop<T, 1>(p, stream);
  p.vectors = p.x_rows.cols / N;
  if (p.vectors > 4 * kMaxThreadsX4) return launch_loop<T, N>(p, stream);
  if constexpr (kInTwos<T, N>) {
    if (!p.once && (p.weight == nullptr || p.weight_type == type)) {
      return p.gate_last    ? launch_fast<Order::kNormFirst, T, N>(p, stream)
             : p.gate_first ? launch_fast<Order::kNormLast, T, N>(p, stream)
                            : launch_fast<Order::kNoGate, T, N>(p, stream);
    }
  }
  return launch_fast<Order::kAny, T, N>(p, stream);
}

}  // namespace

int32_t gated_norm(const GatedNormArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  GatedNormParams p{};
  p.out = a.out;
  p.x = a.x;
  p.gate = a.gate != nullptr ? a.gate : a.x;
  p.weight = a.weight;
  p.x_rows = a.x_rows;
  p.gate_rows = a.gate_rows;
  p.weight_rows = a.weight_rows;
  p.inverse_cols = static_cast<float>(1.0 / static_cast<double>(a.x_rows.cols));
  p.eps = a.eps;
  p.gate_first = a.gate != nullptr && !a.norm_before_gate;
  p.gate_last = a.gate != nullptr && a.norm_before_gate;
  p.once = a.once;
  p.sigmoid = a.sigmoid;
  p.weight_type = a.weight_type;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.type, stream);
    case DType::F16: return launch_typed<__half>(p, a.type, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.type, stream);
  }
}

}  // namespace hfp::cuda
