/*
 * The stub of libhfpatch: every function is there and answers HFP_NOT_AVAILABLE, so that a program
 * links and runs, and falls back, where the library is not installed.
 *
 * Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
 */
#include "hfpatch.h"

#if defined(__cplusplus)
#define HFP_THREAD_LOCAL thread_local
#else
#define HFP_THREAD_LOCAL _Thread_local
#endif

static HFP_THREAD_LOCAL const char *message = "";

#define HFP_WHY                                                                                   \
  ": this is the stub of libhfpatch, which has no kernels; link with libhfpatch, or compute this" \
  " another way"

static int32_t missing(const char *why) {
  message = why;
  return HFP_NOT_AVAILABLE;
}

#ifdef __cplusplus
extern "C" {
#endif

const char *hfp_last_error(void) { return message; }

int32_t hfp_abi_version(void) { return HFP_ABI_VERSION; }

const char *hfp_build_info(void) {
  return "{\"abi\": 4, \"devices\": [], \"cuda_archs\": [], \"compiler\": \"\", \"simd\": \"none\", \"openmp\": false, \"stub\": true}";
}

int32_t hfp_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight, const DLTensor *bias, double eps, double weight_offset, int64_t cast, void *stream) {
  (void)out;
  (void)x;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)weight_offset;
  (void)cast;
  (void)stream;
  return missing("hfp_rms_norm" HFP_WHY);
}

int32_t hfp_layer_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight, const DLTensor *bias, double eps, void *stream) {
  (void)out;
  (void)x;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)stream;
  return missing("hfp_layer_norm" HFP_WHY);
}

int32_t hfp_gelu(DLTensor *out, const DLTensor *x, int64_t approximate, void *stream) {
  (void)out;
  (void)x;
  (void)approximate;
  (void)stream;
  return missing("hfp_gelu" HFP_WHY);
}

int32_t hfp_silu(DLTensor *out, const DLTensor *x, void *stream) {
  (void)out;
  (void)x;
  (void)stream;
  return missing("hfp_silu" HFP_WHY);
}

int32_t hfp_gated(DLTensor *out, const DLTensor *gate, const DLTensor *up, int64_t activation, void *stream) {
  (void)out;
  (void)gate;
  (void)up;
  (void)activation;
  (void)stream;
  return missing("hfp_gated" HFP_WHY);
}

int32_t hfp_gated_packed(DLTensor *out, const DLTensor *x, int64_t activation, int64_t gate_first, void *stream) {
  (void)out;
  (void)x;
  (void)activation;
  (void)gate_first;
  (void)stream;
  return missing("hfp_gated_packed" HFP_WHY);
}

int32_t hfp_gated_clamped(DLTensor *out, const DLTensor *gate, const DLTensor *up, int64_t activation, double alpha, double gate_min, double gate_max, double up_min, double up_max, double up_offset, int64_t clamp_activated, void *stream) {
  (void)out;
  (void)gate;
  (void)up;
  (void)activation;
  (void)alpha;
  (void)gate_min;
  (void)gate_max;
  (void)up_min;
  (void)up_max;
  (void)up_offset;
  (void)clamp_activated;
  (void)stream;
  return missing("hfp_gated_clamped" HFP_WHY);
}

int32_t hfp_norm_modulate(DLTensor *out, const DLTensor *x, const DLTensor *scale, const DLTensor *shift, const DLTensor *weight, const DLTensor *bias, double eps, int64_t norm_type, int64_t cast, void *stream) {
  (void)out;
  (void)x;
  (void)scale;
  (void)shift;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)norm_type;
  (void)cast;
  (void)stream;
  return missing("hfp_norm_modulate" HFP_WHY);
}

int32_t hfp_gate_residual(DLTensor *out, const DLTensor *residual, const DLTensor *gate, const DLTensor *x, int64_t cast, void *stream) {
  (void)out;
  (void)residual;
  (void)gate;
  (void)x;
  (void)cast;
  (void)stream;
  return missing("hfp_gate_residual" HFP_WHY);
}

