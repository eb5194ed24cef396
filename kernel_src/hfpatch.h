/*
 * hfpatch.h: the C interface of the hfpatch kernels. C11, no torch, no CUDA include.
 *
 * This file is the single source of truth of the interface: the torch operators, the ctypes
 * binding, the stub and the generated docs all come from HFP_OP_TABLE below.
 *
 * Contract of every function declared here
 *   - Tensors are DLPack DLTensors, so any framework's tensor can be passed. `shape` and `strides`
 *     count elements; `strides == NULL` means contiguous. All tensors of a call live on one device:
 *     kDLCPU or kDLCUDA.
 *   - `stream` is a cudaStream_t (NULL: the default stream); ignored on the CPU.
 *   - Functions never allocate (but those over lists 64 bytes of the host's memory per tensor, until
 *     they return), synchronize, throw, exit, or use a stream of their own. The caller owns every
 *     buffer. Zero-size tensors return HFP_OK at once. Indices are 64 bit.
 *   - Everything is validated before anything is launched. On failure nothing was written, and
 *     hfp_last_error() (thread local) names the argument, what was expected and what came.
 *   - Every function exists in every build; one built without CUDA answers HFP_NOT_AVAILABLE for a
 *     CUDA tensor, so that a caller can fall back.
 *   - Inputs may be strided as long as the last dimension has stride 1 and the leading dimensions
 *     collapse to at most HFP_MAX_OUTER_DIMS; any alignment to the element size is accepted
 *     (16-byte aligned rows are the fast path). `out` is contiguous.
 *   - In place: a result may be exactly the view (data, dtype, shape and strides) of an input that
 *     has its shape, so also its dtype: x, residual, gate, up, a, grad. For rope_qk and
 *     qk_norm_rope q_out may be q and k_out k, not the other way round; rope's may be strided. A
 *     result may not overlap anything else: parameters, what is broadcast (scale, shift, gate, b,
 *     c), tables, `partials`, another result, or a part of an input. Such overlaps are refused
 *     where they are certain; of two views with gaps, only the first and last rows are compared.
 *     The tensors of lists have no gaps: every overlap with one that is written is refused.
 */
#ifndef HFPATCH_H_
#define HFPATCH_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bumped when a function changes; adding one is compatible. */
#define HFP_ABI_VERSION 4

#if defined(_WIN32)
#define HFP_EXPORT __declspec(dllexport)
#else
#define HFP_EXPORT __attribute__((visibility("default")))
#endif

/* Statuses. */
enum {
  HFP_OK = 0,
  HFP_NOT_AVAILABLE = -1,    /* this build has no kernel for that device */
  HFP_INVALID_ARGUMENT = -2, /* dtype, device, shape, stride, alignment or value */
  HFP_LAUNCH_FAILED = -3,    /* the CUDA runtime refused the launch */
  HFP_OUT_OF_MEMORY = -4     /* the host has none left; see lists below */
};

/* Leading dimensions with independent strides that a kernel can walk, after collapsing. */
#define HFP_MAX_OUTER_DIMS 3

/* Activations. GELU and SiLU: x * Phi(x) and x * sigmoid(x); Hendrycks & Gimpel, arXiv:1606.08415. */
enum {
  HFP_ACT_GELU_ERF = 0,     /* 0.5 x (1 + erf(x / sqrt 2)) */
  HFP_ACT_GELU_TANH = 1,    /* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
  HFP_ACT_GELU_SIGMOID = 2, /* x sigmoid(1.702 x) */
  HFP_ACT_SILU = 3,         /* x sigmoid(x) */
  HFP_ACT_RELU = 4,         /* max(x, 0), NaN propagates */
  HFP_ACT_COUNT = 5
};

/*
 * Where rms_norm rounds; xhat = x * rsqrt(mean(x^2) + eps) in fp32. With a weight:
 *   NONE:   y = (xhat * (weight_offset + w) + b), one rounding, to the dtype of x    (Gemma, Olmo2)
 *   INPUT:  xhat is rounded to the dtype of x, then multiplied by w in the promoted dtype, then b
 *           added; the result has the promoted dtype of x and w                      (Llama)
 *   WEIGHT: the same, but xhat is rounded to the dtype of w when w is a half type and stays fp32
 *           otherwise; the result has the dtype of w                                 (T5, diffusers)
 * Without a weight all three mean: round xhat (+ b) once, to the dtype of x.
 * INPUT and WEIGHT take weight_offset == 0 only.
 */
enum { HFP_CAST_NONE = 0, HFP_CAST_INPUT = 1, HFP_CAST_WEIGHT = 2, HFP_CAST_COUNT = 3 };

/* DLPack, https://dmlc.github.io/dlpack/latest/c_api.html; skipped when its own header is there. */
#ifndef DLPACK_DLPACK_H_
enum { kDLCPU = 1, kDLCUDA = 2 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };
typedef struct {
  int32_t device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;
#endif

/* Message of this thread's last failed call; "" if there was none. Valid until the next call. */
HFP_EXPORT const char *hfp_last_error(void);

/* HFP_ABI_VERSION of the built library. */
HFP_EXPORT int32_t hfp_abi_version(void);

/* JSON: abi, devices ("cpu", "cuda"), CUDA architectures, compiler, SIMD level in use. Static storage. */
HFP_EXPORT const char *hfp_build_info(void);

/* out[..., i] = rms_norm(x)[..., i]; see HFP_CAST_*. weight, bias: [D] or NULL, one dtype. */
HFP_EXPORT int32_t hfp_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight,
                                const DLTensor *bias, double eps, double weight_offset, int64_t cast,
                                void *stream);

/*
 * (x - mean) * rsqrt(var + eps) * weight + bias over the last dimension, all in fp32, one rounding to
 * the dtype of x. weight, bias: [D] or NULL, each of any supported dtype. Ba et al., arXiv:1607.06450.
 */
HFP_EXPORT int32_t hfp_layer_norm(DLTensor *out, const DLTensor *x, const DLTensor *weight,
                                  const DLTensor *bias, double eps, void *stream);

/* approximate: HFP_ACT_GELU_ERF, _TANH or _SIGMOID. */
HFP_EXPORT int32_t hfp_gelu(DLTensor *out, const DLTensor *x, int64_t approximate, void *stream);

HFP_EXPORT int32_t hfp_silu(DLTensor *out, const DLTensor *x, void *stream);

/* act(gate) * up, act(gate) rounded to the dtype first as in eager PyTorch. Shazeer, arXiv:2002.05202. */
HFP_EXPORT int32_t hfp_gated(DLTensor *out, const DLTensor *gate, const DLTensor *up,
                             int64_t activation, void *stream);

/* The same from one tensor [..., 2 D]: gate is the first half if gate_first, else the second. */
HFP_EXPORT int32_t hfp_gated_packed(DLTensor *out, const DLTensor *x, int64_t activation,
                                    int64_t gate_first, void *stream);

/*
 * act(gate) * (up + up_offset) of clamped tensors (DeepSeek-V4, GPT-OSS), with eager PyTorch's
 * roundings: of act, of the sum and of the product.
 *   gate: clamped to [gate_min, gate_max] before the activation, or with clamp_activated 1 act(gate)
 *         is, after its rounding (Step-3.7)
 *   up:   clamped to [up_min, up_max] before the sum
 * A bound is rounded to the dtype; -inf and inf are none; NaN stays NaN; where min > max all become
 * max. alpha: with HFP_ACT_SILU x sigmoid(alpha x); 1 with the others.
 */
