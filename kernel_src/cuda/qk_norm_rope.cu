// qk_norm_rope.cu: RMS norm of q and k, per head or across heads, then rotary position embedding;
// hfp_qk_norm_rope on CUDA. A head that a warp holds goes through rope_heads_kernel, anything
// wider through a CTA per row. Zhang & Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864.
#include "norm_rope_vector.cuh"
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

// What a thread adds to the sum of a row: its vectors each by itself, as norm_rope_vector_kernel has them.
template <class T, int N>
__device__ __forceinline__ float squares_of(const Pair<T, N> &v) {
  return sum_of_squares(v.a) + sum_of_squares(v.b);
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
    for (int i = 0; i < kUnits; ++i) scale[r] += squares_of(v[r][i]);
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

// The rows of q and k of one token, of one size, whose heads are rotated wholly and have a power of two
// of units: addresses are ready before the wait and take no division, and tables and weights are asked
// for after the sum, which leaves registers for 1024 threads on an SM. bf16 on an H200, us, cold:
// 2 x 2688 x 32 x 64 37.9 -> 35.7, 1 x 4608 x 24 x 128 56.4 -> 54.0, 512 tokens of 32 heads of 64 6.6
// -> 5.1.
// With tables and weights first, in 80 registers, as whole vectors, 34.8, 53.6 and 6.4.
template <class T, class Tab, int N, bool kInterleaved>
__global__ void __launch_bounds__(max_row_threads(1), resident_ctas(max_row_threads(1), kSomeThreads))
    norm_rope_whole_kernel(const __grid_constant__ RopeParams p) {
  __shared__ float partial[2][32];
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
  const Unit u{0, p.half, true, true};
  Pair<T, N> v[2];
  float scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    v[r].zero();
    if (active) v[r].load(x[r], u);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) scale[r] = squares_of(v[r]);
  sum_cta(scale, partial);
  if (!active) return;

  AnglesFor<T, Tab, N, kInterleaved> angles;
  angles.load(p, cos_at, sin_at, unit);
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const RopeTensor &t = of == 0 ? p.q : p.k;
    T *out = static_cast<T *>(t.out) + offset(t.out_batch, t.out_seq, t.out_head) + col;
    const float each = rsqrtf(fmaf(scale[of], of == 0 ? p.inverse_q : p.inverse_k, p.eps));
    v[of].stay_packed(p.zero);
    normalize_unit<T, T>(p, v[of], u, each, t.weight, static_cast<int64_t>(head) * p.dim + col);
    finish_unit<T, Tab, N, kInterleaved>(p, v[of], u, angles, p.round_products, out);
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
    sum[0] += squares_of(v);
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
          if (shares_wide_tables(a, p.units) && narrow_strides(two) && 2 * threads <= kMostVectorThreads) {
            p.q = two.q, p.k = two.k;
            return each_token_range(two, p, 1, [&](int64_t tokens) {
              return launch(&norm_rope_vector_kernel<T, N>, tokens, whole_warps(2 * most), p, stream, kOp);
            });
          }
        }
        return each_token_range(a, p, 1, [&](int64_t tokens) {
          return launch(&norm_rope_whole_kernel<T, Tab, N, kInterleaved>, tokens, threads, p, stream,
                        kOp);
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
