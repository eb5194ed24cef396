// Bound by arithmetic: 2048 multiplications with addition for each element.
#include <cuda_runtime.h>

constexpr int kSteps = 512;

__global__ void fma_kernel(const float* x, float* y, int n) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n) return;
  float a = x[at], b = a + 1, c = a + 2, d = a + 3;
#pragma unroll 16
  for (int i = 0; i < kSteps; ++i) {
    a = fmaf(a, 0.9990234375f, 0.0009765625f);
    b = fmaf(b, 0.9990234375f, 0.0009765625f);
    c = fmaf(c, 0.9990234375f, 0.0009765625f);
    d = fmaf(d, 0.9990234375f, 0.0009765625f);
  }
  y[at] = (a + b) + (c + d);
}

extern "C" void solve(const float* x, float* y, int n, cudaStream_t stream) {
  fma_kernel<<<(n + 255) / 256, 256, 0, stream>>>(x, y, n);
}
