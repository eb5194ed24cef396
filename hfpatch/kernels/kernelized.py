"""Modules whose forward the `kernels` package replaced: `kernelize`, or `use_kernels=True`.

It writes the forward of a kernel's layer, or the class's own again, to the instance, whatever stood
there: a module that it gave a kernel is left to it, and one of ours that it wrote over afterwards
is found and said. A model loaded with `use_kernels=True` is kernelized again by each `train()` and
`eval()` that changes the mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NOTE = (
    "the model was kernelized by `kernels` (`use_kernels=True` or `kernelize`): {count} of its "
    "modules keep those kernels, the others are hfpatch's to swap. A `train()` or `eval()` that "
    "changes the mode kernelizes a model of `use_kernels=True` again, over hfpatch's swaps: call "
    "`hfpatch.apply` after it"
)
OVERWRITTEN = (
    "hfpatch's swap was written over, as `kernels.kernelize` does; call `hfpatch.apply` again"
)


def kernel_of(forward: Any) -> str | None:
    """The layer of a loaded Hub kernel that a bound forward belongs to, or None."""
    from kernels import get_loaded_kernels

    function = getattr(forward, "__func__", forward)
    package = str(getattr(function, "__module__", None) or "").split(".")[0]
    for loaded in get_loaded_kernels():
        if package == loaded.metadata.id:
            layer = str(getattr(function, "__qualname__", "")).removesuffix(".forward")
            origin = loaded.repo_info.repo_id if loaded.repo_info else str(loaded.metadata.name)
            return f"`{layer}` of `{origin}`"
    return None


def kernelized(module: nn.Module) -> str | None:
    """Which kernel's layer stands in for the forward of `module`, or None."""
    forward = module.__dict__.get("forward")
    return kernel_of(forward) if forward is not None else None


def note(modules: Iterable[nn.Module]) -> str | None:
    """What the report says of a model that was kernelized; None for one that was not."""
    seen = list(modules)
    count = sum(kernelized(m) is not None for m in seen)
    if count or any(getattr(m, "_use_kernels", False) is True for m in seen):
        return NOTE.format(count=count)
    return None
