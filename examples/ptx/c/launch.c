/*
 * Loads the PTX that `hfpatch kernel build --ptx DIR` wrote, by the driver API, and launches by name.
 *
 *   cc launch.c -ldl -o launch && ./launch DIR
 *
 * Needs an NVIDIA driver; no CUDA toolkit: libcuda is loaded at run time.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KERNELS 2


static void *library;

static void *find(const char *name) {
  void *found = dlsym(library, name);
  if (found) return found;
  fprintf(stderr, "libcuda has no %s; install a newer driver\n", name);
  exit(1);
}

static void check(const char *name, int status) {
  if (status == 0) return;
  fprintf(stderr, "%s failed with status %d\n", name, status);
  exit(1);
}

/* Calls a function of libcuda with parameters of these types; they all return a CUresult. */
#define CUDA(name, types, ...)                  \
  do {                                          \
    int(*function) types;                       \
    void *found = find(#name);                  \
    memcpy(&function, &found, sizeof function); \
    check(#name, function(__VA_ARGS__));        \
  } while (0)

struct kernel {
  const char *name;
  void *function;
  int launches;
};

static struct kernel kernels[KERNELS] = {{"relu_squared", NULL, 0}, {"block_sums", NULL, 0}};

static void launch(const char *name, unsigned grid, unsigned block, void **arguments) {
  for (int i = 0; i < KERNELS; ++i) {
    if (strcmp(kernels[i].name, name) != 0) continue;
    CUDA(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          void *, void **, void **),
         kernels[i].function, grid, 1, 1, block, 1, 1, 0, NULL, arguments, NULL);
    ++kernels[i].launches;
    return;
  }
  fprintf(stderr, "there is no kernel `%s`\n", name);
  exit(1);
}

/* The file of the newest architecture that this GPU runs: relu_squared.sm_90.ptx on 9.0. */
static char *read_newest(const char *folder, int arch) {
  for (; arch >= 75; --arch) {
    char path[4096];
    snprintf(path, sizeof path, "%s/relu_squared.sm_%d.ptx", folder, arch);
    FILE *file = fopen(path, "rb");
    if (!file) continue;
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    rewind(file);
    char *text = calloc((size_t)size + 1, 1);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) exit(1);
    fclose(file);
    return text;
  }
  fprintf(stderr, "%s has no PTX for this GPU; build it with --archs\n", folder);
  exit(1);
}

int main(int argc, char **argv) {
  enum { n = 1000, block = 256, blocks = (n + block - 1) / block };
  if (argc != 2) return fprintf(stderr, "usage: %s DIR\n", argv[0]), 2;
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return fprintf(stderr, "no NVIDIA driver: %s\n", dlerror()), 1;
  int device = 0, major = 0, minor = 0;
  void *context = NULL, *module = NULL;
  CUDA(cuInit, (unsigned), 0);
  CUDA(cuDeviceGet, (int *, int), &device, 0);
  CUDA(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
  CUDA(cuCtxSetCurrent, (void *), context);
  CUDA(cuDeviceGetAttribute, (int *, int, int), &major, 75, device);
  CUDA(cuDeviceGetAttribute, (int *, int, int), &minor, 76, device);
  char *text = read_newest(argv[1], major * 10 + minor);
  CUDA(cuModuleLoadData, (void **, const void *), &module, text);
  free(text);
  for (int i = 0; i < KERNELS; ++i) {
    CUDA(cuModuleGetFunction, (void **, void *, const char *), &kernels[i].function, module,
         kernels[i].name);
  }

  float x[n], sums[blocks], total = 0;
  for (int i = 0; i < n; ++i) x[i] = (float)(i % 7) - 3.0f;
  uint64_t source = 0, squared = 0, totals = 0;
  int count = n;
  CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &source, sizeof x);
  CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &squared, sizeof x);
  CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &totals, sizeof sums);
  CUDA(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), source, x, sizeof x);
  launch("relu_squared", blocks, block, (void *[]){&squared, &source, &count});
  launch("block_sums", blocks, block, (void *[]){&totals, &squared, &count});
  CUDA(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), sums, totals, sizeof sums);
  CUDA(cuMemFree_v2, (uint64_t), source);
  CUDA(cuMemFree_v2, (uint64_t), squared);
  CUDA(cuMemFree_v2, (uint64_t), totals);
  for (int i = 0; i < blocks; ++i) total += sums[i];
  printf("sum %.1f\nlaunches block_sums %d relu_squared %d\n", total, kernels[1].launches,
         kernels[0].launches);
  return 0;
}
