// ordered.cuh: what keeps a kernel's steps in the order in which they are written: addresses, the
// wait for the kernel before, loads, the sum over the row.
//
// ptxas moves them to where that saves registers: the wait above the arithmetic of the same basic
// block, which then begins only when the kernel before has ended; and loads below the sum, where
// their values are used, so that their latency comes on top of the sum's. Mostly it moves neither
// past an instruction that leaves the kernel. Those here are never taken. A kernel of rms_norm in bf16
// on an H200, warm, with both, with the wait first, and with the weight read after the sum: 4096 x 512
// 2.2 us, 2.4, 2.7; 1024 x 4096 3.4, 3.7, 4.2.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// These addresses and offsets are computed before what follows, that is wait_for_previous. 64 bits
// each, and never negative.
template <class A, class B>
__device__ __forceinline__ void settle(A &a, B &b) {
  asm volatile(
      "{\n.reg .pred never;\n.reg .b64 all;\n"
      "or.b64 all, %0, %1;\n"
      "setp.lt.s64 never, all, 0;\n@never exit;\n}"
      : "+l"(a), "+l"(b));
}
template <class A, class B, class C>
__device__ __forceinline__ void settle(A &a, B &b, C &c) {
  asm volatile(
      "{\n.reg .pred never;\n.reg .b64 all;\n"
      "or.b64 all, %0, %1;\nor.b64 all, all, %2;\n"
      "setp.lt.s64 never, all, 0;\n@never exit;\n}"
      : "+l"(a), "+l"(b), "+l"(c));
}
template <class A, class B, class C, class D>
__device__ __forceinline__ void settle(A &a, B &b, C &c, D &d) {
  asm volatile(
      "{\n.reg .pred never;\n.reg .b64 all;\n"
      "or.b64 all, %0, %1;\nor.b64 all, all, %2;\nor.b64 all, all, %3;\n"
      "setp.lt.s64 never, all, 0;\n@never exit;\n}"
      : "+l"(a), "+l"(b), "+l"(c), "+l"(d));
}

// The loads so far are asked for before what follows; those of Cache::kReadOnly may sink all the
// same. zero: a kernel parameter that is 0.
__device__ __forceinline__ void keep_loads_above(uint32_t zero) {
  asm volatile("{\n.reg .pred never;\nsetp.ne.u32 never, %0, 0;\n@never exit;\n}" ::"r"(zero)
               : "memory");
}

// load(i) of a thread's kVectors vectors of each of v, where they are written also if registers are short:
// ptxas moves no load out of a branch, as which it has to take this one.
template <int kVectors, class Load, class... V>
__device__ __forceinline__ void load_in_place(uint32_t zero, const Load &load, V (&...v)[kVectors]) {
  if (zero == 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) load(i);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) (v[i].zero(), ...);
  }
}

// A thread's vectors of a parameter: from `from` on, where `vectors` of the row are left, each
// `stride`. To be kept above the sum, hence not Cache::kReadOnly. An absent one is `otherwise`.
template <class V, class W, int kVectors>
__device__ __forceinline__ void load_early(V (&v)[kVectors], bool present, const W *from,
                                           int stride, int vectors, float otherwise) {
  constexpr int N = V::kBytes / static_cast<int>(sizeof(W));
  float value[N];
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = otherwise;
  if (present) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * stride < vectors) v[i].template load<Cache::kTwice>(from + i * stride * N);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i].set(value);
  }
}

// Before wait_for_previous: the first CTAs bring a thread's kVectors vectors of a parameter to L2, each
// `step` elements, where `elements` of the row are left. No read, so that the kernel before may still
// write them. layer_norm in bf16 on an H200, us, with cold parameters, without and with: 4096 x 2048
// 9.76, 9.59, x 8192 33.8, 33.6; read late, x 16384 68.2, 67.3. By all CTAs 17.2 at 4096 x 2048.
inline constexpr unsigned kBringingCtas = 4;
template <int kVectors, class W>
__device__ __forceinline__ void bring_early(bool present, const W *from, int step, int elements) {
  if (!present || blockIdx.x >= kBringingCtas) return;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i * step < elements) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i * step));
  }
}

// A row to L2, `vectors` of 16 bytes, by one thread (sm_90). No read, so that the kernel before may still write
// it. An address that is not the same for all threads of a warp would take a loop over them.
__device__ __forceinline__ void bring_row(const void *row, uint32_t vectors) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(vectors * 16) : "memory");
#endif
}

// By a CTA that has asked for its own row: the row that one some CTAs on will ask for comes to L2 meanwhile,
// from `skipped` elements on.
template <class T>
__device__ __forceinline__ void bring_ahead(const RowsAhead &ahead, const void *rows, int64_t stride,
                                            uint32_t row, uint32_t skipped, uint32_t vectors) {
  if (threadIdx.x == 0 && row + ahead.distance < ahead.rows) {
    bring_row(static_cast<const T *>(rows) + (row + ahead.distance) * stride + skipped, vectors);
  }
}

// For __launch_bounds__: the CTAs that give an SM `wanted` threads, or as many as it can have.
constexpr int resident_ctas(int threads, int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  wanted = wanted < 1024 ? wanted : 1024;
#endif
  return wanted < threads ? 1 : wanted / threads;
}

}  // namespace hfp::cuda
