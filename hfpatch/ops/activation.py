"""`gelu` and `silu`: activations, fp32 inside, one rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.ops.base import Op, Tensor, compute_dtype

#: Names of activations; the codes are HFP_ACT_* of `kernel_src/hfpatch.h`.
ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "gelu_sigmoid": 2, "silu": 3, "relu": 4}
#: `approximate` of `gelu` to the activation's name.
APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation called `activation`, computed in fp32 (fp64 for fp64), rounded once."""
    wide = x.to(compute_dtype(x))
    if activation == "gelu":
        y = F.gelu(wide)
    elif activation == "gelu_tanh":
        y = F.gelu(wide, approximate="tanh")
    elif activation == "gelu_sigmoid":
        y = wide * torch.sigmoid(1.702 * wide)
    elif activation == "silu":
        y = F.silu(wide)
    elif activation == "relu":
        y = F.relu(wide)
    else:
        raise ValueError(f"`activation` must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    return y.to(x.dtype)


def activate_aten(x: Tensor, activation: str) -> Tensor:
    """`activate` on ATen's own kernels, which compute half types in fp32 and round once."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return activate(x, activation)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU (Hendrycks & Gimpel, arXiv:1606.08415).

    Args:
        x: any shape, floating.
        approximate: "none" (erf), "tanh", or "sigmoid" (`x * sigmoid(1.702 x)`).

    Returns:
        the shape and dtype of `x`.
    """
    return activate(x, APPROXIMATIONS[approximate])


def silu(x: Tensor) -> Tensor:
    """SiLU, `x * sigmoid(x)`, of the shape and dtype of `x`."""
    return activate(x, "silu")


def gelu_aten(x: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` on ATen's kernel."""
    return activate_aten(x, APPROXIMATIONS[approximate])


def encode_gelu(params: dict[str, Any]) -> tuple[Any, ...]:
    return (ACTIVATIONS[APPROXIMATIONS[params.get("approximate", "none")]],)


def encode_silu(params: dict[str, Any]) -> tuple[Any, ...]:
    return ()


GELU = Op("gelu", gelu, gelu_aten, encode_gelu, captured=True)
SILU = Op("silu", silu, F.silu, encode_silu, captured=True)
