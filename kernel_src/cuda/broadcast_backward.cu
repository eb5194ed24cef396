// broadcast_backward.cu: the gradients of a * b + c and of act(x + bias), whose b, c and bias are the
// same for many rows: see BroadcastBackwardArgs. hfp_mul_add_backward, hfp_add_gelu_backward and
// hfp_add_silu_backward on CUDA.
//
// One pass over x and grad. A CTA has a part of the rows of one sum, and up to kLanes vectors of their
// columns, in groups of threads that have other rows each; a thread has one vector of columns, keeps
// the sums of its rows in registers, and asks for its next rows before it computes the present one.
// With parts > 1 the groups' sums together are a row of `partials`, which a second, small launch adds
// up (partial_sums.cu). Little work is one launch, of CTAs that have all rows of a few columns, as is more
// of it on sm_90, of clusters that have (broadcast_backward_cluster.cuh); both leave `partials` as it is.
// No atomics, and the number of CTAs depends on the shape only: same input, same bits.
#include "broadcast_backward_cluster.cuh"
#include "broadcast_backward_row.cuh"
#include "ordered.cuh"
#include "partial_sums.cuh"

namespace hfp::cuda {
namespace {

constexpr int kThreads = 256;  // of a CTA, where rows are not at one distance
constexpr int64_t kMaxPlainRows = int64_t{1} << 30;  // they are counted in 32 bits
constexpr char kOp[] = "broadcast_backward";

// ---------------------------------------------------------------------------------------------
// Kernels

// One row's x and grad as they lie in memory. Grad: T or float.
template <class T, class Grad, int N>
struct Held {
  Vec<T, N> x;
  Vec<Grad, N> grad;

