// products.cu: product.cuh's kernels in several sizes of ring and CTA, called from products.py.
#include "product.cuh"

using decoding::Epilogue;
using decoding::Product;

namespace {

template <class Kernel>
cudaError_t launch(Kernel kernel, const Product &p, int grid, int threads, int bytes, bool overlap,
                   cudaStream_t stream) {
  if (bytes > 48 << 10) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
  }
  // A multiprocessor that must divide its memory anew between L1 and shared memory waits until it is empty.
  const cudaError_t divided =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (divided != cudaSuccess) return divided;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <class T, Epilogue kEpilogue, int kStages, int kWarps, int kCtas>
cudaError_t choose(const Product &p, bool staged, int grid, bool overlap, cudaStream_t s) {
  using namespace decoding;
  const auto kernel = p.rows > 8
                          ? (staged ? product<T, kEpilogue, true, true, kStages, kWarps, kCtas>
                                    : product<T, kEpilogue, true, false, kStages, kWarps, kCtas>)
                          : (staged ? product<T, kEpilogue, false, true, kStages, kWarps, kCtas>
                                    : product<T, kEpilogue, false, false, kStages, kWarps, kCtas>);
  return launch(kernel, p, grid, kWarps * 32, shared_bytes(kWarps, kStages, staged, p.rows, p.columns), overlap, s);
}

template <class T, int kStages, int kWarps, int kCtas>
cudaError_t choose(const Product &p, int epilogue, bool staged, int grid, bool overlap, cudaStream_t s) {
  using namespace decoding;
  if (epilogue == kStore) return choose<T, kStore, kStages, kWarps, kCtas>(p, staged, grid, overlap, s);
  if (epilogue == kResidual) return choose<T, kResidual, kStages, kWarps, kCtas>(p, staged, grid, overlap, s);
  if (epilogue == kGated) return choose<T, kGated, kStages, kWarps, kCtas>(p, staged, grid, overlap, s);
  return launch(norm_row<T, kWarps>, p, p.rows, kWarps * 32, 0, overlap, s);
}

}  // namespace

extern "C" const char *error_text(int e) { return cudaGetErrorString(static_cast<cudaError_t>(e)); }

// epilogue: a decoding::Epilogue, or 3 for the norm alone. variant: which of the sizes below. grid: CTAs. overlap: programmatic dependent launch.
extern "C" int product(const Product *p, int half, int variant, int epilogue, int staged, int grid,
                       int overlap, void *stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  using B = __nv_bfloat16;
  if (half) return choose<__half, 10, 16, 1>(*p, epilogue, staged, grid, overlap, s);
  switch (variant) {
    case 0: return choose<B, 10, 16, 1>(*p, epilogue, staged, grid, overlap, s);
    case 1: return choose<B, 6, 16, 1>(*p, epilogue, staged, grid, overlap, s);
    case 2: return choose<B, 12, 16, 1>(*p, epilogue, staged, grid, overlap, s);
    case 3: return choose<B, 6, 16, 2>(*p, epilogue, staged, grid, overlap, s);
    case 4: return choose<B, 12, 8, 2>(*p, epilogue, staged, grid, overlap, s);
    default: return cudaErrorInvalidValue;
  }
}
