"""Locks that are free in a child of this process, whoever held them when it was forked.

A child of `os.fork`, as `DataLoader` makes them, has the thread alone that forked, and the memory
as it was at that moment. So a fork waits for a proof of another thread, as it does for the records
of `logging`: else the child would wait for that thread for ever, in the proof's default dtype.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

#: Seconds that a fork waits in all: what holds a lock may itself wait for who forks.
_PATIENCE = 30.0
_waited_for: list[Any] = []
_others: weakref.WeakSet[Any] = weakref.WeakSet()
_mine = threading.local()


def lock(*, waits: bool = False) -> Any:
    """A reentrant lock.

    Args:
        waits: a fork waits until it is free, since something of the process is other than it was
            while it is held; for modules, which live as long as the process.
    """
    made = threading.RLock()
    if waits:
        _waited_for.append(made)
    else:
        _others.add(made)
    return made


def _before() -> None:
    until = time.monotonic() + _PATIENCE
    while True:
        got: list[Any] = []
        busy = None
        for one in _waited_for:
            if not one.acquire(blocking=False):
                busy = one
                break
            got.append(one)
        left = until - time.monotonic()
        if busy is None or left <= 0:
            break
        # None is held while another one is waited for: who has that may want these.
        for one in reversed(got):
            one.release()
        if busy.acquire(timeout=left):
            busy.release()
    _mine.locks = got


def _in_parent() -> None:
    for one in reversed(_mine.__dict__.pop("locks", ())):
        one.release()


def _in_child() -> None:
    got = {id(one) for one in _mine.__dict__.get("locks", ())}
    _in_parent()
    for one in (*_waited_for, *_others):
        # what the thread that forked holds itself it also gives back itself
        if id(one) not in got and not one._is_owned():
            one._at_fork_reinit()  # as `threading` does with its own


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
