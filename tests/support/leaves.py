"""Single modules that a kernel takes over: what one computes in fp64, and the errors of both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from torch import nn

import hfpatch
from support.nearness import Draw, Verdict, allowance, draw, verdict

#: Rows of one input, at each of several scales: eps counts at the smallest.
ROWS, SCALES = 48, (1.0, 0.02, 30.0)
DRAWS = 12
#: `like` of `nearness`: fewer than the elements, which are rounded one by one.
LIKE = 3000
#: Norms alone: one input, and roundings that can be counted.
NORMS = frozenset({"rms_norm", "layer_norm"})


@dataclass(frozen=True)
class Leaf:
    """A module of a patched model, and the same of the model before."""

    name: str
    module: nn.Module
    original: nn.Module

    def draws(self, dtype: torch.dtype) -> list[Draw]:
        """Each row counts alike, whatever its scale."""
        weight = self.module._parameters.get("weight")
        width = 96 if weight is None else weight.shape[-1]
        truth_of = zoo.norms_in_fp64_(copy.deepcopy(self.original).double())
        found = []
        for seed in range(DRAWS):
            g = torch.Generator().manual_seed(seed)
            rows = [torch.randn(ROWS, width, generator=g) * scale for scale in SCALES]
            x = torch.cat(rows).to(dtype)
            with torch.no_grad():
                truth = truth_of(x.double())
                size = truth.norm(dim=-1, keepdim=True)
                ours, theirs = self.module(x), self.original(x)
                assert ours.dtype == theirs.dtype
                found.append(draw(ours / size, theirs / size, truth / size))
        return found

    def verdict(self, dtype: torch.dtype) -> Verdict:
        """Of a single op no rounding to a half type is allowed besides the original's."""
        return verdict(self.draws(dtype), allowance(dtype, roundings=0), LIKE)


def leaves(name: str, dtype: torch.dtype, **settings: Any) -> Iterator[Leaf]:
    """One leaf for each class and formula of a zoo model that is patched with these settings."""
    model = zoo.ENTRIES[name].build(dtype)
    plain = copy.deepcopy(model)
    seen = set()
    for swap in hfpatch.apply(model, **settings).swaps:
        key = (swap.class_name, swap.formula)
        if swap.op in NORMS and key not in seen:
            seen.add(key)
            yield Leaf(
                f"{swap.class_name}, {swap.formula}",
                model.get_submodule(swap.path),
                plain.get_submodule(swap.path),
            )
