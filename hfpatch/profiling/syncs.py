"""Where a model makes the host wait for a value: `.item()` and its kin, with their lines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that read a tensor's value on the host, or whose result's size depends on it.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Syncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every operator of a forward that makes the host wait on a GPU.

    On a CPU nothing waits, but the same operators are found, so that a GPU's waits are seen here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _WAITING or _copies_to_host(name, args, kwargs or {}):
            self.found[name, _stack(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))

    def rows(self) -> list[dict[str, Any]]:
        """The most frequent first: `operator`, `count`, `at` (`file:line in function`), `stack`."""
        return [
            {"operator": name, "count": count, "at": stack[0] if stack else "", "stack": [*stack]}
            for (name, stack), count in self.found.most_common()
        ]


def _copies_to_host(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name != "aten::_to_copy" or kwargs.get("non_blocking"):
        return False
    device = kwargs.get("device")
    given = args[0].device.type != "cpu" if isinstance(args[0], torch.Tensor) else False
    return given and device is not None and torch.device(device).type == "cpu"


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """Lines outside of PyTorch, the innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < 12:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            lines.append(f"{_short(file)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(lines)


def _short(file: str) -> str:
    """A path from its package on, where it is in one."""
    for top in ("site-packages", "dist-packages"):
        if top in file:
            return file.split(f"{top}/", 1)[-1]
    return file
