"""Which modules a call reaches, told by the profiler: a replaced `__call__` or a hook is noticed by
patched modules, which then step aside."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_CALL = nn.Module._call_impl.__code__


@contextlib.contextmanager
def calls_seen(module: nn.Module) -> Iterator[list[nn.Module]]:
    """A list that gets `module` at each of its calls in this thread, while the context is open."""
    seen: list[nn.Module] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is _CALL and frame.f_locals["self"] is module:
            seen.append(module)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
