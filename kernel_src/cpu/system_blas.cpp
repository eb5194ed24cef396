// system_blas.cpp: loads OpenBLAS, MKL or BLIS at the first product and calls their cblas_sgemm.
//
// HFPATCH_BLAS names the library to load instead, or "none". The reference BLAS is not taken: our own
// blocks are faster. So a name that any BLAS may have (libblas, libcblas) is loaded only if it turns out
// to be one of the three.
#include "system_blas.h"

#include <cstdlib>
#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#define HFP_DLOPEN 1
#endif

namespace hfp {
namespace cpu {

namespace {

// With 32-bit sizes (LP64), as the names below promise.
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                       const float *a, int lda, const float *b, int ldb, float beta, float *c,
                       int ldc);

struct Blas {
  Sgemm sgemm = nullptr;
  int64_t kind = HFP_GEMM_OWN;
};

#if defined(HFP_DLOPEN)
int64_t kind_of(void *library) {
  if (dlsym(library, "openblas_get_config")) return HFP_GEMM_OPENBLAS;
  if (dlsym(library, "MKL_Get_Version") || dlsym(library, "mkl_get_version")) return HFP_GEMM_MKL;
  if (dlsym(library, "bli_info_get_version_str")) return HFP_GEMM_BLIS;
  return HFP_GEMM_BLAS;
}

Blas load(const char *name, bool asked) {
  Blas blas;
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return blas;
  const int64_t kind = kind_of(library);
  void *found = dlsym(library, "cblas_sgemm");
  if (found && (asked || kind != HFP_GEMM_BLAS)) {
    std::memcpy(&blas.sgemm, &found, sizeof found);
    blas.kind = kind;
    return blas;
  }
  dlclose(library);
  return blas;
}
#endif

Blas find() {
#if defined(HFP_DLOPEN)
  if (const char *wanted = std::getenv("HFPATCH_BLAS")) {
    if (std::strcmp(wanted, "none") == 0) return Blas();
    if (*wanted) return load(wanted, true);
  }
#if defined(__APPLE__)
  const char *const names[] = {"libopenblas.dylib", "libblis.dylib"};
#else
  const char *const names[] = {"libmkl_rt.so.2", "libopenblas.so.0", "libblis.so.4", "libblas.so.3"};
#endif
  for (const char *name : names) {
    const Blas blas = load(name, false);
    if (blas.sgemm) return blas;
  }
#endif
  return Blas();
}

const Blas &blas() {
  static const Blas found = find();
  return found;
}

bool fits(int64_t x) { return x <= INT32_MAX; }

}  // namespace

int64_t gemm_backend() { return blas().kind; }

bool system_gemm(const GemmArgs &g) {
  const Sgemm sgemm = blas().sgemm;
  if (!sgemm) return false;
  if (!(fits(g.m) && fits(g.n) && fits(g.k) && fits(g.a_row) && fits(g.b_row) && fits(g.out_row)))
    return false;
  // What a BLAS asks of leading dimensions, also of a matrix with one row.
  if (g.a_row < (g.a_transposed ? g.m : g.k) || g.b_row < (g.b_transposed ? g.k : g.n) ||
      g.out_row < g.n)
    return false;
  constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
  for (int64_t i = 0; i < g.batch; ++i) {
    const float *a = static_cast<const float *>(g.a) + i * g.a_batch;
    const float *b = static_cast<const float *>(g.b) + i * g.b_batch;
    float *out = static_cast<float *>(g.out) + i * g.out_batch;
    if (g.c) {
      const float *c = static_cast<const float *>(g.c) + i * g.c_batch;
      if (c != out || g.c_row != g.out_row) {
        for (int64_t row = 0; row < g.m; ++row)
          std::memcpy(out + row * g.out_row, c + row * g.c_row,
                      static_cast<std::size_t>(g.n) * sizeof(float));
      }
    }
    sgemm(kRowMajor, g.a_transposed ? kTransposed : kPlain, g.b_transposed ? kTransposed : kPlain,
          static_cast<int>(g.m), static_cast<int>(g.n), static_cast<int>(g.k), g.alpha, a,
          static_cast<int>(g.a_row), b, static_cast<int>(g.b_row), g.c ? g.beta : 0.0f, out,
          static_cast<int>(g.out_row));
  }
  return true;
}

}  // namespace cpu
}  // namespace hfp
