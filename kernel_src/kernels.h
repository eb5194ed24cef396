// kernels.h: what the device backends implement; internal, C++17, no torch, no CUDA include.
//
// api.cpp validates a call once, turns its DLTensors into these plain arguments and hands them to
// hfp::cpu or hfp::cuda. A backend may assume everything written here.
#pragma once

#include <cstdint>

#include "hfpatch.h"

namespace hfp {

enum class DType : int32_t { F32 = 0, F16 = 1, BF16 = 2 };

inline constexpr int64_t size_of(DType t) { return t == DType::F32 ? 4 : 2; }

// A [rows, cols] view with stride 1 in cols. The rows may come from up to HFP_MAX_OUTER_DIMS leading
// dimensions: row = (i0 * n1 + i1) * n2 + i2 starts at element i0 * s0 + i1 * s1 + i2 * s2.
// A plain matrix has n1 == 1, n2 == rows, s2 == row stride (i.e. only the last outer dim is used).
struct Rows {
  int64_t rows = 0, cols = 0;
  int64_t n1 = 1, n2 = 1;
  int64_t s0 = 0, s1 = 0, s2 = 0;

  bool uniform() const { return rows == n2; }  // one row stride: s2
};

// out is always contiguous [rows, cols]; weight and bias are contiguous [cols] or null.
struct RmsNormArgs {
  void *out;
  const void *x;
  const void *weight;
  const void *bias;
  DType out_type, x_type, weight_type;  // weight_type is also the bias's
  Rows x_rows;
  float eps, weight_offset;
  int cast;  // HFP_CAST_*; HFP_CAST_NONE when there is no weight and no bias
};

struct LayerNormArgs {
  void *out;
  const void *x;
  const void *weight;
  const void *bias;
  DType type, weight_type, bias_type;  // out has the type of x
  Rows x_rows;
  float eps;
};

// A tensor that is read; null data: none.
struct Input {
  const void *data;
  DType type;
  Rows rows;
};

// out, contiguous, of up to three tensors of the same rows and cols, element by element; those that
// repeat have rows with stride 0. The op says what the inputs are, and which have one dtype.
struct PointwiseArgs {
  void *out;
  DType out_type;
  Input in[3];
  int activation;  // of add_activation
  bool eager;      // round the product to out_type (mul_add, gate_residual)
};

struct ActivationArgs {
  void *out;
  const void *x;
  DType type;
  Rows x_rows;  // contiguous tensors arrive as one row: rows == 1, cols == numel
  int activation;
};

// What hfp_gated_clamped does beside hfp_gated. Bounds that are none are infinite, so that all are
// applied; an offset that is none is -0, which leaves even a zero as it is.
struct GatedClamps {
  float alpha;
  float gate_min, gate_max, act_min, act_max, up_min, up_max;  // not rounded to the dtype yet
  float up_offset;
};

struct GatedArgs {
  void *out;
  const void *gate;
  const void *up;
  DType type;
  Rows gate_rows, up_rows;  // same rows and cols; a packed tensor arrives as two views
  int activation;
  bool clamped;
  GatedClamps clamps;
};

// sum = residual + gate * x; out = norm(sum or x), modulated: what hfp_norm_modulate,
// hfp_gate_residual_norm_modulate, hfp_add_rms_norm and hfp_add_layer_norm have in common.
struct FusedNormArgs {
  void *out;
  void *sum;  // null: no residual, the norm is of x
  const void *x, *residual;
  const void *gate;  // null: sum = residual + x
  const void *weight, *bias;
  const void *scale, *shift;  // both or none
  DType type, out_type;       // x, residual and sum have `type`
  DType weight_type;          // also the bias's
  DType modulation_type;      // of gate, scale and shift
  Rows x_rows, residual_rows, gate_rows, scale_rows, shift_rows;  // broadcast: rows with stride 0
  float eps, weight_offset;
  int norm_type;  // HFP_NORM_*
  int cast;       // HFP_CAST_* of norm and weight; HFP_CAST_NONE when there is no weight
  bool eager;     // gate, scale and shift round after each step (else once, at the end)
};

// q or k of rope: [batch, seq, heads, dim], any strides but 1 in dim.
struct RopeTensor {
  const void *x;
  void *out;
  const void *weight;  // of the norm: [dim], or [heads * dim] if across; null: none
  int64_t x_batch, x_seq, x_head;        // strides
  int64_t out_batch, out_seq, out_head;
  int64_t heads;  // 0: there is no such tensor
};

// cos or sin; a stride is 0 where the table repeats.
struct RopeTable {
  const void *data;  // null in both: no rotation
  int64_t batch, seq, head;
};

struct RopeArgs {
  RopeTensor q, k;
  RopeTable cos, sin;
  DType type, table_type, weight_type;  // table_type: F32 or type
  int64_t batch, seq, dim;
  int64_t rotary;       // even, at most dim; 0 without tables
  bool interleaved;
  bool wide;            // interleaved only: the tables are [rotary], each value twice
  bool paired;          // wide, and one table: cos and sin in turns; `cos` and `sin` both name it
  bool round_products;  // to `type`; never set where the promoted dtype is fp32
  bool norm, across;    // across: over heads * dim
  bool round_hat;       // round xhat to `type` before the weight
  float eps, weight_offset;  // weight_offset is 0 without weights
};

// A row is one group of columns. All tensors have `type`.
struct GatedNormArgs {
  void *out;
  const void *x;
  const void *gate, *weight;  // null: none
  DType type, weight_type;    // weight_type is `type` unless `once`
  Rows x_rows, gate_rows;  // rows * groups of cols / groups; without a gate the same
  Rows weight_rows;        // the same rows; stride 0 but over the groups
  float eps;
  bool norm_before_gate;
  bool once;     // one rounding, at the end
  bool sigmoid;  // of the gate; else silu
};

// out = silu(rms_norm(x + addend) * weight * (1 + scale) + shift), one rounding. addend: contiguous
// [cols], of `type`; weight: contiguous [cols]; null: none. scale and shift: both or neither.
struct RmsNormSiluArgs {
  void *out;
  const void *x, *addend, *weight, *scale, *shift;
  DType type, weight_type, modulation_type;
  Rows x_rows;
  Rows scale_rows, shift_rows;  // the same rows, stride 0 where they repeat
  float eps;
};

// x and out: contiguous [batch, channels, positions], or with channels_last [batch, positions,
// channels]. stats: [batch, groups, parts + 1, 2]; slot `parts` becomes mean and rstd.
struct GroupNormArgs {
  void *out;
  float *stats;
  const void *x;
  const void *weight, *bias;  // [channels]; null: none
  DType type;
  DType weight_type;  // also the bias's
  int64_t batch, channels, positions, groups, parts;
  float eps;
  bool silu;  // of the result, rounded to `type`
  bool channels_last;
};

// Gradients of rms_norm and layer_norm. dx is contiguous [rows, cols] in x_type. partials is
// [partial_rows, K * cols]: the weight's columns if dweight is wanted (not null), then the bias's if
// dbias is; it may be left unwritten. With rows == 0, what is wanted becomes 0.
struct NormBackwardArgs {
  void *dx, *dweight, *dbias;
  float *partials;
  const void *grad, *x, *weight;
  DType grad_type, x_type, weight_type, bias_type;
  DType hat_type;  // what the forward rounded xhat to before the weight; F32: nothing
  Rows grad_rows, x_rows;
  int64_t partial_rows;
  float eps, weight_offset;
};

struct ActivationBackwardArgs {
  void *dx;
  const void *grad, *x;
  DType type;
  Rows grad_rows, x_rows;  // the same rows and cols
  int activation;
};

// Row i of dgate and of dup starts at element i * out_stride.
struct GatedBackwardArgs {
  void *dgate, *dup;
  const void *grad, *gate, *up;
  DType type;
  Rows grad_rows, gate_rows, up_rows;  // the same rows and cols
  int64_t out_stride;
  int activation;
};

// One row per target. loss and lse, or grad and lse and dlogits (contiguous): see hfpatch.h.
struct CrossEntropyArgs {
  float *loss, *lse;      // forward
  void *dlogits;          // backward
  const float *grad;      // backward
  bool one_grad;          // for all rows
  const float *saved_lse; // backward
  const void *logits;
  const int64_t *target;
  DType type;
  Rows rows;
  int64_t ignore_index;
  float label_smoothing, softcap;
};

// A value of one element: at `pointer` on the device of the call or, if that is null, `value`. The CPU
// backend gets values only.
struct Scalar {
  const float *pointer = nullptr;
  float value = 0.0f;
};

// The mean or sum of the losses of `rows`, and its gradient; loss, lse and dlogits of `rows` are results.
struct CrossEntropyTotalArgs {
  float *total;
  CrossEntropyArgs rows;
  bool counts;  // divides by the number of rows that are not ignored, not by `divisor`
  Scalar divisor;
};

// One parameter of adamw_step: all of `numel` elements in the same order.
struct AdamWTensor {
  void *param;
  float *master;  // null: the step is made on param
  const void *grad;
  void *exp_avg, *exp_avg_sq;
  void *max_exp_avg_sq;  // null: no AMSGrad
  Scalar step;
  int64_t numel;
};

struct AdamWArgs {
  const HfpTensorList *params, *grads, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *masters, *steps;
  DType param_type, grad_type, moment_type;
  Scalar lr, clip_coef, grad_scale, found_inf;  // absent: lr, 1, 1, 0
  float beta2, one_minus_beta1, one_minus_beta2;
  float log_beta1, log_beta2;  // 1 - beta^t = -expm1(t log(beta)) does not cancel in fp32
  float eps, weight_decay;
  bool maximize;

