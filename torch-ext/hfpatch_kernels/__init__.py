"""Fused normalizations, activations and rotary embeddings for transformers and diffusers models.

The functions take and return tensors and know autograd and `torch.compile`. `ops` holds the raw
operators with integer codes (`ops.rms_norm.default(x, weight, bias, eps, weight_offset, cast)` and
`ops.rms_norm_out.default(out, x, ...)`), for paths where each microsecond of the host counts; they
have no autograd, and writing to `out` does not raise its version counter. `layers` are modules for
`kernels.LayerRepository`.
"""

from . import _fakes as _fakes
from . import layers
from ._adaln import (
    add_layer_norm,
    add_rms_norm,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from ._functions import gated, gated_packed, gelu, layer_norm, rms_norm, silu
from ._gated_norm import gated_rms_norm
from ._group_norm import group_norm
from ._loss import cross_entropy
from ._ops import add_op_namespace_prefix, ops
from ._rope import qk_norm_rope, rope, rope_qk

__all__ = [
    "add_layer_norm",
    "add_op_namespace_prefix",
    "add_rms_norm",
    "cross_entropy",
    "gate_residual",
    "gate_residual_norm_modulate",
    "gated",
    "gated_packed",
    "gated_rms_norm",
    "gelu",
    "group_norm",
    "layer_norm",
    "layers",
    "norm_modulate",
    "ops",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_qk",
    "silu",
]
