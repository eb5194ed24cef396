"""A block's linear layers: several as one product, GELU in the epilogue, where they are plain.

A layer is plain when calling it is `F.linear` with its own weight and nothing else: no LoRA, no
quantized weight, no hook, nobody's forward in its place. Any other layer is called as a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.patches.base import Tensor, is_hooked


def is_plain(linear: Any, x: Tensor) -> bool:
    """Whether calling `linear` on `x` is `F.linear` with its own weight and nothing else."""
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and linear.weight.dtype == x.dtype
        and "forward" not in linear.__dict__
        and not is_hooked(linear)
    )


def project(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """`tuple(linear(x) for linear in linears)`: one product where their weights stand packed.

    Returns views of one [..., N1 + N2 + …] tensor then, so their rows are strided.
    """
    packed = _packed(linears, x)
    if packed is None:
        return tuple(linear(x) for linear in linears)
    weight, bias = packed
    return torch.split(F.linear(x, weight, bias), [m.out_features for m in linears], -1)


def is_packed(linears: Sequence[Any], x: Tensor) -> bool:
    """Whether `project` of `x` is one product."""
    return _packed(linears, x) is not None


def project_into(out: Tensor, x: Tensor, linears: Sequence[Any]) -> None:
    """Write `project(x, linears)`, side by side, to `out`; for layers that `is_packed`.

    Args:
        out: [M, N1 + N2 + …], contiguous.
        x: [M, K].
        linears: layers whose weights stand packed.
    """
    packed = _packed(linears, x)
    assert packed is not None
    weight, bias = packed
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _packed(linears: Sequence[Any], x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """The weights and biases as one, if they lie one after the other in one storage."""
    first = linears[0]
    if not is_plain(first, x):  # what stands in its place may have none of its attributes
        return None
    rows, columns = 0, first.in_features
    with_bias = first.bias is not None
    weight_at = first.weight.data_ptr()
    bias_at = first.bias.data_ptr() if with_bias else 0
    size = first.weight.element_size()
    for linear in linears:
        if (
            not is_plain(linear, x)
            or (linear.bias is not None) != with_bias
            or linear.weight.data_ptr() != weight_at + rows * columns * size
            or (with_bias and linear.bias.data_ptr() != bias_at + rows * size)
        ):
            return None
        rows += linear.out_features
    if not (_holds(first.weight, rows * columns) and (not with_bias or _holds(first.bias, rows))):
        return None
    weight = first.weight.as_strided((rows, columns), (columns, 1))
    return weight, first.bias.as_strided((rows,), (1,)) if with_bias else None


def _holds(first: Tensor, elements: int) -> bool:
    """Whether the storage goes on behind `first`: neighbours in memory may be two storages."""
    end = first.storage_offset() + elements
    return first.is_contiguous() and first.untyped_storage().nbytes() >= end * first.element_size()


def gelu_product(linear: Any, x: Tensor, approximate: str) -> Tensor | None:
    """`gelu(linear(x))` with GELU in the epilogue of the product, where cuBLASLt offers it.

    Args:
        linear: the layer, as a module.
        x: [..., K].
        approximate: the GELU's formula; the epilogue computes "tanh".

    Returns:
        [..., N], or None where the modules must be called.
    """
    if not (
        x.is_cuda
        and x.dtype != torch.float32
        and approximate == "tanh"
        and linear.bias is not None
        and is_plain(linear, x)
    ):
        return None
    h = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
    return h.view(*x.shape[:-1], -1)


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' `FeedForward`: [activation with its projection, dropout, linear]."""
    first, dropout, second = ff.net[0], ff.net[1], ff.net[-1]
    if (
        len(ff.net) == 3
        and hasattr(first, "approximate")
        and not (dropout.training and dropout.p)
        and not any(is_hooked(m) for m in (ff, first, dropout))
    ):
        h = gelu_product(first.proj, x, first.approximate)
        if h is not None:
            return second(h)  # type: ignore[no-any-return]
    return ff(x)  # type: ignore[no-any-return]
