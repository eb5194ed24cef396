"""A model of the zoo and several inputs: what it computes before a patch, in fp64, and after.

Models and inputs are made on the CPU from a seed, so that they are the same on every device; fp64
runs there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo
from zoo_models import Inputs

from support.nearness import LIKE, Draw, draw

#: Other weights; the inputs of each share them.
SEEDS = 2
#: Models with a recurrence: in fp32 its decays carry an early rounding to every later token, so
#: that few independent parts make up a draw's error (docs/nearness.md).
RECURRENT = frozenset({"bamba", "falcon-h1", "kimi-linear", "qwen3-next"})


def draws_and_like(name: str, dtype: torch.dtype) -> tuple[int, int]:
    """How many draws decide about a model, and `like` of `nearness` for each of them.

    Half types need fewer: their bound was wider by far, and both sides round alike.
    """
    if dtype != torch.float32:
        return 12, LIKE
    return (48, 16) if name in RECURRENT else (24, LIKE)


def moved(value: Any, device: torch.device | str) -> Any:
    """`value` with every tensor in it, however deep, on `device`."""
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


class Sample:
    """One model with random weights, and `count` inputs of it, which `change` may alter; it runs on
    `device`."""

    def __init__(
        self,
        entry: zoo.Entry,
        dtype: torch.dtype,
        seed: int,
        count: int,
        change: Callable[[Inputs], Inputs] = lambda inputs: inputs,
        device: torch.device | str = "cpu",
    ) -> None:
        self.entry = entry
        self.model: Any = entry.build(dtype, seed)
        generators = (torch.Generator().manual_seed(1000 * seed + i) for i in range(count))
        self.inputs = [change(entry.inputs(self.model, dtype, g)) for g in generators]
        wide = zoo.in_fp64(self.model)
        self.truths = [entry.run(wide, zoo.cast_inputs(i, torch.float64)) for i in self.inputs]
        self.model.to(device)
        self.inputs = [moved(i, device) for i in self.inputs]
        self.originals = self.run()

    def run(self) -> list[torch.Tensor]:
        """The outputs of the model as it is now."""
        return [self.entry.run(self.model, i) for i in self.inputs]

    def draws(self) -> list[Draw]:
        """The errors of the model as it is now, and of the original."""
        rows = zip(self.run(), self.originals, self.truths, strict=True)
        return [draw(ours.cpu(), theirs.cpu(), truth) for ours, theirs, truth in rows]
