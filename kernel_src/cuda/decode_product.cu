// decode_product.cu: chooses among the kernels of decode_product.cuh.
#include "decode_product.cuh"

namespace hfp::cuda::decode {

namespace {

constexpr int kStagedBytes = 12 << 10;  // x in shared memory up to this size, where it need not be for a norm
constexpr int kDepths[] = {8, 4};

template <class T, bool kPairs, bool kTall>
int32_t launch_depth(Product &p, bool staged, int stages, const Device &device, void *stream) {
  const auto kernel = staged ? (stages == 8 ? &decode_product_kernel<T, kPairs, kTall, true, 8>
                                            : &decode_product_kernel<T, kPairs, kTall, true, 4>)
                             : (stages == 8 ? &decode_product_kernel<T, kPairs, kTall, false, 8>
                                            : &decode_product_kernel<T, kPairs, kTall, false, 4>);
  const int units = ((kPairs ? p.end[0] : p.end[2]) + kUnit - 1) / kUnit;
  const int grid = units < device.processors ? units : device.processors;
  return launch_step(kernel, dim3(static_cast<unsigned>(grid)), kThreads,
                     shared_bytes(stages, staged, p.rows, p.columns), p, stream);
}

template <class T>
int32_t launch_for(Product &p, bool pairs, bool staged, int stages, const Device &device, void *stream) {
  const bool tall = p.rows > 8;
  if (pairs) {
    return tall ? launch_depth<T, true, true>(p, staged, stages, device, stream)
                : launch_depth<T, true, false>(p, staged, stages, device, stream);
  }
  return tall ? launch_depth<T, false, true>(p, staged, stages, device, stream)
              : launch_depth<T, false, false>(p, staged, stages, device, stream);
}

// The deepest ring that fits beside x; 0: none.
int depth_beside(const Product &p, bool staged, const Device &device) {
  for (const int stages : kDepths) {
    if (shared_bytes(stages, staged, p.rows, p.columns) <= device.shared_limit) return stages;
  }
  return 0;
}

}  // namespace

Device device_of(int device) {
  Device found{device, sm_count(device), shared_memory_limit(), false, false};
  cudaFuncAttributes of{};
  const void *kernel =
      reinterpret_cast<const void *>(&decode_product_kernel<__half, false, false, false, 4>);
  // Where the driver made its code from PTX older than sm_80's, the kernels are empty.
  found.tensor_cores = cudaFuncGetAttributes(&of, kernel) == cudaSuccess && capability_major() >= 8 &&
                       of.ptxVersion >= 80;
  if (!found.tensor_cores) cudaGetLastError();
  found.bulk_copies = found.tensor_cores && bulk_copies_supported();
  return found;
}

bool takes_product(DType type, const Product &p, const Device &device) {
  if (type == DType::F32 || !device.tensor_cores || p.columns % 8 != 0 || p.x_stride % 8 != 0) return false;
  if (depth_beside(p, false, device) == 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (p.weight[i] != nullptr && (!pointer_aligned(p.weight[i]) || p.stride[i] % 8 != 0)) return false;
  }
  return true;
}

int32_t run_product(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, const Device &device,
                    void *stream) {
  const int rows = p.rows;
  Product most = p;
  most.rows = rows < kMaxRows ? rows : kMaxRows;
  const bool here = norm.present() && !norm.layer() && norm.weight != nullptr && norm.bias == nullptr &&
                    pointer_aligned(norm.weight);
  const bool fused = here && depth_beside(most, true, device) != 0;
  if (fused) {
    p.norm_weight = norm.weight;
    p.eps = norm.eps, p.norm_offset = norm.offset, p.round_normed = norm.rounded();
  } else {
    const int32_t status = norm_before(type, &p, norm, normed, stream);
    if (status != HFP_OK) return status;
  }
  if (takes_bulk(p, device)) return run_bulk(type, p, pairs, device, stream);
  for (int first = 0; first < rows; first += kMaxRows) {
    Product part = p;
    part.rows = rows - first < kMaxRows ? rows - first : kMaxRows;
    part.x = static_cast<const char *>(p.x) + first * p.x_stride * 2;
    part.out = static_cast<char *>(p.out) + first * p.out_columns * (p.finish.wide ? 4 : 2);
    if (p.finish.residual != nullptr) {
      part.finish.residual = static_cast<const char *>(p.finish.residual) + first * p.out_columns * 2;
    }
    bool staged = fused || part.rows * staged_row_bytes(part.columns) <= kStagedBytes;
    int stages = depth_beside(part, staged, device);
    if (stages == 0) staged = false, stages = depth_beside(part, false, device);
    const int32_t status = type == DType::BF16
                               ? launch_for<__nv_bfloat16>(part, pairs, staged, stages, device, stream)
                               : launch_for<__half>(part, pairs, staged, stages, device, stream);
    if (status != HFP_OK) return status;
  }
  return HFP_OK;
}

}  // namespace hfp::cuda::decode
