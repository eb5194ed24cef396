// packed.cuh: arithmetic on two elements of a half type at once, as they lie in a word.
//
// Each result is rounded to T once, and has the bits of fp32 rounded to T: the 24 bits of fp32 hold
// any product of two significands of 11 or 8 bits, and as they are at least twice as many plus two,
// the second rounding of a sum changes nothing (Figueroa, SIGNUM 30(3), 1995). Only a bf16 product
// below 2^-126 can differ, by one unit of a subnormal, where fp32 would round twice. It takes one
// instruction for two elements, where fp32 takes one for each, as many to unpack them and half as
// many to pack.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// Whether Vec<T, N> consists of such words.
template <class T, int N>
inline constexpr bool kInTwos = sizeof(T) == 2 && N > 1;

// Whether the GPU that this is compiled for has the instructions. Where it does not, CUDA's headers
// compute in fp32: the same bits, no faster, and in more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
inline constexpr bool kHasTwos = std::is_same_v<T, __half>;
#else
template <class T>
inline constexpr bool kHasTwos = true;
#endif

template <class T>
using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ __forceinline__ Two<T> as_two(uint32_t word) {
  return *reinterpret_cast<const Two<T> *>(&word);
}
template <class V>
__device__ __forceinline__ uint32_t as_word(V v) {
  return *reinterpret_cast<const uint32_t *>(&v);
}

// _rn: no fused multiply-add.
template <class T>
__device__ __forceinline__ uint32_t mul_two(uint32_t a, uint32_t b) {
  return as_word(__hmul2_rn(as_two<T>(a), as_two<T>(b)));
}
template <class T>
__device__ __forceinline__ uint32_t add_two(uint32_t a, uint32_t b) {
  return as_word(__hadd2_rn(as_two<T>(a), as_two<T>(b)));
}
template <class T>
__device__ __forceinline__ uint32_t sub_two(uint32_t a, uint32_t b) {
  return as_word(__hsub2_rn(as_two<T>(a), as_two<T>(b)));
}

// The greater of each two; a NaN is passed by or, with kNaN, the result. From sm_80 on it is one
// instruction, for both half types; before, for fp16 too, CUDA's headers compare the elements one by
// one in fp32.
template <class T, bool kNaN>
__device__ __forceinline__ uint32_t max_two(uint32_t a, uint32_t b) {
  if constexpr (kNaN) return as_word(__hmax2_nan(as_two<T>(a), as_two<T>(b)));
  return as_word(__hmax2(as_two<T>(a), as_two<T>(b)));
}

// Whether max_two is that instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kHasMaxOfTwos = false;
#else
inline constexpr bool kHasMaxOfTwos = true;
#endif

template <class T, int N>
__device__ __forceinline__ Vec<T, N> mul_twos(const Vec<T, N> &a, const Vec<T, N> &b) {
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kWords; ++i) v.word[i] = mul_two<T>(a.word[i], b.word[i]);
  return v;
}
template <class T, int N>
__device__ __forceinline__ Vec<T, N> add_twos(const Vec<T, N> &a, const Vec<T, N> &b) {
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < Vec<T, N>::kWords; ++i) v.word[i] = add_two<T>(a.word[i], b.word[i]);
  return v;
}

}  // namespace hfp::cuda
