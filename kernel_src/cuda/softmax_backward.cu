// softmax_backward.cu: the gradient of softmax from its result; hfp_softmax_backward on CUDA. The
// same ways through a row as softmax.cu.
#include "row_cluster.cuh"

namespace hfp::cuda {
namespace {

struct SoftmaxBackwardParams {
  static constexpr bool kStartsEarly = true;
  void *dx;
  float *workspace;  // the sum of each part
  const void *grad, *y;
  Rows x_rows, grad_rows;  // x_rows: those of y
  int64_t first_row;
  int64_t vectors;
  float scale;
  Parts parts;
  int write_ctas;
  int cluster_ctas;  // per row
};

// One row of both inputs; 0 past its end.
template <class T, bool kAligned>
struct Pair {
  static constexpr int N = kVectorOf<T>;
  const T *grad, *y;
  int64_t cols;

  __device__ Pair(const SoftmaxBackwardParams &p, int64_t row)
      : grad(static_cast<const T *>(p.grad) + row_offset(p.grad_rows, row)),
        y(static_cast<const T *>(p.y) + row_offset(p.x_rows, row)),
        cols(p.x_rows.cols) {}

  template <Cache kCache = Cache::kStream>
  __device__ __forceinline__ void load(Vec<T, N> &g, Vec<T, N> &v, int64_t at) const {
    load_vector<T, kAligned, kCache>(g, grad, at, cols);
    load_vector<T, kAligned, kCache>(v, y, at, cols);
  }

  __device__ __forceinline__ static float dot(const Vec<T, N> &g, const Vec<T, N> &v, float sum) {
    float a[N], b[N];
    g.get(a);
    v.get(b);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
  }

  __device__ __forceinline__ void write(T *to, const Vec<T, N> &g, const Vec<T, N> &v, int64_t at,
                                        float by, float scale) const {
    float a[N], b[N];
    g.get(a);
    v.get(b);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = b[i] * scale * (a[i] - by);
    store_vector<T, kAligned>(to, at, cols, a);
  }
};

template <class T, bool kAligned, int kThreads, int kVectors>
__global__ void __launch_bounds__(max_threads(kThreads, kVectors))
    softmax_backward_held_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
  wait_for_previous();
  using G = Group<kThreads>;
  constexpr int N = kVectorOf<T>;
  __shared__ float partial[kPartials];
  const int64_t row = G::row(p.first_row);
  const bool live = row < p.x_rows.rows;
  const Pair<T, kAligned> pair(p, live ? row : 0);
  const int vectors = live ? static_cast<int>(p.vectors) : 0;
  Vec<T, N> g[kVectors], v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at < vectors) pair.load(g[i], v[i], at);
  }
  float sums[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    sums[i] = at < vectors ? pair.dot(g[i], v[i], 0.0f) : 0.0f;
  }
  const float by = G::sum(sums, partial);
  T *to = static_cast<T *>(p.dx) + row * pair.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = G::index() + i * G::stride();
    if (at < vectors) pair.write(to, g[i], v[i], at, by, p.scale);
  }
}

// The sum of part `part`, by one warp. kVectors: of each input that a lane asks for at once.
template <class T, bool kAligned, Cache kCache, int kVectors = kWaveVectors>
__device__ __forceinline__ float part_of(const SoftmaxBackwardParams &p,
                                         const Pair<T, kAligned> &pair, int part) {
  constexpr int N = kVectorOf<T>;
  const int64_t first = part * (p.parts.cols / N);
  const int64_t past = first + p.parts.cols / N < p.vectors ? first + p.parts.cols / N : p.vectors;
  float sum = 0.0f;
  for (int64_t at = first + threadIdx.x % 32u; at < past; at += 32 * kVectors) {
    Vec<T, N> g[kVectors], v[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (at + 32 * u < past) pair.template load<kCache>(g[u], v[u], at + 32 * u);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (at + 32 * u < past) sum = pair.dot(g[u], v[u], sum);
    }
  }
  return Group<32>::sum_lanes(sum);
}

__device__ __forceinline__ float whole(const float *parts, int count) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32u; i < count; i += 32) sum += parts[i];
  return Group<32>::sum_lanes(sum);
}

// A part of both inputs stays in the registers of a warp: all of a row is on its way at once.
template <class T>
struct HeldPair {
  static constexpr int N = kVectorOf<T>;
  static constexpr int kLaneVectors = static_cast<int>(kPartCols) / N / 32;
  Vec<T, N> g[kLaneVectors], v[kLaneVectors];
  int first, past;  // vectors

  __device__ __forceinline__ HeldPair(const SoftmaxBackwardParams &p, int part)
      : first(part * static_cast<int>(kPartCols / N) + static_cast<int>(threadIdx.x % 32u)),
        past(static_cast<int>(p.vectors)) {}

