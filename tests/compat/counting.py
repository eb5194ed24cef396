"""Which of hfpatch's code ran: every call of a kernel and of a fused block, counted.

The counters stand between the adapters and the kernels, so they say what a call did, not what was
planned; they work in any thread and leave the dispatcher, autograd and the compiler alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from hfpatch.kernels import sources
from hfpatch.proof import probe, proofs
from hfpatch.regions import kind, offer


@dataclass
class Count:
    """Calls since `reset`."""

    kernels: int = 0  # outside of fused blocks
    inside: int = 0  # of them, whose number depends on what their layers are
    blocks: int = 0
    formulas: int = 0  # what autograd records of a kernel without a gradient: PyTorch's operators

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def copy(self) -> Count:
        return replace(self)

    def set(self, values: Iterable[int]) -> None:
        """The counters, in their order."""
        self.__init__(*values)  # type: ignore[misc]

    @property
    def some(self) -> bool:
        """Whether a kernel ran."""
        return bool(self.kernels or self.inside)


class _Now(threading.local):
    fused = 0  # blocks that this thread is in


COUNT = Count()
_COUNTING = threading.Lock()
_now = _Now()


def _counted(function: Callable[..., Any], name: str, training: bool = True) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            recorded = not training and torch.is_grad_enabled() and _requires_grad(args)
            counter = "formulas" if recorded else name
            if counter == "kernels" and _now.fused:
                counter = "inside"
            with _COUNTING:  # threads call too, and a sum is no single step
                setattr(COUNT, counter, getattr(COUNT, counter) + 1)
        return function(*args, **kwargs)

    return call


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def _counted_block(function: Callable[..., Any]) -> Callable[..., Any]:
    counted = _counted(function, "blocks")

    def call(*args: Any, **kwargs: Any) -> Any:
        _now.fused += 1
        try:
            return counted(*args, **kwargs)
        finally:
            _now.fused -= 1

    return call


@contextmanager
def installed() -> Iterator[Count]:
    """Counters in place for every proof made inside."""
    bind, bind_into, fill = sources.Kernel.bind, sources.Kernel.bind_into, proofs._fill_block
    prove, decide, emit = probe.prove_autocast, kind.Kind.decide, kind.emit

    def counted_emit(*args: Any) -> Any:
        run, source = emit(*args)
        return _counted_block(run), source

    def counted_decision(self: Any, block: Any, call: Any, tensors: Any, original: Any) -> Any:
        """The call that decides counts as the fused one that it found, else as what the original
        called: not what its proof did."""
        before, decided, own = astuple(COUNT), len(self.decided), [0, 0, 0, 0]

        def counted_original() -> Any:
            first = astuple(COUNT)
            result = original()
            own[:] = [n - m for n, m in zip(astuple(COUNT), first, strict=True)]
            return result

        result = decide(self, block, call, tensors, counted_original)
        fused = len(self.decided) > decided
        # the proof's own runs have kernels inside, and are no calls of the block
        COUNT.set([0, 1, 1, 0] if fused else own)
        COUNT.set(n + m for n, m in zip(before, astuple(COUNT), strict=True))
        return result

    def counted_fill(contract: Any, proof: Any, device: str) -> None:
        fill(contract, replace(proof, forward=_counted_block(proof.forward)), device)

    def uncounted_proof(*args: Any, **kwargs: Any) -> Any:
        """Under autocast it is made at the first call."""
        before = COUNT.copy()
        try:
            return prove(*args, **kwargs)
        finally:
            COUNT.set(astuple(before))

    proofs.forget_proofs()
    offer.forget()
    sources.Kernel.bind = lambda kernel, params, training=False: _counted(  # type: ignore
        bind(kernel, params, training), "kernels", training
    )
    sources.Kernel.bind_into = lambda *a, **k: _counted(  # type: ignore[method-assign]
        bind_into(*a, **k), "kernels"
    )
    proofs._fill_block = counted_fill
    probe.prove_autocast = uncounted_proof
    kind.Kind.decide, kind.emit = counted_decision, counted_emit  # type: ignore[method-assign]
    try:
        yield COUNT
    finally:
        sources.Kernel.bind, sources.Kernel.bind_into = bind, bind_into  # type: ignore
        proofs._fill_block = fill
        probe.prove_autocast = prove
        kind.Kind.decide, kind.emit = decide, emit  # type: ignore[method-assign]
        proofs.forget_proofs()
        offer.forget()
