"""Tensors that autograd is not to keep, because they can be made again in the backward.

Where a layer's products are modules of their own kind (LoRA, quantized layers) their own code
runs, and saves its input. `kept_as_recipe` puts a recipe in that input's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfpatch.proof.saved import written_to
from hfpatch.proof.subject import version


class _Recipe:
    """Makes a tensor again once; all views of it that were saved share the result."""

    def __init__(self, make: Callable[[], Tensor], of: Sequence[Tensor]) -> None:
        self._make, self._of = make, of
        self._versions = [version(t) for t in of]
        self._made: Tensor | None = None
        self._left = 0

    def expect(self) -> None:
        self._left += 1

    def take(self) -> Tensor:
        if self._made is None:
            for t, before in zip(self._of, self._versions, strict=True):
                if before is not None and t._version != before:
                    raise written_to(t, before)
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
        make: computes it anew.
        of: what that reads: tensors that are kept anyway. If one was written to, the backward is an
            error.

    A module may write to its input (a dropout that is `inplace`): what it saves of that is no
    longer what `make` makes, and is kept.
    """

    def __init__(self, made: Tensor, make: Callable[[], Tensor], of: Sequence[Tensor]) -> None:
        recipe = _Recipe(make, of)
        storage, count = made.untyped_storage()._cdata, made.numel()
        offset, dtype = made.storage_offset(), made.dtype
        as_made = version(made)

        def pack(saved: Tensor) -> Any:
            if (
                saved.layout is torch.strided  # others have no storage
                and saved.untyped_storage()._cdata == storage
                and saved.numel() == count
                and saved.storage_offset() == offset
                and saved.dtype == dtype
                and (as_made is None or saved._version == as_made)
            ):
                recipe.expect()
                return recipe, saved.shape, saved.stride(), None
            counted = version(saved)
            if saved.grad_fn is not None:  # an output of what saves it must not hold itself
                saved = saved.detach()
            return None, saved, counted, saved.device

        def unpack(packed: Any) -> Tensor:
            first, second, third, _ = packed
            if first is None:
                if third is not None and second._version != third:
                    raise written_to(second, third)
                return second  # type: ignore[no-any-return]
            return first.take().as_strided(second, third)  # type: ignore[no-any-return]

        super().__init__(pack, unpack)
