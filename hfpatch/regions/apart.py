"""Work in the middle of a compiled graph that must not be of it: in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """`function()`, without gradients, where nothing that PyTorch has set for this thread holds.

    Neither dynamo's tensors without data do, nor the dispatch keys that an operator of a graph is
    called below: what is captured would be mixed with these, or not be seen at all. Nor does the
    pool of a CUDA graph, from which this thread's allocations may come: what is kept of them, as
    packed weights are, would be taken for the graph's own. Work that was queued on the GPU is
    waited for, before and behind it.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    inference, context = torch.is_inference_mode_enabled(), contextvars.copy_context()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.device(torch.cuda.current_device()) if on_gpu else nullcontext()

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad(), device:
                found.append(context.run(function))
                if on_gpu:
                    torch.cuda.current_stream().synchronize()
        except BaseException as e:
            failed.append(e)

    if on_gpu:
        torch.cuda.current_stream().synchronize()
    thread = threading.Thread(target=run, name="hfpatch-capture")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