HFP_EXPORT int32_t hfp_gated_clamped(DLTensor *out, const DLTensor *gate, const DLTensor *up,
                                     int64_t activation, double alpha, double gate_min,
                                     double gate_max, double up_min, double up_max,
                                     double up_offset, int64_t clamp_activated, void *stream);

/*
 * Adaptive layer norm (AdaLN; Peebles & Xie, arXiv:2212.09748) and residual sums.
 *
 * A modulation tensor (scale, shift, gate) applies to x [..., D] if it has
 *   - shape [D];
 *   - as many dimensions as x, each of the size of x's or 1, the last one D: [B, 1, D] is one vector
 *     per sample, [B, S, D] one per token;
 *   - shape [B, D] where x has 3 dimensions or more: one vector per sample.
 * Views are taken as they are (chunks of [B, 6, D] or [B, 6 D]); the last stride is 1.
 *
 * `cast` says where sums and products round:
 *   HFP_CAST_INPUT: after each step, as eager PyTorch does: the norm to the dtype of x; 1 + scale to
 *     its dtype; products and sums to the promoted dtype, which is also the result's (Flux, LTX).
 *   HFP_CAST_NONE: once, to the dtype of x; all between is fp32 (Wan).
 * norm_type: HFP_NORM_*. weight, bias: [D] or NULL, one dtype; they belong to the norm.
 */
enum { HFP_NORM_RMS = 0, HFP_NORM_LAYER = 1, HFP_NORM_COUNT = 2 };

/* norm(x) * (1 + scale) + shift. scale, shift: one dtype. */
HFP_EXPORT int32_t hfp_norm_modulate(DLTensor *out, const DLTensor *x, const DLTensor *scale,
                                     const DLTensor *shift, const DLTensor *weight,
                                     const DLTensor *bias, double eps, int64_t norm_type,
                                     int64_t cast, void *stream);

/* residual + gate * x. x has the shape and dtype of residual. */
HFP_EXPORT int32_t hfp_gate_residual(DLTensor *out, const DLTensor *residual, const DLTensor *gate,
                                     const DLTensor *x, int64_t cast, void *stream);

/*
 * Both: sum = residual + gate * x, rounded to the dtype of residual, and
 * out = norm(sum) * (1 + scale) + shift. gate, scale and shift have one dtype: that of residual,
 * or any under HFP_CAST_NONE.
 */
HFP_EXPORT int32_t hfp_gate_residual_norm_modulate(
    DLTensor *sum, DLTensor *out, const DLTensor *residual, const DLTensor *gate, const DLTensor *x,
    const DLTensor *scale, const DLTensor *shift, const DLTensor *weight, const DLTensor *bias,
    double eps, int64_t norm_type, int64_t cast, void *stream);

/*
 * sum = x + residual, rounded to their dtype; out = rms_norm(sum) or layer_norm(sum), the arguments
 * as there, except that weight and bias have one dtype.
 */
HFP_EXPORT int32_t hfp_add_rms_norm(DLTensor *out, DLTensor *sum, const DLTensor *x,
                                    const DLTensor *residual, const DLTensor *weight,
                                    const DLTensor *bias, double eps, double weight_offset,
                                    int64_t cast, void *stream);
HFP_EXPORT int32_t hfp_add_layer_norm(DLTensor *out, DLTensor *sum, const DLTensor *x,
                                      const DLTensor *residual, const DLTensor *weight,
                                      const DLTensor *bias, double eps, void *stream);

/*
 * Rotary position embedding (Su et al., arXiv:2104.09864) of the first R columns of every head; the
 * others are copied. Column pairs (a, b) become (a cos - b sin, b cos + a sin):
 *   interleaved 0   the pair is columns i and i + R / 2 (transformers' rotate_half)
 *   interleaved 1   the pair is columns 2 i and 2 i + 1 (GPT-J, Cohere, diffusers)
 * x: 4 dimensions [B, S, H, D] or [B, H, S, D], 3 [B, S, D] or [S, H, D], 2 [S, D]; `seq_dim` is the
 * dimension of S. rotary_dim: R, even; 0: D. cos, sin: one shape, one dtype, fp32 or the dtype of x,
 * of the shape of x with dimensions of size 1 where they repeat, or [1 or B, S, *], or [S, *]; the
 * last dimension is R / 2, or R with each value twice (as the pairs lie), of which either is read.
 * A complex table e^(i angle) is given as its real view [..., R / 2, 2] in `cos`, with sin == NULL;
 * then interleaved is 1, since x is a view of complex numbers too (Llama's own code, Z-Image).
 * round_products 0: fp32 throughout, one rounding (diffusers). 1: each product is first rounded to
 * the promoted dtype of x and the tables, as x * cos + rotated * sin does in eager PyTorch
 * (transformers). Unlike elsewhere `out` may be strided like an input, if no element repeats.
 */
HFP_EXPORT int32_t hfp_rope(DLTensor *out, const DLTensor *x, const DLTensor *cos,
                            const DLTensor *sin, int64_t seq_dim, int64_t interleaved,
                            int64_t rotary_dim, int64_t round_products, void *stream);

/* The same of two tensors at once, which may differ in H only. */
HFP_EXPORT int32_t hfp_rope_qk(DLTensor *q_out, DLTensor *k_out, const DLTensor *q,
                               const DLTensor *k, const DLTensor *cos, const DLTensor *sin,
                               int64_t seq_dim, int64_t interleaved, int64_t rotary_dim,
                               int64_t round_products, void *stream);

/*
 * hfp_rms_norm, then hfp_rope, with the normalized value rounded to the dtype of q between them.
 * norm_across_heads 0: over D, weights [D] (Qwen3, Flux); 1: over H D, weights [H D] (LTX, Wan).
 * Weights: both or neither; HFP_CAST_INPUT and _WEIGHT need the dtype of q, and then are the same.
 * cos, sin: as in hfp_rope, or both NULL for the norm alone.
 */
HFP_EXPORT int32_t hfp_qk_norm_rope(DLTensor *q_out, DLTensor *k_out, const DLTensor *q,
                                    const DLTensor *k, const DLTensor *q_weight,
                                    const DLTensor *k_weight, const DLTensor *cos,
                                    const DLTensor *sin, double eps, double weight_offset,
                                    int64_t cast, int64_t norm_across_heads, int64_t seq_dim,
                                    int64_t interleaved, int64_t rotary_dim,
                                    int64_t round_products, void *stream);

/*
 * The gated norm of Mamba-2 (Dao & Gu, arXiv:2405.21060), over each group of group_size columns (0:
 * all D; else it divides D); xhat = v * rsqrt(mean(v^2) + eps), all in fp32. act: silu or sigmoid,
 * by gate_activation. `cast` is HFP_CAST_INPUT:
 *   norm_before_gate == 0: v = x * act(gate);  out = xhat rounded, * weight rounded       (Bamba)
 *   norm_before_gate == 1: v = x;  out = xhat rounded, * weight rounded, * act(gate) rounded
 *                                                                                   (Qwen3-Next)
 * or HFP_CAST_NONE: the same, rounded once, at the end             (Falcon-H1; Kimi Linear: sigmoid)
 * gate: shape and dtype of x, or NULL: the norm of groups alone, out = xhat rounded, * weight rounded.
 * weight: [D] or NULL, in the dtype of x, or any under HFP_CAST_NONE.
 */
