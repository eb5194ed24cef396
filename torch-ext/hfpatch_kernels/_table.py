"""The op tables of hfpatch.h.

Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.
"""

#: By operator: its result rules and the names of its arguments.
OPS = {
    "rms_norm": (
        "norm",
        "x weight bias eps weight_offset cast",
    ),
    "layer_norm": (
        "x",
        "x weight bias eps",
    ),
    "gelu": (
        "x",
        "x approximate",
    ),
    "silu": (
        "x",
        "x",
    ),
    "gated": (
        "x",
        "gate up activation",
    ),
    "gated_packed": (
        "halved",
        "x activation gate_first",
    ),
    "gated_clamped": (
        "x",
        "gate up activation alpha gate_min gate_max up_min up_max up_offset clamp_activated",
    ),
    "norm_modulate": (
        "modulated",
        "x scale shift weight bias eps norm_type cast",
    ),
    "gate_residual": (
        "modulated",
        "residual gate x cast",
    ),
    "gate_residual_norm_modulate": (
        "x, x",
        "residual gate x scale shift weight bias eps norm_type cast",
    ),
    "add_rms_norm": (
        "norm, x",
        "x residual weight bias eps weight_offset cast",
    ),
    "add_layer_norm": (
        "x, x",
        "x residual weight bias eps",
    ),
    "rope": (
        "x",
        "x cos sin seq_dim interleaved rotary_dim round_products",
    ),
    "rope_qk": (
        "=q, =k",
        "q k cos sin seq_dim interleaved rotary_dim round_products",
    ),
    "qk_norm_rope": (
        "=q, =k",
        "q k q_weight k_weight cos sin eps weight_offset cast norm_across_heads seq_dim "
        "interleaved rotary_dim round_products",
    ),
    "gated_rms_norm": (
        "x",
        "x gate weight eps group_size norm_before_gate cast gate_activation",
    ),
    "rms_norm_silu": (
        "x",
        "x addend weight scale shift eps",
    ),
    "add_bias": (
        "x",
        "x bias residual",
    ),
    "group_norm": (
        "x, groups",
        "x weight bias groups eps silu channels_last",
    ),
    "rms_norm_backward": (
        "=x, dweight, dbias, partials",
        "grad x weight bias eps weight_offset cast needs",
    ),
    "layer_norm_backward": (
        "=x, dweight, dbias, partials",
        "grad x weight bias eps needs",
    ),
    "gelu_backward": (
        "=x",
        "grad x approximate",
    ),
    "silu_backward": (
        "=x",
        "grad x",
    ),
    "gated_backward": (
        "=gate, =up",
        "grad gate up activation",
    ),
    "gated_packed_backward": (
        "=x",
        "grad x activation gate_first",
    ),
    "cross_entropy": (
        "rows, rows",
        "logits target ignore_index label_smoothing softcap",
    ),
    "cross_entropy_backward": (
        "=logits",
        "grad logits target lse ignore_index label_smoothing softcap",
    ),
    "cross_entropy_with_gradient": (
        "scalar, rows, rows, =logits",
        "logits target divisor_tensor divisor ignore_index label_smoothing softcap",
    ),
    "adamw_step": (
        "none",
        "params grads exp_avgs exp_avg_sqs max_exp_avg_sqs masters steps lr_tensor clip_coef "
        "grad_scale found_inf lr beta1 beta2 eps weight_decay maximize",
    ),
    "grad_norm": (
        "scalar, chunks",
        "tensors norm_type",
    ),
    "clip_grads": (
        "none",
        "grads total_norm max_norm",
    ),
    "scale_grads": (
        "none",
        "grads factor",
    ),
    "softmax": (
        "x, workspace",
        "x mask scale",
    ),
    "softmax_backward": (
        "x, workspace",
        "grad y scale",
    ),
    "argmax": (
        "indices, workspace",
        "x",
    ),
    "topk": (
        "topk, topk_indices",
        "x k",
    ),
    "sample": (
        "indices",
        "logits seeds positions temperatures top_ks top_ps min_ps temperature top_k top_p min_p",
    ),
    "add_gelu": (
        "x",
        "x bias approximate",
    ),
    "add_silu": (
        "x",
        "x bias",
    ),
    "mul_add": (
        "modulated",
        "a b c cast",
    ),
    "add_gelu_backward": (
        "=x, =bias&2, sums=bias",
        "grad x bias approximate needs",
    ),
    "add_silu_backward": (
        "=x, =bias&2, sums=bias",
        "grad x bias needs",
    ),
    "mul_add_backward": (
        "=a, =b&1, =b&2, sums=b",
        "grad a b cast needs",
    ),
    "add": (
        "x",
        "a b alpha",
    ),
    "mul": (
        "x",
        "a b",
    ),
    "scale": (
        "x",
        "x factor",
    ),
    "gemm": (
        "product, product_workspace",
        "a b c alpha beta transpose_a transpose_b",
    ),
    "gemm_batched": (
        "product, product_workspace",
        "a b c alpha beta transpose_a transpose_b",
    ),
    "attention": (
        "attended, rows",
        "q k v mask q_starts k_starts k_lengths scale causal most_queries window softcap",
    ),
    "cross_entropy_log_probs": (
        "rows, rows, =logits",
        "logits target ignore_index label_smoothing softcap",
    ),
    "load_balancing_loss": (
        "scalar, balance, balance_partials",
        "logits mask k",
    ),
    "load_balancing_loss_backward": (
        "=logits",
        "grad logits stats mask",
    ),
}
#: Which have an operator that writes over arguments.
IN_PLACE = (
    "rms_norm",
    "layer_norm",
    "gelu",
    "silu",
    "add_gelu",
    "add_silu",
    "mul_add",
    "gate_residual",
    "add_rms_norm",
    "add_layer_norm",
    "rope",
    "rope_qk",
    "qk_norm_rope",
)
