// rope.cpp: rotary position embedding, with or without an RMS norm before it.
// Su et al., arXiv:2104.09864; Zhang & Sennrich, arXiv:1910.07467.
#if !defined(HFP_SIMD)

#define HFP_SIMD_SOURCE "rope.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t rope(const RopeArgs &args) {
  const auto kernel = HFP_FOR_SIMD(rope_kernel)(args.type, args.interleaved, args.norm);
  const int64_t row = (args.q.heads + args.k.heads) * args.dim;
  if (row == 0) return HFP_OK;
  parallel(kernel, args, args.batch * args.seq, rows_grain(row), 1);
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

// cos and sin of a stretch of columns as fp32, laid out as they are multiplied: half style, one
// value per pair; interleaved, each value twice and sin with the sign of its term. Filled once for
// all heads of a token where the tables are the same for all.
constexpr int64_t kHeldAngles = 1024;

struct Angles {
  alignas(64) float cos[kHeldAngles], sin[kHeldAngles];
};

HFP_INLINE vf load_any(DType type, const char *p, int64_t n) {
  if (n == kLanes) {
    return type == DType::F32   ? load<DType::F32>(p)
           : type == DType::F16 ? load<DType::F16>(p)
                                : load<DType::BF16>(p);
  }
  return type == DType::F32   ? load_n<DType::F32>(p, n)
         : type == DType::F16 ? load_n<DType::F16>(p, n)
                              : load_n<DType::BF16>(p, n);
}

// Elements of a table as fp32.
static void fill_plain(float *to, const char *from, DType type, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store<DType::F32>(reinterpret_cast<char *>(to + i),
                      load_any(type, from + i * size_of(type), kLanes));
  }
  if (i < count) {
    store_n<DType::F32>(reinterpret_cast<char *>(to + i),
                        load_any(type, from + i * size_of(type), count - i), count - i);
  }
}

// Columns [begin, begin + count) of the tables; interleaved, of the rotated columns.
template <bool Interleaved>
static void fill_angles(Angles &angles, const RopeArgs &args, const char *cos, const char *sin,
                            int64_t begin, int64_t count) {
  const DType type = args.table_type;
  if constexpr (!Interleaved) {
    fill_plain(angles.cos, cos + begin * size_of(type), type, count);
    fill_plain(angles.sin, sin + begin * size_of(type), type, count);
  } else if (args.paired) {
    fill_plain(angles.cos, cos + begin * size_of(type), type, count);
    for (int64_t i = 0; i < count; i += 2) {
      const float s = angles.cos[i + 1];
      angles.cos[i + 1] = angles.cos[i];
      angles.sin[i] = -s;
      angles.sin[i + 1] = s;
    }
  } else if (args.wide) {
    fill_plain(angles.cos, cos + begin * size_of(type), type, count);
    fill_plain(angles.sin, sin + begin * size_of(type), type, count);
    for (int64_t i = 0; i < count; i += 2) angles.sin[i] = -angles.sin[i];
  } else {
    // Into the upper half first, then spread from the front: 2 i never passes half + i.
    const int64_t half = count / 2;
    fill_plain(angles.cos + half, cos + begin / 2 * size_of(type), type, half);
    fill_plain(angles.sin + half, sin + begin / 2 * size_of(type), type, half);
    for (int64_t i = 0; i < half; ++i) {
      const float c = angles.cos[half + i], s = angles.sin[half + i];
      angles.cos[2 * i] = angles.cos[2 * i + 1] = c;
      angles.sin[2 * i] = -s;
      angles.sin[2 * i + 1] = s;
    }
  }
}

// x of one head, normalized if there is a norm; the result of the norm is rounded to T.
template <DType T, bool Norm>
HFP_INLINE vf rope_input(const RopeArgs &args, const char *x, const char *weight, vf rstd,
                         int64_t i, int64_t n) {
  vf v = n == kLanes ? load<T>(x + i * size_of(T)) : load_n<T>(x + i * size_of(T), n);
  if constexpr (Norm) {
    v *= rstd;
    if (args.round_hat) v = round_to<T>(v);
    if (weight) {
      v *= load_any(args.weight_type, weight + i * size_of(args.weight_type), n) +
           args.weight_offset;
    }
    v = round_to<T>(v);
  }
  return v;
}

template <DType T>
HFP_INLINE void rope_store(char *out, int64_t i, vf v, int64_t n) {
  if (n == kLanes) store<T>(out + i * size_of(T), v);
  else store_n<T>(out + i * size_of(T), v, n);
}

// a * c + b * s
template <DType T>
HFP_INLINE vf sum_of_products(vf a, vf c, vf b, vf s, bool round) {
  if (!round) return a * c + b * s;
  return round_to<T>(a * c) + round_to<T>(b * s);
}

