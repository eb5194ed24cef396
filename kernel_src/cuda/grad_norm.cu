// grad_norm.cu: the norm of a list of tensors, and clipping by it; hfp_grad_norm and hfp_clip_grads
// on CUDA.
//
// A CTA reduces a chunk of a tensor in fp32 to one of the partials; one more CTA adds those up in
// fp64. Which elements a thread adds up, and in which order, depends on the sizes alone.
#include "tensor_list.cuh"

namespace hfp::cuda {
namespace {

constexpr int kUnroll = 4;            // vectors that a thread has on their way
constexpr int kFinishThreads = 1024;  // one CTA
constexpr int kClipChunk = HFP_NORM_CHUNK;

template <int kBytes>
struct ListTable {
  static constexpr int kEntry = 8 + 8 + 4 + 1;
  static constexpr int kCapacity = (kBytes - 64) / kEntry;
  float *partials;          // of the first chunk; grad_norm
  const float *total_norm;  // clip_grads
  float max_norm;
  int count;
  void *data[kCapacity];
  int64_t numel[kCapacity];
  uint32_t first[kCapacity];
  uint8_t type[kCapacity];  // DType
};

// The larger one; NaN if either is.
template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

struct SquareSum {
  template <class T>
  __device__ __forceinline__ static T join(T a, T b) { return a + b; }
  __device__ __forceinline__ static float add(float sum, float x) { return fmaf(x, x, sum); }
  __device__ __forceinline__ static double finish(double sum) { return sqrt(sum); }
};

struct Largest {
  template <class T>
  __device__ __forceinline__ static T join(T a, T b) { return larger(a, b); }
  __device__ __forceinline__ static float add(float most, float x) { return larger(most, fabsf(x)); }
  __device__ __forceinline__ static double finish(double most) { return most; }
};

// ---------------------------------------------------------------------------------------------
// Kernels

// Over the CTA, to thread 0.
template <class Norm, class T>
__device__ __forceinline__ T join_all(T value) {
  __shared__ T parts[32];
#pragma unroll
  for (int across = 16; across > 0; across /= 2) {
    value = Norm::join(value, __shfl_xor_sync(~0u, value, across));
  }
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < warps ? parts[lane] : T{0};
#pragma unroll
    for (int across = 16; across > 0; across /= 2) {
      value = Norm::join(value, __shfl_xor_sync(~0u, value, across));
    }
  }
  return value;
}

// Elements [at, at + N) of x, 0 from `n` on, one by one where a vector does not fit.
template <class T, int N>
__device__ __forceinline__ void load_vector(float (&value)[N], const T *x, int at, int n,
                                            bool aligned) {
  if (aligned && at + N <= n) {
    Vec<T, N> v;
    v.template load<Cache::kStream>(x + at);
    v.get(value);
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    value[k] = 0.0f;
    if (at + k < n) {
      Vec<T, 1> one;
      one.template load<Cache::kStream>(x + at + k);
      float single[1];
      one.get(single);
      value[k] = single[0];
    }
  }
}

template <class Norm, class T>
__device__ __forceinline__ float reduce_chunk(const T *x, int n) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr int kStep = kListThreads * N;
  const bool aligned = reinterpret_cast<uint64_t>(x) % kVectorBytes == 0;
  float total = 0.0f;
  int at = threadIdx.x * N;
  // Both loops give a thread the same vectors; the first has several of them on their way.
  for (; aligned && at + (kUnroll - 1) * kStep + N <= n; at += kUnroll * kStep) {
    Vec<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u].template load<Cache::kStream>(x + at + u * kStep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float value[N];
      v[u].get(value);
#pragma unroll
      for (int k = 0; k < N; ++k) total = Norm::add(total, value[k]);
    }
  }
  for (; at < n; at += kStep) {
    float value[N];
    load_vector<T, N>(value, x, at, n, aligned);
#pragma unroll
    for (int k = 0; k < N; ++k) total = Norm::add(total, value[k]);
  }
  return total;
}

template <class Norm, int kBytes>
__global__ void __launch_bounds__(kListThreads)
    norm_kernel(const __grid_constant__ ListTable<kBytes> table) {
  const int i = find_tensor(table, blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - table.first[i]) * HFP_NORM_CHUNK;
  const int64_t left = table.numel[i] - begin;
  const int n = static_cast<int>(left < HFP_NORM_CHUNK ? left : HFP_NORM_CHUNK);
  const DType type = static_cast<DType>(table.type[i]);
  float total;
  if (type == DType::F32) {
    total = reduce_chunk<Norm>(static_cast<const float *>(table.data[i]) + begin, n);
  } else if (type == DType::F16) {
    total = reduce_chunk<Norm>(static_cast<const __half *>(table.data[i]) + begin, n);
  } else {
    total = reduce_chunk<Norm>(static_cast<const __nv_bfloat16 *>(table.data[i]) + begin, n);
  }
  total = join_all<Norm>(total);
  if (threadIdx.x == 0) table.partials[blockIdx.x] = total;
}

struct FinishParams {
  float *norm;
  const float *partials;
  int64_t count;
};

