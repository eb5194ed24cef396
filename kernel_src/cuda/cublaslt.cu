// cublaslt.cu: loads cuBLASLt: the library that HFPATCH_CUBLASLT names, else the one that the process has
// loaded already (PyTorch's), else the newest that the system finds.
#include "cublaslt.h"

#include <cstdlib>
#include <cstring>

#if defined(__unix__)
#include <dlfcn.h>
#define HFP_DLOPEN 1
#endif

namespace hfp::cuda::cublaslt {

namespace {

#if defined(HFP_DLOPEN)
template <class Function>
bool find(void *library, const char *name, Function *function) {
  void *found = dlsym(library, name);
  static_assert(sizeof found == sizeof *function, "functions are found as pointers");
  std::memcpy(function, &found, sizeof found);
  return found != nullptr;
}

void *open() {
  if (const char *wanted = std::getenv("HFPATCH_CUBLASLT")) {
    if (*wanted) return dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
  }
  const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"};
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char *name : names) {
      if (void *library = dlopen(name, flags)) return library;
    }
  }
  return nullptr;
}
#endif

bool load(Library *l) {
#if defined(HFP_DLOPEN)
  void *from = open();
  return from && find(from, "cublasLtCreate", &l->create) &&
         find(from, "cublasLtMatmulDescCreate", &l->product_create) &&
         find(from, "cublasLtMatmulDescSetAttribute", &l->product_set) &&
         find(from, "cublasLtMatmulDescDestroy", &l->product_destroy) &&
         find(from, "cublasLtMatrixLayoutCreate", &l->matrix_create) &&
         find(from, "cublasLtMatrixLayoutSetAttribute", &l->matrix_set) &&
         find(from, "cublasLtMatrixLayoutDestroy", &l->matrix_destroy) &&
         find(from, "cublasLtMatmulPreferenceCreate", &l->preference_create) &&
         find(from, "cublasLtMatmulPreferenceSetAttribute", &l->preference_set) &&
         find(from, "cublasLtMatmulPreferenceDestroy", &l->preference_destroy) &&
         find(from, "cublasLtMatmulAlgoGetHeuristic", &l->heuristic) &&
         find(from, "cublasLtMatmul", &l->multiply);
#else
  (void)l;
  return false;
#endif
}

}  // namespace

const Library *library() {
  static Library loaded = {};
  static const bool there = load(&loaded);
  return there ? &loaded : nullptr;
}

}  // namespace hfp::cuda::cublaslt
