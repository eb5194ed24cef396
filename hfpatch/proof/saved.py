"""What autograd saves for a backward: whether somebody looks at it, and who keeps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfpatch.proof.subject import version


def written_to(t: Tensor, before: int) -> RuntimeError:
    """The error of a backward whose tensor `t` has had another version since it was saved."""
    return RuntimeError(
        "a tensor that the backward needs was modified by an inplace operation: it is at version "
        f"{t._version}, expected {before}"
    )


class kept_as_they_are(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves inside this context is kept, whatever hooks are around it.

    Of hooks only the innermost are called. An output of the function that saves it must not hold
    itself, hence another tensor of the same memory.
    """

    def __init__(self) -> None:
        def pack(saved: Tensor) -> Any:
            return saved.detach(), version(saved)

        def unpack(packed: Any) -> Tensor:
            saved, counted = packed
            if counted is not None and saved._version != counted:
                raise written_to(saved, counted)
            return saved  # type: ignore[no-any-return]

        super().__init__(pack, unpack)


def saving_is_watched() -> bool:
    """Whether somebody, as activation checkpointing, looks at what autograd saves: it is theirs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
