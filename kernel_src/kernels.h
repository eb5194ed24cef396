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

struct ActivationArgs {
  void *out;
  const void *x;
  DType type;
  Rows x_rows;  // contiguous tensors arrive as one row: rows == 1, cols == numel
  int activation;
};

struct GatedArgs {
  void *out;
  const void *gate;
  const void *up;
  DType type;
  Rows gate_rows, up_rows;  // same rows and cols; a packed tensor arrives as two views
  int activation;
};

// Gradients of rms_norm and layer_norm. dx is contiguous [rows, cols] in x_type. partials is
// [partial_rows, K * cols]: the weight's columns if dweight is wanted (not null), then the bias's if
// dbias is. With rows == 0, what is wanted becomes 0.
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
  const float *saved_lse; // backward
  const void *logits;
  const int64_t *target;
  DType type;
  Rows rows;
  int64_t ignore_index;
  float label_smoothing, softcap;
};

// Each returns HFP_OK, or a status after set_error().
namespace cpu {
int32_t rms_norm(const RmsNormArgs &);
int32_t layer_norm(const LayerNormArgs &);
int32_t activation(const ActivationArgs &);
int32_t gated(const GatedArgs &);
int32_t rms_norm_backward(const NormBackwardArgs &);
int32_t layer_norm_backward(const NormBackwardArgs &);
int32_t activation_backward(const ActivationBackwardArgs &);
int32_t gated_backward(const GatedBackwardArgs &);
int32_t cross_entropy(const CrossEntropyArgs &);
int32_t cross_entropy_backward(const CrossEntropyArgs &);
const char *simd_level();
}  // namespace cpu

namespace cuda {
int32_t rms_norm(const RmsNormArgs &, int device, void *stream);
int32_t layer_norm(const LayerNormArgs &, int device, void *stream);
int32_t activation(const ActivationArgs &, int device, void *stream);
int32_t gated(const GatedArgs &, int device, void *stream);
int32_t rms_norm_backward(const NormBackwardArgs &, int device, void *stream);
int32_t layer_norm_backward(const NormBackwardArgs &, int device, void *stream);
int32_t activation_backward(const ActivationBackwardArgs &, int device, void *stream);
int32_t gated_backward(const GatedBackwardArgs &, int device, void *stream);
int32_t cross_entropy(const CrossEntropyArgs &, int device, void *stream);
int32_t cross_entropy_backward(const CrossEntropyArgs &, int device, void *stream);
}  // namespace cuda

// Stores the message that hfp_last_error() returns on this thread; returns `status`.
int32_t set_error(int32_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace hfp
