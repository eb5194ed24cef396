"""`layer_norm`: layer norm over the last dimension, fp32 inside, one rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension (Ba et al., arXiv:1607.06450).

    Args:
        x: `[..., D]`, floating.
        weight, bias: `[D]` or None, any floating dtype.
        eps: added to the (biased) variance.

    Returns:
        `[..., D]` in the dtype of `x`, computed in fp32 and rounded once.
    """
    wide = compute_dtype(x, weight, bias)
    centred = x.to(wide)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def layer_norm_aten(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`layer_norm` on `torch.nn.functional.layer_norm` where the dtypes agree."""
    if all(t is None or t.dtype == x.dtype for t in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return layer_norm(x, weight, bias, eps)


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (params["eps"],)


OP = Op(
    "layer_norm",
    layer_norm,
    layer_norm_aten,
    encode,
    beats_single_kernel=frozenset({"cuda", "cpu"}),
    captured=True,
)
