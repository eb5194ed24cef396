"""`apply(model, gain="time")`: of each kind of module original and patched forward are timed on the
calls that come, and the faster one is kept.

A kind is a class with its formula and the shapes of its parameters, in calls of one size. Its
modules take turns: a call is computed one way or the other, never both, so that nothing is written
twice and a model of eight equal layers has decided behind its first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.blocks.memo import for_a_graph
from hfpatch.per_object import PerObject
from hfpatch.planning.plan import Candidate, Timed
from hfpatch.planning.race import Race
from hfpatch.proof.proofs import Prepared, stands_for
from hfpatch.proof.subject import Forward, Tensor, class_of, forward_of_class, watched

#: What `gain=` may be.
CHOICES = (None, "time")
#: The ways of a race, as `Timed.kept` says them.
_ORIGINAL, _PATCHED = 0, 1
_KEPT = ("original", "patched")
#: Ops of a whole model, which is timed by `cuda_graphs="auto"`.
_WHOLE = ("cuda_graphs", "decoding")
#: Calls of each way that decide: the time of a short one is mostly noise.
_ROUNDS = 7
#: Shapes that one kind remembers; a server sees many.
_MOST = 1024
#: Sizes of calls that one kind has times of; beyond them the oldest are forgotten.
_MOST_SIZES = 256


def check_choice(value: Any, training: bool) -> bool:
    """Whether `gain=` asks for times.

    Raises:
        ValueError: it is neither None nor "time", or the mode is training, whose backward is not
            timed.
    """
    if value not in CHOICES:
        raise ValueError(f'`gain` must be None or "time", got {value!r}')
    if value is not None and training:
        raise ValueError('`gain="time"` needs mode="inference": what a backward takes is not timed')
    return value is not None


@dataclass(eq=False)
class _Kind:
    """Modules that take equally long: the same class, formula and parameters."""

    class_name: str
    op: str
    modules: int = 0
    #: By the size of a call.
    races: dict[Any, tuple[str, Race]] = field(default_factory=dict)
    #: By the exact shapes of a call: the way that it goes.
    ways: dict[Any, int] = field(default_factory=dict)


class Table:
    """What was timed of one model.

    Args:
        host_counts: whether calls wait for the host; in a CUDA graph they do not.
    """

    def __init__(self, host_counts: bool = True) -> None:
        self.kinds: dict[Any, _Kind] = {}
        self._host_counts = host_counts
        self._measured = False

    def wrap(self, prepared: Prepared) -> Prepared:
        """The swap with a forward that takes the faster way; one of a whole model as it is."""
        module, swap = prepared.module, prepared.swap
        what: Any
        if isinstance(swap, Candidate):  # a block that is captured at its first call
            op, what = "block", id(getattr(swap, "kind", None))
        elif swap.op in _WHOLE:
            return prepared
        else:
            op, what = swap.op, swap.formula
        held = tuple((tuple(p.shape), p.dtype, p.device) for p in module.parameters())
        key = (class_of(module), op, what, held)
        kind = self.kinds.setdefault(key, _Kind(swap.class_name, op))
        kind.modules += 1
        return replace(prepared, make=partial(self._make, prepared.make, module, kind))

    def _make(self, make: Callable[[], Forward], module: nn.Module, kind: _Kind) -> Forward:
        patched = make()
        forward = _adapter(forward_of_class, patched, kind, self)
        stands_for(forward, patched)
        return forward

    def decide(
        self, kind: _Kind, exact: Any, call: tuple[Forward, Forward], args: Any, kwargs: Any
    ) -> Any:
        """Make a call whose way is not known yet, and time it where that can be done."""
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        device = tensors[0].device if tensors else None
        size = (_width(tensors), tuple(map(_size, tensors)), device)
        held = kind.races.get(size)
        if held is not None and held[1].winner is not None:
            if len(kind.ways) >= _MOST:
                kind.ways.clear()
            kind.ways[exact] = held[1].winner
            return call[held[1].winner](*args, **kwargs)
        if device is None or device.type not in ("cpu", "cuda") or not _can_be_timed(device):
            return call[_PATCHED](*args, **kwargs)
        if held is None:
            while len(kind.races) >= _MOST_SIZES:
                kind.races.pop(next(iter(kind.races), None), None)  # another thread may be first
            race = Race(self._host_counts, queued=True, rounds=_ROUNDS)
            held = kind.races[size] = (_described(tensors), race)
        race = held[1]
        self._measured = True
        _now.timing = True
        try:
            return race.run(partial(call[race.turn()], *args, **kwargs), device)
        finally:
            _now.timing = False

    def pending(self) -> bool:
        """Whether something was timed since this was asked last: a recording waits for that."""
        measured, self._measured = self._measured, False
        return measured

    def times(self) -> list[Timed]:
        """What was found, for the report."""
        return [
            Timed(
                kind.class_name,
                kind.op,
                call,
                kind.modules,
                race.milliseconds(_ORIGINAL),
                race.milliseconds(_PATCHED),
                "being timed" if race.winner is None else _KEPT[race.winner],
            )
            for kind in self.kinds.values()
            for call, race in list(kind.races.values())  # another thread may add one
        ]


class _Now(threading.local):
    timing: bool = False  # inside of a module that is timed nothing else is


_now = _Now()


def _adapter(original: Forward, patched: Forward, kind: _Kind, table: Table) -> Forward:
    both, ways = (original, patched), kind.ways

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return patched(self, *args, **kwargs)
        exact = _exact(args, kwargs)
        way = ways.get(exact)
        if way is not None:
            return both[way](self, *args, **kwargs)
        return table.decide(kind, exact, both, (self, *args), kwargs)

    return forward


def _exact(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes and dtypes of a call. It is made at every call, so it is made fast."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return (args[0].shape, args[0].dtype)
    return tuple(
        part
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor)
        for part in (value.shape, value.dtype)
    )


def _width(tensors: Sequence[Tensor]) -> int:
    """The last dimension of what a module computes on; that of a mask is a length."""
    return tensors[0].shape[-1] if tensors and tensors[0].dim() else 0


def _size(t: Tensor) -> Any:
    """What calls have in common that are timed as one: about as much, and about as long rows."""
    return (t.shape[-1].bit_length() if t.dim() else 0, t.numel().bit_length(), t.dtype)


def _can_be_timed(device: torch.device) -> bool:
    return not (
        _now.timing
        or for_a_graph()
        or watched()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{'×'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}"
        for t in tensors[:3]
    )


# -------------------------------------------------------------------------------------------------
# The tables of models

_tables: PerObject[nn.Module, Table] = PerObject()


def keep(root: nn.Module, table: Table) -> None:
    """Remember what is timed of a model."""
    _tables[root] = table


def release(roots: Iterable[nn.Module]) -> None:
    """Forget it."""
    for root in roots:
        _tables.pop(root, None)


def times(root: nn.Module) -> list[Timed]:
    """What was timed of a model."""
    table = _tables.get(root)
    return [] if table is None else table.times()


def pending(root: nn.Module) -> bool:
    """Whether calls of a model are being timed still."""
    table = _tables.get(root)
    return table is not None and table.pending()