enum { HFP_GATE_SILU = 0, HFP_GATE_SIGMOID = 1, HFP_GATE_COUNT = 2 };
HFP_EXPORT int32_t hfp_gated_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *gate,
                                      const DLTensor *weight, double eps, int64_t group_size,
                                      int64_t norm_before_gate, int64_t cast,
                                      int64_t gate_activation, void *stream);

/*
 * What stands between two convolutions of a residual block, its channels last:
 *   rms_norm_silu: y = rms_norm(x + addend) * weight * (1 + scale) + shift, out = y sigmoid(y)
 *   add_bias:      out = x + bias + residual
 * All in fp32 and rounded once, to the dtype of x. addend and bias: [D], in the dtype of x: the bias
 * of the convolution that x comes from. addend, weight ([D], any dtype) and residual (the shape and
 * dtype of x) may be NULL; scale and shift are modulation tensors of one dtype, both or neither.
 */
HFP_EXPORT int32_t hfp_rms_norm_silu(DLTensor *out, const DLTensor *x, const DLTensor *addend,
                                     const DLTensor *weight, const DLTensor *scale,
                                     const DLTensor *shift, double eps, void *stream);
HFP_EXPORT int32_t hfp_add_bias(DLTensor *out, const DLTensor *x, const DLTensor *bias,
                                const DLTensor *residual, void *stream);

/*
 * Group norm (Wu & He, arXiv:1803.08494): each group of C / groups neighbouring channels of a sample,
 * at all positions, is normalized by its mean and biased variance, all in fp32, and rounded to the
 * dtype of x. silu 1: then x sigmoid(x), rounded again, as two modules would.
 * x: contiguous [N, C, S], or with channels_last 1 [N, S, C]. weight, bias: [C] or NULL, one dtype.
 * stats: fp32 [N, groups, P + 1, 2], P = hfp_group_parts(C, S, groups, channels_last). Its last slot
 * becomes mean and rsqrt(var + eps) of each group, the others are scratch.
 */
HFP_EXPORT int64_t hfp_group_parts(int64_t channels, int64_t positions, int64_t groups,
                                   int64_t channels_last);

HFP_EXPORT int32_t hfp_group_norm(DLTensor *out, DLTensor *stats, const DLTensor *x,
                                  const DLTensor *weight, const DLTensor *bias, int64_t groups,
                                  double eps, int64_t silu, int64_t channels_last, void *stream);

/*
 * Gradients. `grad` is the gradient of the forward's result, of its shape and dtype; the results have
 * the shapes and dtypes of what they are gradients of, fp32 inside and one rounding. dx may be the
 * buffer of `grad` or of x (where the dtype is the same). The statistics of a row are computed from x
 * again: x is read anyway.
 *
 * Norms: `needs` says which gradients are wanted besides dx: HFP_NEED_WEIGHT, HFP_NEED_BIAS, their
 * sum, or 0. Those of parameters are sums over all rows: row p of `partials`, fp32 [P, K D], holds
 * the sums over a part of the rows (the weight's D, then the bias's D; K is how many are wanted),
 * P = hfp_partial_rows(rows, D), and then the P rows are added up (or fewer, the first ones). It is
 * scratch: where one launch makes the sums it is left unwritten, so read nothing from it. No
 * atomics: same input, same bits.
 * What is not wanted may be NULL or anything. Of `bias`, only the presence and the dtype count.
 * With no rows at all the sums are 0.
 */
enum { HFP_NEED_WEIGHT = 1, HFP_NEED_BIAS = 2, HFP_NEED_COUNT = 4 };

/* Rows of `partials` for an x of [rows, cols]; on every device the same. */
HFP_EXPORT int64_t hfp_partial_rows(int64_t rows, int64_t cols);

/* The weight's factor is xhat as the forward rounded it; see HFP_CAST_*. */
HFP_EXPORT int32_t hfp_rms_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias,
                                         DLTensor *partials, const DLTensor *grad,
                                         const DLTensor *x, const DLTensor *weight,
                                         const DLTensor *bias, double eps, double weight_offset,
                                         int64_t cast, int64_t needs, void *stream);

HFP_EXPORT int32_t hfp_layer_norm_backward(DLTensor *dx, DLTensor *dweight, DLTensor *dbias,
                                           DLTensor *partials, const DLTensor *grad,
                                           const DLTensor *x, const DLTensor *weight,
                                           const DLTensor *bias, double eps, int64_t needs,
                                           void *stream);

/* grad * act'(x). approximate: HFP_ACT_GELU_ERF, _TANH or _SIGMOID. */
HFP_EXPORT int32_t hfp_gelu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x,
                                     int64_t approximate, void *stream);

HFP_EXPORT int32_t hfp_silu_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x,
                                     void *stream);

/* dgate = grad * up * act'(gate); dup = grad * act(gate), rounded as in the forward. */
HFP_EXPORT int32_t hfp_gated_backward(DLTensor *dgate, DLTensor *dup, const DLTensor *grad,
                                      const DLTensor *gate, const DLTensor *up, int64_t activation,
                                      void *stream);

/* The same with x and dx [..., 2 D], grad [..., D]. */
HFP_EXPORT int32_t hfp_gated_packed_backward(DLTensor *dx, const DLTensor *grad, const DLTensor *x,
                                             int64_t activation, int64_t gate_first, void *stream);

/*
 * Cross entropy of each row. logits [..., V], target [...] int64, loss and lse [...] fp32:
 *   z = logits, or softcap * tanh(logits / softcap) if softcap > 0; lse = log(sum(exp(z)))
 *   loss = lse - (1 - label_smoothing) z[target] - label_smoothing mean(z)
 * as torch.nn.functional.cross_entropy without class weights (Szegedy et al., arXiv:1512.00567, for
 * the smoothing). Where target is ignore_index, loss and lse are 0 and the row is not read; any other
 * target outside of [0, V) gives NaN, since its value is not known before the launch.
 */
HFP_EXPORT int32_t hfp_cross_entropy(DLTensor *loss, DLTensor *lse, const DLTensor *logits,
                                     const DLTensor *target, int64_t ignore_index,
                                     double label_smoothing, double softcap, void *stream);

/*
 * dlogits of the above, in the dtype of the logits; grad and lse: [...] fp32, contiguous. dlogits may
 * be the buffer of logits.
 */
HFP_EXPORT int32_t hfp_cross_entropy_backward(DLTensor *dlogits, const DLTensor *grad,
                                              const DLTensor *logits, const DLTensor *target,
                                              const DLTensor *lse, int64_t ignore_index,
                                              double label_smoothing, double softcap, void *stream);

/*
 * Both at once, for the sum of all losses divided by one number, while the logits are read once:
 *   total = sum(loss) / n;  dlogits = its gradient, 1 / n times that of each row's loss
 * n: one fp32 element, divisor_tensor, on the device of the logits or on the CPU; else divisor; else, if
 * that is 0, the number of rows whose target is not ignore_index (0 of them: total is NaN, and dlogits 0).
 * total: one fp32 element; loss, lse: as above. dlogits may be the buffer of logits.
 */
HFP_EXPORT int32_t hfp_cross_entropy_with_gradient(DLTensor *total, DLTensor *loss, DLTensor *lse,
                                                   DLTensor *dlogits, const DLTensor *logits,
                                                   const DLTensor *target,
                                                   const DLTensor *divisor_tensor, double divisor,
                                                   int64_t ignore_index, double label_smoothing,
                                                   double softcap, void *stream);

