"""`add_gelu`, `add_silu`: bias and activation; `add_bias`; `mul_add`: product and sum."""

from __future__ import annotations

from typing import Any

from hfpatch.ops.activation import APPROXIMATIONS, activate, activate_aten, encode_gelu, encode_silu
from hfpatch.ops.adaln import broadcast, encode_gate_residual
from hfpatch.ops.base import Example, Op, Tensor, compute_dtype


def add_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(x + bias)`, the sum rounded to the dtype first.

    Args:
        x: `[..., D]`, floating.
        bias: `[D]`, the dtype of `x`.
        approximate: as in `gelu`.

    Returns:
        the shape and dtype of `x`.
    """
    return activate(x + bias, APPROXIMATIONS[approximate])


def add_silu(x: Tensor, bias: Tensor) -> Tensor:
    """`silu(x + bias)`, the sum rounded to the dtype first; `bias`: `[D]`, the dtype of `x`."""
    return activate(x + bias, "silu")


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """`x + bias + residual`, in fp32 and rounded once.

    Args:
        x: `[..., D]`, floating.
        bias: `[D]`, the dtype of `x`.
        residual: the shape and dtype of `x`, or None.

    Returns:
        the shape and dtype of `x`.
    """
    wide = compute_dtype(x)
    y = x.to(wide) + bias.to(wide)
    return (y if residual is None else y + residual.to(wide)).to(x.dtype)


def encode_add_bias(params: dict[str, Any]) -> tuple[Any, ...]:
    return ()


def mul_add(a: Tensor, b: Tensor, c: Tensor, cast: str = "input") -> Tensor:
    """`a * b + c`.

    Args:
        a: `[..., D]`, floating.
        b, c: each like `scale` of `norm_modulate`, one dtype.
        cast: "input" rounds the product and the sum to the promoted dtype; "none" rounds once, to
            the dtype of `a`.

    Returns:
        the shape of `a`.
    """
    b, c = broadcast(b, a), broadcast(c, a)
    if cast == "input":
        return a * b + c
    wide = compute_dtype(a, b, c)
    return (a.to(wide) * b.to(wide) + c.to(wide)).to(a.dtype)


def add_gelu_aten(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`add_gelu` on ATen's kernels."""
    return activate_aten(x + bias, APPROXIMATIONS[approximate])


def add_silu_aten(x: Tensor, bias: Tensor) -> Tensor:
    """`add_silu` on ATen's kernels."""
    return activate_aten(x + bias, "silu")


ADD_BIAS = Op(
    "add_bias",
    add_bias,
    add_bias,
    encode_add_bias,
    example=Example(
        "x R D; bias D; residual R D", "videos", lambda x, bias, residual: x + bias + residual
    ),
)
ADD_GELU = Op("add_gelu", add_gelu, add_gelu_aten, encode_gelu, captured=True)
ADD_SILU = Op("add_silu", add_silu, add_silu_aten, encode_silu, captured=True)
MUL_ADD = Op("mul_add", mul_add, mul_add, encode_gate_residual, captured=True)
