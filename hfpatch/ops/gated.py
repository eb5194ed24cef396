"""`gated` and `gated_packed`: the product at the heart of GEGLU, SwiGLU and ReGLU."""

from __future__ import annotations

from typing import Any

from hfpatch.ops.activation import ACTIVATIONS, activate, activate_aten
from hfpatch.ops.base import Op, Tensor


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


def encode_gated(params: dict[str, Any]) -> tuple[Any, ...]:
    return (ACTIVATIONS[params.get("activation", "silu")],)


def encode_gated_packed(params: dict[str, Any]) -> tuple[Any, ...]:
    return (ACTIVATIONS[params.get("activation", "silu")], int(params.get("gate_first", True)))


GATED = Op("gated", gated, gated_aten, encode_gated)
GATED_PACKED = Op("gated_packed", gated_packed, gated_packed_aten, encode_gated_packed)
