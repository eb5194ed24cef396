"""Which of hfpatch's code ran: every call of a kernel and of a fused block, counted.

The counters stand between the adapters and the kernels, so they say what a call did, not what was
planned; they work in any thread and leave the dispatcher, autograd and the compiler alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from hfpatch.kernels import sources
from hfpatch.proof import probe, proofs


@dataclass
class Count:
    """Calls since `reset`."""

    kernels: int = 0
    blocks: int = 0
    formulas: int = 0  # what autograd records of a kernel without a gradient: PyTorch's operators

    def reset(self) -> None:
        self.kernels = self.blocks = self.formulas = 0

    def copy(self) -> Count:
        return Count(self.kernels, self.blocks, self.formulas)


COUNT = Count()
_COUNTING = threading.Lock()


def _counted(function: Callable[..., Any], name: str, training: bool = True) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            recorded = not training and torch.is_grad_enabled() and _requires_grad(args)
            counter = "formulas" if recorded else name
            with _COUNTING:  # threads call too, and a sum is no single step
                setattr(COUNT, counter, getattr(COUNT, counter) + 1)
        return function(*args, **kwargs)

    return call


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


@contextmanager
def installed() -> Iterator[Count]:
    """Counters in place for every proof made inside."""
    bind, bind_into, fill = sources.Kernel.bind, sources.Kernel.bind_into, proofs._fill_block
    prove = probe.prove_autocast

    def counted_fill(contract: Any, proof: Any, device: str) -> None:
        fill(contract, replace(proof, forward=_counted(proof.forward, "blocks")), device)

    def uncounted_proof(*args: Any, **kwargs: Any) -> Any:
        """Under autocast it is made at the first call."""
        before = COUNT.copy()
        try:
            return prove(*args, **kwargs)
        finally:
            COUNT.kernels, COUNT.blocks, COUNT.formulas = astuple(before)

    proofs.forget_proofs()
    sources.Kernel.bind = lambda kernel, params, training=False: _counted(  # type: ignore
        bind(kernel, params, training), "kernels", training
    )
    sources.Kernel.bind_into = lambda *a, **k: _counted(  # type: ignore[method-assign]
        bind_into(*a, **k), "kernels"
    )
    proofs._fill_block = counted_fill
    probe.prove_autocast = uncounted_proof
    try:
        yield COUNT
    finally:
        sources.Kernel.bind, sources.Kernel.bind_into = bind, bind_into  # type: ignore
        proofs._fill_block = fill
        probe.prove_autocast = prove
        proofs.forget_proofs()
