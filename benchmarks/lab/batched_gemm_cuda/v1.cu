// Products of many small matrices: a block has a tile, from tiles in shared memory.
#include <cuda_runtime.h>

constexpr int kTile = 16;

__global__ void gemm_kernel(const float* a, const float* b, float* c, int m, int n, int k) {
  size_t batch = blockIdx.z;
  a += batch * m * k;
  b += batch * k * n;
  c += batch * m * n;
  int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  __shared__ float as[kTile][kTile], bs[kTile][kTile];
  float sum = 0;
  for (int first = 0; first < k; first += kTile) {
    int i = first + threadIdx.x, j = first + threadIdx.y;
    as[threadIdx.y][threadIdx.x] = row < m && i < k ? a[row * k + i] : 0;
    bs[threadIdx.y][threadIdx.x] = j < k && column < n ? b[j * n + column] : 0;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTile; ++t) sum += as[threadIdx.y][t] * bs[t][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

extern "C" void solve(const float* a, const float* b, float* c, int batch, int m, int n, int k,
                      cudaStream_t stream) {
  dim3 threads(kTile, kTile), blocks((n + kTile - 1) / kTile, (m + kTile - 1) / kTile, batch);
  gemm_kernel<<<blocks, threads, 0, stream>>>(a, b, c, m, n, k);
}
