"""`rms_norm`: root-mean-square norm with every rounding rule that HuggingFace models use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype

#: Where the normalized value is rounded; the codes are HFP_CAST_* of `kernel_src/hfpatch.h`.
CASTS = {"none": 0, "input": 1, "weight": 2}


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich, arXiv:1910.07467).

    Args:
        x: `[..., D]`, floating.
        weight, bias: `[D]` or None.
        eps: added to the mean square.
        weight_offset: added to the weight in fp32 (Gemma's `1 + w`); `cast="none"` only.
        cast: "none" rounds once, at the end, to the dtype of `x`; "input" rounds the normalized
            value to the dtype of `x` before the weight (Llama); "weight" rounds it to the dtype of
            the weight if that is a half type (T5, diffusers).

    Returns:
        `[..., D]`; dtype of `x` for "none" and without a weight, the promoted dtype of `x` and
        `weight` for "input", the dtype of `weight` for "weight".
    """
    wide = compute_dtype(x, weight, bias)
    x_hat = x.to(wide)
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "none" or weight is None:
        if weight is not None:
            x_hat = x_hat * (weight.to(wide) + weight_offset)
        if bias is not None:
            x_hat = x_hat + bias.to(wide)
        return x_hat.to(x.dtype)
    if cast == "input":
        x_hat = x_hat.to(x.dtype)
    elif weight.dtype in (torch.float16, torch.bfloat16) or x.dtype != torch.float64:
        x_hat = x_hat.to(weight.dtype)
    y = x_hat * weight
    return y if bias is None else y + bias


def rms_norm_aten(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tensor:
    """`rms_norm` on `torch.nn.functional.rms_norm`, which rounds once, to the dtype of `x`."""
    shape = x.shape[-1:]
    same_dtype = weight is None or weight.dtype == x.dtype
    if bias is None and same_dtype and (weight is None or cast == "none") and weight_offset == 0:
        return F.rms_norm(x, shape, weight, eps)
    if bias is None and same_dtype and weight is not None and weight_offset == 0:
        return F.rms_norm(x, shape, None, eps) * weight
    return rms_norm(x, weight, bias, eps, weight_offset, cast)


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (params["eps"], params.get("weight_offset", 0.0), CASTS[params.get("cast", "none")])


OP = Op(
    "rms_norm",
    rms_norm,
    rms_norm_aten,
    encode,
    beats_single_kernel=frozenset({"cuda", "cpu"}),
    captured=True,
)
