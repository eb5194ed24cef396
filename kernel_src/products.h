// products.h: the arguments of matrix products and attention; internal, like kernels.h.
#pragma once

#include "kernels.h"

namespace hfp {

// out = alpha * op(a) op(b) + beta * c, one rounding, to `type`, which all have; on CUDA out and c may be
// fp32 (`wide`). A row of a matrix is contiguous; op transposes. Batch strides may be 0, but that of out.
struct GemmArgs {
  void *out;
  float *workspace;
  const void *a, *b, *c;  // c: null: none
  DType type;
  int64_t batch, m, n, k;  // all but k at least 1; k may be 0
  int64_t out_row, a_row, b_row, c_row;
  int64_t out_batch, a_batch, b_batch, c_batch;
  int64_t workspace_bytes;
  bool a_transposed, b_transposed;  // a is [k, m], b is [n, k]
  bool wide;
  float alpha, beta;
};

// The packed part of b that the CPU's blocked product works on at once: all of k, and so many columns.
constexpr int64_t kGemmColumns = 512;    // at most
constexpr int64_t kGemmPanel = 32;       // a multiple of every instruction set's width
constexpr int64_t kGemmCapacity = 1 << 20;  // floats, where k allows it

inline int64_t gemm_columns(int64_t n, int64_t k) {
  const int64_t padded = (n + kGemmPanel - 1) / kGemmPanel * kGemmPanel;
  int64_t columns = kGemmCapacity / (k > 0 ? k : 1) / kGemmPanel * kGemmPanel;
  if (columns > kGemmColumns) columns = kGemmColumns;
  if (columns < kGemmPanel) columns = kGemmPanel;
  return columns < padded ? columns : padded;
}

// How many batches are packed at once.
inline int64_t gemm_group(int64_t batch, int64_t n, int64_t k) {
  const int64_t one = gemm_columns(n, k) * (k > 0 ? k : 1);
  const int64_t fit = kGemmCapacity / one;
  return fit < 1 ? 1 : fit < batch ? fit : batch;
}

// What cuBLASLt may use; PyTorch's default on Hopper.
constexpr int64_t kCudaGemmWorkspace = int64_t{32} << 20;

struct AttentionArgs {
  void *out;
  float *lse;  // [batch, heads, queries], or packed [heads, queries]
  const void *q, *k, *v;
  const void *mask;  // null: none
  DType type, mask_type;
  bool mask_bits;  // bool or uint8: 0 is not seen; mask_type means nothing
  int64_t batch, heads, kv_heads;
  int64_t queries, keys;  // of a sample, at most; packed: of all
  int64_t dim, value_dim;
  // strides of batch, head and position; packed: the batch's is 0
  int64_t q_batch, q_head, q_row;
  int64_t k_batch, k_head, k_row;
  int64_t v_batch, v_head, v_row;
  int64_t out_batch, out_head, out_row;
  int64_t mask_batch, mask_head, mask_row, mask_col;  // 0 where it repeats
  const int64_t *q_starts, *k_starts;  // [batch + 1], both or neither: packed
  const int64_t *k_lengths;            // [batch], or null
  int64_t most_queries;                // of a sample
  int64_t window;  // 0: none; else `causal`
  float scale;
  float softcap;   // 0: none
  bool causal;
};

// The part of a packed or padded sample that a kernel works on. Values that make no sense, which are
// not known before the launch, are cut to what the tensors hold.
struct AttentionSample {
  int64_t q_begin, queries, k_begin, keys;
};

#if defined(__CUDACC__)
__host__ __device__
#endif
inline AttentionSample attention_sample(const AttentionArgs &a, int64_t b) {
  AttentionSample s = {0, a.queries, 0, a.keys};
  if (a.q_starts) {
    const auto cut = [](int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; };
    s.q_begin = cut(a.q_starts[b], a.queries);
    s.queries = cut(a.q_starts[b + 1], a.queries) - s.q_begin;
    s.k_begin = cut(a.k_starts[b], a.keys);
    s.keys = cut(a.k_starts[b + 1], a.keys) - s.k_begin;
    if (s.queries < 0) s.queries = 0;
    if (s.queries > a.most_queries) s.queries = a.most_queries;
    if (s.keys < 0) s.keys = 0;
  }
  if (a.k_lengths) {
    const int64_t given = a.k_lengths[b];
    if (given < s.keys) s.keys = given < 0 ? 0 : given;
  }
  return s;
}

constexpr int64_t kMaxHeadDim = 256;

namespace cpu {
int32_t gemm(const GemmArgs &);
int32_t attention(const AttentionArgs &);
int64_t gemm_backend();  // HFP_GEMM_*
}  // namespace cpu

namespace cuda {
int32_t gemm(const GemmArgs &, int device, void *stream);
int64_t gemm_backend();
int32_t attention(const AttentionArgs &, int device, void *stream);
}  // namespace cuda

}  // namespace hfp
