"""What PyTorch leaves undone where the capture of a CUDA graph fails."""

from __future__ import annotations

import contextlib
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
