// balance.cu: the loss that balances the load of experts, and its gradient; hfp_load_balancing_loss on
// CUDA. A warp has one token at a time; sums are those of a warp, of a CTA, of all, each in one order.
#include "common.cuh"

namespace hfp::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kFinishThreads = 256;

// The logits and the softmax of a row: expert 32 i + lane.
template <class T, int kSteps>
struct Router {
  float x[kSteps], p[kSteps];

  __device__ Router(const T *row, int experts) {
    const int lane = threadIdx.x % 32;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      x[i] = -INFINITY;
      if (i * 32 + lane < experts) {
        Vec<T, 1> v;
        v.template load<Cache::kStream>(row + i * 32 + lane);
        float value[1];
        v.get(value);
        x[i] = value[0];
      }
      top = x[i] > top ? x[i] : top;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, step);
      top = other > top ? other : top;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      p[i] = i * 32 + lane < experts ? expf(x[i] - top) : 0.0f;
      sum += p[i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) p[i] /= sum;
  }
};

template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads) balance_kernel(const __grid_constant__ BalanceArgs a) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = static_cast<int>(a.rows.cols), width = 2 * experts + 1;
  float *own = shared + warp * width;
  for (int i = lane; i < width; i += 32) own[i] = 0.0f;
  __syncwarp();
  const int64_t tokens = a.rows.rows, share = (tokens + a.parts - 1) / a.parts;
  const int64_t first = blockIdx.x * share;
  const int64_t last = first + share < tokens ? first + share : tokens;
  for (int64_t t = first + warp; t < last; t += kWarps) {
    const float weight = a.mask != nullptr ? a.mask[t] : 1.0f;
    if (lane == 0) own[2 * experts] += weight;
    if (weight == 0.0f) continue;
    const Router<T, kSteps> r(static_cast<const T *>(a.logits) + row_offset(a.rows, t), experts);
    uint32_t taken = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i * 32 + lane < experts) own[experts + i * 32 + lane] += weight * r.p[i];
    }
    for (int j = 0; j < a.k; ++j) {
      float best = -INFINITY;
      int at = experts;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int e = i * 32 + lane;
        if (e < experts && (taken >> i & 1) == 0 && (at == experts || r.x[i] > best)) {
          best = r.x[i], at = e;
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, step);
        const int other_at = __shfl_xor_sync(0xffffffffu, at, step);
        const bool better = at == experts || other > best || (other == best && other_at < at);
        if (other_at < experts && better) best = other, at = other_at;
      }
      // A NaN leaves the lanes with different answers.
      at = __shfl_sync(0xffffffffu, at, 0);
      if (at % 32 == lane && at < experts) {
        taken |= 1u << (at / 32);
        own[at] += weight;
      }
    }
    __syncwarp();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < width; i += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += shared[w * width + i];
    a.partials[blockIdx.x * width + i] = sum;
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    balance_finish_kernel(const __grid_constant__ BalanceArgs a) {
  const int experts = static_cast<int>(a.rows.cols), width = 2 * experts + 1;
  for (int i = threadIdx.x; i < width; i += kFinishThreads) {
    double sum = 0.0;
    for (int64_t p = 0; p < a.parts; ++p) sum += a.partials[p * width + i];
    a.stats[i] = static_cast<float>(sum);
  }
  __syncthreads();
  const float all = a.stats[2 * experts], share = all != 0.0f ? 1.0f / all : 0.0f;
  double loss = 0.0;
  for (int e = threadIdx.x; e < experts; e += kFinishThreads) {
    const float f = a.stats[e] * share, p = a.stats[experts + e] * share;
    a.stats[e] = f;
    a.stats[experts + e] = p;
    loss += static_cast<double>(f) * p;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) loss += __shfl_xor_sync(0xffffffffu, loss, step);
  __shared__ double of_warp[kFinishThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = loss;
  __syncthreads();
  if (threadIdx.x != 0) return;
  loss = 0.0;
  for (int w = 0; w < kFinishThreads / 32; ++w) loss += of_warp[w];
  *a.loss = static_cast<float>(loss * experts);
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads)
    balance_backward_kernel(const __grid_constant__ BalanceArgs a) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(a.rows.cols);
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (t >= a.rows.rows) return;
  const float all = a.saved[2 * experts];
  const float mask = a.mask != nullptr ? a.mask[t] : 1.0f;
  const float weight = all != 0.0f ? *a.grad * static_cast<float>(experts) / all * mask : 0.0f;
  const Router<T, kSteps> r(static_cast<const T *>(a.logits) + row_offset(a.rows, t), experts);
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i * 32 + lane < experts) mean += r.p[i] * a.saved[i * 32 + lane];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mean += __shfl_xor_sync(0xffffffffu, mean, step);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int e = i * 32 + lane;
    if (e >= experts) continue;
    const float y[1] = {weight == 0.0f ? 0.0f : r.p[i] * (a.saved[e] - mean) * weight};
    store_as<T>(a.dlogits, t * experts + e, y);
  }
}

template <class T, int kSteps>
int32_t forward(const BalanceArgs &a, cudaStream_t stream) {
  const int bytes = kWarps * static_cast<int>(2 * a.rows.cols + 1) * static_cast<int>(sizeof(float));
  balance_kernel<T, kSteps><<<static_cast<unsigned>(a.parts), kThreads, bytes, stream>>>(a);
  const int32_t status = check(cudaGetLastError(), "load_balancing_loss");
  if (status != HFP_OK) return status;
  balance_finish_kernel<<<1, kFinishThreads, 0, stream>>>(a);
  return check(cudaGetLastError(), "load_balancing_loss");
}

template <class T, int kSteps>
int32_t backward(const BalanceArgs &a, cudaStream_t stream) {
  const int64_t grid = (a.rows.rows + kWarps - 1) / kWarps;
  if (grid > kMaxGrid) {
    return set_error(HFP_INVALID_ARGUMENT,
                     "hfp_load_balancing_loss_backward: `logits` must have fewer than 2^33 tokens, got"
                     " %lld", static_cast<long long>(a.rows.rows));
  }
  balance_backward_kernel<T, kSteps><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a);
  return check(cudaGetLastError(), "load_balancing_loss_backward");
}

template <class T, int kSteps>
int32_t either(const BalanceArgs &a, cudaStream_t stream) {
  return a.dlogits != nullptr ? backward<T, kSteps>(a, stream) : forward<T, kSteps>(a, stream);
}

template <class T>
int32_t sized(const BalanceArgs &a, cudaStream_t stream) {
  if (a.rows.cols <= 64) return either<T, 2>(a, stream);
  if (a.rows.cols <= 256) return either<T, 8>(a, stream);
  return either<T, 32>(a, stream);
}

int32_t run(const BalanceArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "load_balancing_loss");
  const auto on = static_cast<cudaStream_t>(stream);
  switch (a.type) {
    case DType::F32: return sized<float>(a, on);
    case DType::F16: return sized<__half>(a, on);
    default: return sized<__nv_bfloat16>(a, on);
  }
}

}  // namespace

int32_t balance(const BalanceArgs &a, int device, void *stream) { return run(a, device, stream); }
int32_t balance_backward(const BalanceArgs &a, int device, void *stream) {
  return run(a, device, stream);
}

}  // namespace hfp::cuda
