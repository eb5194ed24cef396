// rope_packed.cuh: RoPE of q and k together in a half type, as models mostly call it: heads that are
// rotated wholly, in the half style, by tables of the same dtype, each product rounded; results as far
// apart as what is read, in place above all; one stride from token to token.
#pragma once

#include "rope_plan.cuh"

namespace hfp::cuda {

// Strides in bytes.
struct PackedRopeParams {
  static constexpr bool kStartsEarly = true;
  const char *q, *k, *cos, *sin;
  int64_t q_out, k_out;  // from what is read to the result
  uint32_t q_token, k_token, cos_token, sin_token, q_head, k_head;
  uint32_t tokens, q_heads, k_heads, groups;
  uint32_t lanes, lane_bits, half;
  FastDivisor by_groups;
};

struct PackedPair {
  uint4 a, b;

  // Loads and stores said in assembly: of some heads the compiler would make four stores of 4 bytes, and
  // it would ask for the first head last. In L1 a line of which two loads take a half each is asked for
  // once.
  __device__ __forceinline__ static void load(uint4 &v, const char *from) {
    asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
  }
  __device__ __forceinline__ static void store(char *to, const uint4 &v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  }
  __device__ __forceinline__ void load(const char *head, uint32_t half) {
    load(a, head), load(b, head + half);
  }
  __device__ __forceinline__ void store(char *head, uint32_t half) const {
    store(head, a), store(head + half, b);
  }
};

template <class T>
__device__ __forceinline__ void rotate_two(uint32_t &a, uint32_t &b, uint32_t cos, uint32_t sin) {
  const uint32_t x = a, y = b;
  a = sub_two<T>(mul_two<T>(x, cos), mul_two<T>(y, sin));
  b = add_two<T>(mul_two<T>(y, cos), mul_two<T>(x, sin));
}

template <class T>
__device__ __forceinline__ void rotate_packed(PackedPair &v, const uint4 &cos, const uint4 &sin) {
  rotate_two<T>(v.a.x, v.b.x, cos.x, sin.x);
  rotate_two<T>(v.a.y, v.b.y, cos.y, sin.y);
  rotate_two<T>(v.a.z, v.b.z, cos.z, sin.z);
  rotate_two<T>(v.a.w, v.b.w, cos.w, sin.w);
}

// `lanes` threads a head; heads h, h + groups, ... of q, kQ at most, and of k, kK at most, in a thread, all
// asked for at once.
//
// So many heads a thread that all CTAs are on the GPU at once, eight to an SM. Where the next kernel is
// not placed early they start one after the other over half of the time, and some write while others
// read; then every instruction before the first load counts, and the parameters are few.
template <class T, int kQ, int kK>
__global__ void __launch_bounds__(kHeadThreads)
    rope_packed_kernel(const __grid_constant__ PackedRopeParams p) {
  const uint32_t unit = threadIdx.x & (p.lanes - 1);
  const uint32_t slot = blockIdx.x * (static_cast<uint32_t>(kHeadThreads) >> p.lane_bits) +
                        (threadIdx.x >> p.lane_bits);
  const uint32_t token = p.by_groups.divide(slot), head = slot - token * p.groups;
  const uint32_t at = unit * kVectorBytes;
  const char *q_x = p.q + narrow_product(token, p.q_token) + head * p.q_head + at;
  const char *k_x = p.k + narrow_product(token, p.k_token) + head * p.k_head + at;
  const char *cos_x = p.cos + narrow_product(token, p.cos_token) + at;
  const char *sin_x = p.sin + narrow_product(token, p.sin_token) + at;
  compute_now(q_x, k_x, cos_x, sin_x);
  if (token >= p.tokens) return;
  wait_for_previous<kQ == 1>();

  const uint32_t q_step = p.groups * p.q_head, k_step = p.groups * p.k_head;
  const auto in = [&](int j, uint32_t heads) { return head + j * p.groups < heads; };
  PackedPair q[kQ], k[kK];
#pragma unroll
  for (int j = 0; j < kQ; ++j) {
    if (j == 0 || in(j, p.q_heads)) q[j].load(q_x + j * q_step, p.half);
  }
#pragma unroll
  for (int j = 0; j < kK; ++j) {
    if (in(j, p.k_heads)) k[j].load(k_x + j * k_step, p.half);
  }
  const uint4 cos = __ldg(reinterpret_cast<const uint4 *>(cos_x));
  const uint4 sin = __ldg(reinterpret_cast<const uint4 *>(sin_x));
  char *q_to = const_cast<char *>(q_x) + p.q_out, *k_to = const_cast<char *>(k_x) + p.k_out;
#pragma unroll
  for (int j = 0; j < kQ; ++j) {
    if (j > 0 && !in(j, p.q_heads)) continue;
    rotate_packed<T>(q[j], cos, sin);
    q[j].store(q_to + j * q_step, p.half);
  }
#pragma unroll
  for (int j = 0; j < kK; ++j) {
    if (!in(j, p.k_heads)) continue;
    rotate_packed<T>(k[j], cos, sin);
    k[j].store(k_to + j * k_step, p.half);
  }
}

// The stride from token to token; -1: there is none.
inline int64_t token_stride(const RopeArgs &a, int64_t batch, int64_t seq) {
  if (a.seq == 1) return batch;
  return a.batch == 1 || batch == a.seq * seq ? seq : -1;
}

// Whether rope_packed_kernel can do it, and then its parameters.
inline bool packed_fits(const RopeArgs &a, const RopeParams &of, PackedRopeParams &p) {
  constexpr int64_t kBytes = 2;  // of an element
  const int64_t tokens = a.batch * a.seq, most = int64_t{1} << 30;
  if (!a.round_products || !heads_whole(of) || tokens > most / of.heads) return false;
  int64_t steps = 0;
  const auto step = [&](int64_t batch, int64_t seq) {
    const int64_t stride = token_stride(a, batch, seq);
    steps |= stride < 0 || stride > most ? -1 : stride;
    return static_cast<uint32_t>(stride * kBytes);
  };
  const auto fill = [&](const RopeTensor &t, const char *&x, int64_t &out, uint32_t &token,
                        uint32_t &head, uint32_t &heads) {
    x = static_cast<const char *>(t.x);
    out = static_cast<const char *>(t.out) - x;
    token = step(t.x_batch, t.x_seq);
    head = static_cast<uint32_t>(t.x_head * kBytes);
    heads = static_cast<uint32_t>(t.heads);
    // Offsets within a token fit 32 bits.
    return t.heads == 0 || (t.x_batch == t.out_batch && t.x_seq == t.out_seq &&
                            t.x_head == t.out_head && t.x_head <= most / (8 * t.heads));
  };
  const bool same = fill(of.q, p.q, p.q_out, p.q_token, p.q_head, p.q_heads) &&
                    fill(of.k, p.k, p.k_out, p.k_token, p.k_head, p.k_heads);
  p.cos = static_cast<const char *>(a.cos.data), p.sin = static_cast<const char *>(a.sin.data);
  p.cos_token = step(a.cos.batch, a.cos.seq), p.sin_token = step(a.sin.batch, a.sin.seq);
  p.tokens = static_cast<uint32_t>(tokens);
  p.lanes = of.lanes, p.lane_bits = of.lane_bits;
  p.half = static_cast<uint32_t>(of.half * kBytes);
  return same && steps >= 0;
}

// bf16 on an H200, in place, us, warm and cold, rope_joint_kernel -> this: 2048 tokens of 32 + 8 heads
// of 128 7.46, 11.9 -> 6.91, 11.7; 4096 of 16 + 8 of 64 5.29, 7.90 -> 4.46, 7.15; 1024 of 24 + 24 of
// 128 4.72, 7.28 -> 4.32, 7.14; 8 of 32 + 8 1.01, 1.00 -> 0.73, 0.76; to new tensors 8.63, 11.8 ->
// 7.13, 11.7 and 4.73, 8.12 -> 4.32, 7.29. The first of these: two heads, one after the other in 32
// registers, as Liger's kernel has it (6.79, 12.4), 6.60, 12.4; four with the head of k last 6.58,
// 12.1; with the next kernel placed early 7.42, 11.8, and two heads 7.46, 12.2; RopeParams for the
// parameters 7.54, 12.2.
template <class T>
int32_t launch_packed(PackedRopeParams &p, void *stream, const char *op) {
  const int64_t slots = kHeadThreads / p.lanes;
  const auto share = [&](int64_t each) {
    p.groups = static_cast<uint32_t>((p.q_heads + each - 1) / each);
    p.by_groups = FastDivisor(p.groups);
    return (int64_t{p.tokens} * p.groups + slots - 1) / slots;
  };
  const auto run = [&](auto *kernel, int64_t grid) {
    return launch(kernel, grid, kHeadThreads, p, stream, op);
  };
  if (share(1) > kFewPackedCtas) {
    int64_t grid = share(2);
    if (grid <= kPackedCtas && p.k_heads <= 2 * p.groups) {
      return run(&rope_packed_kernel<T, 2, 2>, grid);
    }
    grid = share(4);
    if (grid <= kPackedCtas && p.k_heads <= p.groups) {
      return run(&rope_packed_kernel<T, 4, 1>, grid);
    }
  }
  return run(&rope_packed_kernel<T, 1, 1>, share(1));
}

}  // namespace hfp::cuda
