// pointers.cu: what memory a pointer leads to, for HFPATCH_CHECK_POINTERS (check.h).
#include "common.cuh"
#include "../pointers.h"

namespace hfp::cuda {

PointerMemory memory_of(const void *pointer, int *device) {
  cudaPointerAttributes found{};
  if (cudaPointerGetAttributes(&found, pointer) != cudaSuccess) {
    cudaGetLastError();
    return PointerMemory::Unknown;
  }
  *device = found.device;
  switch (found.type) {
    case cudaMemoryTypeDevice: return PointerMemory::Device;
    case cudaMemoryTypeUnregistered: return PointerMemory::Host;
    default: return PointerMemory::Both;  // pinned or managed
  }
}

}  // namespace hfp::cuda
