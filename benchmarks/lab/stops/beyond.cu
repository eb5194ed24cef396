// Writes beyond its output: the last block has no bound.
#include <cuda_runtime.h>

__global__ void copy_kernel(const float* x, float* y, int n) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  y[at] = at < n ? x[at] : 0;
}

extern "C" void solve(const float* x, float* y, int n, cudaStream_t stream) {
  copy_kernel<<<(n + 255) / 256, 256, 0, stream>>>(x, y, n);
}
