// decode_plain.cuh: a decoding step's products and attention without tensor cores: fp32, GPUs before sm_80,
// and sizes or addresses that are no multiples of 16 bytes.
#pragma once

#include "decode_common.cuh"

namespace hfp::cuda::decode {

inline constexpr int kPlainWarps = 8;
inline constexpr int kPlainThreads = kPlainWarps * 32;
inline constexpr int kPlainRows = 4;  // of x that a warp sums at once

// x . w for kPlainRows rows of x from `first` on; every lane gets the sums.
template <class T>
__device__ __forceinline__ void plain_dots(const Product &p, const T *w, int first, int lane,
                                           float (&sum)[kPlainRows]) {
  const T *const x = static_cast<const T *>(p.x) + first * p.x_stride;
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) sum[r] = 0.0f;
#pragma unroll 4
  for (int k = lane; k < p.columns; k += 32) {
    const float weight = load_parameter(w + k);
#pragma unroll
    for (int r = 0; r < kPlainRows; ++r) {
      if (first + r < p.rows) sum[r] = fmaf(weight, load_one(x + r * p.x_stride + k), sum[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) sum[r] = warp_sum(sum[r]);
}

// A warp has a row of the weight (of both, if kPairs) and all rows of x.
template <class T, bool kPairs>
__global__ void __launch_bounds__(kPlainThreads) decode_plain_product_kernel(const __grid_constant__ Product p) {
  let_next_start();
  wait_for_previous<false>();
  const int lane = threadIdx.x % 32;
  const int column = static_cast<int>(blockIdx.x) * kPlainWarps + threadIdx.x / 32;
  if (column >= (kPairs ? p.end[0] : p.end[2])) return;
  const int part = kPairs ? 0 : column >= p.end[1] ? 2 : column >= p.end[0] ? 1 : 0;
  const int row = column - (part == 2 ? p.end[1] : part == 1 ? p.end[0] : 0);
  const T *const w = static_cast<const T *>(p.weight[part]) + row * p.stride[part];
  for (int first = 0; first < p.rows; first += kPlainRows) {
    float sum[kPlainRows], up[kPlainRows];
    plain_dots<T>(p, w, first, lane, sum);
    if constexpr (kPairs) {
      plain_dots<T>(p, static_cast<const T *>(p.weight[1]) + row * p.stride[1], first, lane, up);
    }
#pragma unroll
    for (int r = 0; r < kPlainRows; ++r) {
      if (lane != r || first + r >= p.rows) continue;
      if constexpr (kPairs) {
        finish_pair<T>(p, first + r, column, sum[r] + bias_at<T>(p, 0, row), up[r] + bias_at<T>(p, 1, row));
      } else {
        finish_one<T>(p, first + r, column, sum[r] + bias_at<T>(p, part, row), residual_at<T>(p, first + r, column));
      }
    }
  }
}

struct PlainPrepare {
  Attention a;
};

inline constexpr int kPlainDim = 256;

// A warp has a head of a query: q's goes to `out`, where attention reads it; k's and v's go to the cache.
template <class T>
__global__ void __launch_bounds__(32) decode_plain_prepare_kernel(const __grid_constant__ PlainPrepare p) {
  const Attention &a = p.a;
  __shared__ float scratch[kPlainDim];
  __shared__ T done[kPlainDim];
  let_next_start();
  wait_for_previous<false>();
  const int lane = threadIdx.x, head = blockIdx.x;
  const int64_t query = blockIdx.y;
  const T *const row = static_cast<const T *>(a.qkv) + query * a.width();
  const float *const table = a.table != nullptr ? a.table + query * 2 * a.half : nullptr;
  const bool key = head >= a.heads;
  const int index = key ? head - a.heads : head;
  const T *const heads = key ? row + a.heads * a.dim : row;
  HeadNorm<T, kPlainDim> of_head;
  if (!a.across) of_head.load_head(key ? a.k_norm : a.q_norm, index, a.dim, lane);
  prepare_head<T, kPlainDim>(a, key ? a.k_norm : a.q_norm, of_head, true, heads, (key ? a.key_heads : a.heads) * a.dim,
                             index * a.dim, table, done, scratch, lane);
  __syncwarp();
  if (!key) {
    T *const out = static_cast<T *>(a.out) + (query * a.heads + index) * a.dim;
    for (int d = lane; d < a.dim; d += 32) out[d] = done[d];
    return;
  }
  const int64_t *const entry = a.cache + 1 + 3 * a.layer;
  const int64_t at = __ldcg(a.cache) + query % a.tokens, capacity = __ldcg(entry + 2);
  const int64_t to = ((query / a.tokens * a.key_heads + index) * capacity + at) * a.dim;
  T *const keys = reinterpret_cast<T *>(__ldcg(entry)), *const values = reinterpret_cast<T *>(__ldcg(entry + 1));
  const T *const value = row + (a.heads + a.key_heads + index) * a.dim;
  for (int d = lane; d < a.dim; d += 32) {
    keys[to + d] = done[d];
    values[to + d] = from_float<T>(load_one(value + d));
  }
}

// A CTA has a head of a query; its warps take keys in turn and are merged in their order. The query lies in
// `out`, where decode_plain_prepare_kernel put it.
template <class T>
__global__ void __launch_bounds__(kPlainThreads) decode_plain_attention_kernel(const __grid_constant__ Attention a) {
  constexpr int kEach = kPlainDim / 32;
  __shared__ float sums[kPlainWarps][kPlainDim];
  __shared__ float tops[kPlainWarps], totals[kPlainWarps];
  let_next_start();
  wait_for_previous<false>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int64_t query = blockIdx.y, row = query / a.tokens;
  const int64_t *const entry = a.cache + 1 + 3 * a.layer;
  const int64_t length = __ldcg(a.cache), capacity = __ldcg(entry + 2), end = length + query % a.tokens + 1;
  const int64_t first = a.window > 0 && end > a.window ? end - a.window : 0;
  const int64_t from = (row * a.key_heads + head / a.group()) * capacity * a.dim;
  const T *const keys = reinterpret_cast<const T *>(__ldcg(entry)) + from;
  const T *const values = reinterpret_cast<const T *>(__ldcg(entry + 1)) + from;
  T *const out = static_cast<T *>(a.out) + (query * a.heads + head) * a.dim;
  float q[kEach], o[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) q[i] = lane + 32 * i < a.dim ? load_one(out + lane + 32 * i) : 0.0f;
  float most = -INFINITY, total = 0.0f;
  for (int64_t at = first + warp; at < end; at += kPlainWarps) {
    if (a.mask != nullptr && __ldcg(a.mask + row * a.mask_width + at) == 0) continue;
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i < a.dim) s = fmaf(q[i], load_one(keys + at * a.dim + lane + 32 * i), s);
    }
    s = warp_sum(s) * a.scale;
    if (a.softcap > 0.0f) s = a.softcap * tanhf(s / a.softcap);
    const float now = fmaxf(most, s), rescale = expf(most - now), p = expf(s - now);
    most = now;
    total = fmaf(total, rescale, p);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i < a.dim) o[i] = fmaf(o[i], rescale, p * load_one(values + at * a.dim + lane + 32 * i));
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) sums[warp][lane + 32 * i] = o[i];
  if (lane == 0) tops[warp] = most, totals[warp] = total;
  __syncthreads();
  const float sink = parameter<T>(a.sinks, head);
  float top = a.sinks != nullptr ? sink : -INFINITY;
#pragma unroll
  for (int w = 0; w < kPlainWarps; ++w) top = fmaxf(top, tops[w]);
  const float base = top == -INFINITY ? 0.0f : top;
  float all = a.sinks != nullptr ? expf(sink - base) : 0.0f;
#pragma unroll
  for (int w = 0; w < kPlainWarps; ++w) all = fmaf(totals[w], expf(tops[w] - base), all);
  for (int d = threadIdx.x; d < a.dim; d += kPlainThreads) {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < kPlainWarps; ++w) y = fmaf(sums[w][d], expf(tops[w] - base), y);
    out[d] = from_float<T>(all > 0.0f ? y / all : 0.0f * all);
  }
}

}  // namespace hfp::cuda::decode
