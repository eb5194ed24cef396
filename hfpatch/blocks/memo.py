"""What the blocks of one step share is computed once: values that depend on the same tensors."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

from hfpatch.per_object import PerObject
from hfpatch.proof.subject import Tensor, version

T = TypeVar("T")


_numbers = itertools.count(1)


class Capture:
    """A CUDA graph that hfpatch records: what it computes may be shared within it, as in a step."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.kept: list[Any] = []  # what the graph reads and was made before; it must stay alive

    def __enter__(self) -> Capture:
        _now.capture = self
        return self

    def __exit__(self, *_: object) -> None:
        _now.capture = None


class Operator:
    """Blocks as one operator of a compiled graph: nothing is kept of its call when it ends. The
    graph writes to its buffers uncounted and under other names, so that no tensor is known to be
    the same at the next call, and a pool of CUDA graphs must get back all memory taken from it.
    """

    def __init__(self, blocks: int) -> None:
        self.number = next(_numbers)
        self.blocks = blocks
        self._endings: list[Callable[[], object]] = []
        self._around: Operator | None = None

    def at_end(self, forget: Callable[[], object]) -> None:
        self._endings.append(forget)

    def __enter__(self) -> Operator:
        self._around, _now.operator = _now.operator, self
        return self

    def __exit__(self, *_: object) -> None:
        _now.operator = self._around
        for forget in self._endings:
            forget()


class Reader(Protocol):
    """Who answers, in a recording of ours and its rehearsal, what the host reads of tensors."""

    def all_ones(self, mask: Tensor) -> bool:
        """Whether `mask` is known to be 1 everywhere, now and at each replay."""


class _Now(threading.local):
    capture: Capture | None = None
    reader: Reader | None = None
    rehearsing: bool = False
    operator: Operator | None = None


_now = _Now()


@contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """`reader` answers what the host reads in this thread."""
    before, _now.reader = _now.reader, reader
    try:
        yield
    finally:
        _now.reader = before


def current_reader() -> Reader | None:
    """Who answers what the host reads now, if somebody does."""
    return _now.reader


def current_capture() -> Capture | None:
    """The graph of ours that is being recorded in this thread."""
    return _now.capture


@contextmanager
def rehearsal() -> Iterator[None]:
    """The run before a recording. It must launch what the recording will: a kernel that is planned,
    compiled or loaded for the first time while a graph is captured may end the capture."""
    before, _now.rehearsing = _now.rehearsing, True
    try:
        yield
    finally:
        _now.rehearsing = before


def current_operator() -> Operator | None:
    """The operator of a compiled graph that this thread is in."""
    return _now.operator


def recording() -> bool:
    """Whether what runs now is recorded in a graph of ours, or rehearsed for it: what its inputs
    hold may differ at each replay."""
    return _now.rehearsing or _now.capture is not None


def for_a_graph() -> bool:
    """Whether what runs now is, or may be, recorded: it must not wait for the GPU."""
    return recording() or _now.operator is not None


def keep_for_capture(value: Any) -> None:
    """`value`, made before, is read by the graph of ours that is recorded now, if one is."""
    if _now.capture is not None:
        _now.capture.kept.append(value)


def stream_of(t: Tensor) -> int | None:
    """The stream that work on `t`'s device is queued on now, 0 on the CPU; None where nothing may
    be kept: under capture and for a block that is an `Operator` alone.

    What is computed while a CUDA graph is captured exists only when that graph is replayed, and
    what was computed before may be gone by then: nothing is kept across the border. A graph of ours
    has a number of its own, less than 0; so has an operator of several blocks.
    """
    if _now.operator is not None:
        return -_now.operator.number if _now.operator.blocks > 1 else None
    if not t.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None if _now.capture is None else -_now.capture.number
    return int(torch._C._cuda_getCurrentRawStream(t.device.index))


class StepMemo(Generic[T]):
    """The last value of `make`, for as long as it is called with the very same tensors, which live.

    The same means: the same objects, not written to since, on the same stream; nor was the value,
    if it is a tensor, by a layer that writes to its input. Nothing is kept of inference tensors,
    whose writes are not counted, nor where `stream_of` is None.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self.missed = 0  # values in a row that were of no use to another call
        self._held: tuple[Any, tuple[int | None, ...], int, T, int | None] | None
        self._held = None

    def __call__(self, *tensors: Tensor) -> T:
        """`make(*tensors)`, remembered."""
        stream = stream_of(tensors[0])
        held = self._held
        if held is not None and held[2] == stream:
            for ref, counted, t in zip(held[0], held[1], tensors, strict=True):
                if ref() is not t or t._version != counted:  # what is held counts its writes
                    break
            else:
                value = held[3]
                if held[4] is None or value._version == held[4]:  # type: ignore[attr-defined]
                    self.missed = 0
                    return value
        versions = tuple(version(t) for t in tensors)
        if stream is None or None in versions:
            return self._make(*tensors)
        made = self._make(*tensors)
        if not self.keeps(made, tensors):
            return made
        self.missed += 1
        # a partial: a tensor may go at the end of the process, behind the names of this file
        told = functools.partial(_tell, weakref.WeakMethod(self._gone))
        refs = tuple(weakref.ref(t, told) for t in tensors)
        own = version(made) if isinstance(made, Tensor) else None
        # one tuple, replaced in one assignment: other threads see the old or the new
        self._held = (refs, versions, stream, made, own)
        if _now.operator is not None:
            _now.operator.at_end(self.forget)
        return made

    def keeps(self, made: T, tensors: tuple[Tensor, ...]) -> bool:
        """Whether a value is worth its memory."""
        return True

    def _gone(self, ref: weakref.ref[Tensor]) -> None:
        """A tensor is gone: what was made of it, as large perhaps, is of no use any more."""
        held = self._held
        if held is not None and any(ref is own for own in held[0]):
            self._held = None

    def forget(self) -> None:
        """Drop what is held."""
        self._held = None


def _tell(gone: weakref.WeakMethod[Any], ref: Any) -> None:
    """Call a method if its object is there."""
    if (method := gone()) is not None:
        method(ref)


#: Of tensors, by who they are: an attribute would go with a copy, whose writes are counted anew,
#: and into a pickle.
_companions: PerObject[Tensor, tuple[int, int, Any]] = PerObject()


def accompany(t: Tensor, value: Any) -> None:
    """Remember with `t` something made from, or along with, it; a write to `t` voids it."""
    if _now.operator is not None:  # `t` may outlive it
        return
    counted, stream = version(t), stream_of(t)
    if counted is not None and stream is not None:
        _companions[t] = counted, stream, value


def companion(t: Tensor) -> Any:
    """What `accompany` remembered; None if `t` was written to since or the stream is another."""
    held = _companions.get(t)
    if held is None or held[:2] != (version(t), stream_of(t)):
        return None
    return held[2]
