"""`gated_rms_norm`: the gated, grouped norm of Mamba-2 layers; also groups without a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.adaln import MODULATION_CASTS
from hfpatch.ops.base import Op, Tensor, compute_dtype

#: Activations of the gate; the codes are HFP_GATE_* of `kernel_src/hfpatch.h`.
GATES = {"silu": 0, "sigmoid": 1}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int = 0,
    norm_before_gate: bool = False,
    cast: str = "input",
    gate_activation: str = "silu",
) -> Tensor:
    """RMSNorm of groups of columns with a gate (Dao & Gu, arXiv:2405.21060), or without one.

    Args:
        x, gate: `[..., D]`, one floating dtype. Without a gate: `weight * norm(x)`.
        weight: `[D]` or None; in that dtype, or any under `cast="none"`.
        eps: added to the mean square.
        group_size: columns that are normalized together; 0: all.
        norm_before_gate: True is `weight * norm(x) * act(gate)` (Qwen3-Next), False is
            `weight * norm(x * act(gate))` (Bamba).
        cast: "input" rounds the norm to the dtype of `x` before the weight, and the product with
            the weight before the gate; "none" rounds once, at the end (Falcon-H1, Kimi Linear).
        gate_activation: "silu" or "sigmoid".

    Returns:
        `[..., D]` in the dtype of `x`; the norm and the gate are in fp32.
    """
    wide = compute_dtype(x)
    dtype = x.dtype if cast == "input" else wide
    y = x.to(wide)
    factor = None if gate is None else _GATES[gate_activation](gate.to(wide))
    if factor is not None and not norm_before_gate:
        y = y * factor
    width = group_size or x.shape[-1]
    grouped = y.reshape(*x.shape[:-1], x.shape[-1] // max(width, 1), width)  # not -1: of no rows
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    y = grouped.flatten(-2).to(dtype)
    if weight is not None:
        y = y * (weight if cast == "input" else weight.to(dtype))
    last = factor is not None and norm_before_gate
    if factor is not None and last:
        y = y * factor
    return y.to(x.dtype) if last or cast == "none" else y


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["eps"],
        params.get("group_size", 0),
        int(params.get("norm_before_gate", False)),
        MODULATION_CASTS[params.get("cast", "input")],
        GATES[params.get("gate_activation", "silu")],
    )


OP = Op("gated_rms_norm", gated_rms_norm, gated_rms_norm, encode)
