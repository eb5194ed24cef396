/* Where the programs have their tensors: host memory; with HFP_CUDA memory that cuda:0 reads too. */
#include <stdio.h>
#include <stdlib.h>

#if defined(HFP_CUDA)
#include <cuda_runtime_api.h>
#define PLACE kDLCUDA

static void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(status));
  exit(2);
}
static void *get_shared(size_t bytes) {
  void *found;
  check_cuda(cudaMallocManaged(&found, bytes ? bytes : 1, cudaMemAttachGlobal));
  return found;
}
static void free_shared(void *data) { check_cuda(cudaFree(data)); }
/* What was launched has ended. */
static void finish(void *stream) { check_cuda(cudaStreamSynchronize((cudaStream_t)stream)); }
#else
#define PLACE kDLCPU

static void *get_shared(size_t bytes) {
  void *found = malloc(bytes ? bytes : 1);
  if (found) return found;
  fprintf(stderr, "out of memory\n");
  exit(2);
}
static void free_shared(void *data) { free(data); }
static void finish(void *stream) { (void)stream; }
#endif
