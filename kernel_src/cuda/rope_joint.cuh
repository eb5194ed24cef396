// rope_joint.cuh: RoPE of q and k together, without a norm.
#pragma once

#include "rope_plan.cuh"

namespace hfp::cuda {

// `lanes` threads per head, head h of q and head h of k of one token per thread.
//
// cos and sin, the same for all heads, are loaded once for both. q has at least the heads of k. An
// address takes one multiply-add a stride, as strides are below 2^32, and is ready before the wait,
// which the exit of the threads past the end keeps behind it. kRounded: p.round_products where the
// angles are packed. In bf16 on an H200, warm and cold, against heads of one tensor in each thread: 2048
// tokens of 32 + 8 heads of 128 in place 7.90 -> 7.51, 12.3 -> 11.8 us, to new tensors 9.02 -> 8.63,
// 12.2 -> 11.7; 4096 of 16 + 8 heads of 64 in place 5.68 -> 5.25, 7.98 -> 7.56. Four heads of q and one
// of k win warm (7.51, 8.22) and lose cold (12.2, 11.9), two and one of 64 lose both (5.65, 8.12).
//
// kWide: heads that are rotated wholly by wide tables, as in kCanBeWide; q is stored before k is asked
// for, which leaves registers for more threads. bf16, cold, us: 2 x 2688 x 32 x 64 24.2 -> 23.4, 1 x 4608 x
// 24 x 128 30.6 -> 29.6, 512 tokens of it 5.56 -> 4.65 (warm 3.46 -> 2.90); k asked for first 23.5, 29.9 and
// 4.74 (2.64), two heads of each 23.8, 30.4 and 5.3.
template <class T, class Tab, int N, bool kInterleaved, bool kRounded, bool kWide>
__global__ void __launch_bounds__(kHeadThreads, kHasTwos<T> ? 0 : 1)
    rope_joint_kernel(const __grid_constant__ RopeParams p) {
  const uint32_t unit = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot), head = slot - outer * p.groups;
  const uint32_t token = outer + p.first_token;
  const Token where = token_at(p, token);
  const auto offset = [&](int64_t batch, int64_t seq, int64_t of_head) {
    return narrow_offset(where, head, batch, seq, of_head);
  };
  const uint32_t col = kWide ? unit * N : 0;  // what all pointers are ahead by
  const Unit u = kWide ? Unit{0, p.half, true, true} : unit_at<N>(p, unit);
  const T *q_x = static_cast<const T *>(p.q.x) + offset(p.q.x_batch, p.q.x_seq, p.q.x_head) + col;
  const T *k_x = static_cast<const T *>(p.k.x) + offset(p.k.x_batch, p.k.x_seq, p.k.x_head) + col;
  int64_t cos_at = offset(p.cos.batch, p.cos.seq, 0), sin_at = offset(p.sin.batch, p.sin.seq, 0);
  compute_now(q_x, k_x, cos_at, sin_at);
  if (token >= p.end_token || (!kWide && unit >= p.units)) return;
  wait_for_previous();

  const bool both = head < static_cast<uint32_t>(p.k.heads);
  Pair<T, N> q, k;
  q.load(q_x, u);
  if (!kWide && both) k.load(k_x, u);
  AnglesFor<T, Tab, N, kInterleaved> angles;
  if constexpr (kWide) load_wide(angles, p, cos_at, sin_at, col);
  else if (u.rotated) angles.load(p, cos_at, sin_at, unit);
  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
  finish_unit<T, Tab, N, kInterleaved>(
      p, q, u, angles, rounded,
      static_cast<T *>(p.q.out) + offset(p.q.out_batch, p.q.out_seq, p.q.out_head) + col);
  if (!both) return;
  if (kWide) k.load(k_x, u);
  finish_unit<T, Tab, N, kInterleaved>(
      p, k, u, angles, rounded,
      static_cast<T *>(p.k.out) + offset(p.k.out_batch, p.k.out_seq, p.k.out_head) + col);
}

// Slots of kHeadThreads threads each, for `tokens` whose heads make p.groups groups.
inline int64_t joint_grid(const RopeParams &p, int64_t tokens) {
  const int64_t slots = kHeadThreads / p.lanes;
  return (tokens * p.groups + slots - 1) / slots;
}

template <class T, class Tab, int N, bool kInterleaved>
int32_t launch_joint(const RopeArgs &a, RopeParams &p, void *stream, const char *op) {
  p.groups = static_cast<uint32_t>(p.q.heads);
  p.by_groups = FastDivisor(p.groups);
  return each_token_range(a, p, p.groups, [&](int64_t tokens) {
    const auto run = [&](auto rounded, auto wide) {
      return launch(&rope_joint_kernel<T, Tab, N, kInterleaved, rounded(), wide()>,
                    joint_grid(p, tokens), kHeadThreads, p, stream, op);
    };
    if constexpr (kCanBeWide<Tab, N, kInterleaved>) {
      if (heads_whole(p) && p.wide && !p.paired) return run(std::false_type(), std::true_type());
    }
    if constexpr (kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run(std::true_type(), std::false_type());
    }
    return run(std::false_type(), std::false_type());
  });
}

}  // namespace hfp::cuda
