"""One measurement at a time on a machine: labs beside each other would time each other's work.

A lab that measures waits for all others to pause; checks of several labs may run at once.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def measuring() -> Iterator[None]:
    """While it lasts no other lab of this user measures or checks."""
    with _held(exclusive=True):
        yield


@contextmanager
def checking() -> Iterator[None]:
    """While it lasts no other lab of this user measures."""
    with _held(exclusive=False):
        yield


@contextmanager
def counting() -> Iterator[None]:
    """While it lasts no other lab of this user runs Nsight Compute; others may load and compile."""
    with _held(exclusive=True, name="counters"):
        yield


@contextmanager
def _held(exclusive: bool, name: str = "measuring") -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: labs are run one after the other
        yield
        return
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        who = str(os.getuid())
    path = Path(tempfile.gettempdir()) / f"hfpatch-lab-{name}-{who}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
