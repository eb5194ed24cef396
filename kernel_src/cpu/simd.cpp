// simd.cpp: which instruction set the CPU kernels use; decided once.
#include <cstdlib>
#include <cstring>

#include "common.h"

#if defined(__x86_64__)
#include <cpuid.h>
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
