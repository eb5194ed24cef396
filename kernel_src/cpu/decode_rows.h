// decode_rows.h: what a decoding step does to a row between its products: norms, residual sums,
// activations, rotations. Rows are fp32 with values of the model's dtype. No include guard: included once
// per instruction set, inside decode_step.cpp's inner part.

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

HFP_INLINE vf load_floats(const float *p, int64_t n) {
  return load_up_to<DType::F32>(reinterpret_cast<const char *>(p), n);
}
HFP_INLINE void store_floats(float *p, vf v, int64_t n) {
  store_up_to<DType::F32>(reinterpret_cast<char *>(p), v, n);
}
HFP_INLINE int64_t lanes_left(int64_t end, int64_t i) { return end - i < kLanes ? end - i : kLanes; }

// What a norm does to every element: (x - mean) * scale.
struct Moments {
  float mean, scale;
};

HFP_INLINE Moments moments(const DecodeNorm &norm, const float *x, int64_t columns) {
  const char *row = reinterpret_cast<const char *>(x);
  const double count = static_cast<double>(columns);
  double mean = 0, square;
  if (norm.layer()) {
    mean = reduce<DType::F32, ShiftedTerm>(row, columns, 0.0f, 0.0f) / count;
    const float high = static_cast<float>(mean);
    square = reduce<DType::F32, ShiftedSquareTerm>(row, columns, high,
                                                   static_cast<float>(mean - static_cast<double>(high)));
  } else {
    square = reduce<DType::F32, SquareTerm>(row, columns, 0.0f, 0.0f);
  }
  const float variance = static_cast<float>(square / count);
  return {static_cast<float>(mean), 1.0f / __builtin_sqrtf(variance + norm.eps)};
}

// y = the norm of x, where columns [from, from + columns) of the weight belong to x; y may be x.
template <DType T>
static void norm_row(const DecodeNorm &norm, const Moments &by, const float *x, float *y,
                     int64_t columns, int64_t from) {
  const char *weight = static_cast<const char *>(norm.weight);
  const char *bias = static_cast<const char *>(norm.bias);
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int64_t n = lanes_left(columns, i);
    vf v = (load_floats(x + i, n) - by.mean) * by.scale;
    if (norm.rounded()) v = round_to<T>(v);
    if (weight) v *= load_up_to<T>(weight + (from + i) * size_of(T), n) + norm.offset;
    if (bias) v += load_up_to<T>(bias + (from + i) * size_of(T), n);
    store_floats(y + i, round_to<T>(v), n);
  }
}

// A norm of q or k as that of one head, of `dim` columns.
template <DType T>
HFP_INLINE DecodeNorm norm_of_head(DecodeNorm norm, int64_t head, int64_t dim) {
  const auto of_head = [&](const void *all) -> const void * {
    if (!all || norm.heads == OfHeads::kTheSame) return all;
    if (norm.heads == OfHeads::kRow) {
      return static_cast<const char *>(all) + head * dim * size_of(T);
    }
    return reinterpret_cast<const void *>(static_cast<const uintptr_t *>(all)[head]);
  };
  norm.weight = of_head(norm.weight), norm.bias = of_head(norm.bias);
  return norm;
}

template <DType T>
static void norm_rows(const DecodeNorm &norm, const float *x, float *y, int64_t rows,
                      int64_t columns) {
  for (int64_t m = 0; m < rows; ++m) {
    norm_row<T>(norm, moments(norm, x + m * columns, columns), x + m * columns, y + m * columns,
                columns, 0);
  }
}

// stream += multiplier * h, h rounded behind its factor.
template <DType T>
static void add_rows(float *stream, const float *h, float multiplier, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = lanes_left(count, i);
    vf v = load_floats(h + i, n);
    if (multiplier != 1.0f) v = round_to<T>(v * multiplier);
    store_floats(stream + i, round_to<T>(load_floats(stream + i, n) + v), n);
  }
}

template <DType T, int Activation>
HFP_INLINE vf activated(vf x) {
  if constexpr (Activation == HFP_DECODE_RELU_SQUARED) {
    const vf y = x < 0.0f ? vf{} : x;
    return round_to<T>(y * y);
  } else {
    return round_to<T>(activate<Activation, T>(x));
  }
}

// up = act(gate) * up, or act(up) where there is no gate.
template <DType T, int Activation>
static void activate_as(const float *gate, float *up, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t n = lanes_left(end, i);
    const vf u = load_floats(up + i, n);
    const vf y = gate ? round_to<T>(activated<T, Activation>(load_floats(gate + i, n)) * u)
                      : activated<T, Activation>(u);
    store_floats(up + i, y, n);
  }
}

template <DType T>
static void activate_row(int activation, const float *gate, float *up, int64_t begin, int64_t end) {
  switch (activation) {
    case HFP_ACT_GELU_ERF: return activate_as<T, HFP_ACT_GELU_ERF>(gate, up, begin, end);
    case HFP_ACT_GELU_TANH: return activate_as<T, HFP_ACT_GELU_TANH>(gate, up, begin, end);
    case HFP_ACT_GELU_SIGMOID: return activate_as<T, HFP_ACT_GELU_SIGMOID>(gate, up, begin, end);
    case HFP_ACT_SILU: return activate_as<T, HFP_ACT_SILU>(gate, up, begin, end);
    case HFP_ACT_RELU: return activate_as<T, HFP_ACT_RELU>(gate, up, begin, end);
    default: return activate_as<T, HFP_DECODE_RELU_SQUARED>(gate, up, begin, end);
  }
}

HFP_INLINE float rounded_one(DType type, float x) { return round_any(type, splat(x))[0]; }

// One head, in place. table: cosines, then sines, `half` of each.
template <DType T>
static void rotate_head(const DecodeRope &rope, const float *table, float *x) {
  const int64_t half = rope.half;
  const float *cosine = table, *sine = table + half;
  if (rope.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      if (rope.rounded && T != DType::F32) {
        x[2 * i] = rounded_one(T, rounded_one(T, a * cosine[i]) - rounded_one(T, b * sine[i]));
        x[2 * i + 1] = rounded_one(T, rounded_one(T, b * cosine[i]) + rounded_one(T, a * sine[i]));
      } else {
        x[2 * i] = rounded_one(T, a * cosine[i] - b * sine[i]);
        x[2 * i + 1] = rounded_one(T, b * cosine[i] + a * sine[i]);
      }
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = lanes_left(half, i);
    const vf a = load_floats(x + i, n), b = load_floats(x + half + i, n);
    const vf c = load_floats(cosine + i, n), s = load_floats(sine + i, n);
    if (rope.rounded) {
      store_floats(x + i, round_to<T>(round_to<T>(a * c) - round_to<T>(b * s)), n);
      store_floats(x + half + i, round_to<T>(round_to<T>(b * c) + round_to<T>(a * s)), n);
    } else {
      store_floats(x + i, round_to<T>(a * c - b * s), n);
      store_floats(x + half + i, round_to<T>(b * c + a * s), n);
    }
  }
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp
