"""Fused normalizations, activations and rotary embeddings for transformers and diffusers models.

The functions take and return tensors and know autograd and `torch.compile`. `ops` holds the raw
operators with integer codes (`ops.rms_norm.default(x, weight, bias, eps, weight_offset, cast)` and
`ops.rms_norm_out.default(out, x, ...)`), for paths where each microsecond of the host counts; they
have no autograd, and writing to `out` does not raise its version counter. Functions that end in an
underscore write over their input. `calls.bind` gives an operator without the dispatcher, for code
that calls few tensors often. `layers` are modules for
`kernels.LayerRepository`.
"""

# Exports: written by `python bindings/generate`.
from . import _fakes as _fakes
from . import calls, layers
from ._adaln import (
    add_layer_norm,
    add_rms_norm,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from ._functions import gated, gated_clamped, gated_packed, gelu, layer_norm, rms_norm, silu
from ._gated_norm import gated_rms_norm
from ._group_norm import group_norm
from ._in_place import (
    add_gelu_,
    add_layer_norm_,
    add_rms_norm_,
    add_silu_,
    gate_residual_,
    gelu_,
    layer_norm_,
    mul_add_,
    qk_norm_rope_,
    rms_norm_,
    rope_,
    rope_qk_,
    silu_,
)
from ._loss import cross_entropy, cross_entropy_log_probs, load_balancing_loss
from ._ops import add_op_namespace_prefix, ops
from ._optim import adamw_step, clip_grad_norm_, clip_grads, grad_norm, scale_grads
from ._pointwise import add, add_bias, add_gelu, add_silu, mul, mul_add, scale
from ._products import attention, gemm, gemm_batched
from ._rms_norm_silu import rms_norm_silu
from ._rope import qk_norm_rope, rope, rope_qk
from ._rowops import argmax, sample, softmax, topk

__all__ = [
    "adamw_step",
    "add",
    "add_bias",
    "add_gelu",
    "add_gelu_",
    "add_layer_norm",
    "add_layer_norm_",
    "add_op_namespace_prefix",
    "add_rms_norm",
    "add_rms_norm_",
    "add_silu",
    "add_silu_",
    "argmax",
    "attention",
    "calls",
    "clip_grad_norm_",
    "clip_grads",
    "cross_entropy",
    "cross_entropy_log_probs",
    "gate_residual",
    "gate_residual_",
    "gate_residual_norm_modulate",
    "gated",
    "gated_clamped",
    "gated_packed",
    "gated_rms_norm",
    "gelu",
    "gelu_",
    "gemm",
    "gemm_batched",
    "grad_norm",
    "group_norm",
    "layer_norm",
    "layer_norm_",
    "layers",
    "load_balancing_loss",
    "mul",
    "mul_add",
    "mul_add_",
    "norm_modulate",
    "ops",
    "qk_norm_rope",
    "qk_norm_rope_",
    "rms_norm",
    "rms_norm_",
    "rms_norm_silu",
    "rope",
    "rope_",
    "rope_qk",
    "rope_qk_",
    "sample",
    "scale",
    "scale_grads",
    "silu",
    "silu_",
    "softmax",
    "topk",
]
# End of the exports.