template <class Norm>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishParams p) {
  double total = 0;
  for (int64_t i = threadIdx.x; i < p.count; i += kFinishThreads) {
    total = Norm::join(total, static_cast<double>(p.partials[i]));
  }
  total = join_all<Norm>(total);
  if (threadIdx.x == 0) *p.norm = static_cast<float>(Norm::finish(total));
}

template <class T>
__device__ __forceinline__ void scale_chunk(T *x, int n, float factor) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr int kStep = kListThreads * N;
  const bool aligned = reinterpret_cast<uint64_t>(x) % kVectorBytes == 0;
  const int whole = aligned ? n / N * N : 0;
  int at = threadIdx.x * N;
  for (; at + (kUnroll - 1) * kStep < whole; at += kUnroll * kStep) {
    Vec<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u].template load<Cache::kStream>(x + at + u * kStep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float value[N];
      v[u].get(value);
#pragma unroll
      for (int k = 0; k < N; ++k) value[k] *= factor;
      store_as<T>(x, at + u * kStep, value);
    }
  }
  for (; at < whole; at += kStep) {
    float value[N];
    load_vector<T, N>(value, x, at, n, true);
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] *= factor;
    store_as<T>(x, at, value);
  }
  for (at = whole + threadIdx.x; at < n; at += kListThreads) {
    float value[1];
    load_vector<T, 1>(value, x, at, n, true);
    value[0] *= factor;
    store_as<T>(x, at, value);
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kListThreads)
    clip_kernel(const __grid_constant__ ListTable<kBytes> table) {
  const float factor = table.max_norm / (__ldg(table.total_norm) + 1e-6f);
  if (factor >= 1.0f) return;  // a factor of 1; false for NaN
  const int i = find_tensor(table, blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - table.first[i]) * kClipChunk;
  const int64_t left = table.numel[i] - begin;
  const int n = static_cast<int>(left < kClipChunk ? left : kClipChunk);
  const DType type = static_cast<DType>(table.type[i]);
  if (type == DType::F32) {
    scale_chunk(static_cast<float *>(table.data[i]) + begin, n, factor);
  } else if (type == DType::F16) {
    scale_chunk(static_cast<__half *>(table.data[i]) + begin, n, factor);
  } else {
    scale_chunk(static_cast<__nv_bfloat16 *>(table.data[i]) + begin, n, factor);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class Table>
using TableKernel = void (*)(Table);

// Norm chunks and clip chunks are equally long.
template <class Table>
struct ListSource {
  const HfpTensorList &tensors;
  TableKernel<Table> kernel;
  void *stream;
  const char *op;

  int64_t chunks(int64_t i) const {
    return (flat_tensor(tensors, i).numel + HFP_NORM_CHUNK - 1) / HFP_NORM_CHUNK;
  }
  void put(Table &table, int at, int64_t i, uint32_t first) const {
    const FlatTensor t = flat_tensor(tensors, i);
    table.first[at] = first;
    table.data[at] = t.data;
    table.numel[at] = t.numel;
    table.type[at] = static_cast<uint8_t>(t.type);
  }
  int32_t launch(Table &table, int64_t grid) const {
    const int32_t status = cuda::launch(kernel, grid, kListThreads, table, stream, op);
    if (table.partials) table.partials += grid;  // where the next launch writes
    return status;
  }
};

template <int kBytes>
int32_t run_norm(const GradNormArgs &a, void *stream) {
  using Table = ListTable<kBytes>;
  static_assert(sizeof(Table) <= kBytes, "the table is larger than it may be");
  Table table;
  table.partials = a.partials;
  const TableKernel<Table> kernel = a.norm_type == HFP_GRAD_NORM_L2
                                        ? &norm_kernel<SquareSum, kBytes>
                                        : &norm_kernel<Largest, kBytes>;
  return launch_tables(ListSource<Table>{*a.tensors, kernel, stream, "grad_norm"},
                       a.tensors->count, table);
}

template <int kBytes>
int32_t run_clip(const ClipGradsArgs &a, void *stream) {
  using Table = ListTable<kBytes>;
  Table table;
  table.partials = nullptr;
  table.total_norm = a.total_norm;
  table.max_norm = a.max_norm;
  return launch_tables(ListSource<Table>{*a.grads, &clip_kernel<kBytes>, stream, "clip_grads"},
                       a.grads->count, table);
}

}  // namespace

int32_t grad_norm(const GradNormArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "grad_norm");
  const int32_t status = a.tensors->count <= ListTable<kSmallTable>::kCapacity
                             ? run_norm<kSmallTable>(a, stream)
                             : run_norm<kLargeTable>(a, stream);
  if (status != HFP_OK) return status;
  FinishParams p = {a.norm, a.partials, a.count};
  const auto kernel =
      a.norm_type == HFP_GRAD_NORM_L2 ? &finish_kernel<SquareSum> : &finish_kernel<Largest>;
  return launch(kernel, 1, kFinishThreads, p, stream, "grad_norm");
}

int32_t clip_grads(const ClipGradsArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "clip_grads");
  return a.grads->count <= ListTable<kSmallTable>::kCapacity ? run_clip<kSmallTable>(a, stream)
                                                             : run_clip<kLargeTable>(a, stream);
}

}  // namespace hfp::cuda
