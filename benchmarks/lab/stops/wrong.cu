// Wrong: the last element is not written.
#include <cuda_runtime.h>

__global__ void copy_kernel(const float* x, float* y, int n) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < n - 1) y[at] = x[at];
}

extern "C" void solve(const float* x, float* y, int n, cudaStream_t stream) {
  copy_kernel<<<(n + 255) / 256, 256, 0, stream>>>(x, y, n);
}
