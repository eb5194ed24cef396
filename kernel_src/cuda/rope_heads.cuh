// rope_heads.cuh: RoPE of any heads, with or without their norm: `lanes` threads have kHeads heads of
// one token.
#pragma once

#include "rope_plan.cuh"

namespace hfp::cuda {

// CTAs on an SM, said for ptxas: left to itself it aims at six where bf16 is emulated, and before
// sm_90 at twelve of fp32, and spills.
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kHeadCtas = sizeof(T) == 4 ? 5 : kHasTwos<T> ? 0 : 1;
#else
inline constexpr int kHeadCtas = kHasTwos<T> ? 0 : 1;
#endif

// cos and sin are loaded once for all of them; with kHeads > 1 they must be the same for all heads.
// With a norm, the lanes hold one head wholly (chunks == 1). kRounded: p.round_products where the
// angles are packed, which else would cost the registers of both ways; elsewhere that is asked.
template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm, int kHeads,
          bool kRounded>
__global__ void __launch_bounds__(kHeadThreads, kHeadCtas<T>)
    rope_heads_kernel(const __grid_constant__ RopeParams p) {
  wait_for_previous();
  const uint32_t lane = threadIdx.x & (p.lanes - 1);
  const uint32_t slots = static_cast<uint32_t>(kHeadThreads) >> p.lane_bits;  // of the CTA
  const uint32_t slot = blockIdx.x * slots + (threadIdx.x >> p.lane_bits);
  const uint32_t outer = p.by_groups.divide(slot);
  uint32_t group = slot - outer * p.groups;
  uint32_t token = outer, chunk = 0;
  if (!kNorm && p.chunks > 1) token = outer / p.chunks, chunk = outer - token * p.chunks;
  token += p.first_token;
  const uint32_t unit = chunk * p.lanes + lane;
  // No early return: every lane takes part in the sums.
  const bool active = token < p.end_token && unit < p.units;
  const Unit u = unit_at<N>(p, unit);
  const Token where = token_at(p, active ? token : 0);

  // Each number is chosen by itself: a choice between q and k would be one between addresses.
  const bool second = group >= p.q_groups;
  uint32_t step = p.q_groups;
  if (second) group -= p.q_groups, step = p.groups - p.q_groups;
  const uint32_t heads = static_cast<uint32_t>(second ? p.k.heads : p.q.heads);
  const int64_t x_head = second ? p.k.x_head : p.q.x_head;
  const int64_t out_head = second ? p.k.out_head : p.q.out_head;
  const T *x = static_cast<const T *>(second ? p.k.x : p.q.x) + group * x_head +
               where.batch * (second ? p.k.x_batch : p.q.x_batch) +
               where.seq * (second ? p.k.x_seq : p.q.x_seq);

  Pair<T, N> v[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if constexpr (kNorm) v[j].zero();
    if (active && group + j * step < heads) v[j].load(x + j * step * x_head, u);
  }

  AnglesFor<T, Tab, N, kInterleaved> angles;
  if (active && u.rotated) {
    const uint32_t head = kHeads == 1 ? group : 0;
    angles.load(p, table_at(p.cos, where, head), table_at(p.sin, where, head), unit);
  }

  // Asked for before the sum waits for x, so that the latencies overlap.
  Weights<W, N> weight_a, weight_b;
  if constexpr (kNorm) {
    const void *weight = second ? p.k.weight : p.q.weight;
    if (active) weight_a.load_from(p, weight, u.a);
    if (active && u.has_b) weight_b.load_from(p, weight, u.b);
  }

  float scale[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) scale[j] = kNorm ? v[j].sum_of_squares() : 1.0f;
  if constexpr (kNorm) {
    for (uint32_t m = p.lanes / 2; m > 0; m /= 2) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) scale[j] += __shfl_xor_sync(~0u, scale[j], m);
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = rsqrtf(fmaf(scale[j], p.inverse_q, p.eps));
  }

  const bool rounded = kPackedAngles<T, Tab, N, kInterleaved> ? kRounded : p.round_products;
  T *out = static_cast<T *>(second ? p.k.out : p.q.out) + group * out_head +
           where.batch * (second ? p.k.out_batch : p.q.out_batch) +
           where.seq * (second ? p.k.out_seq : p.q.out_seq);
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (!active || group + j * step >= heads) continue;
    if constexpr (kNorm) {
      if constexpr (kHeads > 1) v[j].stay_packed(p.zero);
      normalize<T, W>(p, v[j].a, scale[j], weight_a);
      if (u.has_b) normalize<T, W>(p, v[j].b, scale[j], weight_b);
    }
    finish_unit<T, Tab, N, kInterleaved>(p, v[j], u, angles, rounded, out + j * step * out_head);
  }
}

template <class T, class Tab, class W, int N, bool kInterleaved, bool kNorm>
int32_t launch_any_heads(const RopeArgs &a, RopeParams &p, void *stream, const char *op) {
  constexpr bool kFast = kFastUnits<T, Tab, N>;
  bool several = false;  // heads per thread
  if constexpr (kFast && kNorm) {
    const int64_t threads = a.batch * a.seq * p.heads * p.chunks * p.lanes;
    several = p.heads >= 4 && threads >= kFullThreads && p.cos.head == 0 && p.sin.head == 0;
  }
  const int64_t each = several ? kThreadHeads : 1;
  share_heads(p, each);
  const int64_t slots = kHeadThreads / p.lanes;
  const int64_t per_token = static_cast<int64_t>(p.chunks) * p.groups;
  return each_token_range(a, p, per_token, [&](int64_t tokens) {
    const int64_t grid = (tokens * per_token + slots - 1) / slots;
    const auto run = [&](auto heads, auto rounded) {
      return launch(&rope_heads_kernel<T, Tab, W, N, kInterleaved, kNorm, heads(), rounded()>, grid,
                    kHeadThreads, p, stream, op);
    };
    const auto run_heads = [&](auto rounded) {
      if constexpr (kFast && kNorm) {
        if (several) return run(std::integral_constant<int, kThreadHeads>(), rounded);
      }
      return run(std::integral_constant<int, 1>(), rounded);
    };
    if constexpr (kFast && kPackedAngles<T, Tab, N, kInterleaved>) {
      if (a.round_products) return run_heads(std::true_type());
    }
    return run_heads(std::false_type());
  });
}

}  // namespace hfp::cuda
