// attention.cuh: what the kernels of hfp_attention share: which rows a CTA has, where they lie, launching.
#pragma once

#include <cfloat>

#include "../products.h"
#include "common.cuh"

namespace hfp::cuda {
namespace {

// A CTA's share: rows from `first` on of one sample and one head of keys. The heads of q that share it lie
// one after the other: row r is query r % queries of head r / queries.
struct AttentionUnit {
  int64_t batch, kv_head, group, first, rows;
  AttentionSample sample;

  __device__ AttentionUnit(const AttentionArgs &a, int64_t index, int64_t blocks, int block_rows) {
    const int64_t of = index / blocks;
    // The last queries of a causal call see the most keys: they begin first.
    first = (blocks - 1 - index % blocks) * block_rows;
    batch = of / a.kv_heads;
    kv_head = of % a.kv_heads;
    group = a.heads / a.kv_heads;
    sample = attention_sample(a, batch);
    rows = group * sample.queries;
  }

  __device__ int64_t head(int64_t row) const { return kv_head * group + row / sample.queries; }
  __device__ int64_t query(int64_t row) const { return row % sample.queries; }
  __device__ int64_t q_offset(const AttentionArgs &a, int64_t row) const {
    return batch * a.q_batch + head(row) * a.q_head + (sample.q_begin + query(row)) * a.q_row;
  }
  __device__ int64_t out_offset(const AttentionArgs &a, int64_t row) const {
    return batch * a.out_batch + head(row) * a.out_head + (sample.q_begin + query(row)) * a.out_row;
  }
  __device__ int64_t lse_offset(const AttentionArgs &a, int64_t row) const {
    const int64_t before = (a.q_starts != nullptr ? 0 : batch * a.heads) + head(row);
    return before * a.queries + sample.q_begin + query(row);
  }
  __device__ int64_t mask_offset(const AttentionArgs &a, int64_t row) const {
    return batch * a.mask_batch + head(row) * a.mask_head + query(row) * a.mask_row;
  }
  __device__ int64_t k_offset(const AttentionArgs &a) const {
    return batch * a.k_batch + kv_head * a.k_head + sample.k_begin * a.k_row;
  }
  __device__ int64_t v_offset(const AttentionArgs &a) const {
    return batch * a.v_batch + kv_head * a.v_head + sample.k_begin * a.v_row;
  }
  // How many keys a row sees.
  __device__ int limit(const AttentionArgs &a, int64_t row) const {
    return a.causal ? limit_of(query(row)) : static_cast<int>(sample.keys);
  }
  __device__ int limit_of(int64_t query) const {
    const int64_t seen = query + 1 + sample.keys - sample.queries;
    return static_cast<int>(seen < 0 ? 0 : seen < sample.keys ? seen : sample.keys);
  }
  // The first key that a row sees, of a window; `limit` is how many keys it saw without one.
  __device__ static int floor_of(const AttentionArgs &a, int limit) {
    return a.window > 0 && limit > a.window ? limit - static_cast<int>(a.window) : 0;
  }
  // The first key that any of this CTA's rows sees, in whole blocks: then a row's bits do not depend on
  // which rows share its CTA.
  __device__ int begin(const AttentionArgs &a, int block_rows, int block_keys) const {
    return floor_of(a, fewest(a, block_rows)) / block_keys * block_keys;
  }
  // The most and the fewest that any of this CTA's rows sees.
  __device__ int most(const AttentionArgs &a, int block_rows) const {
    if (!a.causal) return static_cast<int>(sample.keys);
    const int64_t last = first + block_rows < rows ? first + block_rows - 1 : rows - 1;
    const bool one_head = first / sample.queries == last / sample.queries;
    return one_head ? limit_of(query(last)) : static_cast<int>(sample.keys);
  }
  __device__ int fewest(const AttentionArgs &a, int block_rows) const {
    if (!a.causal) return static_cast<int>(sample.keys);
    const int64_t last = first + block_rows < rows ? first + block_rows - 1 : rows - 1;
    const bool one_head = first / sample.queries == last / sample.queries;
    return limit_of(one_head ? query(first) : 0);
  }
};

// 1 - 2 / (exp(2 x) + 1): as near as the exponential of the hardware; `x` in units of 1 / log2(e).
__device__ __forceinline__ float tanh_of_log2(float x) {
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(2.0f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.0f));
  return fmaf(-2.0f, inverse, 1.0f);
}

__device__ __forceinline__ float mask_value(const AttentionArgs &a, int64_t element) {
  if (a.mask_bits) {
    return static_cast<const uint8_t *>(a.mask)[element] != 0 ? 0.0f : -INFINITY;
  }
  float value[1];
  load_any(value, a.mask, a.mask_type, element);
  return value[0];
}

// A score in units of 1 / log2(e), and the mask's value. The least number of a dtype, as models write it in
// place of -infinity, stays one: a query that has nothing else weighs all keys the same.
__device__ __forceinline__ float masked(float score, float mask) {
  const float sum = fmaf(mask, 1.4426950408889634f, score);
  return sum == -INFINITY && mask != -INFINITY && score != -INFINITY ? -FLT_MAX : sum;
}

template <class Kernel, class... Options>
int32_t launch_attention(const AttentionArgs &a, Kernel kernel, int block_rows, int threads, int bytes,
                         cudaStream_t stream, Options... options) {
  const int64_t rows = a.heads / a.kv_heads * a.most_queries;
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  const int64_t grid = blocks * a.kv_heads * a.batch;
  if (grid > kMaxGrid) {
    return set_error(HFP_INVALID_ARGUMENT,
                     "hfp_attention: `q` must have fewer than 2^31 blocks of %d rows, got %lld; call it"
                     " for fewer samples at a time",
                     block_rows, static_cast<long long>(grid));
  }
  if (bytes > 40 * 1024) {  // beside what a kernel has of its own
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return check(status, "attention");
  }
  kernel<<<static_cast<unsigned>(grid), threads, bytes, stream>>>(a, blocks, options...);
  return check(cudaGetLastError(), "attention");
}

}  // namespace
}  // namespace hfp::cuda