int32_t hfp_gate_residual_norm_modulate(DLTensor *sum, DLTensor *out, const DLTensor *residual, const DLTensor *gate, const DLTensor *x, const DLTensor *scale, const DLTensor *shift, const DLTensor *weight, const DLTensor *bias, double eps, int64_t norm_type, int64_t cast, void *stream) {
  (void)sum;
  (void)out;
  (void)residual;
  (void)gate;
  (void)x;
  (void)scale;
  (void)shift;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)norm_type;
  (void)cast;
  (void)stream;
  return missing("hfp_gate_residual_norm_modulate" HFP_WHY);
}

int32_t hfp_add_rms_norm(DLTensor *out, DLTensor *sum, const DLTensor *x, const DLTensor *residual, const DLTensor *weight, const DLTensor *bias, double eps, double weight_offset, int64_t cast, void *stream) {
  (void)out;
  (void)sum;
  (void)x;
  (void)residual;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)weight_offset;
  (void)cast;
  (void)stream;
  return missing("hfp_add_rms_norm" HFP_WHY);
}

int32_t hfp_add_layer_norm(DLTensor *out, DLTensor *sum, const DLTensor *x, const DLTensor *residual, const DLTensor *weight, const DLTensor *bias, double eps, void *stream) {
  (void)out;
  (void)sum;
  (void)x;
  (void)residual;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)stream;
  return missing("hfp_add_layer_norm" HFP_WHY);
}

int32_t hfp_rope(DLTensor *out, const DLTensor *x, const DLTensor *cos, const DLTensor *sin, int64_t seq_dim, int64_t interleaved, int64_t rotary_dim, int64_t round_products, void *stream) {
  (void)out;
  (void)x;
  (void)cos;
  (void)sin;
  (void)seq_dim;
  (void)interleaved;
  (void)rotary_dim;
  (void)round_products;
  (void)stream;
  return missing("hfp_rope" HFP_WHY);
}

int32_t hfp_rope_qk(DLTensor *q_out, DLTensor *k_out, const DLTensor *q, const DLTensor *k, const DLTensor *cos, const DLTensor *sin, int64_t seq_dim, int64_t interleaved, int64_t rotary_dim, int64_t round_products, void *stream) {
  (void)q_out;
  (void)k_out;
  (void)q;
  (void)k;
  (void)cos;
  (void)sin;
  (void)seq_dim;
  (void)interleaved;
  (void)rotary_dim;
  (void)round_products;
  (void)stream;
  return missing("hfp_rope_qk" HFP_WHY);
}

int32_t hfp_qk_norm_rope(DLTensor *q_out, DLTensor *k_out, const DLTensor *q, const DLTensor *k, const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos, const DLTensor *sin, double eps, double weight_offset, int64_t cast, int64_t norm_across_heads, int64_t seq_dim, int64_t interleaved, int64_t rotary_dim, int64_t round_products, void *stream) {
  (void)q_out;
  (void)k_out;
  (void)q;
  (void)k;
  (void)q_weight;
  (void)k_weight;
  (void)cos;
  (void)sin;
  (void)eps;
  (void)weight_offset;
  (void)cast;
  (void)norm_across_heads;
  (void)seq_dim;
  (void)interleaved;
  (void)rotary_dim;
  (void)round_products;
  (void)stream;
  return missing("hfp_qk_norm_rope" HFP_WHY);
}

int32_t hfp_gated_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *gate, const DLTensor *weight, double eps, int64_t group_size, int64_t norm_before_gate, int64_t cast, int64_t gate_activation, void *stream) {
  (void)out;
  (void)x;
  (void)gate;
  (void)weight;
  (void)eps;
  (void)group_size;
  (void)norm_before_gate;
  (void)cast;
  (void)gate_activation;
  (void)stream;
  return missing("hfp_gated_rms_norm" HFP_WHY);
}

int32_t hfp_rms_norm_silu(DLTensor *out, const DLTensor *x, const DLTensor *addend, const DLTensor *weight, const DLTensor *scale, const DLTensor *shift, double eps, void *stream) {
  (void)out;
  (void)x;
  (void)addend;
  (void)weight;
  (void)scale;
  (void)shift;
  (void)eps;
  (void)stream;
  return missing("hfp_rms_norm_silu" HFP_WHY);
}

int32_t hfp_add_bias(DLTensor *out, const DLTensor *x, const DLTensor *bias, const DLTensor *residual, void *stream) {
  (void)out;
  (void)x;
  (void)bias;
  (void)residual;
  (void)stream;
  return missing("hfp_add_bias" HFP_WHY);
}

