"""Hooks on logits that a loss was made without: the loss's backward calls them.

FSDP2 and DeepSpeed put a hook on each result of a model, to know when its backward begins; they do
not look at the gradient. So a hook is given one that is made where the hook reads it. Where a hook
gives another, that one goes on to the head by PyTorch's operators, as in the original.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hfpatch.errors import HfpatchError
from hfpatch.proof.subject import only_by_operators

Hook = Callable[[Tensor], Any]


class DeferredGradient(Tensor):
    """A gradient that is made when somebody reads it."""

    _make: Callable[[], Tensor]
    _made: Tensor | None
    _version_made: int

    @staticmethod
    def of(make: Callable[[], Tensor], like: Place) -> DeferredGradient:
        found: DeferredGradient = Tensor._make_wrapper_subclass(
            DeferredGradient, like.shape, dtype=like.dtype, device=like.device
        )
        found._make, found._made, found._version_made = make, None, 0
        return found

    def made(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
            self._version_made = self._made._version
        return self._made

    def is_changed(self) -> bool:
        """Whether somebody wrote to it."""
        return self._made is not None and self._made._version != self._version_made

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.made())


def _plain(value: Any) -> Any:
    return tree_map_only(DeferredGradient, DeferredGradient.made, value)


#: Reading these needs no values.
_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
}


class Place(NamedTuple):
    """Of logits: how many steps they are behind the head's result, and what they are like."""

    steps: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Formula(NamedTuple):
    """What the logits of a loss are made by.

    product: of the head's tensors its result. steps: of these the loss's logits [N, V], fp32; each
    is given the head's tensors too. loss: of those the loss of each row, or the sum of all.
    bias: that of a step, which is taken for the head's where it has a gradient.
    """

    product: Callable[..., Tensor]
    steps: Sequence[Callable[[Tensor, Sequence[Tensor | None]], Tensor]]
    loss: Callable[[Tensor, bool], Tensor]
    bias: Tensor | None = None


class LogitsHooks:
    """The hooks on all logits that one loss was made of.

    is_alone: whether nothing but this loss was made of these logits. If more was, the gradient that
    a hook is due is the sum of several, which nobody has.
    """

    def __init__(self, formula: Formula) -> None:
        self._formula = formula
        self._hooks: OrderedDict[int, tuple[Place, Hook]] = OrderedDict()
        self._tensors: Sequence[Tensor | None] = ()
        self._check: Callable[[], None] = lambda: None
        self.is_alone = True

    def add(
        self,
        hook: Hook,
        place: Place,
        tensors: Sequence[Tensor | None],
        check: Callable[[], None],
        others: Sequence[LogitsHooks] = (),
    ) -> RemovableHandle:
        """tensors: the head's: hidden states, weight, bias, an adapter's two; `check` raises where
        one was written to since. others: the losses that were made of these logits besides."""
        handle = RemovableHandle(self._hooks, extra_dict=[o._hooks for o in others])
        for found in (self, *others):
            found._tensors, found._check = tensors, check
            found._hooks[handle.id] = place, hook
        return handle

    def __len__(self) -> int:
        return len(self._hooks)

    def run(self, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None] | None:
        """Call them. The gradients of the head's tensors that are `wanted` where a hook has changed
        the logits' gradient, None where none has.

        Args:
            grad: of the sum of the rows' losses, or of the loss of each.
        """
        hooks = self._in_turn()
        if only_by_operators(grad) or self._formula.bias is not None:
            return self._by_autograd(hooks, grad, wanted)
        changed: tuple[int, Tensor] | None = None
        for place, hook in hooks:

            def make(place: Place = place, behind: Any = changed) -> Tensor:
                return self._gradient(place.steps, behind, grad)

            given = DeferredGradient.of(make, place)
            found = hook(given)
            if found is not None and found is not given:
                changed = place.steps, found.made() if type(found) is DeferredGradient else found
            elif given.is_changed():
                changed = place.steps, given.made()
        if changed is None:
            return None
        own = self._own(wanted)
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            y = self._logits(own, changed[0])
        return _gradients(y, own, wanted, changed[1])

    def run_without_gradient(self) -> None:
        """Call them where the losses have none: PyTorch gives a hook None then, and takes no
        other."""
        for _, hook in self._in_turn():
            given: Any = None
            if hook(given) is not None:
                raise RuntimeError("can't replace a None gradient with a non-None value")

    def _in_turn(self) -> list[tuple[Place, Hook]]:
        """Autograd comes to what was made last first."""
        return sorted(self._hooks.values(), key=lambda pair: -pair[0].steps)

    def _gradient(self, steps: int, behind: tuple[int, Tensor] | None, grad: Tensor) -> Tensor:
        """Of the logits `steps` behind the head's result; `behind`: of those behind them, where a
        hook has changed it."""
        self._check_alone()
        with torch.autocast(grad.device.type, enabled=False):
            y = self._logits(self._own(()), steps).requires_grad_()
            with torch.enable_grad():
                end = y
                for step in self._formula.steps[steps : None if behind is None else behind[0]]:
                    end = step(end, self._tensors)
                if behind is None:
                    end, seed = self._formula.loss(end, grad.dim() == 0), grad
                else:
                    seed = behind[1]
        return torch.autograd.grad(end, y, seed)[0]

    def _by_autograd(
        self, hooks: Sequence[tuple[Place, Hook]], grad: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Where gradients of gradients may be asked for, or a batch: all by PyTorch's operators.
        The hooks are on logits that are made, and are called for the second gradients too."""
        self._check_alone()
        graph = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            own = [
                None if t is None else t.view_as(t) for t in self._own(wanted, detached=not graph)
            ]
            y: Any = self._formula.product(*own)
            for i, step in enumerate((*self._formula.steps, None)):
                for place, hook in hooks:
                    if place.steps == i:
                        y.register_hook(hook)
                if step is not None:
                    y = step(y, own)
            loss = self._formula.loss(y, grad.dim() == 0)
        return _gradients(loss, own, wanted, grad, graph)

    def _check_alone(self) -> None:
        if not self.is_alone:
            raise HfpatchError(
                "`logits`: a hook that was put on them behind the loss reads their gradient, of "
                "which that loss is only a part, for they were used elsewhere too; put it on "
                "before the loss is made, or leave the head alone with `exclude='lm_head'`, by the "
                "path that the report names"
            )

    def _own(self, wanted: Sequence[bool], detached: bool = True) -> list[Tensor | None]:
        """The head's tensors as others of the same values: with tied weights the hidden states are
        made of the head's, and what comes to it by them is not the head's."""
        self._check()
        tensors = list(self._tensors)
        if self._formula.bias is not None:
            tensors[2] = self._formula.bias
        own = [None if t is None else t.view_as(t) for t in tensors]
        if detached:
            own = [None if t is None else t.detach() for t in own]
            for t, want in zip(own, wanted, strict=False):
                if t is not None:
                    t.requires_grad_(want)
        return own

    def _logits(self, tensors: Sequence[Tensor | None], steps: int) -> Tensor:
        y = self._formula.product(*tensors)
        for step in self._formula.steps[:steps]:
            y = step(y, tensors)
        return y


def _gradients(
    result: Tensor,
    of: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grad: Tensor,
    graph: bool = False,
) -> list[Tensor | None]:
    """The gradients that are `wanted`; None for the others."""
    inputs = [t for t, want in zip(of, wanted, strict=True) if t is not None and want]
    found = iter(torch.autograd.grad(result, inputs, grad, create_graph=graph))
    return [next(found) if want else None for want in wanted]
