// products.cu: product.cuh's kernels in several depths of ring, called from products.py.
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

template <class T, Epilogue kEpilogue, int kStages>
cudaError_t choose(const Product &p, bool staged, int grid, bool overlap, cudaStream_t s) {
  using namespace decoding;
  const auto kernel = p.rows > 8
                          ? (staged ? product<T, kEpilogue, true, true, kStages>
                                    : product<T, kEpilogue, true, false, kStages>)
                          : (staged ? product<T, kEpilogue, false, true, kStages>
                                    : product<T, kEpilogue, false, false, kStages>);
  return launch(kernel, p, grid, kThreads, shared_bytes(kStages, staged, p.rows, p.columns), overlap, s);
}

template <class T, int kStages>
cudaError_t choose(const Product &p, int epilogue, bool staged, int grid, bool overlap, cudaStream_t s) {
  using namespace decoding;
  if (epilogue == kStore) return choose<T, kStore, kStages>(p, staged, grid, overlap, s);
  if (epilogue == kResidual) return choose<T, kResidual, kStages>(p, staged, grid, overlap, s);
  if (epilogue == kGated) return choose<T, kGated, kStages>(p, staged, grid, overlap, s);
  return launch(norm_row<T>, p, p.rows, kThreads, 0, overlap, s);
}

}  // namespace

extern "C" const char *error_text(int e) { return cudaGetErrorString(static_cast<cudaError_t>(e)); }

// epilogue: a decoding::Epilogue, or 3 for the norm alone. stages: of a warp's ring; fp16 is compiled for 4. grid: CTAs. overlap: programmatic dependent launch.
extern "C" int product(const Product *p, int half, int stages, int epilogue, int staged, int grid,
                       int overlap, void *stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  using B = __nv_bfloat16;
  if (half) return choose<__half, 4>(*p, epilogue, staged, grid, overlap, s);
  switch (stages) {
    case 4: return choose<B, 4>(*p, epilogue, staged, grid, overlap, s);
    case 8: return choose<B, 8>(*p, epilogue, staged, grid, overlap, s);
    case 12: return choose<B, 12>(*p, epilogue, staged, grid, overlap, s);
    default: return cudaErrorInvalidValue;
  }
}
