"""The signatures of the ops that several packages serve, written once.

Each function here makes an op (of `hfpatch.ops`) of a call that takes what the packages take; what
an op's parameters may be for a package is said by its row's `accepts`, before anything is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
#: Called with (x, weight, bias, eps, weight_offset).
Norm = Callable[[Tensor, Tensor | None, Tensor | None, float, float], Any]
#: The same with (x, residual, …).
AddNorm = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float, float], Any]


def as_rms_norm(call: Norm) -> Callable[..., Any]:
    """The op `rms_norm`; where it rounds (`cast`) is the package's, for the probe to find."""

    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        return call(x, weight, bias, eps, weight_offset)

    return rms_norm


def as_layer_norm(call: Norm) -> Callable[..., Any]:
    """The op `layer_norm`, which has no offset of its weight."""

    def layer_norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Any:
        return call(x, weight, bias, eps, 0.0)

    return layer_norm


def as_add_rms_norm(call: AddNorm) -> Callable[..., Any]:
    """The op `add_rms_norm`."""

    def add_rms_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        return call(x, residual, weight, bias, eps, weight_offset)

    return add_rms_norm


def as_add_layer_norm(call: AddNorm) -> Callable[..., Any]:
    """The op `add_layer_norm`."""

    def add_layer_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        return call(x, residual, weight, bias, eps, 0.0)

    return add_layer_norm


def as_rope_qk(call: Callable[[Tensor, Tensor, Tensor, Tensor, int], Any]) -> Callable[..., Any]:
    """The op `rope_qk` of a call with (q, k, cos, sin, seq_dim)."""

    def rope_qk(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        seq_dim: int = 1,
        interleaved: bool = False,
        rotary_dim: int = 0,
        round_products: bool = False,
    ) -> Any:
        return call(q, k, cos, sin, seq_dim)

    return rope_qk
