// Softmax of rows: a block has a row, and holds it in registers.
#include <cuda_runtime.h>
#include <math.h>

constexpr int kThreads = 256;
constexpr int kHeld = 16;  // of a row in the registers of a thread; what is more is read again

__device__ float block_max(float value) {
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      parts[threadIdx.x] = fmaxf(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  return parts[0];
}

__device__ float block_sum(float value) {
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  return parts[0];
}

__global__ void softmax_kernel(const float* x, float* y, int columns) {
  const float* in = x + (size_t)blockIdx.x * columns;
  float* out = y + (size_t)blockIdx.x * columns;
  float held[kHeld];
  float greatest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    int i = threadIdx.x + j * kThreads;
    held[j] = i < columns ? in[i] : -INFINITY;
    greatest = fmaxf(greatest, held[j]);
  }
  for (int i = threadIdx.x + kHeld * kThreads; i < columns; i += kThreads)
    greatest = fmaxf(greatest, in[i]);
  greatest = block_max(greatest);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    held[j] = expf(held[j] - greatest);
    if (threadIdx.x + j * kThreads < columns) sum += held[j];
  }
  for (int i = threadIdx.x + kHeld * kThreads; i < columns; i += kThreads)
    sum += expf(in[i] - greatest);
  sum = block_sum(sum);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    int i = threadIdx.x + j * kThreads;
    if (i < columns) out[i] = held[j] / sum;
  }
  for (int i = threadIdx.x + kHeld * kThreads; i < columns; i += kThreads)
    out[i] = expf(in[i] - greatest) / sum;
}

extern "C" void solve(const float* x, float* y, int rows, int columns, cudaStream_t stream) {
  softmax_kernel<<<rows, kThreads, 0, stream>>>(x, y, columns);
}
