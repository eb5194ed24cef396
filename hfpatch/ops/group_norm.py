"""`group_norm`: group norm with an optional SiLU behind it, as in the residual blocks of UNets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype


def group_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    channels_last: bool = False,
) -> Tensor:
    """Group norm (Wu & He, arXiv:1803.08494) of neighbouring channels, at all positions.

    Args:
        x: `[N, C, S]`, or `[N, S, C]` with `channels_last`, floating.
        weight, bias: `[C]` or None, one floating dtype.
        groups: divides C.
        eps: added to the biased variance.
        silu: whether `y * sigmoid(y)` of the rounded result follows.
        channels_last: whether the channels are the last dimension.

    Returns:
        the shape and dtype of `x`; the norm is in fp32 and rounded once, the SiLU once more.
    """
    wide = compute_dtype(x, weight)
    v = x.to(wide).transpose(1, 2) if channels_last else x.to(wide)
    grouped = v.reshape(v.shape[0], groups, v.shape[1] // groups * v.shape[2])
    grouped = grouped - grouped.mean(-1, keepdim=True)
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    y = grouped.view(v.shape)
    if weight is not None:
        y = y * weight.to(wide)[:, None]
    if bias is not None:
        y = y + bias.to(wide)[:, None]
    y = y.to(x.dtype)
    y = F.silu(y) if silu else y
    return y.transpose(1, 2).contiguous() if channels_last else y


def group_norm_aten(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    channels_last: bool = False,
) -> Tensor:
    """`group_norm` on PyTorch's fused norm where the dtypes agree."""
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        return group_norm(x, weight, bias, groups, eps, silu, channels_last)
    y = F.group_norm(x.transpose(1, 2) if channels_last else x, groups, weight, bias, eps)
    y = F.silu(y) if silu else y
    return y.transpose(1, 2).contiguous() if channels_last else y


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["groups"],
        params["eps"],
        int(params.get("silu", False)),
        int(params.get("channels_last", False)),
    )


OP = Op("group_norm", group_norm, group_norm_aten, encode, scratch=1)
