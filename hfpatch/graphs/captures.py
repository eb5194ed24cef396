"""What others make of the capture of a CUDA graph: what PyTorch leaves undone where one fails, and
what transformers does differently in one."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


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


@contextlib.contextmanager
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


def recorded(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `work` launches on the current device, as a graph; nothing of it runs.

    Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache first.

    Args:
        work: called once, on a stream of its own.
        pool: where the graph's memory comes from, `torch.cuda.graph_pool_handle()`. PyTorch takes
            no graph into one that its last graph has left.

    Raises:
        Exception: of `work`, or what CUDA says of the capture. PyTorch is then as it was before.
    """
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream), without_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what `work` said counts
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        abandon(graph, pool, stream)
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