/*
 * Training: functions over lists of tensors (HFP_LIST_OP_TABLE). The tensors of a list may have any
 * shape, also none (0 dimensions) or zero size, and any strides that leave neither gaps nor overlaps;
 * what belongs to one parameter has one shape and one set of strides. No tensor that is written may
 * share memory with another one of the call, of whatever list; those that are only read may (one
 * step count for all parameters). `Tensor[]` in a schema is:
 */
typedef struct {
  DLTensor *const *tensors; /* may be NULL if count is 0 */
  int64_t count;
} HfpTensorList;

/*
 * One step of AdamW (Loshchilov & Hutter, arXiv:1711.05101), in place, as torch.optim.AdamW has it:
 *   g = grad * clip_coef / grad_scale, negated if `maximize`
 *   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  w = max(w, v) with max_exp_avg_sqs
 *   p -= lr weight_decay p + lr / (1 - beta1^t) m / (sqrt(w or v) / sqrt(1 - beta2^t) + eps)
 * all in fp32, each result rounded once. Lists of one length: params; grads, in the params' dtype or,
 * with masters, fp32; exp_avgs (m) and exp_avg_sqs (v), in the params' dtype or fp32; steps (t), one
 * fp32 element each, already counting this step. Empty or of that length: max_exp_avg_sqs (AMSGrad,
 * Reddi et al., arXiv:1904.09237), of the moments' dtype; masters, fp32, with half params: they are
 * p, and params receives them rounded; the moments are then fp32. Each list has one dtype.
 * One fp32 element or NULL: lr_tensor, instead of lr; clip_coef and grad_scale (NULL: 1); found_inf:
 * if not 0, nothing is changed. They and the steps lie on the device of the params, where the kernel
 * reads them (so that a captured graph sees new values), or on the CPU, where this call reads them.
 */
HFP_EXPORT int32_t hfp_adamw_step(const HfpTensorList *params, const HfpTensorList *grads,
                                  const HfpTensorList *exp_avgs, const HfpTensorList *exp_avg_sqs,
                                  const HfpTensorList *max_exp_avg_sqs,
                                  const HfpTensorList *masters, const HfpTensorList *steps,
                                  const DLTensor *lr_tensor, const DLTensor *clip_coef,
                                  const DLTensor *grad_scale, const DLTensor *found_inf, double lr,
                                  double beta1, double beta2, double eps, double weight_decay,
                                  int64_t maximize, void *stream);

/*
 * norm = the norm of all elements of `tensors`, whose dtypes may differ: HFP_GRAD_NORM_L2 or the
 * largest magnitude, NaN if there is a NaN. norm: one fp32 element. partials: fp32
 * [hfp_norm_partials(tensors)], one per HFP_NORM_CHUNK elements of a tensor, each a sum in fp32; their
 * sum is in fp64, in order, so that the same input gives the same bits.
 */
enum { HFP_GRAD_NORM_L2 = 0, HFP_GRAD_NORM_INF = 1, HFP_GRAD_NORM_COUNT = 2 };
#define HFP_NORM_CHUNK 16384

HFP_EXPORT int64_t hfp_norm_partials(const HfpTensorList *tensors);
HFP_EXPORT int32_t hfp_grad_norm(DLTensor *norm, DLTensor *partials, const HfpTensorList *tensors,
                                 int64_t norm_type, void *stream);

/*
 * grads *= min(1, max_norm / (total_norm + 1e-6)), in place, as torch.nn.utils.clip_grad_norm_ does;
 * NaN if total_norm is. total_norm: one fp32 element on the device of the grads.
 */
HFP_EXPORT int32_t hfp_clip_grads(const HfpTensorList *grads, const DLTensor *total_norm,
                                  double max_norm, void *stream);

/*
 * grads *= factor, in place; one fp32 element on the device of the grads. Nothing is read or written
 * where it is 1.
 */
HFP_EXPORT int32_t hfp_scale_grads(const HfpTensorList *grads, const DLTensor *factor, void *stream);

/*
 * Operations on rows: the last dimension, V columns, of a tensor with one or more rows.
 *
 * `workspace`: int64, contiguous, [hfp_row_workspace(rows, V)]; holds what the parts of a row that is
 * shared among CTAs hand over. It needs no initial value and is not read afterwards. Every result is
 * a function of its own row: not of the other rows, nor of how a row was shared out.
 */
HFP_EXPORT int64_t hfp_row_workspace(int64_t rows, int64_t cols);

/*
 * out = softmax(scale * x + mask) over the last dimension, fp32 inside, rounded once. mask: NULL or a
 * tensor of fp32, fp16 or bf16 that is broadcast as a modulation tensor is (see above). A row whose
 * greatest value is not finite becomes NaN.
 */
HFP_EXPORT int32_t hfp_softmax(DLTensor *out, DLTensor *workspace, const DLTensor *x,
                               const DLTensor *mask, double scale, void *stream);

/* dx = scale * y * (grad - sum(grad * y)), y the result of hfp_softmax; dx may be grad or y. */
HFP_EXPORT int32_t hfp_softmax_backward(DLTensor *dx, DLTensor *workspace, const DLTensor *grad,
                                        const DLTensor *y, double scale, void *stream);

/*
 * The order of values is that of torch: NaN above +inf, -0 equal to 0. x has two dimensions or more
 * and fewer than 2^31 columns (hfp_sample: up to 2^23); a row must have one.
 *
 * argmax: out [...] int64, the first index of the greatest value.
 * topk: values [..., k] and indices [..., k] int64 of the k greatest values, descending, equal values
 * in the order of their indices. 1 <= k <= min(V, HFP_MAX_TOPK).
 */
#define HFP_MAX_TOPK 2048
HFP_EXPORT int32_t hfp_argmax(DLTensor *out, DLTensor *workspace, const DLTensor *x, void *stream);
HFP_EXPORT int32_t hfp_topk(DLTensor *values, DLTensor *indices, const DLTensor *x, int64_t k,
                            void *stream);

/*
 * One token of each row of logits [..., V], at random: out [...] int64. Of z = logits / temperature,
 * in fp32, these tokens are kept, each step applied to what the one before it has kept:
 *   top_k  z >= the top_k-th greatest z (so all that equal it); 0: all
 *   top_p  sorted by (z, index), descending: the tokens before which the probabilities add up to less
 *          than top_p; the first one always. 1: all. Probabilities are those of the kept tokens.
 *   min_p  exp(z - max z) >= min_p; 0: all
 * and one of them is drawn by its probability: the greatest z - log(E), where E is exponentially
 * distributed, made of word i % 4 of Philox-4x32-10 (Salmon et al., SC 2011) under the key `seed` at
 * the counter (i / 4, 0, position). temperature 0, or a greatest z that is not finite: argmax.
 * seeds, positions: [...] int64. Each parameter is that of its tensor ([...], fp32, or int64 top_ks)
 * if that is not NULL, else the number. A tensor's values are not known before the launch: they are
 * read as temperature 0 if not above 0, no top_k if not above 0, top_p and min_p cut to [0, 1], NaN
 * as 0, top_p's as 1.
 */
