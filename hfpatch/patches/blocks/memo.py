"""What the blocks of one step share is computed once: values that depend on the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from hfpatch.patches.base import Tensor

T = TypeVar("T")


class StepMemo(Generic[T]):
    """The last value of `make`, for as long as it is called with the very same tensors.

    The same means: the same objects, not written to since, on the same stream. While a CUDA graph
    is captured nothing is kept, so a graph never reads what another one, or nobody, computes.
    Inference tensors count no writes, so nothing derived from them is kept either.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._held: tuple[tuple[weakref.ref[Tensor], ...], tuple[int, ...], int, T] | None = None

    def __call__(self, *tensors: Tensor) -> T:
        """`make(*tensors)`, remembered."""
        if any(t.is_inference() for t in tensors):
            return self._make(*tensors)
        stream = 0
        if tensors[0].is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return self._make(*tensors)
            stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        versions = tuple(t._version for t in tensors)
        held = self._held
        if (
            held is not None
            and all(r() is t for r, t in zip(held[0], tensors, strict=True))
            and held[1:3] == (versions, stream)
        ):
            return held[3]
        made = self._make(*tensors)
        # one tuple, replaced in one assignment: other threads see the old or the new
        self._held = (tuple(weakref.ref(t) for t in tensors), versions, stream, made)
        return made
