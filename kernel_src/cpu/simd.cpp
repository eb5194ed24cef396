// simd.cpp: which instruction set the CPU kernels use, decided once; which stores.
#include <cstdlib>
#include <cstring>

#include "common.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace hfp {
namespace cpu {

namespace {

Simd detect() {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks the operating system whether it saves the registers. F16C is
  // read by hand: older compilers do not know its name there. It uses the AVX state.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
  Simd level = Simd::Baseline;
  if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) level = Simd::Avx2;
  if (level == Simd::Avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    level = Simd::Avx512;
  }
  // For tests: a lower level than the CPU's. Asking for a higher one changes nothing.
  if (const char *wanted = std::getenv("HFPATCH_SIMD")) {
    if (std::strcmp(wanted, "baseline") == 0) return Simd::Baseline;
    if (std::strcmp(wanted, "avx2") == 0 && level == Simd::Avx512) return Simd::Avx2;
  }
  return level;
#else
  return Simd::Baseline;
#endif
}

}  // namespace

Simd simd() {
  static const Simd level = detect();
  return level;
}

bool streams(int64_t moved, const void *out, int64_t out_bytes) {
#if defined(__x86_64__) && defined(__linux__)
  if (moved < 12000000) return false;
  static const int64_t page = sysconf(_SC_PAGESIZE);
  constexpr int64_t kLooks = 8;
  for (int64_t i = 0; i < kLooks; ++i) {
    uintptr_t at = reinterpret_cast<uintptr_t>(out);
    at += static_cast<uintptr_t>(out_bytes / kLooks * i);
    at -= at % static_cast<uintptr_t>(page);
    unsigned char there = 0;
    if (mincore(reinterpret_cast<void *>(at), 1, &there) != 0 || (there & 1) == 0) return false;
  }
  return true;
#else
  (void)moved, (void)out, (void)out_bytes;
  return false;
#endif
}

const char *simd_level() {
  switch (simd()) {
    case Simd::Avx512:
      return "avx512";
    case Simd::Avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace cpu
}  // namespace hfp