HFP_EXPORT int32_t hfp_sample(DLTensor *out, const DLTensor *logits, const DLTensor *seeds,
                              const DLTensor *positions, const DLTensor *temperatures,
                              const DLTensor *top_ks, const DLTensor *top_ps,
                              const DLTensor *min_ps, double temperature, int64_t top_k,
                              double top_p, double min_p, void *stream);

/*
 * act(x + bias), the sum rounded to the dtype first, as eager PyTorch does. bias: [D], the dtype of
 * x. The rest as hfp_gelu and hfp_silu.
 */
HFP_EXPORT int32_t hfp_add_gelu(DLTensor *out, const DLTensor *x, const DLTensor *bias,
                                int64_t approximate, void *stream);
HFP_EXPORT int32_t hfp_add_silu(DLTensor *out, const DLTensor *x, const DLTensor *bias,
                                void *stream);

/*
 * a * b + c. b and c, of one dtype, apply to a [..., D] as a modulation tensor does, each in its own
 * shape. HFP_CAST_INPUT: the product and the sum are rounded to the promoted dtype, which is the
 * result's, as eager PyTorch does; HFP_CAST_NONE: one rounding, to the dtype of a.
 */
HFP_EXPORT int32_t hfp_mul_add(DLTensor *out, const DLTensor *a, const DLTensor *b,
                               const DLTensor *c, int64_t cast, void *stream);

/*
 * Their gradients. `needs`: HFP_NEED_BIAS for dbias; of mul_add HFP_NEED_WEIGHT for db and
 * HFP_NEED_BIAS for dc, which has the shape and dtype of db. They are sums over the rows that share
 * a row of bias or b; `partials` is fp32 [hfp_sum_partial_rows(rows, D, sums), K D], where sums is
 * the number of rows of bias (1) or b; it is scratch, and may be left unwritten. No atomics: same
 * input, same bits. b must be broadcast over adjacent dimensions, as [D], [B, D], [B, 1, D],
 * [1, S, D] or not at all.
 */
HFP_EXPORT int32_t hfp_add_gelu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials,
                                         const DLTensor *grad, const DLTensor *x,
                                         const DLTensor *bias, int64_t approximate, int64_t needs,
                                         void *stream);
HFP_EXPORT int32_t hfp_add_silu_backward(DLTensor *dx, DLTensor *dbias, DLTensor *partials,
                                         const DLTensor *grad, const DLTensor *x,
                                         const DLTensor *bias, int64_t needs, void *stream);
HFP_EXPORT int32_t hfp_mul_add_backward(DLTensor *da, DLTensor *db, DLTensor *dc,
                                        DLTensor *partials, const DLTensor *grad,
                                        const DLTensor *a, const DLTensor *b, int64_t cast,
                                        int64_t needs, void *stream);

/* Rows of `partials` for `sums` sums over the rows of [rows, cols]; 0 where none are needed. */
HFP_EXPORT int64_t hfp_sum_partial_rows(int64_t rows, int64_t cols, int64_t sums);

/*
 * a + alpha * b, a * b and x * factor, in fp32 and rounded once, to the dtype of a (x). b has the dtype
 * of a and applies to it as a modulation tensor does: the shape of a, sizes 1 where it is broadcast,
 * or [D]. The result may also be exactly b, where b has the shape of a.
 */
HFP_EXPORT int32_t hfp_add(DLTensor *out, const DLTensor *a, const DLTensor *b, double alpha,
                           void *stream);
HFP_EXPORT int32_t hfp_mul(DLTensor *out, const DLTensor *a, const DLTensor *b, void *stream);
HFP_EXPORT int32_t hfp_scale(DLTensor *out, const DLTensor *x, double factor, void *stream);

/*
 * Matrix products: out [M, N] = alpha * a b + beta * c, sums in fp32, rounded once, to the dtype, which
 * all have. a: [M, K], or [K, M] with transpose_a 1; b: [K, N], or [N, K] with transpose_b 1 (a linear
 * layer's weight); c: [M, N] or NULL (0); it may be exactly `out`. Rows may be apart, those of out too.
 * hfp_gemm_batched: the same with a dimension before, the batch; that of a, b and c may be 1.
 *
 * workspace: contiguous fp32 [n]; on the CPU n is at least hfp_gemm_workspace(...), on CUDA as much or
 * less, also 0: then fewer algorithms can be used. Scratch.
 * Who computes: on the CPU fp32 goes to OpenBLAS, MKL or BLIS, if the system has one (HFPATCH_BLAS names
 * another or is "none"); else, and in half types, blocks of our own. On CUDA cuBLASLt, without TF32.
 * They are loaded at the first call, which therefore allocates; hfp_gemm_backend says which were found.
 * Where there is no cuBLASLt (HFPATCH_CUBLASLT names it), a CUDA call answers HFP_NOT_AVAILABLE.
 */
enum {
  HFP_GEMM_NONE = 0, /* no kernel for that device */
  HFP_GEMM_OWN = 1,
  HFP_GEMM_OPENBLAS = 2,
  HFP_GEMM_MKL = 3,
  HFP_GEMM_BLIS = 4,
  HFP_GEMM_BLAS = 5, /* what HFPATCH_BLAS names, and is none of these */
  HFP_GEMM_CUBLASLT = 6
};

/* Who computes products of fp32 on kDLCPU or kDLCUDA: HFP_GEMM_*. Loads what they need. */
HFP_EXPORT int64_t hfp_gemm_backend(int64_t device_type);

HFP_EXPORT int64_t hfp_gemm_workspace(int64_t batch, int64_t m, int64_t n, int64_t k,
                                      int64_t device_type);
HFP_EXPORT int32_t hfp_gemm(DLTensor *out, DLTensor *workspace, const DLTensor *a,
                            const DLTensor *b, const DLTensor *c, double alpha, double beta,
                            int64_t transpose_a, int64_t transpose_b, void *stream);
HFP_EXPORT int32_t hfp_gemm_batched(DLTensor *out, DLTensor *workspace, const DLTensor *a,
                                    const DLTensor *b, const DLTensor *c, double alpha, double beta,
                                    int64_t transpose_a, int64_t transpose_b, void *stream);

/*
 * Attention: out = softmax(capped(scale * q k^T) + mask) v for each head, blocks of keys at a time (Dao et al.,
 * arXiv:2205.14135), so that no matrix of scores exists; lse = log of the sum of exp of a query's
 * scores, with scale and mask. q: [B, H, S, D]; k: [B, G, L, D]; v: [B, G, L, E]; out: [B, H, S, E],
 * whose heads and rows may be strided as those of the inputs; lse: fp32 [B, H, S]. G divides H: each head of k and v serves
 * H / G heads of q that follow each other (1: multi-query). D and E: 1 to HFP_MAX_HEAD_DIM.
 * A view of [B, S, H, D] is taken as it is.
 *   mask       NULL; or of 4 dimensions that are those of [B, H, S, L] or 1, or [S, L]: of fp32, fp16
 *              or bf16, which is added, or bool or uint8, where 0 is not seen
 *   causal     1: query i sees the keys up to i + L - S, so that the last query sees all
 *   k_lengths  NULL, or int64 [B]: how many keys a sample has; the others are not read. `causal` counts
 *              from this number
 *   q_starts, k_starts   NULL, or both int64 [N + 1]: N samples of different lengths lie one after the
 *              other in q [1, H, S, D] and k, v [1, G, L, ...]; sample n has the rows from starts[n] to
 *              starts[n + 1] - 1, of q at most most_queries (0: S). Then there is no mask, and
 *              k_lengths is [N]. What no sample has is not written
 *   window     0; or with `causal`: of the keys that a query sees, it sees this many, the last ones
 *   softcap    0; or the c of capped(s) = c tanh(s / c)
 * Lengths and starts are not known before the launch: they are cut to what the tensors hold. A query
 * that sees nothing gets 0, and lse -inf. fp32 inside; on CUDA the weights of half types are rounded to
 * the dtype before they are multiplied with v.
 */
