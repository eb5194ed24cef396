"""Who an op is measured against, and how each of them is called."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from hfpatch.bench import liger
from hfpatch.bench.cases import Case, Function
from hfpatch.bench.timing import Call

Tensor = torch.Tensor

#: In the order of the tables. `hfpatch` is always measured.
PEERS = ("eager", "torch", "compile", "max-autotune", "liger")
OURS = "hfpatch"

#: CUDA graphs are the benchmark's own.
_MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_DEFAULT = {"cuda": ("eager", "torch", "compile", "liger"), "cpu": ("eager", "torch")}


def choose(wanted: list[str] | None, device: str) -> tuple[str, ...]:
    """The peers of a run, from what `--peer` was given.

    Raises:
        ValueError: a peer that is none, or one that cannot run here; says which are.
    """
    if not wanted:
        return tuple(p for p in _DEFAULT[device] if _missing(p, device) is None)
    names = PEERS if "all" in wanted else tuple(p for p in PEERS if p in wanted)
    unknown = sorted(set(wanted) - {*PEERS, "all"})
    if unknown:
        raise ValueError(f"--peer {unknown[0]}: expected one of {', '.join(PEERS)} or all")
    if "all" in wanted:
        return tuple(p for p in names if _missing(p, device) is None)
    for name in names:
        why = _missing(name, device)
        if why is not None:
            raise ValueError(f"--peer {name}: {why}")
    return names


def _missing(peer: str, device: str) -> str | None:
    if peer == "liger":
        if device == "cpu":
            return "Liger's kernels are Triton's and need a GPU"
        if not liger.available():
            return "the package `liger-kernel` is not installed"
    if peer in ("compile", "max-autotune") and device == "cuda" and not _has("triton"):
        return "torch.compile needs the package `triton` on a GPU"
    return None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def function_of(peer: str, case: Case, package: Any) -> Function | None:
    """What `peer` runs for `case`; None if it has nothing of the kind."""
    if peer == OURS:
        return functools.partial(case.ours, package)
    if peer == "torch":
        return case.torch
    if peer == "liger":
        return case.liger
    if peer in _MODES:
        # the graph of a gradient's forward is kept: the gradient runs many times
        torch._functorch.config.donated_buffer = False
        compiled: Function = torch.compile(case.eager, dynamic=False, mode=_MODES[peer])
        return compiled
    return case.eager


def prepare(peer: str, case: Case, fn: Function, inputs: tuple[Tensor, ...]) -> Call:
    """`fn` on these inputs as a call without arguments, the forward of a backward done already."""
    if peer == "liger" or (peer == OURS and case.in_place):  # written over
        inputs = tuple(t.clone() for t in inputs)
    if case.mode == "forward" or (case.mode == "backward" and peer == OURS):
        return lambda: fn(*inputs)
    if case.mode == "train":
        leaves = _leaves(inputs)
        return lambda: _train(fn, leaves)
    grad, *rest = inputs
    leaves = _leaves(tuple(rest))
    wanted = [t for t in leaves if t.requires_grad]
    with torch.enable_grad():
        out = fn(*leaves)
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs)


def _train(fn: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        loss = fn(*leaves)
        return loss, *torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
