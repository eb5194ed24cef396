// simd.h: one register of floats and its loads, stores and roundings, for the instruction set that
// foreach_simd.h is compiling. Written in the vector extensions of GCC and clang, with intrinsics
// where those have no words. No include guard: included once per instruction set.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

constexpr int kLanes = HFP_SIMD_BYTES / 4;

typedef float vf __attribute__((vector_size(HFP_SIMD_BYTES)));
typedef int32_t vi __attribute__((vector_size(HFP_SIMD_BYTES)));
typedef uint32_t vu __attribute__((vector_size(HFP_SIMD_BYTES)));
typedef uint16_t vh __attribute__((vector_size(HFP_SIMD_BYTES / 2)));

HFP_INLINE vf splat(float x) { return vf{} + x; }

// a * b + c, in one rounding where the hardware has it.
HFP_INLINE vf fma(vf a, vf b, vf c) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_fmadd_ps(a, b, c);
#elif HFP_SIMD_LEVEL == 1
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// max(x, low), a NaN in x survives: x86's max returns its second operand when one is NaN.
HFP_INLINE vf at_least(vf x, float low) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_max_ps(splat(low), x);
#elif HFP_SIMD_LEVEL == 1
  return _mm256_max_ps(splat(low), x);
#else
  return x < splat(low) ? splat(low) : x;
#endif
}
HFP_INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

// (b, a, d, c, ...) for (a, b, c, d, ...).
HFP_INLINE vf swap_pairs(vf v) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_permute_ps(v, 0xb1);
#elif HFP_SIMD_LEVEL == 1
  return _mm256_permute_ps(v, 0xb1);
#elif defined(__x86_64__)
  return _mm_shuffle_ps(v, v, 0xb1);
#elif defined(__aarch64__)
  return vrev64q_f32(v);
#else
  return vf{v[1], v[0], v[3], v[2]};
#endif
}

// The sum of the lanes, in a fixed order.
HFP_INLINE float sum_lanes(vf v) {
#if defined(__x86_64__)
#if HFP_SIMD_LEVEL == 2
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif HFP_SIMD_LEVEL == 1
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  __m128 s = v;
#endif
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// --- half types <-> fp32 ----------------------------------------------------------------------

HFP_INLINE vu widen(vh h) {
#if HFP_SIMD_LEVEL == 2
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif HFP_SIMD_LEVEL == 1
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}

HFP_INLINE vh narrow(vu u) {  // u <= 0xffff
#if HFP_SIMD_LEVEL == 2
  return (vh)_mm512_cvtepi32_epi16((__m512i)u);
#elif HFP_SIMD_LEVEL == 1
  const __m256i packed = _mm256_packus_epi32((__m256i)u, (__m256i)u);
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(u, vh);
#endif
}

// bf16 is the upper half of fp32. Adding 0x7fff, plus one if the kept part is odd, rounds to
// nearest even and carries into the exponent, up to infinity; a NaN would carry too, so it is
// made quiet instead.
HFP_INLINE vu carry_bf16(vf x) {  // the result is in the upper half of each lane
#if HFP_SIMD_LEVEL == 2
  const __m512i u = (__m512i)x;
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  __m512i rounded = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_sub_epi32(rounded, odd, rounded, _mm512_set1_epi32(-1));
  return (vu)_mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x00400000));
#else
  const vu u = (vu)x;
  return x == x ? u + (((u >> 16) & 1u) + 0x7fffu) : u | 0x00400000u;
#endif
}

HFP_INLINE vf round_bf16(vf x) { return (vf)(carry_bf16(x) & 0xffff0000u); }
HFP_INLINE vf from_bf16(vh h) { return (vf)(widen(h) << 16); }
HFP_INLINE vh to_bf16(vf x) { return narrow(carry_bf16(x) >> 16); }

HFP_INLINE vf from_f16(vh h) {
#if HFP_SIMD_LEVEL == 2
  return _mm512_cvtph_ps((__m256i)h);
#elif HFP_SIMD_LEVEL == 1
  return _mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return vcvt_f32_f16((float16x4_t)h);
#else
  // Shift the fields into place and rebias the exponent by 127 - 15; infinity and NaN need as much
  // again. A subnormal is m * 2^-24: read as 2^-14 + m * 2^-24, then 2^-14 is taken off, exactly.
  const vu u = widen(h);
  const vu fields = (u & 0x7fffu) << 13;
  const vu exponent = fields & 0x0f800000u;
  vu bits = fields + (112u << 23);
  bits = exponent == 0x0f800000u ? bits + (112u << 23) : bits;
  const vf subnormal = (vf)(bits + (1u << 23)) - 6.103515625e-05f;
  bits = exponent == 0u ? (vu)subnormal : bits;
  return (vf)(bits | (u & 0x8000u) << 16);
#endif
}