  __device__ __forceinline__ void load(const BroadcastParams &p, int64_t x_at, int64_t grad_at) {
    x.template load<Cache::kStream>(static_cast<const T *>(p.x) + x_at);
    grad.template load<Cache::kStream>(static_cast<const Grad *>(p.grad) + grad_at);
  }
  __device__ __forceinline__ void load_row(const BroadcastParams &p, int64_t row, int64_t col) {
    load(p, row_offset(p.x_rows, row) + col, row_offset(p.grad_rows, row) + col);
  }
};

// Stores dx of every step-th row from r on, `now` the first of them, and adds these rows to the sums.
// Index: int where it is enough, which takes fewer registers (of 64, which some need all).
template <class F, class T, class Grad, class Index, int N>
__device__ __forceinline__ void sum_rows(const BroadcastParams &p, Held<T, Grad, N> now,
                                         const float (&param)[N], Index r, Index step,
                                         int64_t row_0, int64_t col, float (&first)[N],
                                         float (&second)[N]) {
  const Index reduced = static_cast<Index>(p.reduced);
  int64_t row = row_0 + r * p.inner;
  while (r < reduced) {
    Held<T, Grad, N> next = now;
    if (r + step < reduced) next.load_row(p, row + step * p.inner, col);
    float x[N], g[N];
    now.x.get(x);
    now.grad.get(g);
    F::template apply<T, N>(g, x, param, first, second);
    store_as<T>(p.dx, row * p.x_rows.cols + col, g);
    now = next;
    r += step;
    row += step * p.inner;
  }
}

// Stores kCount sums of the CTA, of a vector of columns from element `from` on, where they belong; to:
// null where they are not wanted.
template <int N, int kCount>
__device__ __forceinline__ void put_sums(const BroadcastParams &p, void *to, bool after_first,
                                         int64_t unit, int64_t vector, int from,
                                         const float (&sums)[kCount]) {
  if (to == nullptr) return;
  if (p.parts > 1) {
    float *const row = p.partials + unit * p.wide + (after_first ? p.x_rows.cols : 0);
    if constexpr (N == 8) {
      store_half(row, vector, from != 0, p.x_rows.cols, sums);
    } else {
      store_as<float>(row, vector * N + from, sums);
    }
  } else {
    store_any(to, p.param_type, unit * p.x_rows.cols + vector * N + from, sums);
  }
}

// A thread's part of the work.
template <class Index>
struct Place {
  Index unit;
  int group, first_vector, vector;  // first_vector: of the CTA
  bool active;
};

// Found again after the rows rather than kept: registers limit how many CTAs fit.
template <class Index>
__device__ __forceinline__ Place<Index> place_of(const BroadcastParams &p) {
  unsigned thread, block;
  asm volatile("mov.u32 %0, %%tid.x;\nmov.u32 %1, %%ctaid.x;" : "=r"(thread), "=r"(block));
  Place<Index> at;
  const unsigned local = p.by_chunks.divide(block);
  at.unit = static_cast<Index>(p.first_unit) + static_cast<Index>(local);
  at.group = static_cast<int>(p.by_lanes.divide(thread));
  at.first_vector = static_cast<int>(block - local * p.chunks) * p.lanes;
  at.vector = at.first_vector + static_cast<int>(thread) - at.group * p.lanes;
  at.active = at.group < p.groups && at.vector < p.vectors;
  return at;
}

template <class F, bool kPlain>
inline constexpr int kCtaThreads = kPlain ? F::kThreads : kThreads;

// Bytes of shared memory that broadcast_backward_kernel declares.
template <class F, int N, bool kPlain>
inline constexpr int kFixed =
    kCtaThreads<F, kPlain> * F::kSums * N * static_cast<int>(sizeof(float));

// kPlain: rows are at one distance from each other.
template <class T, class Grad, class F, int N, bool kPlain>
__global__ void __launch_bounds__(kCtaThreads<F, kPlain>, kPlain ? F::kCtas : 1)
    broadcast_backward_kernel(const __grid_constant__ BroadcastParams p) {
  float first[N], second[N];
#pragma unroll
  for (int i = 0; i < N; ++i) first[i] = second[i] = 0.0f;
  if constexpr (kPlain) {
    const Place<int> at = place_of<int>(p);
    const unsigned unit = at.unit, parts = static_cast<unsigned>(p.parts), sum = p.by_parts.divide(unit);
    const unsigned outer = p.by_inner.divide(sum);
    const int64_t inner = sum - outer * p.inner, row_0 = outer * p.reduced * p.inner + inner;
    const int r = static_cast<int>(unit - sum * parts) * p.groups + at.group;
    const int step = p.step;
    const int64_t row = row_0 + r * p.inner, col = static_cast<int64_t>(at.vector) * N;
    PlainRows<T> rows;
    rows.x = static_cast<const T *>(p.x) + row * p.x_rows.s2 + col;
    rows.grad = static_cast<const T *>(p.grad) + row * p.grad_rows.s2 + col;
    rows.dx = static_cast<T *>(p.dx) + row * p.x_rows.cols + col;
    rows.first = row_0, rows.col = col;
    rows.left = at.active ? p.by_step.divide(static_cast<int>(p.reduced) - r + step - 1) : 0;
    settle(rows.x, rows.grad, rows.dx);
    wait_for_previous();
    if (rows.left > 0) sum_plain_rows<F, F::kAhead, NoneBrought>(p, rows, first, second);
  } else {
    wait_for_previous();
    const Place<int64_t> at = place_of<int64_t>(p);
    const int64_t sum = at.unit / p.parts, step = p.parts * p.groups;
    const int64_t r = (at.unit - sum * p.parts) * p.groups + at.group;
    const int64_t outer = sum / p.inner, inner = sum - outer * p.inner;
    const int64_t row_0 = outer * p.reduced * p.inner + inner;
    const int64_t col = static_cast<int64_t>(at.vector) * N;
    if (at.active && r < p.reduced) {
      float param[N];
      load_any(param, p.param, p.param_type, row_offset(p.param_rows, row_0) + col);
      Held<T, Grad, N> now;
      now.load_row(p, row_0 + r * p.inner, col);
      sum_rows<F>(p, now, param, r, step, row_0, col, first, second);
    }
  }

  // By pieces of kCount columns, each of which one thread adds up over the groups.
  constexpr int kCount = N < 4 ? N : 4, kOfVector = N / kCount, kPieces = F::kSums * kOfVector;
  __shared__ __align__(16) float all[kPieces][kCtaThreads<F, kPlain> * kCount];
  const auto share = [&](int piece, const float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      all[piece + i / kCount][threadIdx.x * kCount + i % kCount] = sums[i];
    }
  };
  if constexpr (F::kSums == 2) share(0, first);
  share(kPieces - kOfVector, second);
  __syncthreads();
  using Index = std::conditional_t<kPlain, int, int64_t>;
  const Place<Index> at = place_of<Index>(p);
  for (int e = threadIdx.x; e < kPieces * p.lanes; e += blockDim.x) {
    const int piece = p.by_lanes.divide(e), lane = e - piece * p.lanes, vector = at.first_vector + lane;
    if (vector >= p.vectors) continue;
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = all[piece][lane * kCount + i];
    for (int group = 1; group < p.groups; ++group) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += all[piece][(group * p.lanes + lane) * kCount + i];
    }
    const bool is_first = piece < kPieces - kOfVector;
    put_sums<N>(p, is_first ? p.first : p.second, !is_first && p.first != nullptr, at.unit, vector,
                piece % kOfVector * kCount, sums);
  }
}