int64_t hfp_group_parts(int64_t channels, int64_t positions, int64_t groups, int64_t channels_last) {
  (void)channels;
  (void)positions;
  (void)groups;
  (void)channels_last;
  return missing("hfp_group_parts" HFP_WHY);
}

int32_t hfp_group_norm(DLTensor *out, DLTensor *stats, const DLTensor *x, const DLTensor *weight, const DLTensor *bias, int64_t groups, double eps, int64_t silu, int64_t channels_last, void *stream) {
  (void)out;
  (void)stats;
  (void)x;
  (void)weight;
  (void)bias;
  (void)groups;
  (void)eps;
  (void)silu;
  (void)channels_last;
  (void)stream;
  return missing("hfp_group_norm" HFP_WHY);
}

int64_t hfp_partial_rows(int64_t rows, int64_t cols) {
  (void)rows;
  (void)cols;
  return missing("hfp_partial_rows" HFP_WHY);
}

int32_t hfp_rms_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias, DLTensor *partials, const DLTensor *grad, const DLTensor *x, const DLTensor *weight, const DLTensor *bias, double eps, double weight_offset, int64_t cast, int64_t needs, void *stream) {
  (void)dx;
  (void)dweight;
  (void)dbias;
  (void)partials;
  (void)grad;
  (void)x;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)weight_offset;
  (void)cast;
  (void)needs;
  (void)stream;
  return missing("hfp_rms_norm_backward" HFP_WHY);
}

int32_t hfp_layer_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias, DLTensor *partials, const DLTensor *grad, const DLTensor *x, const DLTensor *weight, const DLTensor *bias, double eps, int64_t needs, void *stream) {
  (void)dx;
  (void)dweight;
  (void)dbias;
  (void)partials;
  (void)grad;
  (void)x;
  (void)weight;
  (void)bias;
  (void)eps;
  (void)needs;
  (void)stream;
  return missing("hfp_layer_norm_backward" HFP_WHY);
}

int32_t hfp_gelu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x, int64_t approximate, void *stream) {
  (void)dx;
  (void)grad;
  (void)x;
  (void)approximate;
  (void)stream;
  return missing("hfp_gelu_backward" HFP_WHY);
}

int32_t hfp_silu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x, void *stream) {
  (void)dx;
  (void)grad;
  (void)x;
  (void)stream;
  return missing("hfp_silu_backward" HFP_WHY);
}

int32_t hfp_gated_backward(DLTensor *dgate, DLTensor *dup, const DLTensor *grad, const DLTensor *gate, const DLTensor *up, int64_t activation, void *stream) {
  (void)dgate;
  (void)dup;
  (void)grad;
  (void)gate;
  (void)up;
  (void)activation;
  (void)stream;
  return missing("hfp_gated_backward" HFP_WHY);
}

int32_t hfp_gated_packed_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x, int64_t activation, int64_t gate_first, void *stream) {
  (void)dx;
  (void)grad;
  (void)x;
  (void)activation;
  (void)gate_first;
  (void)stream;
  return missing("hfp_gated_packed_backward" HFP_WHY);
}

int32_t hfp_cross_entropy(DLTensor *loss, DLTensor *lse, const DLTensor *logits, const DLTensor *target, int64_t ignore_index, double label_smoothing, double softcap, void *stream) {
  (void)loss;
  (void)lse;
  (void)logits;
  (void)target;
  (void)ignore_index;
  (void)label_smoothing;
  (void)softcap;
  (void)stream;
  return missing("hfp_cross_entropy" HFP_WHY);
}

int32_t hfp_cross_entropy_backward(DLTensor *dlogits, const DLTensor *grad, const DLTensor *logits, const DLTensor *target, const DLTensor *lse, int64_t ignore_index, double label_smoothing, double softcap, void *stream) {
  (void)dlogits;
  (void)grad;
  (void)logits;
  (void)target;
  (void)lse;
  (void)ignore_index;
  (void)label_smoothing;
  (void)softcap;
  (void)stream;
  return missing("hfp_cross_entropy_backward" HFP_WHY);
}

