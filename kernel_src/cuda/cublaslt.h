// cublaslt.h: what is used of cuBLASLt, which is loaded at run time. Written from its documentation
// (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api): neither its header nor the library is
// needed to build. These types and numbers are the same in CUDA 11, 12 and 13.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace hfp::cuda::cublaslt {

using Handle = void *;
using Object = void *;  // a description of a product, of a matrix, or of preferences

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  std::size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

constexpr int kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14;  // cudaDataType
constexpr int kComputeFloat32 = 68;                        // CUBLAS_COMPUTE_32F: no TF32
constexpr int kTransposeA = 3, kTransposeB = 4;            // of CUBLASLT_MATMUL_DESC
constexpr int kBatchCount = 5, kBatchOffset = 6;           // of CUBLASLT_MATRIX_LAYOUT
constexpr int kMaxWorkspace = 1, kReductions = 3, kAlignments = 5;  // of CUBLASLT_MATMUL_PREF
constexpr int kReduceInFloat32 = 1 | 2;  // in place, or through the workspace; not in half types

struct Library {
  int (*create)(Handle *);
  int (*product_create)(Object *, int compute, int scale);
  int (*product_set)(Object, int attribute, const void *, std::size_t);
  int (*product_destroy)(Object);
  int (*matrix_create)(Object *, int type, uint64_t rows, uint64_t cols, int64_t stride);
  int (*matrix_set)(Object, int attribute, const void *, std::size_t);
  int (*matrix_destroy)(Object);
  int (*preference_create)(Object *);
  int (*preference_set)(Object, int attribute, const void *, std::size_t);
  int (*preference_destroy)(Object);
  int (*heuristic)(Handle, Object, Object, Object, Object, Object, Object, int, Heuristic *, int *);
  int (*multiply)(Handle, Object, const void *alpha, const void *a, Object, const void *b, Object,
                  const void *beta, const void *c, Object, void *d, Object, const Algorithm *,
                  void *workspace, std::size_t, cudaStream_t);
};

// Loaded at the first call; nullptr: there is none.
const Library *library();

}  // namespace hfp::cuda::cublaslt