  __device__ __forceinline__ float read(const Pair<T, true> &pair) {
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      if (first + 32 * u < past) pair.load(g[u], v[u], first + 32 * u);
    }
    float own = 0.0f;
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      if (first + 32 * u < past) own = pair.dot(g[u], v[u], own);
    }
    return Group<32>::sum_lanes(own);
  }

  __device__ __forceinline__ void write(const SoftmaxBackwardParams &p, const Pair<T, true> &pair,
                                        int64_t row, float by) const {
    T *to = static_cast<T *>(p.dx) + row * pair.cols;
#pragma unroll
    for (int u = 0; u < kLaneVectors; ++u) {
      if (first + 32 * u < past) pair.write(to, g[u], v[u], first + 32 * u, by, p.scale);
    }
  }
};

// A CTA per row and a warp per part. As many warps as parts: with 88 registers a thread, an SM has two
// CTAs of up to eleven parts (22528 columns), one of more. Against softmax_backward_parts_kernel, whose
// bits these are, on an H200 in bf16, 512 threads for all: 8192x32000 405 -> 362 us, 2048x32000 108 ->
// 94, 4096x20480 163 -> 123; grad in shared memory instead, two CTAs of any row on an SM: 365, 94.5,
// 119.
template <class T>
__global__ void __launch_bounds__(kPartThreads)
    softmax_backward_held_parts_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
  wait_for_previous();
  __shared__ float all[kHeldParts];
  const int64_t row = p.first_row + blockIdx.x;
  const Pair<T, true> pair(p, row);
  const int part = threadIdx.x / 32u;
  HeldPair<T> held(p, part);
  const float own = held.read(pair);
  if (threadIdx.x % 32u == 0) all[part] = own;
  __syncthreads();
  held.write(p, pair, row, whole(all, p.parts.count));
}

// Warps of a CTA of which two fit on an SM, with 96 registers a thread. With y in registers and grad in
// shared memory two of sixteen warps do: 2048 x 128256 374 us, of ten with both in registers 361.
constexpr int kPairWarps = 10;

// A cluster per row and a warp per part.
template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps <= kPairWarps ? 2 : 1)
    softmax_backward_cluster_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ PartResults<1> all;
  all.begin(p.parts.count);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.cluster_ctas);
  const int part = static_cast<int>(Team<true>::rank() * (blockDim.x / 32u) + threadIdx.x / 32u);
  const Pair<T, true> pair(p, row);
  HeldPair<T> held(p, part);
  wait_for_previous();
  const float own = held.read(pair);
  all.exchange({own}, part, p.parts.count, p.cluster_ctas);
  held.write(p, pair, row, whole(&all.of_part[0][0], p.parts.count));
#endif
}

// Any number of parts. A CTA per row, and so wide that one fills an SM: its row of both inputs then
// stays in L1 (128 KB of 16000 columns in fp32) until it is read again.
constexpr int kPairThreads = 1024;

// Vectors of each input that a thread asks for at once, of a row that is not aligned, as it writes and as it
// adds up: without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLooseAtOnce = 1;
#else
constexpr int kLooseAtOnce = 2;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kLooseWave = 2;
#else
constexpr int kLooseWave = kWaveVectors;
#endif

template <class T, bool kAligned>
__global__ void __launch_bounds__(kPairThreads)
    softmax_backward_parts_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
  constexpr int kAtOnce = kAligned ? 2 : kLooseAtOnce;
  constexpr int kWave = kAligned ? kWaveVectors : kLooseWave;
  wait_for_previous();
  __shared__ float all[kMaxParts];
  const int64_t row = p.first_row + blockIdx.x;
  const Pair<T, kAligned> pair(p, row);
  for (int part = threadIdx.x / 32u; part < p.parts.count; part += kPairThreads / 32) {
    const float own = part_of<T, kAligned, Cache::kTwice, kWave>(p, pair, part);
    if (threadIdx.x % 32u == 0) all[part] = own;
  }
  __syncthreads();
  const float by = whole(all, p.parts.count);
  T *to = static_cast<T *>(p.dx) + row * pair.cols;
  for (int64_t at = threadIdx.x; at < p.vectors; at += kPairThreads * kAtOnce) {
    Vec<T, kVectorOf<T>> g[kAtOnce], v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t here = at + u * kPairThreads;
      if (here < p.vectors) pair.template load<Cache::kTwice>(g[u], v[u], here);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t here = at + u * kPairThreads;
      if (here < p.vectors) pair.write(to, g[u], v[u], here, by, p.scale);
    }
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kSplitThreads)
    softmax_backward_split_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.parts.ctas);
  const int part = blockIdx.x % static_cast<unsigned>(p.parts.ctas) * (kSplitThreads / 32) +
                   threadIdx.x / 32u;
  if (part >= p.parts.count) return;
  const float own =
      part_of<T, kAligned, Cache::kStream>(p, Pair<T, kAligned>(p, row), part);
  if (threadIdx.x % 32u == 0) p.workspace[row * p.parts.count + part] = own;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kSplitThreads)
    softmax_backward_write_kernel(const __grid_constant__ SoftmaxBackwardParams p) {
  wait_for_previous();
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.write_ctas);
  const int64_t first = static_cast<int64_t>(blockIdx.x % static_cast<unsigned>(p.write_ctas)) *
                            (kSplitThreads * kSplitVectors) +
                        threadIdx.x;
  const Pair<T, kAligned> pair(p, row);
  Vec<T, kVectorOf<T>> g[kSplitVectors], v[kSplitVectors];
