"""`softmax`: over the last dimension, with a scale and an additive mask."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.ops.base import Op, Tensor, compute_dtype


def softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Exponentials that add up to 1 in each row.

    Args:
        x: `[..., D]`, any floating dtype.
        mask: added to `scale * x`; `[D]`, `[B, D]`, or the shape of `x` with sizes 1.
        scale: a factor.

    Returns:
        `[..., D]` in the dtype of `x`, rounded once from fp32. NaN where the greatest value of a
        row is not finite.
    """
    wide = compute_dtype(x, mask)
    z = x.to(wide) * scale
    if mask is not None:
        if mask.dim() == 2 and x.dim() > 2:  # one row per sample
            mask = mask.reshape(mask.shape[0], *[1] * (x.dim() - 2), mask.shape[1])
        z = z + mask.to(wide)
    e = torch.exp(z - z.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax_aten(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """`softmax` on PyTorch's own."""
    if mask is None and scale == 1.0:
        return torch.softmax(x, -1)
    return softmax(x, mask, scale)


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (params.get("scale", 1.0),)


OP = Op("softmax", softmax, softmax_aten, encode, direct=False)
