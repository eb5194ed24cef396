"""Fused normalizations and activations for transformers and diffusers models.

The functions take and return tensors and know autograd and `torch.compile`. `ops` holds the raw
operators with integer codes (`ops.rms_norm.default(x, weight, bias, eps, weight_offset, cast)` and
`ops.rms_norm_out.default(out, x, ...)`), for paths where each microsecond of the host counts; they
have no autograd, and writing to `out` does not raise its version counter. `layers` are modules for
`kernels.LayerRepository`.
"""

from . import _fakes as _fakes
from . import layers
from ._functions import gated, gated_packed, gelu, layer_norm, rms_norm, silu
from ._loss import cross_entropy
from ._ops import add_op_namespace_prefix, ops

__all__ = [
    "add_op_namespace_prefix",
    "cross_entropy",
    "gated",
    "gated_packed",
    "gelu",
    "layer_norm",
    "layers",
    "ops",
    "rms_norm",
    "silu",
]
