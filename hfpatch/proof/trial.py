"""One run of a module in one combination of dtypes, and how far off results may be.

What decides is written in `Limits`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.kernels.sources import reference_kernel
from hfpatch.proof.subject import Combo, Formula, Subject, Tensor
from hfpatch.reading.leaf import Unexplained


@dataclass(frozen=True)
class Limits:
    """Errors in units of the dtype's epsilon, relative to the largest value of the row.

    formula: how far the original may be from a candidate's fp64 value. In fp32 a chain of a dozen
        roundings and a reduction explain 24; in a half dtype composed activations round after each
        of up to nine operations, and the formula was identified in fp32 already.
    kernel: how much farther than the original a kernel may be from the fp64 value: one rounding
        (half an epsilon), doubled because a row's largest value can lie just under a power of two;
        in fp32 six, for a reduction in another order.
    gradient: how many times these a gradient may be off: it passes the module twice, and that of a
        parameter is a sum over rows.
    """

    formula_fp32: float = 24.0
    formula_half: float = 8.0
    kernel_fp32: float = 6.0
    kernel_half: float = 1.0
    gradient: float = 4.0


LIMITS = Limits()


class Trial:
    """One dtype combination: the replica, its input, and what the original makes of it."""

    def __init__(self, subject: Subject, combo: Combo, device: torch.device, seed: int = 0) -> None:
        self.subject, self.combo, self.device = subject, combo, device
        #: How many dimensions the original's input may have, where it is not any number.
        self.dims: frozenset[int] | None = None
        #: Whether it may have no elements.
        self.takes_empty = True
        #: What the code computes of inputs of other numbers of dimensions, where that decides.
        self.steps_of: dict[int, tuple[Any, ...]] = {}
        #: The dtypes that values are rounded to on their way to the result.
        self.dtypes = [combo.x, combo.param, combo.autocast if subject.has_layers else None]
        self.module = subject.replica(combo, device, seeded(seed))
        self.x = subject.inputs(combo, device, seeded(seed + 1))
        fp64 = torch.float64
        wide = Combo(fp64, fp64 if combo.param else None, combo.autocast)
        self.wide = subject.replica(wide, device, seeded(seed))
        self._truths: dict[Formula, Tensor] = {}
        # the fp64 replica holds the very values of the rounded one
        for ours, theirs in zip(self.module.modules(), self.wide.modules(), strict=True):
            if ours is theirs:
                continue
            for name, p in ours._parameters.items():
                if p is not None:
                    theirs._parameters[name] = nn.Parameter(p.double(), requires_grad=False)
            for name, b in ours._buffers.items():
                if b is not None and b.is_floating_point():
                    theirs._buffers[name] = b.double()
        with self.context():
            #: What the code says; it is not run before that is known.
            self.reading = subject.read(self.module, self.x)
            self.original: Any = subject.run(self.module, self.x)
        if not _alike(self.original, self.reading.result):
            raise Unexplained("it gives another result than its source")

    def context(self) -> AbstractContextManager[Any]:
        """What a call of the combination runs in; no weight of ours gets into autocast's cache."""
        if self.combo.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.combo.autocast, cache_enabled=False)

    def truth(self, formula: Formula) -> Tensor:
        """What the formula gives in fp64."""
        found = self._truths.get(formula)
        if found is None:
            compute = self.subject.compute(reference_kernel(formula.op), formula)
            found = self._truths[formula] = compute(self.wide, self.x.double())
        return found

    def off_bends(self, formula: Formula, x: Tensor) -> Tensor:
        """Like `x`, for gradients to be compared: see `Subject.off_bends`."""
        eps = max(torch.finfo(t).eps for t in self.dtypes if t is not None)
        return self.subject.off_bends(self.wide, formula, x, eps)

    def candidate(self, formula: Formula, widens: bool | None = None) -> Tensor:
        """What the formula gives in the combination's dtypes."""
        kernel = replace(reference_kernel(formula.op), widens=widens)
        compute = self.subject.compute(kernel, formula)
        with self.context():
            result: Tensor = compute(self.module, self.x)
        return result


def _alike(original: Any, read: Tensor) -> bool:
    """Whether running the code gave what reading it did, apart from one rounding of a product."""
    if type(original) is not Tensor or original.dtype != read.dtype:
        return False
    if original.shape != read.shape:
        return False
    return original.numel() == 0 or error_of(original, read.double(), read.dtype) <= 1.0


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def error_of(y: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Largest distance, in epsilons of `dtype`, relative to each row's largest finite true value.

    Where `truth` is NaN or infinite `y` must be the same; infinity stands for any other outcome.
    """
    ours, exact = _array(y), _array(truth)
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    with numpy.errstate(all="ignore"):
        worst = _farthest(ours, exact, tiny)
        if not math.isfinite(worst):  # so is some value; else none, since it would be in that
            finite = numpy.isfinite(exact)
            same = (ours == exact) | (numpy.isnan(ours) & numpy.isnan(exact))
            if not (finite | same).all():
                return float("inf")
            worst = _farthest(numpy.where(finite, ours, 0), numpy.where(finite, exact, 0), tiny)
    return worst / eps if worst == worst else float("inf")


def _array(t: Tensor) -> numpy.ndarray[Any, Any]:
    """As fp64 on the CPU: NumPy takes a third of the time for so few values, and a GPU launches
    for each operator."""
    return t.detach().cpu().double().numpy()


def _farthest(ours: Any, exact: Any, tiny: float) -> float:
    scale = numpy.maximum(abs(exact).max(-1, keepdims=True), tiny)
    return float((abs(ours - exact) / scale).max())


def formula_limit(trial: Trial, out: torch.dtype) -> float:
    """What roundings explain, in epsilons of `out`: more where a value was rounded on its way."""
    widening = _widening(trial, out)
    return LIMITS.formula_half * widening if widening else LIMITS.formula_fp32


def kernel_slack(trial: Trial, out: torch.dtype) -> float:
    """How much farther than the original a kernel may be, in epsilons of `out`."""
    widening = _widening(trial, out)
    return LIMITS.kernel_half * widening if widening else LIMITS.kernel_fp32


def _widening(trial: Trial, out: torch.dtype) -> float:
    """Epsilon of the narrowest half dtype on the way to `out`, in epsilons of `out`; 0 if none."""
    halves = [t for t in (*trial.dtypes, out) if t is not None and _half(t)]
    return max((torch.finfo(t).eps for t in halves), default=0.0) / torch.finfo(out).eps


def _half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of a call that launch work (views do not)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else PyTorch imports dynamo at the first operator, which takes over a second where nobody
        # has. Nothing is compiled under this mode: dynamo skips what is called under any.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))