#pragma unroll
  for (int u = 0; u < kSplitVectors; ++u) {
    const int64_t at = first + u * kSplitThreads;
    if (at < p.vectors) pair.load(g[u], v[u], at);
  }
  const float by = whole(p.workspace + row * p.parts.count, p.parts.count);
  T *to = static_cast<T *>(p.dx) + row * pair.cols;
#pragma unroll
  for (int u = 0; u < kSplitVectors; ++u) {
    const int64_t at = first + u * kSplitThreads;
    if (at < p.vectors) pair.write(to, g[u], v[u], at, by, p.scale);
  }
}

template <class T>
bool launch_cluster(SoftmaxBackwardParams &p, int device, void *stream, int32_t *status) {
  const ClusterPlan plan = plan_cluster(p.parts.count);
  auto *kernel = plan.threads <= kPairWarps * 32
                     ? &softmax_backward_cluster_kernel<T, kPairWarps>
                     : &softmax_backward_cluster_kernel<T, kHeldParts>;
  return launch_row_clusters(kernel, plan, p, device, stream, "softmax_backward", status);
}

template <class T, bool kAligned>
int32_t launch_typed(SoftmaxBackwardParams &p, int device, void *stream) {
  constexpr const char *op = "softmax_backward";
  constexpr int N = kVectorOf<T>;
  p.vectors = (p.x_rows.cols + N - 1) / N;
  if (p.vectors <= kMostHeld) {
    const RowPlan plan = plan_held(p.vectors);
    switch (plan.shape) {
      case Shape::k8x2:
        return launch_rows(&softmax_backward_held_kernel<T, kAligned, 8, 2>, plan, p, stream, op);
      case Shape::k32x2:
        return launch_rows(&softmax_backward_held_kernel<T, kAligned, 32, 2>, plan, p, stream, op);
      case Shape::k32x4:
        return launch_rows(&softmax_backward_held_kernel<T, kAligned, 32, 4>, plan, p, stream, op);
      default:
        return launch_rows(&softmax_backward_held_kernel<T, kAligned, kCta, 4>, plan, p, stream,
                           op);
    }
  }
  p.parts = parts_of(p.x_rows.cols);
  const bool split = split_rows(p.x_rows.rows, p.x_rows.cols);
  if constexpr (kAligned && sizeof(T) == 2) {
    if (!split && p.parts.count <= kHeldParts) {
      return launch_rows(&softmax_backward_held_parts_kernel<T>,
                         {Shape::kLoop, p.parts.count * 32, 1}, p, stream, op);
    }
    int32_t status = HFP_OK;
    if (launch_cluster<T>(p, device, stream, &status)) return status;
  }
  if (!split) {
    return launch_rows(&softmax_backward_parts_kernel<T, kAligned>,
                       {Shape::kLoop, kPairThreads, 1}, p, stream, op);
  }
  const int64_t each = kSplitThreads * kSplitVectors, rows = p.x_rows.rows;
  p.write_ctas = static_cast<int>((p.vectors + each - 1) / each);
  const int32_t status = launch(&softmax_backward_split_kernel<T, kAligned>, rows * p.parts.ctas,
                                kSplitThreads, p, stream, op);
  if (status != HFP_OK) return status;
  return launch(&softmax_backward_write_kernel<T, kAligned>, rows * p.write_ctas, kSplitThreads, p,
                stream, op);
}

template <class T>
int32_t launch_for(SoftmaxBackwardParams &p, int device, void *stream) {
  const bool aligned = rows_of_vectors(p.x_rows, p.y, sizeof(T)) &&
                       rows_of_vectors(p.grad_rows, p.grad, sizeof(T)) && pointer_aligned(p.dx);
  return aligned ? launch_typed<T, true>(p, device, stream)
                 : launch_typed<T, false>(p, device, stream);
}

}  // namespace

int32_t softmax_backward(const SoftmaxArgs &a, int device, void *stream) {
  if (a.y_rows.rows <= 0 || a.y_rows.cols <= 0) return HFP_OK;
  SoftmaxBackwardParams p{};
  p.dx = a.out;
  p.workspace = a.workspace;
  p.grad = a.grad;
  p.y = a.y;
  p.x_rows = a.y_rows;
  p.grad_rows = a.grad_rows;
  p.scale = a.scale;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "softmax_backward");
  switch (a.type) {
    case DType::F32: return launch_for<float>(p, device, stream);
    case DType::F16: return launch_for<__half>(p, device, stream);
    default: return launch_for<__nv_bfloat16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