// Little work: one launch. A CTA has all rows of kFewSumLanes vectors of columns of one sum: a warp
// adds up its threads' sums, each lane one of the values, then the CTA its warps'.
// Two CTAs fit on an SM, so that more than 132 of them still are one wave on an H100; for a grad in
// fp32 beside an x of 16 bits the registers of that are too few.
template <class T, class F>
__global__ void __launch_bounds__(kFewSumThreads, 2)
    broadcast_backward_few_kernel(const __grid_constant__ BroadcastParams p) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T)), kLanes = kFewSumLanes;
  constexpr int kValues = F::kSums * N, kAll = kLanes * kValues;
  static_assert(kAll <= 32, "a lane has one value, and a warp all of the CTA's");
  __shared__ float of_warps[kFewSumThreads / 32][kAll];

  const int64_t local = blockIdx.x / static_cast<unsigned>(p.chunks);
  const int chunk = static_cast<int>(blockIdx.x - local * p.chunks);
  const int64_t sum = p.first_unit + local;
  const int64_t outer = sum / p.inner, inner = sum - outer * p.inner;
  const int groups = static_cast<int>(blockDim.x) / kLanes;
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const int vector = chunk * kLanes + threadIdx.x % static_cast<unsigned>(kLanes);
  const int64_t col = static_cast<int64_t>(vector) * N;
  const int64_t row_0 = outer * p.reduced * p.inner + inner;
  const int r = static_cast<int>(threadIdx.x) / kLanes;
  const bool any = vector < p.vectors && r < p.reduced;
  int64_t param_at = row_offset(p.param_rows, row_0) + col;
  int64_t x_at = 0, grad_at = 0;  // of the first row
  if (any) {
    x_at = row_offset(p.x_rows, row_0 + r * p.inner) + col;
    grad_at = row_offset(p.grad_rows, row_0 + r * p.inner) + col;
  }
  compute_now(param_at, x_at, grad_at);
  wait_for_previous();

  float first[N], second[N];
#pragma unroll
  for (int i = 0; i < N; ++i) first[i] = second[i] = 0.0f;
  if (any) {
    Held<T, T, N> now;
    now.load(p, x_at, grad_at);
    float param[N];
    load_any(param, p.param, p.param_type, param_at);
    sum_rows<F>(p, now, param, r, groups, row_0, col, first, second);
  }

  float v[kValues];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (F::kSums == 2) v[i] = first[i];
    v[(F::kSums - 1) * N + i] = second[i];
  }
  // Lanes outnumber the values where these are few: the first of those with the same one has it.
  share_out<kFewSumLanes, 1, kValues>(v, lane);
  constexpr int kSame = 32 / kValues;
  if (lane % kSame < kLanes) of_warps[warp][lane / kSame * kLanes + lane % kLanes] = v[0];
  __syncthreads();

  if (static_cast<int>(threadIdx.x) >= kAll) return;
  const int warps = static_cast<int>(blockDim.x) / 32;
  float of_cta[1] = {0.0f};
