// qk_norm_rope.cu: RMS norm of q and k, per head or across heads, then rotary position embedding;
// hfp_qk_norm_rope on CUDA. A head that a warp holds goes through rope_heads_kernel, anything
// wider through a CTA per row. Zhang & Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864.
#include "rope_launch.cuh"

namespace hfp::cuda {
namespace {

constexpr char kOp[] = "qk_norm_rope";

// A row is what is normalized at once: all heads of one token of q or of k, or one head.
struct Row {
  HeadRow at;
  uint32_t head;   // the first one
  uint32_t units;  // of the row
  float inverse;
};

// Row `index` of one token, of q's and k's; q first.
template <class T>
__device__ __forceinline__ Row row_at(const RopeParams &p, const Token &token, uint32_t index) {
  const uint32_t q_heads = static_cast<uint32_t>(p.q.heads);
  const bool second = p.across ? index > 0 : index >= q_heads;
  Row row;
  row.head = p.across ? 0 : second ? index - q_heads : index;
  const uint32_t heads = !p.across ? 1 : static_cast<uint32_t>(second ? p.k.heads : p.q.heads);
  row.units = heads * p.units;
  row.inverse = second ? p.inverse_k : p.inverse_q;
  row.at = second ? head_row<T>(p.k, token, row.head) : head_row<T>(p.q, token, row.head);
  return row;
}

// Sums of kRows values over the CTA with one barrier; the order depends on its size only.
template <int kRows>
__device__ __forceinline__ void sum_cta(float (&v)[kRows], float (*partial)[32]) {
  using G = Group<kCta>;
  const unsigned lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    v[r] = G::sum_lanes(v[r]);
    if (lane == 0) partial[r][warp] = v[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) v[r] = G::sum_lanes(lane < warps ? partial[r][lane] : 0.0f);
}

// One vector of the weights at a time. `at`: of the head.
template <class T, class W, int N>
__device__ __forceinline__ void normalize_unit(const RopeParams &p, Pair<T, N> &v, const Unit &u,
                                               float scale, const void *weight, int64_t at) {
  Weights<W, N> w;
  w.load_from(p, weight, at + u.a);
  normalize<T, W>(p, v.a, scale, w);
  if (!u.has_b) return;
  w.load_from(p, weight, at + u.b);
  normalize<T, W>(p, v.b, scale, w);
}

constexpr int max_row_threads(int units) { return units == 1 ? 512 : 768; }

// The row in registers, kUnits units per thread. kRows == 2: the rows of q and k of one token,
// which then are of one size, so that cos and sin are loaded once for both.
template <class T, class Tab, class W, int N, bool kInterleaved, int kRows, int kUnits>
__global__ void __launch_bounds__(max_row_threads(kUnits))
    norm_rope_row_kernel(const __grid_constant__ RopeParams p) {
  wait_for_previous();
  __shared__ float partial[kRows][32];
  const uint32_t local = kRows == 2 ? blockIdx.x : blockIdx.x / p.groups;
  const uint32_t first = kRows == 2 ? 0 : blockIdx.x - local * p.groups;
  const Token token = token_at(p, p.first_token + local);
  Row row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = row_at<T>(p, token, first + r);

  Unit unit[kUnits];
  uint32_t in_head[kUnits], head[kUnits];
  const auto find = [&](int i, uint32_t at) {
    head[i] = at / p.units;
    in_head[i] = at - head[i] * p.units;
    unit[i] = unit_at<N>(p, in_head[i]);
  };
  Pair<T, N> v[kRows][kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t at = threadIdx.x + i * blockDim.x;
    find(i, at);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      v[r][i].zero();
      if (at < row[r].units) {
        v[r][i].load(reinterpret_cast<const T *>(row[r].at.x) + head[i] * row[r].at.x_head,
                     unit[i]);
      }
    }
  }

