// Products of many small matrices: a block has a tile, from tiles in shared memory.
#include <cuda_runtime.h>

constexpr int kTile = 16;
constexpr int kEach = 4;  // rows and columns of the result that a thread has

__global__ void gemm_kernel(const float* a, const float* b, float* c, int m, int n, int k) {
  size_t batch = blockIdx.z;
  a += batch * m * k;
  b += batch * k * n;
  c += batch * m * n;
  __shared__ float as[kTile][kTile * kEach], bs[kTile][kTile * kEach];
  int row = blockIdx.y * kTile * kEach, column = blockIdx.x * kTile * kEach;
  float sums[kEach][kEach] = {};
  for (int first = 0; first < k; first += kTile) {
    for (int e = 0; e < kEach; ++e) {
      int i = first + threadIdx.x, r = row + threadIdx.y + e * kTile;
      as[threadIdx.x][threadIdx.y + e * kTile] = r < m && i < k ? a[r * k + i] : 0;
      int j = first + threadIdx.y, col = column + threadIdx.x + e * kTile;
      bs[threadIdx.y][threadIdx.x + e * kTile] = j < k && col < n ? b[j * n + col] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      float left[kEach], right[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        left[e] = as[t][threadIdx.y + e * kTile];
        right[e] = bs[t][threadIdx.x + e * kTile];
      }
#pragma unroll
      for (int y = 0; y < kEach; ++y)
#pragma unroll
        for (int x = 0; x < kEach; ++x) sums[y][x] += left[y] * right[x];
    }
    __syncthreads();
  }
#pragma unroll
  for (int y = 0; y < kEach; ++y)
#pragma unroll
    for (int x = 0; x < kEach; ++x) {
      int r = row + threadIdx.y + y * kTile, col = column + threadIdx.x + x * kTile;
      if (r < m && col < n) c[r * n + col] = sums[y][x];
    }
}

extern "C" void solve(const float* a, const float* b, float* c, int batch, int m, int n, int k,
                      cudaStream_t stream) {
  int side = kTile * kEach;
  dim3 threads(kTile, kTile), blocks((n + side - 1) / side, (m + side - 1) / side, batch);
  gemm_kernel<<<blocks, threads, 0, stream>>>(a, b, c, m, n, k);
}
