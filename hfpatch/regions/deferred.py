"""Calls for which no block is captured: something faster computes the like from then on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    count = 0


_depth = _Depth()


@contextmanager
def nothing_captured() -> Iterator[None]:
    """In this thread, blocks of kinds that were not captured yet run as they are. A capture takes
    seconds, and moves weights."""
    _depth.count += 1
    try:
        yield
    finally:
        _depth.count -= 1


def is_deferred() -> bool:
    """Whether a capture waits for another call."""
    return _depth.count > 0
