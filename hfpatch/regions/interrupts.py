"""Interrupts that wait until a capture is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def held_back() -> Iterator[None]:
    """Python's handlers of signals run at the end, each of them: PyTorch, whose modes a capture is
    inside of, ends the process where one raises between two of them (`trying to set the current
    FakeTensorMode, but one already exists`). Where one raises in the Python code of a size that is
    a symbol, PyTorch makes another error of it, of an operator's arguments, and the interrupt is
    lost. Signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, int, Any]] = []
    before: list[tuple[int, Any]] = []

    def of(handler: Any) -> Any:
        return lambda number, frame: came.append((handler, number, frame))

    try:
        # every one: schedulers send SIGUSR1, timeouts are of SIGALRM, SIGVTALRM or SIGPROF
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                before.append((number, handler))
                signal.signal(number, of(handler))
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        with ExitStack() as each:  # one that raises keeps no other from running
            for handler, number, frame in reversed(came):
                each.callback(handler, number, frame)
