"""Products with low-rank adapters (LoRA) inside the halves of a decoder layer, and their gradients.

`y = x W^T + b + scale (x A^T) B^T`. Where A and B are of the dtype that the product is computed in,
the adapter's part is added by the matrix product itself. PEFT keeps adapters of half models in
fp32: without autocast it widens x, computes the adapter's part in fp32, adds it to the rounded
product and rounds the sum. The same happens here, some rows at a time: neither the wide x nor the
wide sum is made as a whole, and only x A^T is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Elements of the widest tensor of some rows: 32 MiB of fp32, which stay in a large GPU's cache.
_PART = 1 << 23


class Pair(NamedTuple):
    """a [r, in], b [out, r]: an adapter. dtype: what its products are computed in."""

    a: Tensor
    b: Tensor
    scale: float
    dtype: torch.dtype


def pairs(
    tensors: Any, scales: tuple[float, ...], cast: torch.dtype | None, count: int
) -> list[Pair | None]:
    """The adapter of each of `count` products, None where there is none.

    Args:
        tensors: A and B of each in turn, or nothing.
        cast: what autocast casts them to; None: it is off, and each has its own dtype.
    """
    if not tensors:
        return [None] * count
    sides = zip(tensors[::2], tensors[1::2], scales, strict=True)
    return [None if a is None else Pair(a, b, s, cast or a.dtype) for a, b, s in sides]


def adapt(out: Tensor, x: Tensor, pair: Pair | None) -> Tensor | None:
    """Add an adapter's part to a product `out` [T, out] of `x` [T, in], in place; gives x A^T."""
    low = low_of(x, pair)
    add(out, low, pair)
    return low


def low_of(x: Tensor, pair: Pair | None) -> Tensor | None:
    """x A^T [T, r]."""
    if pair is None:
        return None
    a = pair.a.to(pair.dtype)
    if x.dtype == pair.dtype:
        return torch.mm(x, a.t())
    low = x.new_empty(len(x), len(a), dtype=pair.dtype)
    for part in _parts(x.shape):
        torch.mm(x[part].to(pair.dtype), a.t(), out=low[part])
    return low


def add(out: Tensor, low: Tensor | None, pair: Pair | None) -> None:
    """out += scale low B^T."""
    if low is None or pair is None:
        return
    b = pair.b.to(pair.dtype)
    if out.dtype == pair.dtype:
        out.addmm_(low, b.t(), alpha=pair.scale)
        return
    for part in _parts(out.shape):
        out[part].add_(torch.mm(low[part], b.t()), alpha=pair.scale)


def backward(
    d: Tensor, x: Tensor | None, low: Tensor | None, pair: Pair | None, need: Any, dx: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and B, in their dtypes; that of x is added to `dx`.

    Args:
        d: the gradient of the product, [T, out].
        x: only where A's gradient is needed.
        need: whether those of A and B are.
    """
    if low is None or pair is None:
        return None, None
    a, b = pair.a.to(pair.dtype), pair.b.to(pair.dtype)
    x = x if need[0] else None
    if d.dtype == pair.dtype:
        d_low = torch.mm(d, b).mul_(pair.scale)
        d_b = torch.mm(d.t(), low).mul_(pair.scale).to(pair.b.dtype) if need[1] else None
        d_a = None if x is None else torch.mm(d_low.t(), x).to(pair.a.dtype)
        if dx is not None:
            dx.addmm_(d_low, a)
        return d_a, d_b
    d_a = None if x is None else torch.zeros_like(a)
    d_b = torch.zeros_like(b) if need[1] else None
    for part in _parts(d.shape, a.shape):
        wide = d[part].to(pair.dtype)
        if d_b is not None:
            d_b.addmm_(wide.t(), low[part], alpha=pair.scale)
        d_low = torch.mm(wide, b).mul_(pair.scale)
        if d_a is not None and x is not None:
            d_a.addmm_(d_low.t(), x[part].to(pair.dtype))
        if dx is not None:
            dx[part].add_(torch.mm(d_low, a))
    return d_a, d_b


def _parts(*shapes: torch.Size) -> Iterator[slice]:
    """The rows of the first, some at a time, so that no tensor of a part is large."""
    step = max(1, _PART // max(1, *(shape[1] for shape in shapes)))
    for start in range(0, shapes[0][0], step):
        yield slice(start, start + step)


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, pair: Pair | None) -> Tensor:
    """The whole product by PyTorch's operators, for gradients of gradients."""
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if pair is None:
        return y
    a, b = pair.a.to(pair.dtype), pair.b.to(pair.dtype)
    more = (x.to(pair.dtype) @ a.t()) @ b.t()
    return (y + pair.scale * more).to(y.dtype)
