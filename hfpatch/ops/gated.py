"""`gated`, `gated_packed`, `gated_clamped`: the product at the heart of GEGLU, SwiGLU, ReGLU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hfpatch.ops.activation import ACTIVATIONS, activate, activate_aten
from hfpatch.ops.base import Op, Tensor, compute_dtype


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """`act(gate) * up` (Shazeer, arXiv:2002.05202).

    `act(gate)` is rounded to the dtype before the product, as eager PyTorch does.

    Args:
        gate, up: one shape, one floating dtype.
        activation: "gelu", "gelu_tanh", "gelu_sigmoid", "silu" or "relu".

    Returns:
        the shape and dtype of `gate`.
    """
    return activate(gate, activation) * up


def gated_packed(x: Tensor, activation: str = "silu", gate_first: bool = True) -> Tensor:
    """`gated` of the two halves of the last dimension.

    Args:
        x: `[..., 2 D]`, floating.
        activation: as in `gated`.
        gate_first: whether the gate is the first half (Phi-3) or the second (diffusers).

    Returns:
        `[..., D]` in the dtype of `x`.
    """
    first, second = x.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    return activate(gate, activation) * up


def gated_aten(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """`gated` on ATen's kernels."""
    return activate_aten(gate, activation) * up


def gated_packed_aten(x: Tensor, activation: str = "silu", gate_first: bool = True) -> Tensor:
    """`gated_packed` on ATen's kernels."""
    first, second = x.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    return activate_aten(gate, activation) * up


def clamped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """`x` between bounds, None being none: NaN stays NaN, and where `low > high` all are `high`."""
    return x if low is None and high is None else x.clamp(low, high)


def _clamping(act: Callable[[Tensor, str], Tensor]) -> Callable[..., Tensor]:
    """`gated_clamped`, activated by a formula or by ATen's kernels."""

    def gated_clamped(
        gate: Tensor,
        up: Tensor,
        activation: str = "silu",
        gate_min: float | None = None,
        gate_max: float | None = None,
        up_min: float | None = None,
        up_max: float | None = None,
        up_offset: float = 0.0,
        alpha: float = 1.0,
        clamp_activated: bool = False,
    ) -> Tensor:
        """`act(clamp(gate)) * (clamp(up) + up_offset)`: DeepSeek-V4, GPT-OSS, MiniMax-M3, Step-3.7.

        What is activated, the sum and the product are each rounded to the dtype, as eager PyTorch
        does.

        Args:
            gate, up: one shape, one floating dtype.
            activation: as in `gated`.
            gate_min, gate_max: bounds of `gate`, or None.
            up_min, up_max: bounds of `up`, or None.
            up_offset: added to `up` after it is clamped (GPT-OSS: 1).
            alpha: of "silu", which is `x * sigmoid(alpha * x)`; 1 with the others.
            clamp_activated: whether the bounds of `gate` are those of `act(gate)` instead
                (Step-3.7).

        Returns:
            the shape and dtype of `gate`.
        """
        if not clamp_activated:
            gate = clamped(gate, gate_min, gate_max)
        if alpha == 1.0:
            activated = act(gate, activation)
        elif activation == "silu":
            wide = gate.to(compute_dtype(gate))
            activated = (wide * torch.sigmoid(alpha * wide)).to(gate.dtype)
        else:
            raise ValueError(f"`alpha` must be 1 unless `activation` is 'silu', got {alpha}")
        if clamp_activated:
            activated = clamped(activated, gate_min, gate_max)
        up = clamped(up, up_min, up_max)
        return activated * (up if up_offset == 0 else up + up_offset)

    return gated_clamped


gated_clamped = _clamping(activate)
gated_clamped_aten = _clamping(activate_aten)


def encode_gated(params: dict[str, Any]) -> tuple[Any, ...]:
    return (ACTIVATIONS[params.get("activation", "silu")],)


def encode_gated_packed(params: dict[str, Any]) -> tuple[Any, ...]:
    return (ACTIVATIONS[params.get("activation", "silu")], int(params.get("gate_first", True)))


def encode_gated_clamped(params: dict[str, Any]) -> tuple[Any, ...]:
    bounds = [
        none if (bound := params.get(name)) is None else float(bound)
        for name, none in (
            ("gate_min", -math.inf),
            ("gate_max", math.inf),
            ("up_min", -math.inf),
            ("up_max", math.inf),
        )
    ]
    numbers = (float(params.get("alpha", 1.0)), *bounds, float(params.get("up_offset", 0.0)))
    return (*encode_gated(params), *numbers, int(params.get("clamp_activated", False)))


GATED = Op("gated", gated, gated_aten, encode_gated, captured=True)
GATED_PACKED = Op("gated_packed", gated_packed, gated_packed_aten, encode_gated_packed)
GATED_CLAMPED = Op(
    "gated_clamped", gated_clamped, gated_clamped_aten, encode_gated_clamped, captured=True
)
