// grad_norm.cu: the norm of a list of tensors, clipping by it, and scaling; hfp_grad_norm,
// hfp_clip_grads and hfp_scale_grads on CUDA.
//
// A CTA reduces a chunk of a tensor in fp32 to one of the partials; one more CTA adds those up in
// fp64. Which elements a thread adds up, and in which order, depends on the sizes alone.
#include "cta_join.cuh"
#include "ordered.cuh"
#include "tensor_list.cuh"

namespace hfp::cuda {
namespace {

constexpr int kUnroll = 4;            // vectors that a thread has on their way
constexpr int kFinishThreads = 1024;  // one CTA
constexpr int kScaleChunk = HFP_NORM_CHUNK;
constexpr int kScaleCtas = 3;  // of an SM

struct ListEntry {
  void *data;
  int64_t numel;
  uint32_t first;  // chunk
  DType type;
};

template <int kBytes>
struct ListTable {
  static constexpr bool kStartsEarly = true;
  static constexpr int kCapacity = (kBytes - 64) / static_cast<int>(sizeof(ListEntry));
  float *partials;          // of the first chunk; grad_norm
  const float *factor, *total_norm;  // scale_grads, clip_grads
  float max_norm;
  uint32_t chunks;
  int count;
  ListEntry entry[kCapacity];
};

// The larger one; NaN if either is.
template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

struct SquareSum : Sum {
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
  const ListEntry &entry = table.entry[find_entry(table, blockIdx.x, gridDim.x)];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - entry.first) * HFP_NORM_CHUNK;
  const int64_t left = entry.numel - begin;
  const int n = static_cast<int>(left < HFP_NORM_CHUNK ? left : HFP_NORM_CHUNK);
  const DType type = entry.type;
  wait_for_previous();
  float total;
  if (type == DType::F32) {
    total = reduce_chunk<Norm>(static_cast<const float *>(entry.data) + begin, n);
  } else if (type == DType::F16) {
    total = reduce_chunk<Norm>(static_cast<const __half *>(entry.data) + begin, n);
  } else {
    total = reduce_chunk<Norm>(static_cast<const __nv_bfloat16 *>(entry.data) + begin, n);
  }
  total = join_all<Norm>(total);
  if (threadIdx.x == 0) table.partials[blockIdx.x] = total;
}

struct FinishParams {
  static constexpr bool kStartsEarly = true;
  float *norm;
  const float *partials;
  int64_t count;
};

template <class Norm>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishParams p) {
  wait_for_previous();
  double total = 0;
  for (int64_t i = threadIdx.x; i < p.count; i += kFinishThreads) {
    total = Norm::join(total, static_cast<double>(p.partials[i]));
  }
  total = join_all<Norm>(total);
  if (threadIdx.x == 0) *p.norm = static_cast<float>(Norm::finish(total));
}

// A warp's vectors lie one after the other: memory is passed over more in order.
template <class T>
__device__ __forceinline__ void scale_chunk(T *x, int n, float factor) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr int kStep = 32 * N;
  const int whole = reinterpret_cast<uint64_t>(x) % kVectorBytes == 0 ? n / N * N : 0;
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  for (int at = warp * kUnroll * kStep + lane * N; at < whole; at += kListThreads * kUnroll * N) {
    Vec<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStep < whole) v[u].template load<Cache::kStream>(x + at + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStep >= whole) continue;
      float value[N];
      v[u].get(value);
#pragma unroll
      for (int k = 0; k < N; ++k) value[k] *= factor;
      store_as<T>(x, at + u * kStep, value);
    }
  }
  for (int at = whole + threadIdx.x; at < n; at += kListThreads) {
    Vec<T, 1> one;
    one.template load<Cache::kStream>(x + at);
    float value[1];
    one.get(value);
    value[0] *= factor;
    store_as<T>(x, at, value);
  }
}

template <class Table>
__device__ __forceinline__ void scale_chunk_of(const Table &table, uint32_t chunk, float factor) {
  const ListEntry &entry = table.entry[find_entry(table, chunk, table.chunks)];
  const int64_t begin = static_cast<int64_t>(chunk - entry.first) * kScaleChunk;
  const int64_t left = entry.numel - begin;
  const int n = static_cast<int>(left < kScaleChunk ? left : kScaleChunk);
  if (entry.type == DType::F32) {
    scale_chunk(static_cast<float *>(entry.data) + begin, n, factor);
  } else if (entry.type == DType::F16) {
    scale_chunk(static_cast<__half *>(entry.data) + begin, n, factor);
  } else {
    scale_chunk(static_cast<__nv_bfloat16 *>(entry.data) + begin, n, factor);
  }
}

