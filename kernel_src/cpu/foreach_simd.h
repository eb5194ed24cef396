// foreach_simd.h: compiles HFP_SIMD_SOURCE once per instruction set, in one translation unit and
// without -march flags, so that any build system can build it with one command line.
//
// An op's .cpp has two parts. The outer part (HFP_SIMD not defined) includes this file and holds
// the entry point; the inner part is the kernel, in namespace hfp::cpu::HFP_SIMD, and is compiled
// here under each target pragma. Everything the inner part calls is always_inline or under the
// same pragma, so nothing loses the target. No lambdas there: GCC drops their target.
#if !defined(HFP_SIMD_SOURCE)
#error "define HFP_SIMD_SOURCE before including foreach_simd.h"
#endif

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// Vectors are passed between always_inline functions only, so their calling convention is moot.
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12 warns about its own _mm512_undefined_ps() (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define HFP_INLINE static inline __attribute__((always_inline))

#define HFP_SIMD baseline
#define HFP_SIMD_LEVEL 0
#define HFP_SIMD_BYTES 16
#include "simd.h"
#include HFP_SIMD_SOURCE
#undef HFP_SIMD
#undef HFP_SIMD_LEVEL
#undef HFP_SIMD_BYTES

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define HFP_SIMD avx2
#define HFP_SIMD_LEVEL 1
#define HFP_SIMD_BYTES 32
#include "simd.h"
#include HFP_SIMD_SOURCE
#undef HFP_SIMD
#undef HFP_SIMD_LEVEL
#undef HFP_SIMD_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))),                   \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define HFP_SIMD avx512
#define HFP_SIMD_LEVEL 2
#define HFP_SIMD_BYTES 64
#include "simd.h"
#include HFP_SIMD_SOURCE
#undef HFP_SIMD
#undef HFP_SIMD_LEVEL
#undef HFP_SIMD_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
