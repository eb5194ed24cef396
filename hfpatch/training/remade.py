"""Tensors that autograd is not to keep, because they can be made again in the backward.

Where a layer's products are modules of their own kind (LoRA, quantized layers) their own code
runs, and saves its input. `kept_as_recipe` puts a recipe in that input's place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recipe:
    """Makes a tensor again once; all views of it that were saved share the result."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._made: Tensor | None = None
        self._left = 0

    def expect(self) -> None:
        self._left += 1

    def take(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        made = self._made
        self._left -= 1
        if self._left <= 0:  # the last one that waits for it
            self._made = None
        return made


class kept_as_recipe(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves of `made` inside this context is how it was made.

    Args:
        made: a dense tensor.
        make: computes it anew, of tensors that are kept anyway and do not change meanwhile.
    """

    def __init__(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        recipe = _Recipe(make)
        storage, count = made.untyped_storage()._cdata, made.numel()
        offset, dtype = made.storage_offset(), made.dtype

        def pack(saved: Tensor) -> Any:
            if (
                saved.untyped_storage()._cdata == storage
                and saved.numel() == count
                and saved.storage_offset() == offset
                and saved.dtype == dtype
            ):
                recipe.expect()
                return recipe, saved.shape, saved.stride(), None
            return None, saved, saved._version, saved.device

        def unpack(packed: Any) -> Tensor:
            first, second, third, _ = packed
            if first is None:
                if second._version != third:
                    raise RuntimeError(
                        "a tensor that the backward needs was modified by an inplace operation: "
                        f"it is at version {second._version}, expected {third}"
                    )
                return second  # type: ignore[no-any-return]
            return first.take().as_strided(second, third)  # type: ignore[no-any-return]

        super().__init__(pack, unpack)


def saving_is_watched() -> bool:
    """Whether somebody, as activation checkpointing, looks at what autograd saves: it is theirs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
