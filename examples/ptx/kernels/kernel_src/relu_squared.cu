// relu_squared.cu: max(x, 0)^2, and the sum of each block's results.
extern "C" __global__ void __launch_bounds__(256) relu_squared(float *out, const float *x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float y = fmaxf(x[i], 0.0f);
  out[i] = y * y;
}

extern "C" __global__ void __launch_bounds__(256) block_sums(float *sums, const float *x, int n) {
  __shared__ float part[256];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  part[threadIdx.x] = i < n ? x[i] : 0.0f;
  for (int step = 128; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
