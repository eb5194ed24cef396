"""The tensor that stands for a mask [B, 1, S, S], and makes it when somebody reads it.

Patched layers know what it says, as the sequences that it keeps apart, and make nothing. Every
other operation makes the mask, by the function and of the arguments that the model would have made
it by and of. Layers' own forwards and the attention functions of others are given the made one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hfpatch.training.packed import Sequences


class DeferredMask(Tensor):
    """See the module. sequences: what it says."""

    sequences: Sequences
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def of(make: Callable[[], Tensor], sequences: Sequences, rows: int, length: int) -> Any:
        """bool [rows, 1, length, length], on the device of `sequences.ends`; `make` makes it."""
        found = Tensor._make_wrapper_subclass(
            DeferredMask, (rows, 1, length, length), dtype=torch.bool, device=sequences.ends.device
        )
        found.sequences, found._make, found._made = sequences, make, None
        return found

    def made(self) -> Tensor:
        """The mask itself; made at the first call."""
        if self._made is None:
            # It is the model's, whoever is the first to read it: a checkpoint that notes what its
            # layer runs would find it made at the second time.
            noted = torch._C._len_torch_dispatch_stack() > 0
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _disable_current_modes() if noted else nullcontext(),
            ):
                self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.made())


def made(mask: Any) -> Any:
    """A mask as it is for who reads it; anything else is given back."""
    return mask.made() if type(mask) is DeferredMask else mask


def with_made(arguments: dict[str, Any]) -> dict[str, Any]:
    """A layer's keyword arguments, for its own forward."""
    return {name: made(value) for name, value in arguments.items()}


def _plain(value: Any) -> Any:
    return tree_map_only(DeferredMask, DeferredMask.made, value)


#: Reading these needs no values.
_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    torch.is_floating_point,
}
