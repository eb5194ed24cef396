"""When the kernels of training (`hfpatch.optim`, `hfpatch.loss`) leave a call to the original."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from hfpatch.announce import warn_in_call
from hfpatch.errors import KernelLoadError
from hfpatch.kernels.sources import Kernel, local_package
from hfpatch.ops import KERNEL_DTYPES

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_OURS = (__name__, "hfpatch.optim", "hfpatch.loss")


@cache
def local_kernel(op: str, device: str) -> Kernel | str:
    """The local kernel for a device type, or why there is none."""
    try:
        kernel = local_package().kernel(op)
    except KernelLoadError as e:
        return str(e)
    return kernel.refuses(device) or kernel


def tensor_refusal(op: str, tensor: Tensor) -> str | None:
    """Why no kernel of `op` takes a tensor of this kind, whatever its shape, or None."""
    if type(tensor) not in PLAIN_TENSORS:
        return f"`{type(tensor).__name__}` is a tensor subclass"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.dtype not in KERNEL_DTYPES:
        return f"dtype {tensor.dtype}"
    kernel = local_kernel(op, tensor.device.type)
    return kernel if isinstance(kernel, str) else None


def warn_of_handover(who: str, original: str, reasons: Iterable[str]) -> None:
    """At the user's line: PyTorch wraps `step`, and its schedulers wrap that once more."""
    listed = "; ".join(f"{n} × {why}" for why, n in Counter(reasons).items())
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    said = f"`hfpatch.{who}` hands over to {original}: {listed}"
    warn_in_call(said, UserWarning, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module in _OURS or module.split(".")[0] == "torch"
