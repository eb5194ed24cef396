"""Kernels that are wrong in one way each: what the criterion of `nearness` must find.

Each takes an op's formula (`hfpatch.ops`) and breaks it; `registered` makes it a kernel that passes
for this project's own with `verify=False`: a fault behind the proof, which others' kernels never
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import hfpatch
from hfpatch.kernels import sources
from hfpatch.ops import OPS

#: Norms: every mutation has a meaning there.
OPS_MUTATED = ("rms_norm", "layer_norm")
Kernel = Callable[..., Tensor]


def exact(op: str) -> Kernel:
    """The formula: nothing is wrong."""
    return OPS[op].reference


def wrong_eps(op: str) -> Kernel:
    def kernel(*tensors: Any, eps: float, **params: Any) -> Tensor:
        return OPS[op].reference(*tensors, eps=eps + 1e-3, **params)  # type: ignore[no-any-return]

    return kernel


def wrong_offset(op: str) -> Kernel:
    """The weight 1e-3 too large, where fp32 holds that; roundings as they were."""

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, **params: Any) -> Tensor:
        dtype = OPS[op].reference(x, weight, bias, **params).dtype
        one = torch.ones(x.shape[-1:], dtype=x.dtype) if weight is None else torch.ones_like(weight)
        wrong = (one if weight is None else weight).float() + 1e-3
        shift = None if bias is None else bias.float()
        if params.get("cast", "none") == "none":
            y = OPS[op].reference(x, wrong, shift, **params)
        else:  # the normalized value is rounded before the weight
            y = OPS[op].reference(x, one, None, **params).float() * wrong
            y = y if shift is None else y + shift
        return y.to(dtype)

    return kernel


def one_more_rounding(op: str) -> Kernel:
    """To a half type: the input is scaled by 0.7 first, which a norm undoes, and rounded; in fp32
    to fp16. One more to fp32 is what `allowance` allows."""

    def kernel(x: Tensor, *rest: Any, eps: float, **params: Any) -> Tensor:
        half = torch.float16 if x.dtype == torch.float32 else x.dtype
        scaled = (x.float() * 0.7).to(half).to(x.dtype)
        return OPS[op].reference(scaled, *rest, eps=eps * 0.49, **params)  # type: ignore[no-any-return]

    return kernel


def sums_in_bf16(op: str) -> Kernel:
    """The row is added up in bf16, one element after the other."""

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, **params: Any) -> Tensor:
        y = OPS[op].reference(x, weight, bias, **params)
        wide, right = x.float(), x.float()
        if op == "layer_norm":
            wide, right = wide - _mean(wide), right - right.mean(-1, keepdim=True)
        square = right.pow(2).mean(-1, keepdim=True)
        factor = torch.rsqrt((_mean(wide * wide) + params["eps"]) / (square + params["eps"]))
        shift = 0.0 if bias is None else bias.float()
        return ((y.float() - shift) * factor + shift).to(y.dtype)

    return kernel


def _mean(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., :1], dtype=torch.bfloat16)
    for column in x.unbind(-1):
        total += column.unsqueeze(-1).bfloat16()
    return total.float() / x.shape[-1]


MUTATIONS: dict[str, Callable[[str], Kernel]] = {
    "one more rounding": one_more_rounding,
    "sums in bf16": sums_in_bf16,
    "eps wrong by 1e-3": wrong_eps,
    "offset wrong by 1e-3": wrong_offset,
}


@contextmanager
def registered(make: Callable[[str], Kernel]) -> Iterator[dict[str, Any]]:
    """The settings of `apply` with which the mutated kernels, and no others, are used."""
    added = [
        hfpatch.register(op=op, kernel=make(op), name="mutated", devices="cpu")
        for op in OPS_MUTATED
    ]
    kernels = sources._registered
    before = {f"{op}:mutated": kernels[f"{op}:mutated"] for op in OPS_MUTATED}
    kernels |= {name: replace(kernel, own=True) for name, kernel in before.items()}
    try:
        yield {
            "kernels": dict.fromkeys(OPS_MUTATED, "mutated") | {"*": None},
            "verify": False,
        }
    finally:
        kernels |= before
        for one in added:
            one.remove()
