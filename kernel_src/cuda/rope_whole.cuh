// rope_whole.cuh: RoPE of heads that are rotated wholly, with or without their norm, by tables that are
// the same for all of them.
#pragma once

#include "rope_plan.cuh"

namespace hfp::cuda {

// As rope_heads_kernel, without what such heads do not ask: each lane has a whole unit, strides are
// below 2^32, and addresses are ready before the wait. Tables in fp32 are shared by kWholeHeads heads
// of one tensor; those that stay packed leave registers for more threads with one head each. bf16 on
// an H200, us, cold, before -> after: qk_norm_rope interleaved 2 x 2688 x 32 x 64 26.3 -> 24.2,
// 1 x 4608 x 24 x 128 33.0 -> 30.3, 512 tokens of it 6.4 -> 5.2; half 1 x 2048 x 32 x 8 x 128 12.5 ->
// 11.7, 8 tokens 1.86 -> 1.30; rope interleaved 2 x 2688 x 32 x 64 13.6 -> 12.7. What lost, in the
// first of these: a head of q and one of k 24.7, one head 26.4, three 24.8, four 26.1, tables and
// weights after the sum 25.4.
// kWide: as in kCanBeWide.
template <class T, class Tab, int N, bool kInterleaved>
inline constexpr int kWholeHeads = kPackedAngles<T, Tab, N, kInterleaved> ? 1 : 2;

template <class T, class Tab, int N, bool kInterleaved, bool kNorm, bool kRounded, bool kWide>
__global__ void __launch_bounds__(kHeadThreads, kHasTwos<T> ? resident_ctas(kHeadThreads, 768) : 1)
    rope_whole_kernel(const __grid_constant__ RopeParams p) {
  constexpr int kHeads = kWholeHeads<T, Tab, N, kInterleaved>;
  const uint32_t unit = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot), token = outer + p.first_token;
  uint32_t group = slot - outer * p.groups;
  // No early return: every lane takes part in the sums.
  const bool active = token < p.end_token;
  const Token where = token_at(p, active ? token : 0);
  // Each number is chosen by itself, as in rope_heads_kernel.
  const bool second = group >= p.q_groups;
  uint32_t step = p.q_groups;
  if (second) group -= p.q_groups, step = p.groups - p.q_groups;
  const int64_t x_head = second ? p.k.x_head : p.q.x_head;
  const int64_t out_head = second ? p.k.out_head : p.q.out_head;
  const uint32_t col = unit * N;
  const T *x = static_cast<const T *>(second ? p.k.x : p.q.x) +
               narrow_offset(where, group, second ? p.k.x_batch : p.q.x_batch,
                             second ? p.k.x_seq : p.q.x_seq, x_head) +
               col;
  T *out = static_cast<T *>(second ? p.k.out : p.q.out) +
           narrow_offset(where, group, second ? p.k.out_batch : p.q.out_batch,
                         second ? p.k.out_seq : p.q.out_seq, out_head) +
           col;
  int64_t cos_at = narrow_offset(where, 0, p.cos.batch, p.cos.seq, 0);
  int64_t sin_at = narrow_offset(where, 0, p.sin.batch, p.sin.seq, 0);
  const void *weight = second ? p.k.weight : p.q.weight;
  const uint32_t heads =
      !active ? 0 : static_cast<uint32_t>(second ? p.k.heads : p.q.heads);
  settle(x, out, cos_at, sin_at);
  wait_for_previous();

  const Unit u{0, p.half, true, true};
  Pair<T, N> v[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if constexpr (kNorm) v[j].zero();
    if (group + j * step < heads) v[j].load(x + j * step * x_head, u);
  }
  AnglesFor<T, Tab, N, kInterleaved> angles;
  if constexpr (kWide) {
    load_wide(angles, p, cos_at, sin_at, col);
  } else {
    angles.load(p, cos_at, sin_at, unit);
  }
  Weights<T, N> weight_a, weight_b;
  float scale[kHeads];
  if constexpr (kNorm) {
    weight_a.load_from(p, weight, col);
    weight_b.load_from(p, weight, p.half + col);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = v[j].sum_of_squares();
    for (uint32_t m = p.lanes / 2; m > 0; m /= 2) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) scale[j] += __shfl_xor_sync(~0u, scale[j], m);
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = rsqrtf(fmaf(scale[j], p.inverse_q, p.eps));
  }
  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (group + j * step >= heads) continue;
    if constexpr (kNorm) {
      if constexpr (kHeads > 1) v[j].stay_packed(p.zero);
      normalize<T, T>(p, v[j].a, scale[j], weight_a);
      normalize<T, T>(p, v[j].b, scale[j], weight_b);
    }
    finish_unit<T, Tab, N, kInterleaved>(p, v[j], u, angles, rounded, out + j * step * out_head);
  }
}

// Whether rope_whole_kernel can do it.
inline bool whole_fits(const RopeArgs &a, const RopeParams &p) {
  return angles_shared(a, p) && heads_whole(p);
}

template <class T, class Tab, int N, bool kInterleaved, bool kNorm, bool kWide>
int32_t launch_whole(const RopeArgs &a, RopeParams &p, void *stream, const char *op) {
  share_heads(p, kWholeHeads<T, Tab, N, kInterleaved>);
  const int64_t slots = kHeadThreads / p.lanes;
  return each_token_range(a, p, p.groups, [&](int64_t tokens) {
    const int64_t grid = (tokens * p.groups + slots - 1) / slots;
    const auto run = [&](auto rounded) {
      return launch(&rope_whole_kernel<T, Tab, N, kInterleaved, kNorm, rounded(), kWide>, grid,
                    kHeadThreads, p, stream, op);
    };
    if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run(std::true_type());
    }
    return run(std::false_type());
  });
}

}  // namespace hfp::cuda
