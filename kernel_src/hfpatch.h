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
 *   - Functions never allocate, synchronize, throw, exit, or use a stream of their own. The caller
 *     owns every buffer. Zero-size tensors return HFP_OK at once. Indices are 64 bit.
 *   - Everything is validated before anything is launched. On failure nothing was written, and
 *     hfp_last_error() (thread local) names the argument, what was expected and what came.
 *   - Every function exists in every build; one built without CUDA answers HFP_NOT_AVAILABLE for a
 *     CUDA tensor, so that a caller can fall back.
 *   - Inputs may be strided as long as the last dimension has stride 1 and the leading dimensions
 *     collapse to at most HFP_MAX_OUTER_DIMS; any alignment to the element size is accepted
 *     (16-byte aligned rows are the fast path). `out` is contiguous.
 *   - `out` may be exactly the same buffer as an input of the same dtype, shape and strides
 *     (in place); any other overlap is undefined.
 */
#ifndef HFPATCH_H_
#define HFPATCH_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bumped when a function changes; adding one is compatible. */
#define HFP_ABI_VERSION 1

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
  HFP_OUT_OF_MEMORY = -4
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
 * cos, sin: both, or neither for the norm alone.
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
 * all D; else it divides D); xhat = v * rsqrt(mean(v^2) + eps), all in fp32.
 *   norm_before_gate == 0: v = x * silu(gate);  out = xhat rounded, * weight rounded      (Bamba)
 *   norm_before_gate == 1: v = x;  out = xhat rounded, * weight rounded, * silu(gate) rounded
 *                                                                                   (Qwen3-Next)
 * gate: shape of x; weight: [D] or NULL; all of one dtype.
 */
HFP_EXPORT int32_t hfp_gated_rms_norm(DLTensor *out, const DLTensor *x, const DLTensor *gate,
                                      const DLTensor *weight, double eps, int64_t group_size,
                                      int64_t norm_before_gate, void *stream);

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
 * P = hfp_partial_rows(rows, D), and then the P rows are added up. No atomics: same input, same bits.
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
 *   "dweight", "dbias"  [D] in the dtype of the weight or bias if `needs` asks for it, else [0]
 *   "groups"  fp32 [N, groups, hfp_group_parts(...) + 1, 2], see hfp_group_norm
 *   "partials"  fp32 [hfp_partial_rows(rows, D), K D], see the gradients of norms
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
    "Tensor x, Tensor cos, Tensor sin, int seq_dim, int interleaved, int rotary_dim, "             \
    "int round_products")                                                                          \
  X(rope_qk, hfp_rope_qk, "=q, =k",                                                                \
    "Tensor q, Tensor k, Tensor cos, Tensor sin, int seq_dim, int interleaved, int rotary_dim, "   \
    "int round_products")                                                                          \
  X(qk_norm_rope, hfp_qk_norm_rope, "=q, =k",                                                      \
    "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, "           \
    "float eps, float weight_offset, int cast, int norm_across_heads, int seq_dim, "               \
    "int interleaved, int rotary_dim, int round_products")                                         \
  X(gated_rms_norm, hfp_gated_rms_norm, "x",                                                       \
    "Tensor x, Tensor gate, Tensor? weight, float eps, int group_size, int norm_before_gate")      \
  X(group_norm, hfp_group_norm, "x, groups",                                                       \
    "Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, int silu, int channels_last")  \
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
    "float label_smoothing, float softcap")

#ifdef __cplusplus
}
#endif
#endif /* HFPATCH_H_ */