// 16384 elements a CTA: few CTAs where there is nothing to clip. bf16 on an H200, us, strided over the
// CTA and not started early -> this: 32 tensors of 2^22 139 -> 132, 256 of 4096 3.55 -> 2.74. With 2048
// elements a CTA 128.4, but 81 where nothing is clipped, instead of 11.
template <int kBytes>
__global__ void __launch_bounds__(kListThreads, resident_ctas(kListThreads, kManyThreads))
    clip_kernel(const __grid_constant__ ListTable<kBytes> table) {
  wait_for_previous();
  const float factor = table.max_norm / (__ldg(table.total_norm) + 1e-6f);
  if (factor >= 1.0f) return;  // a factor of 1; false for NaN
  scale_chunk_of(table, blockIdx.x, factor);
}

// CTAs that stay and take chunk after chunk, as mostly there is nothing to do: kScaleCtas of an SM begin in
// vain then, while scaling takes 4 to 8 % longer than in a CTA for each chunk.
template <int kBytes>
__global__ void __launch_bounds__(kListThreads)
    scale_kernel(const __grid_constant__ ListTable<kBytes> table) {
  wait_for_previous();
  const float factor = __ldg(table.factor);
  if (factor == 1.0f) return;
  for (uint32_t chunk = blockIdx.x; chunk < table.chunks; chunk += gridDim.x) {
    scale_chunk_of(table, chunk, factor);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class Table>
using TableKernel = void (*)(Table);

// The chunks of a norm and of scaling are equally long.
template <class Table>
struct ListSource {
  const HfpTensorList &tensors;
  TableKernel<Table> kernel;
  int64_t most;  // CTAs
  void *stream;
  const char *op;

  int64_t chunks(int64_t i) const {
    return (flat_tensor(tensors, i).numel + HFP_NORM_CHUNK - 1) / HFP_NORM_CHUNK;
  }
  void put(Table &table, int at, int64_t i, uint32_t first) const {
    const FlatTensor t = flat_tensor(tensors, i);
    table.entry[at] = {t.data, t.numel, first, t.type};
  }
  int32_t launch(Table &table, int64_t grid) const {
    table.chunks = static_cast<uint32_t>(grid);
    const int64_t ctas = grid < most ? grid : most;
    const int32_t status = cuda::launch(kernel, ctas, kListThreads, table, stream, op);
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
  return launch_tables(ListSource<Table>{*a.tensors, kernel, kMaxGrid, stream, "grad_norm"},
                       a.tensors->count, table);
}

const char *name_of(const ScaleGradsArgs &a) {
  return a.total_norm != nullptr ? "clip_grads" : "scale_grads";
}

template <int kBytes>
int32_t run_scale(const ScaleGradsArgs &a, int device, void *stream) {
  using Table = ListTable<kBytes>;
  Table table;
  table.partials = nullptr;
  table.factor = a.factor;
  table.total_norm = a.total_norm;
  table.max_norm = a.max_norm;
  const bool clips = a.total_norm != nullptr;
  const int64_t most = clips ? kMaxGrid : int64_t{kScaleCtas} * sm_count(device);
  const TableKernel<Table> kernel = clips ? &clip_kernel<kBytes> : &scale_kernel<kBytes>;
  return launch_tables(
      ListSource<Table>{*a.grads, kernel, most, stream, name_of(a)}, a.grads->count, table);
}

// Calls run with the bytes of the smallest table that holds `count` tensors, or of the largest.
template <class Run>
int32_t with_table(int64_t count, const Run &run) {
  if (count <= ListTable<kSmallTable>::kCapacity) {
    return run(std::integral_constant<int, kSmallTable>());
  }
  if (count <= ListTable<kMiddleTable>::kCapacity) {
    return run(std::integral_constant<int, kMiddleTable>());
  }
  return run(std::integral_constant<int, kLargeTable>());
}

}  // namespace

int32_t grad_norm(const GradNormArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "grad_norm");
  const int32_t status = with_table(
      a.tensors->count, [&](auto bytes) { return run_norm<bytes()>(a, stream); });
  if (status != HFP_OK) return status;
  FinishParams p = {a.norm, a.partials, a.count};
  const auto kernel =
      a.norm_type == HFP_GRAD_NORM_L2 ? &finish_kernel<SquareSum> : &finish_kernel<Largest>;
  return launch(kernel, 1, kFinishThreads, p, stream, "grad_norm");
}

int32_t scale_grads(const ScaleGradsArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), name_of(a));
  return with_table(a.grads->count,
                    [&](auto bytes) { return run_scale<bytes()>(a, device, stream); });
}

}  // namespace hfp::cuda
