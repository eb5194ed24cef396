"""What others make of the capture of a CUDA graph: what PyTorch leaves undone where one fails, and
what transformers does differently in one."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from hfpatch.collector import without_collection
from hfpatch.graphs.keys import NotCapturable


def abandon(graph: Any, pool: Any, stream: Any) -> bool:
    """Undo what a failed capture leaves in PyTorch, as far as its own `reset` does not.

    The allocator would go on as if a capture were underway (`empty_cache` frees nothing then) and
    never give the graph's memory back, and the generator of random numbers would refuse every
    `torch.randn` ("Offset increment outside graph capture") until some capture ends well.

    Args:
        graph: the `torch.cuda.CUDAGraph`, whose capture is over.
        pool: the handle that it was captured with.
        stream: the stream that it was captured on, of the current device.

    Returns:
        whether captures on the stream end well again.
    """
    graph.reset()
    device = torch.cuda.current_device()
    with contextlib.suppress(AttributeError, RuntimeError):  # it is not underway: all is well
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    try:
        one = torch.ones(1, device="cuda")
        small = torch.cuda.CUDAGraph()
        with torch.cuda.graph(small, stream=stream, capture_error_mode="thread_local"):
            one.fill_(1)
    except RuntimeError:
        return False
    return True


class Pool:
    """Where the graphs of one model are recorded: memory that they share, and a stream of its own.

    The first graph allocates the workspace of cuBLAS for that stream in this memory, and the later
    ones use it too. Some versions of PyTorch (2.13) free it with any graph of the stream: not with
    one of another model, then, and what is left of the memory is only the next recording's. Others
    (2.11) never free it, so the stream of a model whose graphs are gone is another model's next.
    """

    _lock = threading.Lock()
    _taken: ClassVar[set[int]] = set()  # streams that are, or once were, a pool's
    _idle: ClassVar[dict[int, list[Any]]] = {}  # by device

    def __init__(self) -> None:
        self.handle: Any = None
        self.stream: Any = None
        self._back: Any = None

    def open(self) -> None:
        """Take memory and a stream of the current device, once.

        Raises:
            NotCapturable: no stream is left.
        """
        if self.stream is not None:
            return
        with self._lock:
            idle = self._idle.setdefault(torch.cuda.current_device(), [])
            self.stream = idle.pop() if idle else self._new_stream()
            self._taken.add(self.stream.cuda_stream)
        self.handle = torch.cuda.graph_pool_handle()
        self._back = weakref.finalize(self, idle.append, self.stream)
        self._back.atexit = False

    def _new_stream(self) -> Any:
        for _ in range(32):  # PyTorch has so many, and hands them out in turns
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in self._taken:
                return stream
        raise NotCapturable("PyTorch's 32 streams are all taken by graphs of other models")

    def abandon(self, graph: Any) -> None:
        """A recording failed. A stream that cannot record any more is not used again."""
        if not abandon(graph, self.handle, self.stream):
            self._back.detach()


def recorded(work: Callable[[], None], pool: Pool | None = None) -> torch.cuda.CUDAGraph:
    """What `work` launches on the current device, as a graph; nothing of it runs.

    Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache first.

    Args:
        work: called once, on a stream of its own.
        pool: where the graph is recorded; default: one of its own, for work without products of
            PyTorch's. PyTorch takes no graph into one that its last graph has left.

    Raises:
        Exception: of `work`, or what CUDA says of the capture. PyTorch is then as it was before.
    """
    graph = torch.cuda.CUDAGraph()
    stream: Any
    if pool is None:
        handle, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    else:
        pool.open()
        handle, stream = pool.handle, pool.stream
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream), without_collection():
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what `work` said counts
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        if pool is None:
            abandon(graph, handle, stream)
        else:
            pool.abandon(graph)
        raise
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def unowned(made: torch.Tensor) -> torch.Tensor:
    """A view of memory of a graph's pool that does not keep it: the next graph of the pool may use
    it too. What the graph leaves there is read before that one runs."""
    storage = made.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), made.device, storage.nbytes()
    )
    view = torch.empty(0, dtype=made.dtype, device=made.device)
    return view.set_(memory, made.storage_offset(), made.shape, made.stride())


class _Told(threading.local):
    capturing: bool | None = None  # what transformers is told in this thread; None: as it is


_told = _Told()
_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []

#: Modules that make masks, and skip those that mask nothing unless they think that they are traced.
_MASKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


@contextlib.contextmanager
def masks_as_outside() -> Iterator[None]:
    """Let transformers make the masks of a recording, and of its rehearsal, as outside of one.

    In a capture it does not look at what a mask holds, and makes full ones where none is needed:
    attention with a mask has slower kernels, or none for grouped heads. Here its masks are made as
    ever, by values that `hfpatch.graphs.host_reads` answers; all its other code goes in both runs
    the way that it goes in a capture, where it leaves out checks that would wait for the GPU.

    transformers asks by functions of its own modules and has no switch. They are replaced for as
    long as this lasts, and answer other threads as ever.
    """
    global _open
    with _lock:
        if not _open:
            _undo.extend(_tell())
        _open += 1
    before, _told.capturing = _told.capturing, True
    try:
        yield
    finally:
        _told.capturing = before
        with _lock:
            _open -= 1
            while not _open and _undo:
                _undo.pop()()


def _tell() -> Iterator[Callable[[], None]]:
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is not None and hasattr(asked, "is_cuda_stream_capturing"):
        yield _put(asked, "is_cuda_stream_capturing", _told_or)
    for name in _MASKS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_tracing"):
            yield _put(module, "is_tracing", _unaware)


def _put(module: Any, name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    own = getattr(module, name)
    setattr(module, name, around(own))
    return lambda: setattr(module, name, own)


def _told_or(own: Callable[[], bool]) -> Callable[[], bool]:
    def is_cuda_stream_capturing() -> bool:
        return own() if _told.capturing is None else _told.capturing

    return is_cuda_stream_capturing


def _unaware(own: Callable[..., bool]) -> Callable[..., bool]:
    def is_tracing(*args: Any, **kwargs: Any) -> bool:
        before = _told.capturing
        if before is not None:
            _told.capturing = False
        try:
            return own(*args, **kwargs)
        finally:
            _told.capturing = before

    return is_tracing