  // With one unit they are asked for before the sum waits for x, so that the latencies overlap.
  AnglesFor<T, Tab, N, kInterleaved> angles;
  const auto load_tables = [&](int i) {
    if (!unit[i].rotated || threadIdx.x + i * blockDim.x >= row[0].units) return;
    const uint32_t absolute = row[0].head + head[i];
    angles.load(p, table_at(p.cos, token, absolute), table_at(p.sin, token, absolute), in_head[i]);
  };
  if constexpr (kUnits == 1) load_tables(0);

  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    scale[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) scale[r] += v[r][i].sum_of_squares();
  }
  sum_cta(scale, partial);
#pragma unroll
  for (int r = 0; r < kRows; ++r) scale[r] = rsqrtf(fmaf(scale[r], row[r].inverse, p.eps));

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t at = threadIdx.x + i * blockDim.x;
    if (at >= row[0].units) break;
    if constexpr (kUnits > 1) {
      find(i, at + p.zero);  // again, as for the compiler it is another unit: kept, two would spill
      load_tables(i);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      normalize_unit<T, W>(p, v[r][i], unit[i], scale[r], row[r].at.weight,
                           static_cast<int64_t>(head[i]) * p.dim);
      finish_unit<T, Tab, N, kInterleaved>(
          p, v[r][i], unit[i], angles, p.round_products,
          reinterpret_cast<T *>(row[r].at.out) + head[i] * row[r].at.out_head);
    }
  }
}

// Threads of a CTA of the next kernel, at most, and those that registers have to allow on an SM.
constexpr int whole_threads(int batches) { return batches == 1 ? max_row_threads(1) : 256; }
constexpr int whole_ctas(int batches) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kOfTwo = 512;  // else it spills
#else
  constexpr int kOfTwo = 768;
#endif
  return resident_ctas(whole_threads(batches), batches == 1 ? kSomeThreads : kOfTwo);
}

// The rows of q and k of one token, of one size, whose heads are rotated wholly and have a power of two
// of units: addresses are ready before the wait and take no division, and tables and weights are asked
// for after the sum, which leaves registers for 1024 threads on an SM. bf16 on an H200, us, cold:
// 2 x 2688 x 32 x 64 37.9 -> 35.7, 1 x 4608 x 24 x 128 56.4 -> 54.0, 512 tokens of 32 heads of 64 6.6
// -> 5.1.
// With tables and weights first, in 80 registers, as whole vectors, 34.8, 53.6 and 6.4.
// kBatches == 2: wide tables, as in kCanBeWide, that two batches share are read once for the token of
// both, as whole vectors, else loads of L1 are the limit; they are asked for before the sum, in 80
// registers. A batch of the launch is then two. 2 x 2688 x 32 x 64 36.9 -> 35.1, 2 x 8064 99.3 -> 95.8,
// 4 x 2688 61.4 -> 59.5, 2 x 256 5.72 -> 5.32; after the sum 34.9, 95.4, 59.1, 5.91; four batches 71.0.
template <class T, class Tab, int N, bool kInterleaved, int kBatches>
__global__ void __launch_bounds__(whole_threads(kBatches), whole_ctas(kBatches))
    norm_rope_whole_kernel(const __grid_constant__ RopeParams p) {
  constexpr int kRows = 2 * kBatches;  // q's and k's in turns
  __shared__ float partial[kRows][32];
  const Token where = token_at(p, p.first_token + blockIdx.x);
  const uint32_t head = threadIdx.x >> p.lane_bits, unit = threadIdx.x & (p.lanes - 1);
  const uint32_t col = unit * N;
  const auto offset = [&](int64_t batch, int64_t seq, int64_t of_head) {
    return narrow_offset(where, head, batch, seq, of_head);
  };
  const T *x[2] = {
      static_cast<const T *>(p.q.x) + offset(p.q.x_batch, p.q.x_seq, p.q.x_head) + col,
      static_cast<const T *>(p.k.x) + offset(p.k.x_batch, p.k.x_seq, p.k.x_head) + col};
  int64_t cos_at = offset(p.cos.batch, p.cos.seq, p.cos.head);
  int64_t sin_at = offset(p.sin.batch, p.sin.seq, p.sin.head);
  settle(x[0], x[1], cos_at, sin_at);
  wait_for_previous();

  const bool active = head < static_cast<uint32_t>(p.q.heads);
  const int64_t q_batch = p.q.x_batch / kBatches, k_batch = p.k.x_batch / kBatches;
  const Unit u{0, p.half, true, true};
  Pair<T, N> v[kRows];
  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    v[r].zero();
    if (active) v[r].load(x[r % 2] + r / 2 * (r % 2 == 0 ? q_batch : k_batch), u);
  }
  AnglesFor<T, Tab, N, kInterleaved> angles;
  if constexpr (kBatches > 1) {
    if (active) load_wide(angles, p, cos_at, sin_at, col);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) scale[r] = v[r].sum_of_squares();
  sum_cta(scale, partial);
  if (!active) return;

  if constexpr (kBatches == 1) angles.load(p, cos_at, sin_at, unit);
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const RopeTensor &t = of == 0 ? p.q : p.k;
    const int64_t at = static_cast<int64_t>(head) * p.dim + col;
    T *out = static_cast<T *>(t.out) + offset(t.out_batch, t.out_seq, t.out_head) + col;
    if constexpr (kBatches == 1) {
      const float each = rsqrtf(fmaf(scale[of], of == 0 ? p.inverse_q : p.inverse_k, p.eps));
      v[of].stay_packed(p.zero);
      normalize_unit<T, T>(p, v[of], u, each, t.weight, at);
      finish_unit<T, Tab, N, kInterleaved>(p, v[of], u, angles, p.round_products, out);
    } else {
      Weights<T, N> weight_a, weight_b;
      weight_a.load_from(p, t.weight, at);
      weight_b.load_from(p, t.weight, at + p.half);
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const int r = 2 * b + of;
        const float each = rsqrtf(fmaf(scale[r], of == 0 ? p.inverse_q : p.inverse_k, p.eps));
        v[r].stay_packed(p.zero);
        normalize<T, T>(p, v[r].a, each, weight_a);
        normalize<T, T>(p, v[r].b, each, weight_b);
        finish_unit<T, Tab, N, kInterleaved>(p, v[r], u, angles, p.round_products,
                                             out + b * (t.out_batch / kBatches));
      }
    }
  }
}

