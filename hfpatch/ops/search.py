"""`argmax` and `topk`: where the greatest values of a row are."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.ops.base import Op, Tensor


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` greatest values of the last dimension and their indices.

    Args:
        x: `[..., D]`, any floating dtype.
        k: from 1 to `D`.

    Returns:
        `[..., k]` in the dtype of `x`, descending, and `[..., k]` int64. NaN is the greatest, and
        equal values (-0 and 0 are) come in the order of their indices.
    """
    # A stable sort moves no -0 behind 0 and keeps the order of what is equal.
    _, order = torch.sort(x, dim=-1, descending=True, stable=True)
    indices = order[..., :k].contiguous()
    return x.gather(-1, indices), indices


def argmax(x: Tensor) -> Tensor:
    """The first index of the greatest value of the last dimension, `[...]` int64.

    Args:
        x: `[..., D]`, any floating dtype. NaN is the greatest.
    """
    nan = x.isnan()
    # A NaN makes amax NaN, which equals nothing.
    top = torch.where(nan.any(-1, keepdim=True), nan, x == x.amax(-1, keepdim=True))
    return top.to(torch.uint8).argmax(-1)


def encode_topk(params: dict[str, Any]) -> tuple[Any, ...]:
    return (params["k"],)


def encode_argmax(params: dict[str, Any]) -> tuple[Any, ...]:
    return ()


ARGMAX = Op("argmax", argmax, argmax, encode_argmax, direct=False)
TOPK = Op("topk", topk, topk, encode_topk)
