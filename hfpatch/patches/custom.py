"""A user's own forward for a class, compared with the original on the user's sample inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hfpatch.patches.base import Combo, Family, Formula, Forward, Subject, Tensor
from hfpatch.patches.contract import Contract
from hfpatch.sources import Kernel


class CustomSubject(Subject):
    """The whole module, as it is: the comparison runs on it, with the user's inputs."""

    #: How far the replacement may be from the original, in epsilons of the output's dtype relative
    #: to the largest value: a block's worth of roundings.
    limit: ClassVar[float] = 64.0
    #: What the report calls it.
    op: ClassVar[str] = "custom"
    source: ClassVar[str] = "registered"

    def __init__(self, module: nn.Module, family: Any) -> None:
        super().__init__(module)
        self.family = family
        self.title = getattr(family.replacement, "__name__", "forward")

    def compare(self) -> tuple[float, float] | str:
        """(largest absolute, largest relative error), or why the replacement is wrong."""
        with torch.no_grad():
            inputs: Any = self.family.sample(self.module)
            if not isinstance(inputs, tuple):
                return f"`sample` returned {type(inputs).__name__}, expected a tuple of inputs"
            expected = pytree.tree_leaves(type(self.module).forward(self.module, *inputs))
            got = pytree.tree_leaves(self.family.replacement(self.module, *inputs))
        if len(expected) != len(got):
            return f"`forward` returned {len(got)} values, the original {len(expected)}"
        worst_abs = worst_rel = 0.0
        for a, b in zip(got, expected, strict=True):
            if not isinstance(b, Tensor) or not b.is_floating_point():
                continue
            if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
                return f"`forward` returned {_signature(a)}, the original {_signature(b)}"
            error = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
            relative = error / max(b.double().abs().max().item(), 1e-30) if a.numel() else 0.0
            if not relative <= self.limit * torch.finfo(b.dtype).eps:
                return f"`forward` differs from the original by {relative:.2e} (relative)"
            worst_abs, worst_rel = max(worst_abs, error), max(worst_rel, relative)
        return worst_abs, worst_rel

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.module), id(self.family))

    def forward(self, original: Forward, contract: Contract) -> Forward:
        replacement = self.family.replacement
        trains = contract.training

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if trains or not torch.is_grad_enabled():
                return replacement(self, *args, **kwargs)
            contract.needs_grad()
            return original(self, *args, **kwargs)

        return forward

    # A custom forward is proven by `compare`; it has no formulas of its own.
    def formulas(self) -> list[Formula]:
        return []

    def combos(self) -> list[Combo]:
        return []

    def main_combo(self) -> Combo:
        return Combo(torch.float32, None)

    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        return self.module

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        raise NotImplementedError("a custom forward is compared on the user's sample inputs")

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        raise NotImplementedError("a custom forward is called as it is")


def _signature(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return type(value).__name__


class CustomFamily(Family):
    name = "custom"
    rank = 0

    def __init__(
        self,
        pattern: re.Pattern[str],
        replacement: Callable[..., Any],
        sample: Callable[[nn.Module], tuple[Any, ...]],
        differentiable: bool,
    ) -> None:
        self.pattern = pattern
        self.replacement = replacement
        self.sample = sample
        self.differentiable = differentiable

    def examine(self, module: nn.Module) -> Subject | str | None:
        return CustomSubject(module, self)
