// step.cu: a decoding step's kernels, called from step.py.
#include "attention.cuh"

using namespace decoding;

namespace {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int bytes, cudaStream_t stream,
                   Arguments... arguments) {
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
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <class T, Epilogue kEpilogue, int kStages>
cudaError_t run_product(const Product &p, bool staged, int grid, cudaStream_t s) {
  const auto kernel = p.rows > 8 ? (staged ? product<T, kEpilogue, true, true, kStages>
                                           : product<T, kEpilogue, true, false, kStages>)
                                 : (staged ? product<T, kEpilogue, false, true, kStages>
                                           : product<T, kEpilogue, false, false, kStages>);
  const int bytes = shared_bytes(kStages, staged, p.rows, p.columns);
  return launch(kernel, grid, kThreads, bytes, s, p);
}

template <class T, int kStages>
cudaError_t run_product(const Product &p, int epilogue, bool staged, int grid, cudaStream_t s) {
  if (epilogue == kStore) return run_product<T, kStore, kStages>(p, staged, grid, s);
  if (epilogue == kResidual) return run_product<T, kResidual, kStages>(p, staged, grid, s);
  if (epilogue == kGated) return run_product<T, kGated, kStages>(p, staged, grid, s);
  return launch(norm_row<T>, p.rows, kThreads, 0, s, p);
}

template <class T, int kDim, int kHeads>
cudaError_t run_attention(const Attention &a, int rows, int heads, cudaStream_t s) {
  const int bytes = sizeof(AttentionShared<T, kDim, kHeads>);
  return launch(attention<T, kDim, kHeads>, dim3(a.parts, a.key_heads, rows), kAttentionWarps * 32, bytes, s, a, heads);
}

template <class T, int kDim>
cudaError_t run_attention(const Attention &a, int rows, int heads, cudaStream_t s) {
  if (heads == 1) return run_attention<T, kDim, 1>(a, rows, heads, s);
  if (heads == 2) return run_attention<T, kDim, 2>(a, rows, heads, s);
  if (heads <= 4) return run_attention<T, kDim, 4>(a, rows, heads, s);
  return heads <= 8 ? run_attention<T, kDim, 8>(a, rows, heads, s) : cudaErrorInvalidValue;
}

}  // namespace

extern "C" const char *error_text(int e) { return cudaGetErrorString(static_cast<cudaError_t>(e)); }

extern "C" int product(const Product *p, int stages, int epilogue, int staged, int grid, void *stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  using B = __nv_bfloat16;
  switch (stages) {
    case 4: return run_product<B, 4>(*p, epilogue, staged, grid, s);
    case 8: return run_product<B, 8>(*p, epilogue, staged, grid, s);
    case 12: return run_product<B, 12>(*p, epilogue, staged, grid, s);
    default: return cudaErrorInvalidValue;
  }
}

extern "C" int attention(const Attention *a, int rows, int heads, int dim, void *stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (dim == 64) return run_attention<__nv_bfloat16, 64>(*a, rows, heads, s);
  if (dim == 128) return run_attention<__nv_bfloat16, 128>(*a, rows, heads, s);
  return cudaErrorInvalidValue;
}

extern "C" int begin_step(const Begin *b, int rows, void *stream) {
  return launch(begin_step<__nv_bfloat16>, rows, 256, 0, static_cast<cudaStream_t>(stream), *b);
}