HFP_INLINE vh to_f16(vf x) {
#if HFP_SIMD_LEVEL == 2
  return (vh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif HFP_SIMD_LEVEL == 1
  return (vh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (vh)vcvt_f16_f32(x);
#else
  const vu u = (vu)x & 0x7fffffffu;
  const vu sign = ((vu)x & 0x80000000u) >> 16;
  // Normal: rebias, round to nearest even at bit 13; the carry may reach infinity.
  const vu normal = (u - (112u << 23) + (((u >> 13) & 1u) + 0x0fffu)) >> 13;
  // Below 2^-14 the result counts in 2^-24: adding 0.5 makes the adder round at that bit.
  const vu subnormal = (vu)((vf)u + 0.5f) - 0x3f000000u;
  vu bits = u < 0x38800000u ? subnormal : normal;
  bits = u >= 0x47800000u ? vu{} + 0x7c00u : bits;  // 2^16 and up
  bits = u > 0x7f800000u ? 0x7e00u | ((u >> 13) & 0x03ffu) : bits;
  return narrow(bits | sign);
#endif
}

// --- memory -----------------------------------------------------------------------------------

template <DType T>
HFP_INLINE vf load(const char *p) {
  if constexpr (T == DType::F32) {
    vf v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  } else {
    vh h;
    __builtin_memcpy(&h, p, sizeof h);
    return T == DType::F16 ? from_f16(h) : from_bf16(h);
  }
}

template <DType T>
HFP_INLINE void store(char *p, vf v) {
  if constexpr (T == DType::F32) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    const vh h = T == DType::F16 ? to_f16(v) : to_bf16(v);
    __builtin_memcpy(p, &h, sizeof h);
  }
}

// Two registers of a half type in one.
template <DType T>
HFP_INLINE vf pack(vf a, vf b) {
#if HFP_SIMD_LEVEL == 2
  if constexpr (T == DType::BF16) {
    // Odd 16-bit words of the pair (a, b); an index counts on into b from 32.
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35,
                                         33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3,
                                         1);
    return (vf)_mm512_permutex2var_epi16((__m512i)carry_bf16(a), odd, (__m512i)carry_bf16(b));
  }
#elif HFP_SIMD_LEVEL == 1
  if constexpr (T == DType::BF16) {
    const __m256i packed = _mm256_packus_epi32((__m256i)(carry_bf16(a) >> 16),
                                               (__m256i)(carry_bf16(b) >> 16));
    return (vf)_mm256_permute4x64_epi64(packed, 0xd8);
  }
#endif
  const vh halves[2] = {T == DType::F16 ? to_f16(a) : to_bf16(a),
                        T == DType::F16 ? to_f16(b) : to_bf16(b)};
  vf packed;
  __builtin_memcpy(&packed, halves, sizeof packed);
  return packed;
}

// Two registers in a row.
template <DType T>
HFP_INLINE void store_pair(char *p, vf a, vf b) {
  if constexpr (T == DType::F32) {
    store<T>(p, a);
    store<T>(p + HFP_SIMD_BYTES, b);
  } else {
    const vf packed = pack<T>(a, b);
    __builtin_memcpy(p, &packed, sizeof packed);
  }
}

// --- past the caches: see streams() -------------------------------------------------------------

// Of `cols` columns, those before the first one that a whole register can be streamed to.
template <DType T>
HFP_INLINE int64_t before_stream(const char *row, int64_t cols) {
  const int64_t past = reinterpret_cast<uintptr_t>(row) % HFP_SIMD_BYTES;
  const int64_t head = (HFP_SIMD_BYTES - past) % HFP_SIMD_BYTES / size_of(T);
  return head < cols ? head : cols;
}

HFP_INLINE void stream(char *p, vf v) {  // p is aligned to the register
#if HFP_SIMD_LEVEL == 2
  _mm512_stream_ps(reinterpret_cast<float *>(p), v);
#elif HFP_SIMD_LEVEL == 1
  _mm256_stream_ps(reinterpret_cast<float *>(p), v);
#elif defined(__x86_64__)
  _mm_stream_ps(reinterpret_cast<float *>(p), v);
#else
  __builtin_memcpy(p, &v, sizeof v);
#endif
}

template <DType T>
HFP_INLINE void stream_pair(char *p, vf a, vf b) {
  if constexpr (T == DType::F32) {
    stream(p, a);
    stream(p + HFP_SIMD_BYTES, b);
  } else {
    stream(p, pack<T>(a, b));
  }
}