// A row too wide for the registers of a CTA, or of narrow vectors, is read twice. A thread writes
// what it has read itself and after the sum, so in place is safe.
template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kLoopThreads)
    norm_rope_loop_kernel(const __grid_constant__ RopeParams p) {
  wait_for_previous();
  __shared__ float partial[1][32];
  const uint32_t local = blockIdx.x / p.groups;
  const Token token = token_at(p, p.first_token + local);
  const Row row = row_at<T>(p, token, blockIdx.x - local * p.groups);

  float sum[1] = {0.0f};
  for (uint32_t at = threadIdx.x; at < row.units; at += blockDim.x) {
    const uint32_t head = at / p.units;
    Pair<T, N> v;
    v.zero();
    v.load(reinterpret_cast<const T *>(row.at.x) + head * row.at.x_head,
           unit_at<N>(p, at - head * p.units));
    sum[0] += v.sum_of_squares();
  }
  sum_cta(sum, partial);
  const float scale = rsqrtf(fmaf(sum[0], row.inverse, p.eps));

  for (uint32_t at = threadIdx.x; at < row.units; at += blockDim.x) {
    const uint32_t head = at / p.units, in_head = at - head * p.units;
    const Unit unit = unit_at<N>(p, in_head);
    Pair<T, N> v;
    v.zero();
    v.load(reinterpret_cast<const T *>(row.at.x) + head * row.at.x_head, unit);
    AnglesFor<T, AnyType, N, kInterleaved> angles;
    if (unit.rotated) {
      const uint32_t absolute = row.head + head;
      angles.load(p, table_at(p.cos, token, absolute), table_at(p.sin, token, absolute), in_head);
    }
    normalize_unit<T, AnyType>(p, v, unit, scale, row.at.weight,
                               static_cast<int64_t>(head) * p.dim);
    finish_unit<T, AnyType, N, kInterleaved>(
        p, v, unit, angles, p.round_products,
        reinterpret_cast<T *>(row.at.out) + head * row.at.out_head);
  }
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr int whole_warps(uint32_t threads) { return static_cast<int>((threads + 31) / 32 * 32); }

// Whether each two batches read the same wide tables.
bool shares_wide_tables(const RopeArgs &a) {
  return a.wide && !a.paired && a.batch % 2 == 0 && a.cos.batch == 0 && a.sin.batch == 0;
}

RopeArgs batches_in_twos(const RopeArgs &a) {
  RopeArgs two = a;
  two.batch = a.batch / 2;
  for (RopeTensor *t : {&two.q, &two.k}) t->x_batch *= 2, t->out_batch *= 2;
  return two;
}

template <class T, class Tab, class W, int N, bool kInterleaved>
int32_t launch_row_kernel(const RopeArgs &a, void *stream) {
  RopeParams p = rope_params(a, N);
  const int64_t q_units = a.across ? a.q.heads * p.units : p.units;
  const int64_t k_units = a.across ? a.k.heads * p.units : p.units;
  const int64_t most = q_units > k_units ? q_units : k_units;
  p.groups = a.across ? 2 : p.heads;  // rows per token

  if constexpr (!std::is_same_v<Tab, AnyType>) {
    if (a.across && q_units == k_units && most <= max_row_threads(1)) {
      const int threads = whole_warps(static_cast<uint32_t>(most));
      while (p.lanes < p.units) p.lanes *= 2, ++p.lane_bits;
      if (p.rest == p.dim && p.lanes == p.units && narrow_strides(a)) {
        if constexpr (kCanBeWide<Tab, N, kInterleaved>) {
          const RopeArgs two = batches_in_twos(a);
          if (shares_wide_tables(a) && narrow_strides(two) && threads <= whole_threads(2)) {
            p.q = two.q, p.k = two.k;
            return each_token_range(two, p, 1, [&](int64_t tokens) {
              return launch(&norm_rope_whole_kernel<T, Tab, N, kInterleaved, 2>, tokens, threads, p,
                            stream, kOp);
            });
          }
        }
        return each_token_range(a, p, 1, [&](int64_t tokens) {
          return launch(&norm_rope_whole_kernel<T, Tab, N, kInterleaved, 1>, tokens, threads, p,
                        stream, kOp);
        });
      }
      return each_token_range(a, p, 1, [&](int64_t tokens) {
        return launch(&norm_rope_row_kernel<T, Tab, W, N, kInterleaved, 2, 1>, tokens, threads, p,
                      stream, kOp);
      });
    }
    if (most <= max_row_threads(1)) {
      const int threads = whole_warps(static_cast<uint32_t>(most));
      return each_token_range(a, p, p.groups, [&](int64_t tokens) {
        return launch(&norm_rope_row_kernel<T, Tab, W, N, kInterleaved, 1, 1>, tokens * p.groups,
                      threads, p, stream, kOp);
      });
    }
    if (most <= 2 * max_row_threads(2)) {
      const int threads = whole_warps(static_cast<uint32_t>((most + 1) / 2));
      return each_token_range(a, p, p.groups, [&](int64_t tokens) {
        return launch(&norm_rope_row_kernel<T, Tab, W, N, kInterleaved, 1, 2>, tokens * p.groups,
                      threads, p, stream, kOp);
      });
    }
  }
  const int threads = most < kLoopThreads ? whole_warps(static_cast<uint32_t>(most)) : kLoopThreads;
  return each_token_range(a, p, p.groups, [&](int64_t tokens) {
    return launch(&norm_rope_loop_kernel<T, N, kInterleaved>, tokens * p.groups, threads, p,
                  stream, kOp);
  });
}

struct NormRopeLaunch {
  template <class T, class Tab, class W, int N, bool kInterleaved>
  static int32_t run(const RopeArgs &a, void *stream) {
    const bool one_head = a.q.heads <= 1 && a.k.heads <= 1;
    if ((!a.across || one_head) && rope_params(a, N).units <= 32) {
      return launch_heads<T, Tab, W, N, kInterleaved, true>(a, stream, kOp);
    }
    return launch_row_kernel<T, Tab, W, N, kInterleaved>(a, stream);
  }
};

}  // namespace

int32_t qk_norm_rope(const RopeArgs &a, int device, void *stream) {
  return dispatch_rope<NormRopeLaunch>(a, device, stream, kOp);
}

}  // namespace hfp::cuda