#pragma unroll 8
  for (int w = 0; w < warps; ++w) of_cta[0] += of_warps[w][threadIdx.x];
  const int value = static_cast<int>(threadIdx.x) / kLanes;
  const int at = chunk * kLanes + static_cast<int>(threadIdx.x) % kLanes;
  void *to = F::kSums == 2 && value < N ? p.first : p.second;
  if (at >= p.vectors || to == nullptr) return;
  store_any(to, p.param_type, sum * p.x_rows.cols + static_cast<int64_t>(at) * N + value % N,
            of_cta);
}

// ---------------------------------------------------------------------------------------------
// Launchers

// `units` CTAs' worth of work, each of `ctas` CTAs, in launches that a grid can have.
int32_t launch_units(void (*kernel)(BroadcastParams), BroadcastParams &p, int64_t units,
                     int64_t ctas, int threads, void *stream, int shared_bytes) {
  const int64_t per_launch = kMaxGrid / ctas;
  for (p.first_unit = 0; p.first_unit < units; p.first_unit += per_launch) {
    const int64_t left = units - p.first_unit;
    const int64_t here = left < per_launch ? left : per_launch;
    const int32_t status = launch(kernel, here * ctas, threads, p, stream, kOp, shared_bytes);
    if (status != HFP_OK) return status;
  }
  return HFP_OK;
}

template <class T, class Grad, class F, int N, bool kPlain>
int32_t launch_vectors(BroadcastParams &p, void *stream) {
  constexpr int kMostThreads = kCtaThreads<F, kPlain>, kMostLanes = kPlain ? F::kLanes : kThreads;
  const int64_t vectors = p.x_rows.cols / N, sums = p.units / p.parts;
  p.chunks = static_cast<int>((vectors + kMostLanes - 1) / kMostLanes);
  p.vectors = static_cast<int>(vectors);
  p.lanes = static_cast<int>((vectors + p.chunks - 1) / p.chunks);
  p.groups = kMostThreads / p.lanes;
  if (p.groups > p.reduced) p.groups = p.reduced > 0 ? static_cast<int>(p.reduced) : 1;
  p.by_chunks = FastDivisor(p.chunks), p.by_lanes = FastDivisor(p.lanes);
  const int threads = (p.lanes * p.groups + 31) / 32 * 32;
  int shared_bytes = 0;
  if constexpr (kPlain) {
    // As many CTAs as run at once: the last of a second wave would run alone.
    const int ctas = F::kCtas * kMostThreads / threads;
    shared_bytes = shared_memory_of_wave(0, kFixed<F, N, kPlain>, ctas);
    const int64_t parts = kFullSms * ctas / (p.chunks * sums);
    if (parts < p.parts) p.parts = parts > 1 ? parts : 1;
    p.units = sums * p.parts;
    p.by_parts = FastDivisor(p.parts), p.by_inner = FastDivisor(p.inner);
    p.step = static_cast<int>(p.parts * p.groups);
    p.by_step = FastDivisor(p.step);
    const int64_t rows = p.step * p.inner;
    p.x_step = rows * p.x_rows.s2;
    p.grad_step = rows * p.grad_rows.s2;
    p.dx_step = rows * p.x_rows.cols;
  }
  const int32_t status = launch_units(&broadcast_backward_kernel<T, Grad, F, N, kPlain>, p,
                                      p.units, p.chunks, threads, stream, shared_bytes);
  if (status != HFP_OK || p.parts == 1) return status;
  SumPartialsParams of{};
  of.first = p.first;
  of.second = p.second;
  of.partials = p.partials;
  of.sums = sums;
  of.rows = p.parts;
  of.cols = p.wide;
  of.first_cols = p.first != nullptr ? p.x_rows.cols : 0;
  of.first_type = of.second_type = p.param_type;
  of.halves = N == 8;
  return sum_partials(of, stream, kOp);
}

