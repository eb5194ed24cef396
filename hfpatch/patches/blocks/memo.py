"""What the blocks of one step share is computed once: values that depend on the same tensors."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from hfpatch.patches.base import Tensor

T = TypeVar("T")


def version(t: Tensor) -> int | None:
    """How often `t` was written to; None for an inference tensor, which does not count."""
    return None if t.is_inference() else t._version


class Capture:
    """A CUDA graph that hfpatch records: what it computes may be shared within it, as in a step."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.kept: list[Any] = []  # what the graph reads and was made before; it must stay alive

    def __enter__(self) -> Capture:
        _now.capture = self
        return self

    def __exit__(self, *_: object) -> None:
        _now.capture = None


class _Now(threading.local):
    capture: Capture | None = None
    rehearsing: bool = False
    in_operator: bool = False


_now = _Now()


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


@contextmanager
def one_operator() -> Iterator[None]:
    """A block as an operator of a compiled graph: nothing is kept of its call. The graph writes to
    its buffers uncounted and under other names, so that no tensor is known to be the same, and a
    pool of CUDA graphs must get back all memory that was taken from it."""
    before, _now.in_operator = _now.in_operator, True
    try:
        yield
    finally:
        _now.in_operator = before


def in_operator() -> bool:
    """Whether this thread is in `one_operator`."""
    return _now.in_operator


def for_a_graph() -> bool:
    """Whether what runs now is, or may be, recorded: it must not wait for the GPU."""
    return _now.rehearsing or _now.capture is not None or _now.in_operator


def keep_for_capture(value: Any) -> None:
    """`value`, made before, is read by the graph of ours that is recorded now, if one is."""
    if _now.capture is not None:
        _now.capture.kept.append(value)


def stream_of(t: Tensor) -> int | None:
    """The stream that work on `t`'s device is queued on now, 0 on the CPU; None where nothing may
    be kept: under capture and in `one_operator`.

    What is computed while a CUDA graph is captured exists only when that graph is replayed, and
    what was computed before may be gone by then: nothing is kept across the border. A graph of ours
    has a number of its own, less than 0.
    """
    if _now.in_operator:
        return None
    if not t.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None if _now.capture is None else -_now.capture.number
    return int(torch._C._cuda_getCurrentRawStream(t.device.index))


class StepMemo(Generic[T]):
    """The last value of `make`, for as long as it is called with the very same tensors.

    The same means: the same objects, not written to since, on the same stream. Nothing is kept of
    inference tensors, whose writes are not counted, nor where `stream_of` is None.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._held: tuple[tuple[weakref.ref[Tensor], ...], tuple[int | None, ...], int, T] | None
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
                return held[3]
        versions = tuple(version(t) for t in tensors)
        if stream is None or None in versions:
            return self._make(*tensors)
        made = self._make(*tensors)
        # one tuple, replaced in one assignment: other threads see the old or the new
        self._held = (tuple(weakref.ref(t) for t in tensors), versions, stream, made)
        return made


_COMPANION = "_hfpatch_companion"


def accompany(t: Tensor, value: Any) -> None:
    """Remember on `t` something made from, or along with, it; a write to `t` voids it."""
    counted, stream = version(t), stream_of(t)
    if counted is not None and stream is not None:
        setattr(t, _COMPANION, (counted, stream, value))


def companion(t: Tensor) -> Any:
    """What `accompany` remembered; None if `t` was written to since or the stream is another."""
    held = getattr(t, _COMPANION, None)
    if held is None or held[:2] != (version(t), stream_of(t)):
        return None
    return held[2]
