"""What a kernel does to a GPU's streams, and whether it makes the host wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.foreign.compare import Asked, wrong_values

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

#: Operators for whose results the host waits, on a GPU.
_WAITS = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
)
_CYCLES = 60_000_000  # of a GPU's clock: some 30 ms


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket._qualified_op_name
        copies = name == "aten::_to_copy" and str((kwargs or {}).get("device")) == "cpu"
        if name in _WAITS or (copies and any(isinstance(a, Tensor) and a.is_cuda for a in args)):
            self.names.append(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def waits(fn: Callable[..., Any], tensors: Tensors) -> str | None:
    """What makes the host wait for the GPU in a call of `fn`, or None.

    By the operators that it calls, on any device; on a GPU also by whether a call returns while the
    stream is still busy, which sees what no operator shows.
    """
    seen = _Waits()
    with seen:
        fn(*tensors)
    if seen.names:
        return f"`{seen.names[0]}`"
    if not any(t is not None and t.is_cuda for t in tensors):
        return None
    for _ in range(2):  # once more: the first may allocate memory, or load code
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
        busy.record()
        fn(*tensors)
        done = busy.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if not done:
            return None
    return "a synchronization outside of PyTorch's operators"


def wrong_on_streams(asked: Asked, fn: Callable[..., Any], tensors: Tensors) -> str | None:
    """Why a result is wrong on streams other than the default one, or None.

    On each of two streams the input is written late, behind work that keeps the stream busy: a
    kernel that runs on a stream of its own reads what was there before. Both are under way at once,
    so that memory which two calls share shows.
    """
    if not any(t is not None and t.is_cuda for t in tensors):
        return None
    # streams can share one of the GPU's queues, which orders them: so several pairs
    for _ in range(3):
        if (why := _wrong_on_two(asked, fn, tensors)) is not None:
            return why
    return None


def _wrong_on_two(asked: Asked, fn: Callable[..., Any], tensors: Tensors) -> str | None:
    late = [[None if t is None else t.clone() for t in tensors] for _ in range(2)]
    for t, made in zip(tensors, late[1], strict=True):
        if t is not None and made is not None and t.is_floating_point():
            made.copy_(t.flip(-1) * 0.5)
    early = [[None if t is None else torch.zeros_like(t) for t in tensors] for _ in range(2)]
    fn(*early[0])  # what is compiled or allocated once
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    results = []
    for stream, given, then in zip(streams, early, late, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_CYCLES // 3)  # type: ignore[no-untyped-call]
            for t, value in zip(given, then, strict=True):
                if t is not None and value is not None:
                    t.copy_(value)
            results.append(fn(*given))
    torch.cuda.synchronize()
    for given, y in zip(late, results, strict=True):
        if (why := wrong_values(asked, given, y)) is not None:
            return f"on a stream that is not the default one {why}"
    return None
