"""`add_rms_norm` and `add_layer_norm`: a residual sum and its norm."""

from __future__ import annotations

from hfpatch.ops import layer_norm, rms_norm
from hfpatch.ops.base import Op, Tensor


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual`, rounded to their dtype, and `rms_norm(sum)`.

    Args:
        x, residual: `[..., D]`, one floating dtype.
        weight, bias, eps, weight_offset, cast: those of `rms_norm`.

    Returns:
        `(y, sum)`.
    """
    total = x + residual
    return rms_norm.rms_norm(total, weight, bias, eps, weight_offset, cast), total


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual`, rounded to their dtype, and `layer_norm(sum)`.

    Args:
        x, residual: `[..., D]`, one floating dtype.
        weight, bias: `[D]` or None, one floating dtype.
        eps: added to the variance.

    Returns:
        `(y, sum)`.
    """
    total = x + residual
    return layer_norm.layer_norm(total, weight, bias, eps), total


def add_rms_norm_aten(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` on PyTorch's fused norm."""
    total = x + residual
    return rms_norm.rms_norm_aten(total, weight, bias, eps, weight_offset, cast), total


def add_layer_norm_aten(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` on PyTorch's fused norm."""
    total = x + residual
    return layer_norm.layer_norm_aten(total, weight, bias, eps), total


ADD_RMS_NORM = Op("add_rms_norm", add_rms_norm, add_rms_norm_aten, rms_norm.encode, captured=True)
ADD_LAYER_NORM = Op(
    "add_layer_norm", add_layer_norm, add_layer_norm_aten, layer_norm.encode, captured=True
)
