/*
 * Where the programs in examples/c and examples/go have their tensors: in host memory, or on cuda:0 by
 * the driver API. libcuda is loaded at run time, so that nobody needs a CUDA toolkit to build them.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hfpatch.h"

static struct {
  int in_use;
  int (*init)(unsigned);
  int (*count)(int *);
  int (*retain)(void **, int);
  int (*set)(void *);
  int (*alloc)(uint64_t *, size_t);
  int (*free)(uint64_t);
  int (*write)(uint64_t, const void *, size_t);
  int (*read)(void *, uint64_t, size_t);
} cuda;

/* Why cuda:0 cannot be used; NULL: from now on it is. */
static inline const char *device_use_cuda(void) {
  const struct {
    const char *name;
    void *into;
  } functions[] = {{"cuInit", &cuda.init},
                   {"cuDeviceGetCount", &cuda.count},
                   {"cuDevicePrimaryCtxRetain", &cuda.retain},
                   {"cuCtxSetCurrent", &cuda.set},
                   {"cuMemAlloc_v2", &cuda.alloc},
                   {"cuMemFree_v2", &cuda.free},
                   {"cuMemcpyHtoD_v2", &cuda.write},
                   {"cuMemcpyDtoH_v2", &cuda.read}};
  void *context, *driver;
  int count = 0;
  if (!strstr(hfp_build_info(), "\"cuda\"")) return "this libhfpatch was built without CUDA";
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return "no NVIDIA driver";
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
    void *found = dlsym(driver, functions[i].name);
    if (!found) return "the NVIDIA driver is too old";
    memcpy(functions[i].into, &found, sizeof found);
  }
  if (cuda.init(0) || cuda.count(&count) || count < 1) return "no NVIDIA GPU";
  /* libhfpatch works in the primary context, as every program of the CUDA runtime does. */
  if (cuda.retain(&context, 0) || cuda.set(context)) return "the GPU cannot be used";
  cuda.in_use = 1;
  return NULL;
}

static inline DLDevice device_in_use(void) {
  DLDevice found = {cuda.in_use ? kDLCUDA : kDLCPU, 0};
  return found;
}

static inline void device_check(int failed, const char *what) {
  if (!failed) return;
  fprintf(stderr, "row: %s failed on %s\n", what, cuda.in_use ? "cuda:0" : "the CPU");
  exit(1);
}

static inline void *device_get(size_t bytes) {
  uint64_t found = 0;
  void *memory;
  if (cuda.in_use) {
    device_check(cuda.alloc(&found, bytes), "an allocation");
    return (void *)(uintptr_t)found;
  }
  memory = malloc(bytes);
  device_check(!memory, "an allocation");
  return memory;
}

static inline void device_free(void *memory) {
  if (cuda.in_use) {
    device_check(cuda.free((uintptr_t)memory), "giving memory back");
  } else {
    free(memory);
  }
}

static inline void device_write(void *to, const void *from, size_t bytes) {
  if (cuda.in_use) {
    device_check(cuda.write((uintptr_t)to, from, bytes), "a copy");
  } else {
    memcpy(to, from, bytes);
  }
}

/* Waits for what was launched on the default stream. */
static inline void device_read(void *to, const void *from, size_t bytes) {
  if (cuda.in_use) {
    device_check(cuda.read(to, (uintptr_t)from, bytes), "a copy");
  } else {
    memcpy(to, from, bytes);
  }
}
