// attention.cu: hfp_attention on CUDA: which kernel, and the plain one.
//
// Half types with tensor cores of sm_80 and newer: attention_mma.cuh. The plain kernel is for fp32 and for
// older GPUs: a warp has eight queries, a lane one of 32 keys, and then one column of every 32 of the values.
#include "attention_mma.cuh"

namespace hfp::cuda {
namespace {

constexpr int kPlainWarps = 4, kPlainRows = 8, kPlainKeys = 32;
constexpr int kPlainThreads = kPlainWarps * 32;

template <int kDim>
constexpr int kPlainBytes = static_cast<int>(sizeof(float)) *
                            (kPlainWarps * kPlainRows * kDim + kPlainKeys * (kDim + 1) +
                             kPlainWarps * kPlainRows * kPlainKeys);

template <class T>
__device__ __forceinline__ float widened(const T *p) {
  if constexpr (std::is_same_v<T, float>) return *p;
  else return unpack<T>(*reinterpret_cast<const uint16_t *>(p)).x;
}

template <class T>
__device__ __forceinline__ void store_rounded(T *p, float x) {
  if constexpr (std::is_same_v<T, float>) *p = x;
  else *reinterpret_cast<uint16_t *>(p) = static_cast<uint16_t>(pack<T>(x, 0.0f));
}

template <class T, int kDim>
__global__ void __launch_bounds__(kPlainThreads, 2)
    attention_plain_kernel(const __grid_constant__ AttentionArgs a, int64_t blocks) {
  extern __shared__ float shared[];
  constexpr int kColumns = kDim / 32;
  float *q = shared;
  float *block = q + kPlainWarps * kPlainRows * kDim;  // keys, then values
  float *weights = block + kPlainKeys * (kDim + 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int64_t masks[kPlainWarps * kPlainRows];  // where a row's begins
  const AttentionUnit unit(a, blockIdx.x, blocks, kPlainWarps * kPlainRows);
  if (unit.first >= unit.rows) return;
  if (a.mask != nullptr && threadIdx.x < kPlainWarps * kPlainRows) {
    const int64_t row = unit.first + threadIdx.x;
    masks[threadIdx.x] = row < unit.rows ? unit.mask_offset(a, row) : 0;
  }
  const int dim = static_cast<int>(a.dim), value_dim = static_cast<int>(a.value_dim);

  for (int i = threadIdx.x; i < kPlainWarps * kPlainRows * dim; i += kPlainThreads) {
    const int r = i / dim, d = i % dim;
    float x = 0.0f;
    if (unit.first + r < unit.rows) {
      x = widened(static_cast<const T *>(a.q) + unit.q_offset(a, unit.first + r) + d) * a.scale;
    }
    q[r * kDim + d] = x;
  }
  int limit[kPlainRows], low[kPlainRows];
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) {
    const int64_t row = unit.first + warp * kPlainRows + r;
    limit[r] = row < unit.rows ? unit.limit(a, row) : 0;
    low[r] = unit.floor_of(a, limit[r]);
  }
  float sum[kPlainRows][kColumns] = {}, top[kPlainRows], total[kPlainRows] = {};
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) top[r] = -INFINITY;
  const int all = unit.most(a, kPlainWarps * kPlainRows);
  const float *own_q = q + warp * kPlainRows * kDim;
  float *own_weights = weights + warp * kPlainRows * kPlainKeys;
  const T *k = static_cast<const T *>(a.k) + unit.k_offset(a);
  const T *v = static_cast<const T *>(a.v) + unit.v_offset(a);