#define HFP_MAX_HEAD_DIM 256
HFP_EXPORT int32_t hfp_attention(DLTensor *out, DLTensor *lse, const DLTensor *q, const DLTensor *k,
                                 const DLTensor *v, const DLTensor *mask, const DLTensor *q_starts,
                                 const DLTensor *k_starts, const DLTensor *k_lengths, double scale,
                                 int64_t causal, int64_t most_queries, int64_t window,
                                 double softcap, void *stream);

/*
 * hfp_cross_entropy, and besides the logarithm of every token's probability: log_probs = z - lse, in the
 * dtype of the logits, in every row, also of those whose target is ignore_index, whose loss and lse are
 * 0 as there. log_probs may be the buffer of logits.
 */
HFP_EXPORT int32_t hfp_cross_entropy_log_probs(DLTensor *loss, DLTensor *lse, DLTensor *log_probs,
                                               const DLTensor *logits, const DLTensor *target,
                                               int64_t ignore_index, double label_smoothing,
                                               double softcap, void *stream);

/*
 * The loss that balances the load of experts (Fedus et al., arXiv:2101.03961, equations 4 to 6), as
 * transformers computes it for top-k routers. logits: [T, E], E at most HFP_MAX_EXPERTS; mask: fp32
 * [T], the weights of the tokens (0: padding), or NULL (1). With W the sum of the weights and p =
 * softmax(logits):
 *   f[e] = sum over t of mask[t] (e is among the k greatest of row t, ties by index) / W
 *   P[e] = sum over t of mask[t] p[t, e] / W;   loss = E * sum over e of f[e] P[e]; 0 if W is 0
 * loss: one fp32 element. stats: fp32 [2 E + 1]: f, P, W. partials: fp32 [hfp_balance_parts(T) (2 E +
 * 1)], scratch. No atomics: same input, same bits.
 * The backward takes the gradient of the loss, one fp32 element, and f and W of stats: f is a constant.
 */
#define HFP_MAX_EXPERTS 1024
HFP_EXPORT int64_t hfp_balance_parts(int64_t tokens);
HFP_EXPORT int32_t hfp_load_balancing_loss(DLTensor *loss, DLTensor *stats, DLTensor *partials,
                                           const DLTensor *logits, const DLTensor *mask, int64_t k,
                                           void *stream);
HFP_EXPORT int32_t hfp_load_balancing_loss_backward(DLTensor *dlogits, const DLTensor *grad,
                                                    const DLTensor *logits, const DLTensor *stats,
                                                    const DLTensor *mask, void *stream);

/*
 * Decoding: the next tokens of `rows` sequences through a whole language model, all layers in one
 * call. Not an operator: nothing differentiates it.
 *
 * `model` says what the model is, and holds its weights. Its tensors, in this order, NULL for what
 * the model has not; weights of products are [out, in], their rows contiguous. On the CPU any of them
 * may be int8 [out, in + 4]: a row of 8-bit integers, and in its last four bytes the fp32 that they
 * are multiplied with:
 *   plan     int64 on the CPU: layers, ropes, the final norm's mode; for each rope: interleaved,
 *            rounded; for each layer HFP_DECODE_PLAN numbers: the modes of the norms before and
 *            after attention, before and after the MLP, of q and of k; heads, key heads, head_dim,
 *            index of the rope or -1, whether q's and k's norm go over all heads at once, whether
 *            they come behind the rotation, window (keys that a query sees; 0: all), activation
 *            (HFP_ACT_* or HFP_DECODE_RELU_SQUARED), whether attention and MLP are parallel
 *   numbers  fp32 on the CPU: embedding scale, logit scale, logit softcap (0: none), the final norm's
 *            eps and offset; for each rope its scaling; for each layer HFP_DECODE_NUMBERS: eps and
 *            offset of the six norms, scale of the scores, their softcap (0: none), limit to which
 *            q, k and v are clamped (0: none), residual multiplier
 *   embedding [vocab, hidden], head, its bias, the final norm's weight and bias; for each rope the
 *            inverse frequencies, fp32 [pairs]; for each layer HFP_DECODE_TENSORS, each with its
 *            bias behind it: the six norms in the order of above (q's and k's last), q, k, v, o,
 *            gate, up, down; then the sinks [heads]. A gate may be missing; where gate, up and down
 *            are, the layer's result is what the hidden state is behind attention
 * A norm's mode is 0 where there is none, else HFP_DECODE_NORM_RMS or _LAYER, plus
 * HFP_DECODE_NORM_ROUNDED where the normalized value is rounded before it is multiplied with
 * weight + offset. Its weight and bias are [n]. Of q's and k's norm, unless it goes over all heads at
 * once, each head may have its own: [heads, head_dim], contiguous, or int64 [heads] on the device, the
 * addresses of [head_dim] in the weights' dtype, which cannot be checked: they must be right, and no
 * result may lie there. Weight and bias are both given in the same form.
 * All weights have one dtype; in a half type every result that the layers' own code would store is
 * rounded to it, attention's once. What layers, ropes and norms compute is said in
 * hfpatch/decoding/spec.py, field by field.
 *
 * cache: int64 [1 + 3 layers] on the device: how many keys there are, L; of each layer the addresses of
 * its keys and of its values, [rows, key heads, capacity, head_dim] in the weights' dtype, and the
 * capacity. The step writes the new keys at L and sees L + tokens of them, token t the first
 * L + 1 + t. What the addresses lead to cannot be checked: they must be right, on CUDA multiples of 16.
 * ids, positions: int64 [rows, tokens]. embeds: [rows, tokens, hidden], instead of ids, or NULL.
 * mask: bool or uint8 [rows, width], 0 where a key is not to be seen, or NULL; width is at least
 * L + tokens. logits: [rows, tokens or 1, vocab], the weights' dtype or fp32; 1: of the last token;
 * NULL where only hidden is asked for. hidden: [rows, tokens, hidden], what the head is given, or NULL.
 * workspace: fp32 [hfp_decode_workspace(...) or more], scratch; on CUDA zero before its first use.
 * most_keys: what L + tokens is at most, for kernels that are fast up to there; 0: not known. With more
 * the results are the same, more slowly. threads: on the CPU, at most; 0: OpenMP's number.
 * A row's results are the same bits whatever the other rows, most_keys and the number of threads; on
 * CUDA, of up to HFP_DECODE_ROWS tokens: the products of more are cuBLASLt's, where it is found. On
 * CUDA all but `model`, `most_keys`, `threads` and the shapes is read on the device, so that a captured
 * graph serves all lengths and caches; the caller keeps L, the addresses, the capacities and the mask's
 * width right, and an id outside of [0, vocab) gives NaN.
 */
