"""A user's own forward for a class, compared with the original on the user's sample inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from hfpatch.kernels.sources import Kernel
from hfpatch.proof.contract import Contract
from hfpatch.proof.copies import CannotReplicateError
from hfpatch.proof.replicas import copied_apart
from hfpatch.proof.subject import (
    Combo,
    Family,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    watched,
)
from hfpatch.proof.unchanged import Part, same_parts


class CustomSubject(Subject):
    """The whole module: the comparison runs on copies of it, with the user's inputs."""

    #: Whether `forward` is this project's own, so that `verify=False` spares it.
    own: ClassVar[bool] = False

    #: What the report calls it.
    op: ClassVar[str] = "custom"
    source: ClassVar[str] = "registered"

    def __init__(self, module: nn.Module, family: Any) -> None:
        super().__init__(module)
        self.family = family
        self.title = getattr(family.replacement, "__name__", "forward")

    def compare(self) -> tuple[float, float] | str:
        """(largest absolute, largest relative error), or why the replacement is wrong."""
        from hfpatch.foreign.process import Process

        before = Process.now()
        try:
            return self._compare(self.module)
        finally:
            before.changed()  # `sample` may draw

    def _compare(self, module: nn.Module) -> tuple[float, float] | str:
        from hfpatch.foreign.forward_watch import Surrounded
        from hfpatch.foreign.forwards import Different, compare_forwards

        if Surrounded(module).now(module) is None:
            raise CannotReplicateError(
                "somebody's hook or forward is on a module inside, which a comparison would call"
            )
        inputs: Any = self.family.sample(copied_apart(module, "it"))
        if not isinstance(inputs, tuple):
            return f"`sample` returned {type(inputs).__name__}, expected a tuple of inputs"
        try:
            return compare_forwards(
                module,
                type(module).forward,
                self.family.replacement,
                inputs,
                {},
                gradients=self.family.differentiable,
            )
        except Different as e:
            return f"the registered `forward` is wrong: {e}"

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.module), id(self.family))

    def forward(self, original: Forward, contract: Contract) -> Forward:
        from hfpatch.foreign.forward_watch import ForwardWatch, Surrounded

        around = Surrounded(self.module)
        watch = ForwardWatch(contract.name, original, self.family.replacement, around)
        trains = contract.training
        cls, own = class_of(self.module), coded(original)
        code = own.__code__
        # whether the replacement reads them, or calls what is inside, nobody knows
        parts = [
            Part(m, tuple(path.split(".")) if path else (), called=True)
            for path, m in self.module.named_modules()
        ]
        same = same_parts(parts, ())

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                return type(self).forward(self, *args, **kwargs)
            if not same(self):
                contract.changed()
            elif watched():
                pass
            elif trains or not torch.is_grad_enabled():
                return watch.call(self, args, kwargs)
            else:
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
