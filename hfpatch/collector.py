"""Python's collector of cyclic garbage while models are planned and graphs captured."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1


class _Held:
    depth = 0
    before = gc.get_threshold()


_lock = threading.Lock()


@contextmanager
def young_only() -> Iterator[None]:
    """New objects are looked at as ever, those that were there before are not.

    To prove makes many objects, for which Python would look at all that the process holds: 0.2 s
    of the 1.1 that `apply` takes for a model of text.
    """
    with _lock:
        if _Held.depth == 0:
            _Held.before = gc.get_threshold()
            gc.set_threshold(*_Held.before[:2], _NEVER)
        _Held.depth += 1
    try:
        yield
    finally:
        with _lock:
            _Held.depth -= 1
            if _Held.depth == 0:
                _as_before()


def _as_before() -> None:
    if gc.get_threshold() == (*_Held.before[:2], _NEVER):  # else somebody chose another meanwhile
        gc.set_threshold(*_Held.before)


def _in_child() -> None:
    """A child of `os.fork` has none of the threads that would set it back."""
    global _lock
    _lock = threading.Lock()
    if _Held.depth:
        _Held.depth = 0
        _as_before()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def without_collection() -> Iterator[None]:
    """Nothing is freed by Python's collector in a capture: what it finds may hold graphs or memory
    of the GPU, whose release CUDA allows in no capture and answers by ending it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
