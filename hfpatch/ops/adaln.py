"""`norm_modulate`, `gate_residual` and both at once: adaptive layer norm (AdaLN)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype

#: Norms by name; the codes are HFP_NORM_* of `kernel_src/hfpatch.h`.
NORMS = {"rms": 0, "layer": 1}
#: Where a modulation rounds; the codes are HFP_CAST_*.
MODULATION_CASTS = {"none": 0, "input": 1}


def broadcast(modulation: Tensor, x: Tensor) -> Tensor:
    """`modulation` so that it broadcasts to `x`: `[B, D]` next to `[B, ..., D]` is per sample."""
    if modulation.dim() == 2 and x.dim() > 2:
        return modulation.reshape(modulation.shape[0], *[1] * (x.dim() - 2), modulation.shape[1])
    return modulation


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: str, wide: torch.dtype
) -> Tensor:
    """The norm in the dtype `wide`, not rounded."""
    y = x.to(wide)
    if norm == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> Tensor:
    """`norm(x) * (1 + scale) + shift` (AdaLN; Peebles & Xie, arXiv:2212.09748).

    Args:
        x: `[..., D]`, floating.
        scale, shift: `[D]`, `[B, D]` (one per sample) or a shape that broadcasts to that of `x`.
        weight, bias: `[D]` or None; part of the norm.
        eps: added to the variance ("layer") or the mean square ("rms").
        norm: "layer" or "rms".
        cast: "input" rounds as eager PyTorch: the norm to the dtype of `x`, `1 + scale` to its own,
            product and sum to the promoted one; "none" computes in fp32 and rounds once, to the
            dtype of `x`.

    Returns:
        `[..., D]`; the promoted dtype of `x` and `scale` for "input", that of `x` for "none".
    """
    scale, shift = broadcast(scale, x), broadcast(shift, x)
    wide = compute_dtype(x, scale, weight)
    y = _norm(x, weight, bias, eps, norm, wide)
    if cast == "input":
        return y.to(x.dtype) * (1 + scale) + shift
    return (y * (1 + scale.to(wide)) + shift.to(wide)).to(x.dtype)


def gate_residual(residual: Tensor, gate: Tensor, x: Tensor, cast: str = "input") -> Tensor:
    """`residual + gate * x`.

    Args:
        residual, x: `[..., D]`, one floating dtype.
        gate: like `scale` of `norm_modulate`.
        cast: "input" rounds the product and the sum to the promoted dtype; "none" rounds once, to
            the dtype of `residual`.

    Returns:
        the shape of `residual`.
    """
    gate = broadcast(gate, residual)
    if cast == "input":
        return residual + gate * x
    wide = compute_dtype(residual, gate)
    return (residual.to(wide) + gate.to(wide) * x.to(wide)).to(residual.dtype)


def gate_residual_norm_modulate(
    residual: Tensor,
    gate: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> tuple[Tensor, Tensor]:
    """`gate_residual` and `norm_modulate` of its rounded result, arguments as there.

    Returns:
        `(sum, y)`.
    """
    total = gate_residual(residual, gate, x, cast)
    return total, norm_modulate(total, scale, shift, weight, bias, eps, norm, cast)


def norm_modulate_aten(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> Tensor:
    """`norm_modulate` on PyTorch's fused norms where the dtypes agree."""
    if cast != "input" or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        return norm_modulate(x, scale, shift, weight, bias, eps, norm, cast)
    if norm == "layer":
        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    elif bias is None:
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
    else:
        return norm_modulate(x, scale, shift, weight, bias, eps, norm, cast)
    return y * (1 + broadcast(scale, x)) + broadcast(shift, x)


def gate_residual_norm_modulate_aten(
    residual: Tensor,
    gate: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> tuple[Tensor, Tensor]:
    """`gate_residual_norm_modulate` on PyTorch's fused norms."""
    total = gate_residual(residual, gate, x, cast)
    return total, norm_modulate_aten(total, scale, shift, weight, bias, eps, norm, cast)


def encode_norm_modulate(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["eps"],
        NORMS[params.get("norm", "layer")],
        MODULATION_CASTS[params.get("cast", "input")],
    )


def encode_gate_residual(params: dict[str, Any]) -> tuple[Any, ...]:
    return (MODULATION_CASTS[params.get("cast", "input")],)


NORM_MODULATE = Op(
    "norm_modulate", norm_modulate, norm_modulate_aten, encode_norm_modulate, captured=True
)
GATE_RESIDUAL = Op(
    "gate_residual", gate_residual, gate_residual, encode_gate_residual, captured=True
)
GATE_RESIDUAL_NORM_MODULATE = Op(
    "gate_residual_norm_modulate",
    gate_residual_norm_modulate,
    gate_residual_norm_modulate_aten,
    encode_norm_modulate,
    captured=True,
)
