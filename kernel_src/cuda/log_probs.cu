// log_probs.cu: the loss of each row and the logarithm of every token's probability;
// hfp_cross_entropy_log_probs on CUDA. A CTA per row: once for the greatest logit and the sum, once more,
// from L2 where rows are not too many, for the results.
#include "common.cuh"

namespace hfp::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Seen {
  float top = -INFINITY, sum = 0.0f, plain = 0.0f;  // plain: of the logits, for label smoothing

  // The greatest as it is; a NaN passes by it, and is caught by the sum.
  __device__ void merge(float other_top, float other_sum) {
    const float high = other_top > top ? other_top : top;
    const float shift = high == -INFINITY ? 0.0f : high;
    sum = sum * expf(top - shift) + other_sum * expf(other_top - shift);
    top = high;
  }
};

__device__ __forceinline__ float capped(float x, float cap) {
  return cap > 0.0f ? cap * tanhf(x / cap) : x;
}

template <class T>
__global__ void __launch_bounds__(kThreads) log_probs_kernel(const __grid_constant__ LogProbsArgs a) {
  const int64_t row = blockIdx.x, cols = a.rows.cols;
  const T *x = static_cast<const T *>(a.logits) + row_offset(a.rows, row);
  const auto logit = [&](int64_t i) {
    Vec<T, 1> v;
    v.template load<Cache::kStream>(x + i);
    float value[1];
    v.get(value);
    return capped(value[0], a.softcap);
  };
  Seen seen;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    const float z = logit(i);
    seen.merge(z, 1.0f);
    seen.plain += z;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float top = __shfl_xor_sync(0xffffffffu, seen.top, step);
    const float sum = __shfl_xor_sync(0xffffffffu, seen.sum, step);
    const float plain = __shfl_xor_sync(0xffffffffu, seen.plain, step);
    seen.merge(top, sum);
    seen.plain += plain;
  }
  __shared__ Seen of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = seen;
  // Read by everybody before anybody writes log_probs, which may be the memory of the logits.
  const int64_t target = a.target[row];
  const bool inside = target >= 0 && target < cols;
  const float z_target = inside ? logit(target) : 0.0f;
  __syncthreads();
  seen = of_warp[0];
  for (int w = 1; w < kWarps; ++w) {
    seen.merge(of_warp[w].top, of_warp[w].sum);
    seen.plain += of_warp[w].plain;
  }
  const float lse = (seen.top == -INFINITY ? 0.0f : seen.top) + logf(seen.sum);
  T *out = static_cast<T *>(a.log_probs) + row * cols;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    const float y[1] = {logit(i) - lse};
    store_as<T>(out, i, y);
  }
  if (threadIdx.x != 0) return;
  if (target == a.ignore_index) {
    a.loss[row] = a.lse[row] = 0.0f;
    return;
  }
  float loss = lse - (1.0f - a.label_smoothing) * z_target;
  if (a.label_smoothing > 0.0f) loss -= a.label_smoothing * (seen.plain / static_cast<float>(cols));
  a.lse[row] = lse;
  a.loss[row] = inside ? loss : NAN;
}

template <class T>
int32_t run(const LogProbsArgs &a, cudaStream_t stream) {
  log_probs_kernel<T><<<static_cast<unsigned>(a.rows.rows), kThreads, 0, stream>>>(a);
  return check(cudaGetLastError(), "cross_entropy_log_probs");
}

}  // namespace

int32_t log_probs(const LogProbsArgs &a, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "cross_entropy_log_probs");
  if (a.rows.rows > kMaxGrid) {
    return set_error(HFP_INVALID_ARGUMENT,
                     "hfp_cross_entropy_log_probs: `logits` must have fewer than 2^31 rows, got %lld",
                     static_cast<long long>(a.rows.rows));
  }
  const auto on = static_cast<cudaStream_t>(stream);
  switch (a.type) {
    case DType::F32: return run<float>(a, on);
    case DType::F16: return run<__half>(a, on);
    default: return run<__nv_bfloat16>(a, on);
  }
}

}  // namespace hfp::cuda