enum { HFP_DECODE_NORM_RMS = 1, HFP_DECODE_NORM_LAYER = 2, HFP_DECODE_NORM_ROUNDED = 4 };
enum { HFP_DECODE_RELU_SQUARED = 16 }; /* max(x, 0)^2 */
#define HFP_DECODE_ROWS 16
#define HFP_DECODE_PLAN 15
#define HFP_DECODE_NUMBERS 16
#define HFP_DECODE_TENSORS 27

/* Elements of `workspace`. */
HFP_EXPORT int64_t hfp_decode_workspace(const HfpTensorList *model, int64_t rows, int64_t tokens,
                                        int64_t threads);

HFP_EXPORT int32_t hfp_decode_step(DLTensor *logits, DLTensor *hidden, DLTensor *workspace,
                                   const HfpTensorList *model, const DLTensor *cache,
                                   const DLTensor *ids, const DLTensor *embeds,
                                   const DLTensor *positions, const DLTensor *mask,
                                   int64_t most_keys, int64_t threads, void *stream);

/*
 * Behind a step of one token a row: each row's greedy token, and what the next step reads, in one
 * launch. Of row r, the steps of whose text are counted from 1 and of which this one is n:
 *   token = the first index of the greatest of logits[r], or pad where the row had ended
 * It is written to ids[r], to slot n % HFP_DECODE_SLOTS of the text's tokens and of its report; there
 * is written to the same slot of `unfinished` whether the row had not ended and this token is none of
 * `ends`. Each number of `counters` gets one more.
 *
 * ids: int64 [rows]. counters: int64 [any], or NULL. logits: [rows, vocab]. workspace: int64
 * [hfp_row_workspace(rows, vocab)], scratch. ends: int64 [any], or NULL: no row ends, `unfinished` is
 * not used, and nor is pad.
 * text: int64 [rows + 3] on the device: n of each row, which gets one more; the addresses of its
 * tokens, int64 [HFP_DECODE_SLOTS, rows], of its `unfinished`, one byte each [HFP_DECODE_SLOTS, rows],
 * and of its report, as its tokens, memory of the host's that the device can write to, or 0. What the
 * addresses lead to cannot be checked: they must be right. The text's end is slot 0 of tokens and of
 * `unfinished`, where n is 1.
 */
#define HFP_DECODE_SLOTS 4
HFP_EXPORT int32_t hfp_decode_choose(DLTensor *ids, DLTensor *counters, DLTensor *text,
                                     DLTensor *workspace, const DLTensor *logits,
                                     const DLTensor *ends, int64_t pad, void *stream);

/*
 * The ops that also have an in-place operator NAME_, and which arguments its results replace, in
 * their order.
 */
#define HFP_IN_PLACE_TABLE(X)                                                                      \
  X(rms_norm, "x")                                                                                 \
  X(layer_norm, "x")                                                                               \
  X(gelu, "x")                                                                                     \
  X(silu, "x")                                                                                     \
  X(add_gelu, "x")                                                                                 \
  X(add_silu, "x")                                                                                 \
  X(mul_add, "a")                                                                                  \
  X(gate_residual, "residual")                                                                     \
  X(add_rms_norm, "x, residual")                                                                   \
  X(add_layer_norm, "x, residual")                                                                 \
  X(rope, "x")                                                                                     \
  X(rope_qk, "q, k")                                                                               \
  X(qk_norm_rope, "q, k")

/*
 * The op table. X(name, function, result, arguments): `arguments` is a PyTorch schema without the
 * outer parentheses, in the order of the C parameters between `out` and `stream`; `result` says what a
 * caller must allocate for `out`:
 *   "x"       shape and dtype of the first tensor argument
 *   "norm"    shape of the first tensor argument; dtype by HFP_CAST_* (the `cast` argument)
 *   "halved"  dtype of the first tensor argument; its shape with the last dimension halved
 *   "modulated"  shape of the first tensor argument; its dtype, under HFP_CAST_INPUT promoted with
 *             that of the second
 *   "=NAME"   shape and dtype of the tensor argument of that name
 *   "rows"    fp32, the shape of the first tensor argument without its last dimension
 *   "scalar"  fp32 [], on the device of the first tensor (of the first list)
 *   "dweight", "dbias"  [D] in the dtype of the weight or bias if `needs` asks for it, else [0]
 *   "groups"  fp32 [N, groups, hfp_group_parts(...) + 1, 2], see hfp_group_norm
 *   "partials"  fp32 [hfp_partial_rows(rows, D), K D], see the gradients of norms
 *   "indices" int64, the shape of the first tensor argument without its last dimension
 *   "workspace"  int64 [hfp_row_workspace(rows, V)] of the first tensor argument
 *   "topk", "topk_indices"  the shape of the first tensor argument, the last dimension `k`; of its
 *             dtype, or int64
 *   "=NAME&BIT"  as "=NAME" if `needs` has BIT (one digit), else [0]
 *   "sums=NAME"  fp32 [hfp_sum_partial_rows(rows, D, rows of NAME), K D], see hfp_mul_add_backward
 *   "product", "product_workspace"  dtype of the first tensor argument, [M, N] or [B, M, N]; fp32
 *             [hfp_gemm_workspace(...)]
 *   "attended"  shape and dtype of the first tensor argument, the last dimension that of `v`
 *   "balance", "balance_partials"  fp32 [2 E + 1], [hfp_balance_parts(T) (2 E + 1)]
 * A function with several outputs has one rule for each, separated by commas.
 */
