"""CUDA graphs on the CPU: what runs in a capture is noted operator by operator, and a replay runs
the same operators on the same memory, as a GPU would.

Tensors say that they are on a GPU, and a capture says that it is one, so that everything around the
kernels is the real thing: keys, rehearsals, results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfpatch.graphs import captures, host_reads
from hfpatch.graphs import recording as graphs

_WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")


class CpuGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.replays = 0
        self.freed = False

    def replay(self) -> None:
        assert not self.freed
        self.replays += 1
        for step in self.steps:
            step()

    def reset(self) -> None:
        self.freed = True
        self.steps.clear()


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _tensor(t)}
        made = [t for t in tree_leaves(out) if _tensor(t)]
        fresh = [t.untyped_storage()._cdata not in given for t in made]
        if func._schema.is_mutable or any(fresh):

            def step() -> None:
                again = [t for t in tree_leaves(func(*args, **kwargs)) if _tensor(t)]
                for own, new, is_fresh in zip(made, again, fresh, strict=True):
                    if is_fresh:
                        own.copy_(new)

            self.graph.steps.append(step)
        return out


def _tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _Stream:
    made = 0

    def __init__(self) -> None:
        _Stream.made += 1
        self.cuda_stream = _Stream.made


class CpuGraphs:
    """What `hfpatch.graphs.recording` uses of torch.cuda, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.made: list[CpuGraph] = []
        self.offset = 0
        stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda e: None, cuda_stream=0)
        event = SimpleNamespace(record=lambda s: None, synchronize=lambda: None)
        generator = SimpleNamespace(get_offset=lambda: 0, set_offset=lambda o: None)
        cuda, put = torch.cuda, monkeypatch.setattr
        put(Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))
        put(host_reads, "_is_host", lambda device: False)
        put(cuda, "is_current_stream_capturing", lambda: self.capturing)
        put(cuda, "graph_pool_handle", lambda: (0, 1))
        put(cuda, "current_device", lambda: 0)
        put(cuda, "Stream", _Stream)
        put(cuda, "device", lambda device: contextlib.nullcontext())
        put(cuda, "current_stream", lambda: stream)
        put(cuda, "set_stream", lambda s: None)
        made = self.made

        class Graph(CpuGraph):
            def __init__(self) -> None:
                super().__init__()
                made.append(self)

        put(cuda, "CUDAGraph", Graph)
        put(cuda, "graph", self._capture)
        put(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        put(graphs, "_event", lambda: event)
        put(graphs, "_generator", lambda device: generator)
        put(graphs, "unavailable", lambda: None)
        put(captures, "abandon", lambda *args: True)
        put(graphs.Pool, "_taken", set())
        put(graphs.Pool, "_idle", {})

    @contextlib.contextmanager
    def _capture(self, graph: CpuGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.capturing = True
        try:
            with _Noted(graph):
                yield
        finally:
            self.capturing = False
