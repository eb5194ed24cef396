"""`gated_rms_norm`: the gated, grouped norm of Mamba-2 layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int = 0,
    norm_before_gate: bool = False,
) -> Tensor:
    """RMSNorm of groups of columns with a gate (Dao & Gu, arXiv:2405.21060).

    Args:
        x, gate: `[..., D]`, one floating dtype.
        weight: `[D]` in that dtype, or None.
        eps: added to the mean square.
        group_size: columns that are normalized together; 0: all.
        norm_before_gate: True is `weight * norm(x) * silu(gate)` (Qwen3-Next), False is
            `weight * norm(x * silu(gate))` (Bamba).

    Returns:
        `[..., D]` in the dtype of `x`; the norm and the gate are in fp32, and the norm is rounded
        before the weight.
    """
    wide = compute_dtype(x)
    y, silu = x.to(wide), F.silu(gate.to(wide))
    if not norm_before_gate:
        y = y * silu
    width = group_size or x.shape[-1]
    grouped = y.reshape(*x.shape[:-1], -1, width)
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    y = grouped.flatten(-2).to(x.dtype)
    if weight is not None:
        y = y * weight
    return (y * silu).to(x.dtype) if norm_before_gate else y


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["eps"],
        params.get("group_size", 0),
        int(params.get("norm_before_gate", False)),
    )


OP = Op("gated_rms_norm", gated_rms_norm, gated_rms_norm, encode)