#define HFP_OP_TABLE(X)                                                                            \
  X(rms_norm, hfp_rms_norm, "norm",                                                                \
    "Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset, int cast")            \
  X(layer_norm, hfp_layer_norm, "x", "Tensor x, Tensor? weight, Tensor? bias, float eps")          \
  X(gelu, hfp_gelu, "x", "Tensor x, int approximate")                                              \
  X(silu, hfp_silu, "x", "Tensor x")                                                               \
  X(gated, hfp_gated, "x", "Tensor gate, Tensor up, int activation")                               \
  X(gated_packed, hfp_gated_packed, "halved", "Tensor x, int activation, int gate_first")          \
  X(gated_clamped, hfp_gated_clamped, "x",                                                         \
    "Tensor gate, Tensor up, int activation, float alpha, float gate_min, float gate_max, "        \
    "float up_min, float up_max, float up_offset, int clamp_activated")                            \
  X(norm_modulate, hfp_norm_modulate, "modulated",                                                 \
    "Tensor x, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias, float eps, "              \
    "int norm_type, int cast")                                                                     \
  X(gate_residual, hfp_gate_residual, "modulated",                                                 \
    "Tensor residual, Tensor gate, Tensor x, int cast")                                            \
  X(gate_residual_norm_modulate, hfp_gate_residual_norm_modulate, "x, x",                          \
    "Tensor residual, Tensor gate, Tensor x, Tensor scale, Tensor shift, Tensor? weight, "         \
    "Tensor? bias, float eps, int norm_type, int cast")                                            \
  X(add_rms_norm, hfp_add_rms_norm, "norm, x",                                                     \
    "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float weight_offset, "    \
    "int cast")                                                                                    \
  X(add_layer_norm, hfp_add_layer_norm, "x, x",                                                    \
    "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps")                          \
  X(rope, hfp_rope, "x",                                                                           \
    "Tensor x, Tensor cos, Tensor? sin, int seq_dim, int interleaved, int rotary_dim, "             \
    "int round_products")                                                                          \
  X(rope_qk, hfp_rope_qk, "=q, =k",                                                                \
    "Tensor q, Tensor k, Tensor cos, Tensor? sin, int seq_dim, int interleaved, int rotary_dim, "  \
    "int round_products")                                                                          \
  X(qk_norm_rope, hfp_qk_norm_rope, "=q, =k",                                                      \
    "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, "           \
    "float eps, float weight_offset, int cast, int norm_across_heads, int seq_dim, "               \
    "int interleaved, int rotary_dim, int round_products")                                         \
  X(gated_rms_norm, hfp_gated_rms_norm, "x",                                                       \
    "Tensor x, Tensor? gate, Tensor? weight, float eps, int group_size, int norm_before_gate, "    \
    "int cast, int gate_activation")                                                               \
  X(group_norm, hfp_group_norm, "x, groups",                                                       \
    "Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, int silu, int channels_last")  \
  X(rms_norm_silu, hfp_rms_norm_silu, "x",                                                         \
    "Tensor x, Tensor? addend, Tensor? weight, Tensor? scale, Tensor? shift, float eps")           \
  X(add_bias, hfp_add_bias, "x", "Tensor x, Tensor bias, Tensor? residual")                        \
  X(rms_norm_backward, hfp_rms_norm_backward, "=x, dweight, dbias, partials",                  \
    "Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset, "        \
    "int cast, int needs")                                                                         \
  X(layer_norm_backward, hfp_layer_norm_backward, "=x, dweight, dbias, partials",              \
    "Tensor grad, Tensor x, Tensor? weight, Tensor? bias, float eps, int needs")                   \
  X(gelu_backward, hfp_gelu_backward, "=x", "Tensor grad, Tensor x, int approximate")          \
  X(silu_backward, hfp_silu_backward, "=x", "Tensor grad, Tensor x")                           \
  X(gated_backward, hfp_gated_backward, "=gate, =up",                                      \
    "Tensor grad, Tensor gate, Tensor up, int activation")                                         \
  X(gated_packed_backward, hfp_gated_packed_backward, "=x",                                    \
    "Tensor grad, Tensor x, int activation, int gate_first")                                       \
  X(cross_entropy, hfp_cross_entropy, "rows, rows",                                                \
    "Tensor logits, Tensor target, int ignore_index, float label_smoothing, float softcap")        \
  X(cross_entropy_backward, hfp_cross_entropy_backward, "=logits",                             \
    "Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, "                    \
    "float label_smoothing, float softcap")                                                        \
  X(cross_entropy_with_gradient, hfp_cross_entropy_with_gradient, "scalar, rows, rows, =logits",   \
    "Tensor logits, Tensor target, Tensor? divisor_tensor, float divisor, int ignore_index, "      \
    "float label_smoothing, float softcap")                                                        \
  X(softmax, hfp_softmax, "x, workspace", "Tensor x, Tensor? mask, float scale")                   \
  X(softmax_backward, hfp_softmax_backward, "x, workspace", "Tensor grad, Tensor y, float scale")  \
  X(argmax, hfp_argmax, "indices, workspace", "Tensor x")                                          \
  X(topk, hfp_topk, "topk, topk_indices", "Tensor x, int k")                                       \
  X(sample, hfp_sample, "indices",                                                                 \
    "Tensor logits, Tensor seeds, Tensor? positions, Tensor? temperatures, Tensor? top_ks, "       \
    "Tensor? top_ps, Tensor? min_ps, float temperature, int top_k, float top_p, float min_p")      \
  X(add_gelu, hfp_add_gelu, "x", "Tensor x, Tensor bias, int approximate")                         \
  X(add_silu, hfp_add_silu, "x", "Tensor x, Tensor bias")                                          \
  X(mul_add, hfp_mul_add, "modulated", "Tensor a, Tensor b, Tensor c, int cast")                   \
  X(add_gelu_backward, hfp_add_gelu_backward, "=x, =bias&2, sums=bias",                            \
    "Tensor grad, Tensor x, Tensor bias, int approximate, int needs")                              \
  X(add_silu_backward, hfp_add_silu_backward, "=x, =bias&2, sums=bias",                            \
    "Tensor grad, Tensor x, Tensor bias, int needs")                                               \
  X(mul_add_backward, hfp_mul_add_backward, "=a, =b&1, =b&2, sums=b",                              \
    "Tensor grad, Tensor a, Tensor b, int cast, int needs")                                        \
  X(add, hfp_add, "x", "Tensor a, Tensor b, float alpha")                                          \
  X(mul, hfp_mul, "x", "Tensor a, Tensor b")                                                       \
  X(scale, hfp_scale, "x", "Tensor x, float factor")                                               \
  X(gemm, hfp_gemm, "product, product_workspace",                                                  \
    "Tensor a, Tensor b, Tensor? c, float alpha, float beta, int transpose_a, int transpose_b")    \
  X(gemm_batched, hfp_gemm_batched, "product, product_workspace",                                  \
    "Tensor a, Tensor b, Tensor? c, float alpha, float beta, int transpose_a, int transpose_b")    \
  X(attention, hfp_attention, "attended, rows",                                                    \
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? q_starts, Tensor? k_starts, "             \
    "Tensor? k_lengths, float scale, int causal, int most_queries, int window, float softcap")                                \
  X(cross_entropy_log_probs, hfp_cross_entropy_log_probs, "rows, rows, =logits",                   \
    "Tensor logits, Tensor target, int ignore_index, float label_smoothing, float softcap")        \
  X(load_balancing_loss, hfp_load_balancing_loss, "scalar, balance, balance_partials",             \
    "Tensor logits, Tensor? mask, int k")                                                          \
  X(load_balancing_loss_backward, hfp_load_balancing_loss_backward, "=logits",                     \
    "Tensor grad, Tensor logits, Tensor stats, Tensor? mask")

/*
 * The same for functions over lists; `Tensor(a!)[]` is changed in place. Result rules besides:
 *   "none"    nothing is returned
 *   "chunks"  fp32 [hfp_norm_partials(tensors)]
 */
#define HFP_LIST_OP_TABLE(X)                                                                       \
  X(adamw_step, hfp_adamw_step, "none",                                                            \
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "       \
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor[] steps, Tensor? lr_tensor, "      \
    "Tensor? clip_coef, Tensor? grad_scale, Tensor? found_inf, float lr, float beta1, "            \
    "float beta2, float eps, float weight_decay, int maximize")                                    \
  X(grad_norm, hfp_grad_norm, "scalar, chunks", "Tensor[] tensors, int norm_type")                 \
  X(clip_grads, hfp_clip_grads, "none", "Tensor(a!)[] grads, Tensor total_norm, float max_norm")   \
  X(scale_grads, hfp_scale_grads, "none", "Tensor(a!)[] grads, Tensor factor")

/*
 * The same for functions that are no operators: they go by addresses that a tensor holds. Result rules
 * besides: "own", as the function's comment says; "own?", that, or NULL.
 */
#define HFP_DECODE_TABLE(X)                                                                        \
  X(decode_step, hfp_decode_step, "own?, own?, own",                                               \
    "Tensor[] model, Tensor cache, Tensor? ids, Tensor? embeds, Tensor positions, Tensor? mask, "  \
    "int most_keys, int threads")                                                                  \
  X(decode_choose, hfp_decode_choose, "own, own?, own, workspace",                                 \
    "Tensor logits, Tensor? ends, int pad")

#ifdef __cplusplus
}
#endif
#endif /* HFPATCH_H_ */
