// pointers.h: whether a pointer leads to the memory of its tensor's device; asked where the environment
// variable HFPATCH_CHECK_POINTERS is 1, since the answer costs about a microsecond per tensor.
#pragma once

#include <cstdlib>
#include <cstring>

namespace hfp {

enum class PointerMemory { Unknown, Host, Device, Both };

#if defined(CUDA_KERNEL)
namespace cuda {
PointerMemory memory_of(const void *pointer, int *device);
}
#endif

// Decided at the first call of a process.
inline bool checks_pointers() {
  static const bool wanted = [] {
    const char *value = std::getenv("HFPATCH_CHECK_POINTERS");
    return value && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

}  // namespace hfp