  const int begin = unit.begin(a, kPlainWarps * kPlainRows, kPlainKeys);
  for (int first = begin; first < all; first += kPlainKeys) {
    const int count = min(kPlainKeys, all - first);
    __syncthreads();
    for (int i = threadIdx.x; i < kPlainKeys * dim; i += kPlainThreads) {
      const int n = i / dim, d = i % dim;
      block[n * (kDim + 1) + d] =
          n < count ? widened(k + static_cast<int64_t>(first + n) * a.k_row + d) : 0.0f;
    }
    __syncthreads();
    float s[kPlainRows] = {};
#pragma unroll 2
    for (int d = 0; d < dim; ++d) {
      const float x = block[lane * (kDim + 1) + d];
#pragma unroll
      for (int r = 0; r < kPlainRows; ++r) s[r] = fmaf(own_q[r * kDim + d], x, s[r]);
    }
    const int key = first + lane;
#pragma unroll
    for (int r = 0; r < kPlainRows; ++r) {
      if (a.softcap > 0.0f) s[r] = a.softcap * tanhf(s[r] / a.softcap);
      if (a.mask != nullptr && key < limit[r]) {
        s[r] += mask_value(a, masks[warp * kPlainRows + r] + key * a.mask_col);
      }
      if (key >= limit[r] || key < low[r]) s[r] = -INFINITY;
      float most = s[r];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
      }
      const float highest = most > top[r] ? most : top[r];
      const float shift = highest == -INFINITY ? 0.0f : highest;
      const float factor = __expf(top[r] - shift), w = expf(s[r] - shift);
      top[r] = highest;
      total[r] = total[r] * factor + w;  // of this lane's keys
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[r][c] *= factor;
      own_weights[r * kPlainKeys + lane] = w;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kPlainKeys * value_dim; i += kPlainThreads) {
      const int n = i / value_dim, d = i % value_dim;
      block[n * (kDim + 1) + d] =
          n < count ? widened(v + static_cast<int64_t>(first + n) * a.v_row + d) : 0.0f;
    }
    __syncthreads();
#pragma unroll 2
    for (int n = 0; n < count; ++n) {
      float x[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int d = c * 32 + lane;
        x[c] = d < value_dim ? block[n * (kDim + 1) + d] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kPlainRows; ++r) {
        const float w = own_weights[r * kPlainKeys + n];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[r][c] = fmaf(w, x[c], sum[r][c]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) {
    const int64_t row = unit.first + warp * kPlainRows + r;
    if (row >= unit.rows) continue;
    float whole = total[r];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, step);
    const bool nothing = top[r] == -INFINITY && whole == 0.0f;
    const float share = nothing ? 0.0f : 1.0f / whole;
    T *out = static_cast<T *>(a.out) + unit.out_offset(a, row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = c * 32 + lane;
      if (d < value_dim) store_rounded(out + d, sum[r][c] * share);
    }
    if (lane == 0) a.lse[unit.lse_offset(a, row)] = nothing ? -INFINITY : top[r] + logf(whole);
  }
}

template <class T, int kDim>
int32_t launch_plain(const AttentionArgs &a, cudaStream_t stream) {
  return launch_attention(a, attention_plain_kernel<T, kDim>, kPlainWarps * kPlainRows, kPlainThreads,
                          kPlainBytes<kDim>, stream);
}

template <class T>
int32_t plain(const AttentionArgs &a, cudaStream_t stream) {
  const int64_t widest = a.dim > a.value_dim ? a.dim : a.value_dim;
  if (widest <= 64) return launch_plain<T, 64>(a, stream);
  if (widest <= 128) return launch_plain<T, 128>(a, stream);
  return launch_plain<T, 256>(a, stream);
}

template <class T>
int32_t with_tensor_cores(const AttentionArgs &a, cudaStream_t stream) {
  const int64_t widest = a.dim > a.value_dim ? a.dim : a.value_dim;
  if (widest <= 64) return launch_mma<T, 64>(a, stream);
  if (widest <= 128) return launch_mma<T, 128>(a, stream);
  return launch_mma<T, 256>(a, stream);
}

}  // namespace

int32_t attention(const AttentionArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "attention");
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.type == DType::F32) return plain<float>(a, on);
  const bool old = capability_major() < 8;
  if (a.type == DType::F16) return old ? plain<__half>(a, on) : with_tensor_cores<__half>(a, on);
  return old ? plain<__nv_bfloat16>(a, on) : with_tensor_cores<__nv_bfloat16>(a, on);
}

}  // namespace hfp::cuda