// Columns [begin, begin + count) of the rotated part; half style, of its first half. Every element
// is read before the one that its pair's other half overwrites, so `out` may be `x`.
template <DType T, bool Interleaved, bool Norm>
static void rotate_columns(const RopeArgs &args, char *out, const char *x, const char *weight,
                           float scale, const Angles &angles, int64_t begin, int64_t count) {
  const vf rstd = splat(scale);
  const bool round = args.round_products;
  const int64_t half = args.rotary / 2;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    const vf c = load_any(DType::F32, reinterpret_cast<const char *>(angles.cos + i), n);
    const vf s = load_any(DType::F32, reinterpret_cast<const char *>(angles.sin + i), n);
    const vf a = rope_input<T, Norm>(args, x, weight, rstd, begin + i, n);
    if constexpr (Interleaved) {
      rope_store<T>(out, begin + i, sum_of_products<T>(a, c, swap_pairs(a), s, round), n);
    } else {
      const vf b = rope_input<T, Norm>(args, x, weight, rstd, half + begin + i, n);
      rope_store<T>(out, begin + i, sum_of_products<T>(a, c, -b, s, round), n);
      rope_store<T>(out, half + begin + i, sum_of_products<T>(b, c, a, s, round), n);
    }
  }
}

HFP_INLINE float rope_rstd(double sum, double count, double eps) {
  return static_cast<float>(1.0 / __builtin_sqrt(sum / count + eps));
}

// All heads of one token of q or k.
template <DType T, bool Interleaved, bool Norm>
static void rope_heads(const RopeArgs &args, const RopeTensor &t, Angles &angles, bool filled,
                           int64_t batch, int64_t seq) {
  const int64_t dim = args.dim, columns = Interleaved ? args.rotary : args.rotary / 2;
  const char *x = at(t.x, batch * t.x_batch + seq * t.x_seq, T);
  char *out = at(t.out, batch * t.out_batch + seq * t.out_seq, T);
  const int64_t x_step = t.x_head * size_of(T), out_step = t.out_head * size_of(T);
  float rstd = 1.0f;
  if (Norm && args.across) {
    double sum = 0;
    for (int64_t h = 0; h < t.heads; ++h) sum += reduce<T, SquareTerm>(x + h * x_step, dim, 0, 0);
    rstd = rope_rstd(sum, static_cast<double>(t.heads * dim), args.eps);
  }
  for (int64_t h = 0; h < t.heads; ++h, x += x_step, out += out_step) {
    const char *weight = static_cast<const char *>(t.weight);
    if (Norm && weight && args.across) weight += h * dim * size_of(args.weight_type);
    if (Norm && !args.across) {
      rstd = rope_rstd(reduce<T, SquareTerm>(x, dim, 0, 0), static_cast<double>(dim), args.eps);
    }
    for (int64_t begin = 0; begin < columns; begin += kHeldAngles) {
      const int64_t count = columns - begin < kHeldAngles ? columns - begin : kHeldAngles;
      if (!filled) {
        const RopeTable &c = args.cos, &s = args.sin;
        const int64_t cos_at = batch * c.batch + seq * c.seq + h * c.head;
        const int64_t sin_at = batch * s.batch + seq * s.seq + h * s.head;
        fill_angles<Interleaved>(angles, args, at(c.data, cos_at, args.table_type),
                                 at(s.data, sin_at, args.table_type), begin, count);
      }
      rotate_columns<T, Interleaved, Norm>(args, out, x, weight, rstd, angles, begin, count);
    }
    for (int64_t i = args.rotary; i < dim; i += kLanes) {
      const int64_t n = dim - i < kLanes ? dim - i : kLanes;
      rope_store<T>(out, i, rope_input<T, Norm>(args, x, weight, splat(rstd), i, n), n);
    }
  }
}

// Tokens [begin, end).
template <DType T, bool Interleaved, bool Norm>
static void rope_tokens(const RopeArgs &args, int64_t begin, int64_t end) {
  Angles angles;
  const int64_t columns = Interleaved ? args.rotary : args.rotary / 2;
  const bool shared = args.cos.head == 0 && args.sin.head == 0 && columns <= kHeldAngles;
  int64_t batch = begin / args.seq, seq = begin % args.seq;
  for (int64_t token = begin; token < end; ++token) {
    if (shared && columns > 0) {
      const RopeTable &c = args.cos, &s = args.sin;
      fill_angles<Interleaved>(angles, args,
                               at(c.data, batch * c.batch + seq * c.seq, args.table_type),
                               at(s.data, batch * s.batch + seq * s.seq, args.table_type), 0,
                               columns);
    }
    rope_heads<T, Interleaved, Norm>(args, args.q, angles, shared, batch, seq);
    rope_heads<T, Interleaved, Norm>(args, args.k, angles, shared, batch, seq);
    if (++seq == args.seq) seq = 0, ++batch;
  }
}

using RopeKernel = void (*)(const RopeArgs &, int64_t, int64_t);

template <DType T>
static RopeKernel rope_choose(bool interleaved, bool norm) {
  if (interleaved) return norm ? rope_tokens<T, true, true> : rope_tokens<T, true, false>;
  return norm ? rope_tokens<T, false, true> : rope_tokens<T, false, false>;
}

static RopeKernel rope_kernel(DType type, bool interleaved, bool norm) {
  return type == DType::F32   ? rope_choose<DType::F32>(interleaved, norm)
         : type == DType::F16 ? rope_choose<DType::F16>(interleaved, norm)
                              : rope_choose<DType::BF16>(interleaved, norm);
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
