"""Capturing while PyTorch traces or runs a compiled graph: in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """`function()`, without gradients, where no mode of this thread holds: neither dynamo's tensors
    without data nor the dispatch keys that an operator of a graph is called below. What is traced
    there would be mixed with these, or not be seen at all."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                found.append(function())
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, name="hfpatch-capture")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