// By broadcast_backward_few_kernel, where the work is little enough and fills enough CTAs; false where
// not, or where there is no second launch anyway.
template <class T, class F>
bool launch_few(BroadcastParams p, void *stream, int32_t *status) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  if (p.parts < 2) return false;
  const int64_t sums = p.units / p.parts, vectors = p.x_rows.cols / N;
  const int64_t chunks = (vectors + kFewSumLanes - 1) / kFewSumLanes;
  if (sums * p.reduced * vectors > kFewSumVectors) return false;
  if (p.reduced > (sums * chunks < kFewSumCtas ? kFewSumRows : F::kMostRows)) return false;
  p.vectors = static_cast<int>(vectors);
  p.chunks = static_cast<int>(chunks);
  const int64_t wanted = (p.reduced * kFewSumLanes + 31) / 32 * 32;
  const int threads = static_cast<int>(wanted < kFewSumThreads ? wanted : kFewSumThreads);
  *status = launch(&broadcast_backward_few_kernel<T, F>, sums * chunks, threads, p, stream, kOp);
  return true;
}

template <class T, class Grad, class F>
int32_t launch_function(BroadcastParams &p, int device, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const bool aligned = p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
                       rows_aligned(p.grad_rows, p.grad, sizeof(Grad)) &&
                       rows_aligned(p.param_rows, p.param, size_of(p.param_type)) &&
                       pointer_aligned(p.dx) && pointer_aligned(p.first) &&
                       pointer_aligned(p.second) && pointer_aligned(p.partials);
  if constexpr (std::is_same_v<T, Grad>) {
    int32_t status;
    const int64_t ctas = p.units * ((p.x_rows.cols / N + F::kLanes - 1) / F::kLanes);
    const bool plain = aligned && p.x_rows.uniform() && p.grad_rows.uniform() &&
                       p.reduced <= kMaxPlainRows && ctas <= kMaxGrid;
    if (plain && launch_cluster<T, F>(p, p.units / p.parts, device, stream, kOp, &status)) {
      return status;
    }
    if (aligned && launch_few<T, F>(p, stream, &status)) return status;
    if (plain) return launch_vectors<T, Grad, F, N, true>(p, stream);
  }
  if (aligned) return launch_vectors<T, Grad, F, N, false>(p, stream);
  return launch_vectors<T, Grad, F, 1, false>(p, stream);
}

template <class T>
int32_t launch_typed(BroadcastParams &p, DType type, int activation, int device, void *stream) {
  switch (activation) {
    case HFP_ACT_GELU_ERF:
      return launch_function<T, T, AddActivationGrad<HFP_ACT_GELU_ERF>>(p, device, stream);
    case HFP_ACT_GELU_TANH:
      return launch_function<T, T, AddActivationGrad<HFP_ACT_GELU_TANH>>(p, device, stream);
    case HFP_ACT_GELU_SIGMOID:
      return launch_function<T, T, AddActivationGrad<HFP_ACT_GELU_SIGMOID>>(p, device, stream);
    case HFP_ACT_SILU:
      return launch_function<T, T, AddActivationGrad<HFP_ACT_SILU>>(p, device, stream);
    default:
      // The gradient of a * b + c has the dtype of a or, promoted, fp32.
      if (p.grad_type == type) return launch_function<T, T, MulAddGrad>(p, device, stream);
      return launch_function<T, float, MulAddGrad>(p, device, stream);
  }
}

}  // namespace

int32_t broadcast_backward(const BroadcastBackwardArgs &a, int device, void *stream) {
  const int64_t units = a.outer * a.inner * a.parts;
  if (units <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  BroadcastParams p{};
  p.dx = a.dx;
  p.first = a.first;
  p.second = a.second;
  p.partials = a.partials;
  p.grad = a.grad;
  p.x = a.x;
  p.param = a.param;
  p.grad_rows = a.grad_rows;
  p.x_rows = a.x_rows;
  p.param_rows = a.param_rows;
  p.reduced = a.reduced;
  p.inner = a.inner;
  p.parts = a.parts;
  p.units = units;
  p.wide = a.x_rows.cols * ((a.first != nullptr) + (a.second != nullptr));
  p.grad_type = a.grad_type;
  p.param_type = a.param_type;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.type, a.activation, device, stream);
    case DType::F16: return launch_typed<__half>(p, a.type, a.activation, device, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.type, a.activation, device, stream);
  }
}

}  // namespace hfp::cuda
