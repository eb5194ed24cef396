"""`rms_norm_silu`: what stands between two convolutions of a video VAE's residual block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.adaln import broadcast
from hfpatch.ops.base import Op, Tensor, compute_dtype


def rms_norm_silu(
    x: Tensor,
    addend: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`silu(rms_norm(x + addend) * weight * (1 + scale) + shift)`, the channels last.

    Args:
        x: `[..., D]`, floating.
        addend: `[D]`, the dtype of `x`, or None: the bias of the convolution that x comes from.
        weight: `[D]` or None, of the norm.
        scale, shift: each as in `norm_modulate`, one dtype; both or neither.
        eps: added to the mean square.

    Returns:
        the shape and dtype of `x`; all in fp32 and rounded once.
    """
    wide = compute_dtype(x, addend, weight, scale, shift)
    y = x.to(wide) if addend is None else x.to(wide) + addend.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if scale is not None and shift is not None:
        y = y * (1 + broadcast(scale, x).to(wide)) + broadcast(shift, x).to(wide)
    return F.silu(y).to(x.dtype)


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (params["eps"],)


OP = Op("rms_norm_silu", rms_norm_silu, rms_norm_silu, encode)