// What this thread has streamed is seen by others before what it writes next.
HFP_INLINE void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n < kLanes elements; the other lanes are 0.
template <DType T>
HFP_INLINE vf load_n(const char *p, int64_t n) {
#if HFP_SIMD_LEVEL == 2
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (T == DType::F32) {
    return _mm512_maskz_loadu_ps(mask, p);
  } else {
    const vh h = (vh)_mm256_maskz_loadu_epi16(mask, p);
    return T == DType::F16 ? from_f16(h) : from_bf16(h);
  }
#else
  char buffer[HFP_SIMD_BYTES] = {};
  __builtin_memcpy(buffer, p, static_cast<std::size_t>(n * size_of(T)));
  return load<T>(buffer);
#endif
}

template <DType T>
HFP_INLINE void store_n(char *p, vf v, int64_t n) {
#if HFP_SIMD_LEVEL == 2
  const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (T == DType::F32) {
    _mm512_mask_storeu_ps(p, mask, v);
  } else {
    const vh h = T == DType::F16 ? to_f16(v) : to_bf16(v);
    _mm256_mask_storeu_epi16(p, mask, (__m256i)h);
  }
#else
  char buffer[HFP_SIMD_BYTES];
  store<T>(buffer, v);
  __builtin_memcpy(p, buffer, static_cast<std::size_t>(n * size_of(T)));
#endif
}

// Full registers and the tail of a row share their code through this.
template <DType T, bool Full>
HFP_INLINE vf load_if(const char *p, int64_t n) {
  if constexpr (Full) return load<T>(p);
  else return load_n<T>(p, n);
}

// x rounded to T and back.
template <DType T>
HFP_INLINE vf round_to(vf x) {
  if constexpr (T == DType::F16) return from_f16(to_f16(x));
  else if constexpr (T == DType::BF16) return round_bf16(x);
  else return x;
}

// --- reductions -------------------------------------------------------------------------------

// Sum over a row of Term::apply(x, shift). The order depends on the column alone: column i goes to
// lane i % kLanes of accumulator (i / kLanes) % 4, accumulators are added up every kBlock columns
// (which bounds the rounding error of long rows), and blocks are added in double.
constexpr int64_t kBlock = 4096;

template <DType T, class Term>
HFP_INLINE double reduce(const char *row, int64_t cols, float shift_hi, float shift_lo) {
  constexpr int64_t size = size_of(T);
  const vf hi = splat(shift_hi), lo = splat(shift_lo);
  double total = 0;
  for (int64_t block = 0; block < cols; block += kBlock) {
    const int64_t end = cols - block < kBlock ? cols : block + kBlock;
    vf acc0 = {}, acc1 = {}, acc2 = {}, acc3 = {};
    int64_t i = block;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      const char *p = row + i * size;
      acc0 = Term::add(acc0, load<T>(p), hi, lo);
      acc1 = Term::add(acc1, load<T>(p + kLanes * size), hi, lo);
      acc2 = Term::add(acc2, load<T>(p + 2 * kLanes * size), hi, lo);
      acc3 = Term::add(acc3, load<T>(p + 3 * kLanes * size), hi, lo);
    }
    if (i + kLanes <= end) {
      acc0 = Term::add(acc0, load<T>(row + i * size), hi, lo);
      i += kLanes;
      if (i + kLanes <= end) {
        acc1 = Term::add(acc1, load<T>(row + i * size), hi, lo);
        i += kLanes;
        if (i + kLanes <= end) {
          acc2 = Term::add(acc2, load<T>(row + i * size), hi, lo);
          i += kLanes;
        }
      }
    }
    if (i < end) {
      const int64_t n = end - i;
      vf last = load_n<T>(row + i * size, n);
      if constexpr (Term::kShifted) {  // lanes past the end must add nothing
        vi lane;
        for (int k = 0; k < kLanes; ++k) lane[k] = k;
        last = lane < static_cast<int32_t>(n) ? last : hi;
        const vf none = lane < static_cast<int32_t>(n) ? lo : vf{};
        acc3 = Term::add(acc3, last, hi, none);
      } else {
        acc3 = Term::add(acc3, last, hi, lo);
      }
    }
    total += sum_lanes((acc0 + acc1) + (acc2 + acc3));
  }
  return total;
}

struct SquareTerm {
  static constexpr bool kShifted = false;
  static inline __attribute__((always_inline)) vf add(vf acc, vf x, vf, vf) {
    return fma(x, x, acc);
  }
};

struct ShiftedTerm {
  static constexpr bool kShifted = true;
  static inline __attribute__((always_inline)) vf add(vf acc, vf x, vf hi, vf lo) {
    return acc + ((x - hi) - lo);
  }
};

struct ShiftedSquareTerm {
  static constexpr bool kShifted = true;
  static inline __attribute__((always_inline)) vf add(vf acc, vf x, vf hi, vf lo) {
    const vf d = (x - hi) - lo;
    return fma(d, d, acc);
  }
};

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
