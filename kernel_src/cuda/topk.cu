// topk.cu: the k greatest values of each row, descending; hfp_topk on CUDA. A radix select
// (row_select.cuh) finds which they are, and only these are sorted.
#include "row_select.cuh"

namespace hfp::cuda {
namespace {

struct TopkParams {
  void *values;
  int64_t *indices;
  const void *x;
  Rows x_rows;
  int64_t first_row;
  int k;
};

constexpr int kTopkThreads = 1024;

// Descending, `size` a power of two.
__device__ __forceinline__ void bitonic_sort(uint64_t *list, int size) {
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int t = threadIdx.x; t < size / 2; t += blockDim.x) {
        const int i = 2 * t - (t & (apart - 1)), j = i + apart;
        const uint64_t a = list[i], b = list[j];
        if ((a < b) == ((i & run) == 0)) list[i] = b, list[j] = a;
      }
      __syncthreads();
    }
  }
}

template <class T, DType kType, bool kAligned, bool kCluster>
__global__ void __launch_bounds__(kTopkThreads)
    topk_kernel(const __grid_constant__ TopkParams p) {
  __shared__ SelectShared s;
  __shared__ uint64_t list[HFP_MAX_TOPK];
  __shared__ unsigned listed;
  using CTAs = Team<kCluster>;
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  const uint32_t first = CTAs::rank() * blockDim.x + threadIdx.x, step = CTAs::size() * blockDim.x;
  if (threadIdx.x == 0) listed = 0;

  int round = 0;
  uint64_t left = 0, all = 0;
  const Prefix least = select_prefix<kCluster>(
      s, round, p.k, key_digits(kType), 24, left, all, [&](const auto &f) {
        each_element<T, kAligned>(x, cols, first, step,
                                  [&](float value, uint32_t) { f(key_of(value)); });
      });
  // Of those that are equal, the first ones.
  const bool tied = left < all;
  const int digits = index_digits(cols);
  const uint32_t index_mask = ~0u >> (32 - 8 * digits);
  Prefix least_index;
  if (tied) {
    least_index = select_prefix<kCluster>(
        s, round, left, digits, 8 * digits - 8, left, all, [&](const auto &f) {
          each_element<T, kAligned>(x, cols, first, step, [&](float value, uint32_t i) {
            if (least.has(key_of(value))) f(~i & index_mask);
          });
        });
  }

  // They meet, in any order, in the first CTA.
  uint64_t *const to = CTAs::at(list, 0);
  unsigned *const count = CTAs::at(&listed, 0);
  each_element<T, kAligned>(x, cols, first, step, [&](float value, uint32_t i) {
    const uint32_t key = key_of(value);
    if (key < least.bits) return;
    if (tied && least.has(key) && (~i & index_mask) < least_index.bits) return;
    to[atomicAdd(count, 1u)] = pair_of(key, i);
  });
  CTAs::sync();
  if (CTAs::rank() != 0) return;

  int size = 1;
  while (size < p.k) size *= 2;
  for (int i = p.k + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
  bitonic_sort(list, size);
  for (int i = threadIdx.x; i < p.k; i += blockDim.x) {
    const uint32_t index = index_of(list[i]);
    p.indices[row * p.k + i] = index;
    static_cast<T *>(p.values)[row * p.k + i] = x[index];
  }
}

template <class T, DType kType>
int32_t launch_for(TopkParams &p, int device, void *stream) {
  const int64_t vectors = (p.x_rows.cols + kVectorOf<T> - 1) / kVectorOf<T>;
  if (rows_of_vectors(p.x_rows, p.x, sizeof(T))) {
    return launch_team(&topk_kernel<T, kType, true, false>, &topk_kernel<T, kType, true, true>, p,
                       vectors, kTopkThreads, device, stream, "topk");
  }
  return launch_team(&topk_kernel<T, kType, false, false>, &topk_kernel<T, kType, false, true>, p,
                     vectors, kTopkThreads, device, stream, "topk");
}

}  // namespace

int32_t topk(const TopkArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  TopkParams p{};
  p.values = a.values;
  p.indices = a.indices;
  p.x = a.x;
  p.x_rows = a.rows;
  p.k = a.k;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "topk");
  switch (a.type) {
    case DType::F32: return launch_for<float, DType::F32>(p, device, stream);
    case DType::F16: return launch_for<__half, DType::F16>(p, device, stream);
    default: return launch_for<__nv_bfloat16, DType::BF16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