int32_t hfp_cross_entropy_with_gradient(DLTensor *total, DLTensor *loss, DLTensor *lse, DLTensor *dlogits, const DLTensor *logits, const DLTensor *target, const DLTensor *divisor_tensor, double divisor, int64_t ignore_index, double label_smoothing, double softcap, void *stream) {
  (void)total;
  (void)loss;
  (void)lse;
  (void)dlogits;
  (void)logits;
  (void)target;
  (void)divisor_tensor;
  (void)divisor;
  (void)ignore_index;
  (void)label_smoothing;
  (void)softcap;
  (void)stream;
  return missing("hfp_cross_entropy_with_gradient" HFP_WHY);
}

int32_t hfp_adamw_step(const HfpTensorList *params, const HfpTensorList *grads, const HfpTensorList *exp_avgs, const HfpTensorList *exp_avg_sqs, const HfpTensorList *max_exp_avg_sqs, const HfpTensorList *masters, const HfpTensorList *steps, const DLTensor *lr_tensor, const DLTensor *clip_coef, const DLTensor *grad_scale, const DLTensor *found_inf, double lr, double beta1, double beta2, double eps, double weight_decay, int64_t maximize, void *stream) {
  (void)params;
  (void)grads;
  (void)exp_avgs;
  (void)exp_avg_sqs;
  (void)max_exp_avg_sqs;
  (void)masters;
  (void)steps;
  (void)lr_tensor;
  (void)clip_coef;
  (void)grad_scale;
  (void)found_inf;
  (void)lr;
  (void)beta1;
  (void)beta2;
  (void)eps;
  (void)weight_decay;
  (void)maximize;
  (void)stream;
  return missing("hfp_adamw_step" HFP_WHY);
}

int64_t hfp_norm_partials(const HfpTensorList *tensors) {
  (void)tensors;
  return missing("hfp_norm_partials" HFP_WHY);
}

int32_t hfp_grad_norm(DLTensor *norm, DLTensor *partials, const HfpTensorList *tensors, int64_t norm_type, void *stream) {
  (void)norm;
  (void)partials;
  (void)tensors;
  (void)norm_type;
  (void)stream;
  return missing("hfp_grad_norm" HFP_WHY);
}

int32_t hfp_clip_grads(const HfpTensorList *grads, const DLTensor *total_norm, double max_norm, void *stream) {
  (void)grads;
  (void)total_norm;
  (void)max_norm;
  (void)stream;
  return missing("hfp_clip_grads" HFP_WHY);
}

int32_t hfp_scale_grads(const HfpTensorList *grads, const DLTensor *factor, void *stream) {
  (void)grads;
  (void)factor;
  (void)stream;
  return missing("hfp_scale_grads" HFP_WHY);
}

int64_t hfp_row_workspace(int64_t rows, int64_t cols) {
  (void)rows;
  (void)cols;
  return missing("hfp_row_workspace" HFP_WHY);
}

int32_t hfp_softmax(DLTensor *out, DLTensor *workspace, const DLTensor *x, const DLTensor *mask, double scale, void *stream) {
  (void)out;
  (void)workspace;
  (void)x;
  (void)mask;
  (void)scale;
  (void)stream;
  return missing("hfp_softmax" HFP_WHY);
}

int32_t hfp_softmax_backward(DLTensor *dx, DLTensor *workspace, const DLTensor *grad, const DLTensor *y, double scale, void *stream) {
  (void)dx;
  (void)workspace;
  (void)grad;
  (void)y;
  (void)scale;
  (void)stream;
  return missing("hfp_softmax_backward" HFP_WHY);
}

int32_t hfp_argmax(DLTensor *out, DLTensor *workspace, const DLTensor *x, void *stream) {
  (void)out;
  (void)workspace;
  (void)x;
  (void)stream;
  return missing("hfp_argmax" HFP_WHY);
}

int32_t hfp_topk(DLTensor *values, DLTensor *indices, const DLTensor *x, int64_t k, void *stream) {
  (void)values;
  (void)indices;
  (void)x;
  (void)k;
  (void)stream;
  return missing("hfp_topk" HFP_WHY);
}

int32_t hfp_sample(DLTensor *out, const DLTensor *logits, const DLTensor *seeds, const DLTensor *positions, const DLTensor *temperatures, const DLTensor *top_ks, const DLTensor *top_ps, const DLTensor *min_ps, double temperature, int64_t top_k, double top_p, double min_p, void *stream) {
  (void)out;
  (void)logits;
  (void)seeds;
  (void)positions;
  (void)temperatures;
  (void)top_ks;
  (void)top_ps;
  (void)min_ps;
  (void)temperature;
  (void)top_k;
  (void)top_p;
  (void)min_p;
  (void)stream;
  return missing("hfp_sample" HFP_WHY);
}

int32_t hfp_add_gelu(DLTensor *out, const DLTensor *x, const DLTensor *bias, int64_t approximate, void *stream) {
  (void)out;
  (void)x;
  (void)bias;
  (void)approximate;
  (void)stream;
  return missing("hfp_add_gelu" HFP_WHY);
}

int32_t hfp_add_silu(DLTensor *out, const DLTensor *x, const DLTensor *bias, void *stream) {
  (void)out;
  (void)x;
  (void)bias;
  (void)stream;
  return missing("hfp_add_silu" HFP_WHY);
}

int32_t hfp_mul_add(DLTensor *out, const DLTensor *a, const DLTensor *b, const DLTensor *c, int64_t cast, void *stream) {
  (void)out;
  (void)a;
  (void)b;
  (void)c;
  (void)cast;
  (void)stream;
  return missing("hfp_mul_add" HFP_WHY);
}

int32_t hfp_add_gelu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials, const DLTensor *grad, const DLTensor *x, const DLTensor *bias, int64_t approximate, int64_t needs, void *stream) {
  (void)dx;
  (void)dbias;
  (void)partials;
  (void)grad;
  (void)x;
  (void)bias;
  (void)approximate;
  (void)needs;
  (void)stream;
  return missing("hfp_add_gelu_backward" HFP_WHY);
}

int32_t hfp_add_silu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials, const DLTensor *grad, const DLTensor *x, const DLTensor *bias, int64_t needs, void *stream) {
  (void)dx;
  (void)dbias;
  (void)partials;
  (void)grad;
  (void)x;
  (void)bias;
  (void)needs;
  (void)stream;
  return missing("hfp_add_silu_backward" HFP_WHY);
}

int32_t hfp_mul_add_backward(DLTensor *da, DLTensor *db, DLTensor *dc, DLTensor *partials, const DLTensor *grad, const DLTensor *a, const DLTensor *b, int64_t cast, int64_t needs, void *stream) {
  (void)da;
  (void)db;
  (void)dc;
  (void)partials;
  (void)grad;
  (void)a;
  (void)b;
  (void)cast;
  (void)needs;
  (void)stream;
  return missing("hfp_mul_add_backward" HFP_WHY);
}

int64_t hfp_sum_partial_rows(int64_t rows, int64_t cols, int64_t sums) {
  (void)rows;
  (void)cols;
  (void)sums;
  return missing("hfp_sum_partial_rows" HFP_WHY);
}

int32_t hfp_add(DLTensor *out, const DLTensor *a, const DLTensor *b, double alpha, void *stream) {
  (void)out;
  (void)a;
  (void)b;
  (void)alpha;
  (void)stream;
  return missing("hfp_add" HFP_WHY);
}

int32_t hfp_mul(DLTensor *out, const DLTensor *a, const DLTensor *b, void *stream) {
  (void)out;
  (void)a;
  (void)b;
  (void)stream;
  return missing("hfp_mul" HFP_WHY);
}

int32_t hfp_scale(DLTensor *out, const DLTensor *x, double factor, void *stream) {
  (void)out;
  (void)x;
  (void)factor;
  (void)stream;
  return missing("hfp_scale" HFP_WHY);
}

int64_t hfp_gemm_backend(int64_t device_type) {
  (void)device_type;
  return missing("hfp_gemm_backend" HFP_WHY);
}

int64_t hfp_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k, int64_t device_type) {
  (void)batch;
  (void)m;
  (void)n;
  (void)k;
  (void)device_type;
  return missing("hfp_gemm_workspace" HFP_WHY);
}

int32_t hfp_gemm(DLTensor *out, DLTensor *workspace, const DLTensor *a, const DLTensor *b, const DLTensor *c, double alpha, double beta, int64_t transpose_a, int64_t transpose_b, void *stream) {
  (void)out;
  (void)workspace;
  (void)a;
  (void)b;
  (void)c;
  (void)alpha;
  (void)beta;
  (void)transpose_a;
  (void)transpose_b;
  (void)stream;
  return missing("hfp_gemm" HFP_WHY);
}

int32_t hfp_gemm_batched(DLTensor *out, DLTensor *workspace, const DLTensor *a, const DLTensor *b, const DLTensor *c, double alpha, double beta, int64_t transpose_a, int64_t transpose_b, void *stream) {
  (void)out;
  (void)workspace;
  (void)a;
  (void)b;
  (void)c;
  (void)alpha;
  (void)beta;
  (void)transpose_a;
  (void)transpose_b;
  (void)stream;
  return missing("hfp_gemm_batched" HFP_WHY);
}

int32_t hfp_attention(DLTensor *out, DLTensor *lse, const DLTensor *q, const DLTensor *k, const DLTensor *v, const DLTensor *mask, const DLTensor *q_starts, const DLTensor *k_starts, const DLTensor *k_lengths, double scale, int64_t causal, int64_t most_queries, int64_t window, double softcap, void *stream) {
  (void)out;
  (void)lse;
  (void)q;
  (void)k;
  (void)v;
  (void)mask;
  (void)q_starts;
  (void)k_starts;
  (void)k_lengths;
  (void)scale;
  (void)causal;
  (void)most_queries;
  (void)window;
  (void)softcap;
  (void)stream;
  return missing("hfp_attention" HFP_WHY);
}

int32_t hfp_cross_entropy_log_probs(DLTensor *loss, DLTensor *lse, DLTensor *log_probs, const DLTensor *logits, const DLTensor *target, int64_t ignore_index, double label_smoothing, double softcap, void *stream) {
  (void)loss;
  (void)lse;
  (void)log_probs;
  (void)logits;
  (void)target;
  (void)ignore_index;
  (void)label_smoothing;
  (void)softcap;
  (void)stream;
  return missing("hfp_cross_entropy_log_probs" HFP_WHY);
}

int64_t hfp_balance_parts(int64_t tokens) {
  (void)tokens;
  return missing("hfp_balance_parts" HFP_WHY);
}

int32_t hfp_load_balancing_loss(DLTensor *loss, DLTensor *stats, DLTensor *partials, const DLTensor *logits, const DLTensor *mask, int64_t k, void *stream) {
  (void)loss;
  (void)stats;
  (void)partials;
  (void)logits;
  (void)mask;
  (void)k;
  (void)stream;
  return missing("hfp_load_balancing_loss" HFP_WHY);
}

int32_t hfp_load_balancing_loss_backward(DLTensor *dlogits, const DLTensor *grad, const DLTensor *logits, const DLTensor *stats, const DLTensor *mask, void *stream) {
  (void)dlogits;
  (void)grad;
  (void)logits;
  (void)stats;
  (void)mask;
  (void)stream;
  return missing("hfp_load_balancing_loss_backward" HFP_WHY);
}

int64_t hfp_decode_workspace(const HfpTensorList *model, int64_t rows, int64_t tokens, int64_t threads) {
  (void)model;
  (void)rows;
  (void)tokens;
  (void)threads;
  return missing("hfp_decode_workspace" HFP_WHY);
}

int32_t hfp_decode_step(DLTensor *logits, DLTensor *hidden, DLTensor *workspace, const HfpTensorList *model, const DLTensor *cache, const DLTensor *ids, const DLTensor *embeds, const DLTensor *positions, const DLTensor *mask, int64_t most_keys, int64_t threads, void *stream) {
  (void)logits;
  (void)hidden;
  (void)workspace;
  (void)model;
  (void)cache;
  (void)ids;
  (void)embeds;
  (void)positions;
  (void)mask;
  (void)most_keys;
  (void)threads;
  (void)stream;
  return missing("hfp_decode_step" HFP_WHY);
}

int32_t hfp_decode_choose(DLTensor *ids, DLTensor *counters, DLTensor *text, DLTensor *workspace, const DLTensor *logits, const DLTensor *ends, int64_t pad, void *stream) {
  (void)ids;
  (void)counters;
  (void)text;
  (void)workspace;
  (void)logits;
  (void)ends;
  (void)pad;
  (void)stream;
  return missing("hfp_decode_choose" HFP_WHY);
}

#ifdef __cplusplus
}
#endif
