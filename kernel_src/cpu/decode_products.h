// decode_products.h: products with weights as they lie in a linear layer, which are read once for all
// rows of x. No include guard: included once per instruction set, inside decode_step.cpp's inner part.
//
// A result is the sum of one register of partial sums, in the order of the columns, whatever is computed
// beside it: a row has the same bits alone and among others.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// Weights in the model's dtype.
template <DType T>
struct Stored {
  static constexpr int64_t kBytes = size_of(T);
  static constexpr bool kScaled = false;
  HFP_INLINE vf get(const char *p) { return load<T>(p); }
  HFP_INLINE vf some(const char *p, int64_t n) { return load_n<T>(p, n); }
};

// Weights of 8 bits: w[n] = integers * scale, the scale behind the row.
struct Bytes {
  static constexpr int64_t kBytes = 1;
  static constexpr bool kScaled = true;
  HFP_INLINE vf get(const char *p) {
#if HFP_SIMD_LEVEL == 2
    return (vf)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif HFP_SIMD_LEVEL == 1
    return (vf)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    typedef int8_t vb __attribute__((vector_size(kLanes)));
    vb v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vf);
#endif
  }
  HFP_INLINE vf some(const char *p, int64_t n) {
    char all[kLanes] = {};
    __builtin_memcpy(all, p, static_cast<size_t>(n));
    return get(all);
  }
};

// out[m * pitch + n * out_step] = x[m] . w[n] for N rows of w, `apart` bytes from each other, and M of x.
template <class W, int N, int M>
HFP_INLINE void dot_block(const char *w, int64_t apart, const float *x, int64_t x_step,
                          int64_t columns, float *out, int64_t pitch, int64_t out_step) {
  vf sum[N][M] = {};
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    vf given[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      given[m] = load<DType::F32>(reinterpret_cast<const char *>(x + m * x_step + k));
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const vf weight = W::get(w + n * apart + k * W::kBytes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[n][m] = fma(weight, given[m], sum[n][m]);
    }
  }
  if (k < columns) {
    const int64_t left = columns - k;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const vf weight = W::some(w + n * apart + k * W::kBytes, left);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const char *p = reinterpret_cast<const char *>(x + m * x_step + k);
        sum[n][m] = fma(weight, load_n<DType::F32>(p, left), sum[n][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) out[m * pitch + n * out_step] = sum_lanes(sum[n][m]);
  }
}

// All rows of x; as many of each at a time as there are registers for.
template <class W, int N>
static void dot_rows(const char *w, int64_t apart, const float *x, int64_t x_step, int64_t rows,
                     int64_t columns, float *out, int64_t pitch, int64_t out_step) {
#if defined(__x86_64__) && HFP_SIMD_LEVEL < 2
  constexpr int kMost = 2;  // of 16 registers
#else
  constexpr int kMost = 4;  // of 32
#endif
  int64_t m = 0;
  for (; m + kMost <= rows; m += kMost) {
    dot_block<W, N, kMost>(w, apart, x + m * x_step, x_step, columns, out + m * pitch, pitch, out_step);
  }
  for (; m < rows; ++m) {
    dot_block<W, N, 1>(w, apart, x + m * x_step, x_step, columns, out + m * pitch, pitch, out_step);
  }
}

// A weight is read at so many places side by side, from each of them on in order, so that the processor
// reads ahead at each. Rows that lie next to each other it takes for one place: half the speed.
constexpr int kPlaces = 4;
constexpr int64_t kShareOfRows = 8;  // threads' shares of a weight are of so many rows, or times that

// Of rows [n, n + count) of a weight with all rows of x; no bias. Many rows at once are read fastest.
template <class W>
static void dots_of(const DecodeProduct &p, int64_t n, int64_t count, const float *x, int64_t x_step,
                    int64_t rows, float *out, int64_t pitch) {
  const int64_t step = p.stride * W::kBytes, each = count / kPlaces;
  const char *w = static_cast<const char *>(p.weight) + n * step;
  for (int64_t i = 0; i < each; ++i) {
    dot_rows<W, kPlaces>(w + i * step, each * step, x, x_step, rows, p.in, out + i, pitch, each);
  }
  for (int64_t i = each * kPlaces; i < count; ++i) {
    dot_rows<W, 1>(w + i * step, 0, x, x_step, rows, p.in, out + i, pitch, 1);
  }
  if constexpr (W::kScaled) {
    for (int64_t i = 0; i < count; ++i) {
      float scale;
      __builtin_memcpy(&scale, w + i * step + p.in, sizeof scale);
      for (int64_t m = 0; m < rows; ++m) out[m * pitch + i] *= scale;
    }
  }
}

template <DType T>
static void dots(const DecodeProduct &p, int64_t n, int64_t count, const float *x, int64_t x_step,
                 int64_t rows, float *out, int64_t pitch) {
  if (p.bytes) return dots_of<Bytes>(p, n, count, x, x_step, rows, out, pitch);
  dots_of<Stored<T>>(p, n, count, x, x_step, rows, out, pitch);
}

// Rows [begin, end) of the product, bias added, rounded; clip 0: none. out[m * pitch + n].
template <DType T>
static void product_rows(const DecodeProduct &p, const float *x, int64_t x_step, int64_t rows,
                         float clip, float *out, int64_t pitch, int64_t begin, int64_t end) {
  dots<T>(p, begin, end - begin, x, x_step, rows, out + begin, pitch);
  const char *bias = static_cast<const char *>(p.bias);
  if (T == DType::F32 && !bias && clip == 0.0f) return;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = begin; n < end; n += kLanes) {
      const int64_t count = end - n < kLanes ? end - n : kLanes;
      char *at = reinterpret_cast<char *>(out + m * pitch + n);
      vf y = load_up_to<DType::F32>(at, count);
      if (bias) y += load_up_to<T>(bias + n * size_of(T), count);
      y = round_to<T>(y);
      if (clip > 0.0f) {
        y = y < -clip ? splat(-clip) : y;
        y = y > clip ? splat(clip) : y;
      }
      store_up_to<DType::F32>(at, y, count);
    }
  }
}

// Several products of one x, their results side by side: rows [begin, end) of all.
template <DType T>
static void products_share(const DecodeProduct *const *products, int count, const float *x,
                           int64_t x_step, int64_t rows, float clip, float *out, int64_t pitch,
                           int64_t begin, int64_t end) {
  int64_t first = 0;
  for (int i = 0; i < count; ++i) {
    const DecodeProduct &p = *products[i];
    const int64_t a = begin > first ? begin - first : 0;
    const int64_t b = end - first < p.out ? end - first : p.out;
    if (a < b) product_rows<T>(p, x, x_step, rows, clip, out + first, pitch, a, b);
    first += p.out;
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
