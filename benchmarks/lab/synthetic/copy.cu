// Bound by memory: each element is read once and written once.
#include <cuda_runtime.h>

__global__ void copy_kernel(const float* x, float* y, int n) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at * 4LL + 3 < n && n % 4 == 0) {
    reinterpret_cast<float4*>(y)[at] = reinterpret_cast<const float4*>(x)[at];
    return;
  }
  for (long long i = at * 4LL; i < at * 4LL + 4 && i < n; ++i) y[i] = x[i];
}

extern "C" void solve(const float* x, float* y, int n, cudaStream_t stream) {
  copy_kernel<<<(n + 1023) / 1024, 256, 0, stream>>>(x, y, n);
}