  AdamWTensor operator[](int64_t i) const;  // api_optim.cpp
};

// The elements of one tensor of a list, which lie in memory without gaps.
struct FlatTensor {
  void *data;
  DType type;
  int64_t numel;
};
FlatTensor flat_tensor(const HfpTensorList &list, int64_t i);  // api_optim.cpp

struct GradNormArgs {
  float *norm, *partials;
  int64_t count;  // of partials
  const HfpTensorList *tensors;
  int norm_type;  // HFP_GRAD_NORM_*
};

// hfp_scale_grads, or hfp_clip_grads, whose factor is of `total_norm` and `max_norm`.
struct ScaleGradsArgs {
  const HfpTensorList *grads;
  const float *factor, *total_norm;  // one of them
  float max_norm;
};

// A wide row is reduced in parts, by one warp each, whose results are then added in their order: the
// bits are the same whether one CTA takes all parts or many CTAs share them (few, wide rows), which
// takes a workspace of one 8-byte entry per part.
inline constexpr int64_t kPartCols = 2048, kMaxParts = 1024;
inline constexpr int64_t kSplitRows = 256, kSplitCols = 16384;

inline int64_t part_cols(int64_t cols) {
  return kPartCols * ((cols + kPartCols * kMaxParts - 1) / (kPartCols * kMaxParts));
}
inline int64_t row_parts(int64_t cols) { return (cols + part_cols(cols) - 1) / part_cols(cols); }
inline bool split_rows(int64_t rows, int64_t cols) {
  return rows > 0 && rows <= kSplitRows && cols >= kSplitCols;
}

// out, dx: contiguous. The forward reads x and mask, the backward grad and y.
struct SoftmaxArgs {
  void *out;
  float *workspace;
  const void *x, *mask;   // forward; mask may be null
  const void *grad, *y;   // backward
  DType type, mask_type;
  Rows x_rows, mask_rows;  // forward; the same rows and cols
  Rows grad_rows, y_rows;  // backward
  float scale;
};

// Of hfp_decode_choose, where its names are explained.
struct Choice {
  int64_t *ids, *counters, *text;
  const int64_t *ends;
  int64_t rows, counters_count, ends_count, pad;  // ends_count: -1 where no row ends
};

struct ArgmaxArgs {
  int64_t *out;  // NULL: there is a choice instead
  Choice choice;
  uint64_t *workspace;
  const void *x;
  DType type;
  Rows rows;
};

struct TopkArgs {
  void *values;
  int64_t *indices;
  const void *x;
  DType type;
  Rows rows;
  int k;
};

// Per row where the pointer is not null.
struct SampleArgs {
  int64_t *out;
  const void *logits;
  DType type;
  Rows rows;
  const int64_t *seeds, *positions, *top_ks;
  const float *temperatures, *top_ps, *min_ps;
  float temperature, top_p, min_p;
  int64_t top_k;
};

// out = a + alpha * b, a * b, or a * alpha where b is null; all have `type`, one rounding. out: contiguous.
struct PairArgs {
  void *out;
  const void *a, *b;
  DType type;
  Rows a_rows, b_rows;  // the same rows; b with stride 0 where it repeats. Contiguous ones: one row
  float alpha;
  bool product;
};

// log_probs: contiguous, may be the memory of logits.
struct LogProbsArgs {
  float *loss, *lse;
  void *log_probs;
  const void *logits;
  const int64_t *target;
  DType type;
  Rows rows;
  int64_t ignore_index;
  float label_smoothing, softcap;
};

// Rows of `partials` are over tokens in equal parts; see hfp_load_balancing_loss.
struct BalanceArgs {
  float *loss, *stats, *partials;  // forward; stats: [2 experts + 1]
  void *dlogits;                   // backward, contiguous
  const float *grad, *saved;       // backward: one element; stats
  const void *logits;
  const float *mask;  // contiguous; null: 1
  DType type;
  Rows rows;  // [tokens, experts]
  int64_t parts;
  int k;
};

// Gradients of what is broadcast over rows. Row (o * reduced + r) * inner + i of x has the row
// o * inner + i of the parameter. `activation` < 0: of a * b + c, where x is a and param is b:
//   dx = grad * param; first = sum over r of grad * x; second = sum over r of grad
// else of act(x + bias), where param is bias and rows have no `first`:
//   dx = grad * act'(x + bias); second = sum over r of dx
// first, second: contiguous, null where not wanted. With parts > 1 each sum is of `parts` sums over
// parts of its rows: partials is [outer * inner * parts, K * cols], K how many are wanted; it may be
// left unwritten. reduced may be 0: the sums are.
struct BroadcastBackwardArgs {
  void *dx, *first, *second;
  float *partials;
  const void *grad, *x, *param;
  DType type, grad_type, param_type;
  Rows grad_rows, x_rows, param_rows;
  int64_t outer, reduced, inner, parts;
  int activation;
};

// Declares, for the file that calls it, what both backends implement for an op. Each returns HFP_OK, or
// a status after set_error().
#define HFP_BACKENDS(name, Args)                                \
  namespace hfp {                                               \
  namespace cpu {                                               \
  int32_t name(const Args &);                                   \
  }                                                             \
  namespace cuda {                                              \
  int32_t name(const Args &, int device, void *stream);         \
  }                                                             \
  }

// Of a backend's function, what Check::run takes: null in a build without CUDA.
#if defined(CUDA_KERNEL)
#define HFP_CUDA(function) (&hfp::cuda::function)
#else
#define HFP_CUDA(function) nullptr
#endif

namespace cpu {
const char *simd_level();
}

// Stores the message that hfp_last_error() returns on this thread; returns `status`.
int32_t set_error(int32_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace hfp
