"""Group norm with an optional SiLU (Wu and He, arXiv:1803.08494)."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import ops

_group_norm = ops.group_norm.default


def _formula(x, weight, bias, groups, eps, silu, channels_last):
    y = x.transpose(1, 2) if channels_last else x
    w, b = (None if p is None else p.float() for p in (weight, bias))
    y = torch.nn.functional.group_norm(y.float(), groups, w, b, eps).to(x.dtype)
    if silu:
        y = torch.nn.functional.silu(y)
    return y.transpose(1, 2) if channels_last else y


def group_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    channels_last: bool = False,
) -> Tensor:
    """Group normalization: neighbouring channels of a sample together, at all positions.

    The norm is in fp32 and rounded to the dtype of ``x``; the SiLU is of the rounded value and
    rounded again. A gradient goes through the formula in plain PyTorch; the kernel has no backward.

    Args:
        x: ``[N, C, S]``, or ``[N, S, C]`` with ``channels_last``; fp32, fp16 or bf16. An image
            ``[N, C, H, W]`` is ``x.flatten(2)``, one in channels-last memory
            ``x.permute(0, 2, 3, 1).flatten(1, 2)``; neither copies.
        weight: ``[C]`` or None.
        bias: ``[C]`` or None; same dtype as ``weight``.
        groups: how many groups the channels form; divides ``C``.
        eps: added to the variance.
        silu: whether ``y * sigmoid(y)`` follows.
        channels_last: whether the channels are the last dimension.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        return _formula(x, weight, bias, groups, eps, silu, channels_last)
    codes = (groups, eps, 1 if silu else 0, 1 if channels_last else 0)
    return _group_norm(x.contiguous(), weight, bias, *codes)[0]
