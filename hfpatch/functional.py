"""Every op as a plain function: the compiled kernel where there is one, else PyTorch.

    y = hfpatch.functional.rms_norm(x, weight, eps=1e-6, cast="input")

Each has the signature, shapes and dtypes of its formula in `hfpatch.ops`. Where the kernel cannot
run (no build, no code for the device, another dtype) PyTorch's operators compute the same, with one
warning for each op and reason; HFPATCH_FALLBACK=error raises `KernelLoadError` instead. Kernels
without a backward compute what autograd records by their formula.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.announce import announce_in_call
from hfpatch.errors import KernelLoadError
from hfpatch.ops import KERNEL_DTYPES, OPS

if TYPE_CHECKING:
    Function = Callable[..., Any]

_warned: set[tuple[str, str]] = set()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]


def _why_not(name: str, given: list[torch.Tensor]) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    from hfpatch.kernels.sources import local_package

    if not given:
        return None  # the function itself says what it expects
    others = (t.dtype for t in given[1:] if t.is_floating_point() or t.is_complex())
    for dtype in (given[0].dtype, *others):
        if dtype not in KERNEL_DTYPES:
            return f"it computes float32, float16 and bfloat16, got {dtype}"
    try:
        return local_package().kernel(name).refuses(given[0].device.type)
    except KernelLoadError as e:
        return str(e)


def _fall_back(name: str, why: str) -> None:
    """Say it once, or raise where that is asked for."""
    wanted = os.environ.get("HFPATCH_FALLBACK", "warn")
    if wanted not in ("warn", "error"):
        raise ValueError(f"HFPATCH_FALLBACK must be `warn` or `error`, got {wanted!r}")
    if wanted == "error":
        raise KernelLoadError(f"`{name}`: {why}; HFPATCH_FALLBACK=error refuses PyTorch's")
    if (name, why) not in _warned:
        _warned.add((name, why))
        announce_in_call(f"`{name}` is computed by PyTorch's operators: {why}", stacklevel=3)


def _function(name: str) -> Function:
    op = OPS[name]

    @functools.wraps(op.reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        from hfpatch.kernels.sources import local_package

        why = _why_not(name, _tensors(args, kwargs))
        if why is None:
            return local_package().kernel(name).fn(*args, **kwargs)
        _fall_back(name, why)
        return op.aten(*args, **kwargs)

    call.__module__ = __name__
    return call


_functions = {name: _function(name) for name in OPS}


def __getattr__(name: str) -> Any:
    if name in _functions:
        return _functions[name]
    raise AttributeError(
        f"module 'hfpatch.functional' has no op {name!r}: expected one of {', '.join(__dir__())}"
    )


def __dir__() -> list[str]:
    return sorted(_functions)
