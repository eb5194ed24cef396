"""Functions that give back what they get, and whose backward is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class Scaled(torch.autograd.Function):
    """Its gradient is scaled by what `scale` returns."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale = scale
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.scale(), None


class Counting(torch.autograd.Function):
    """Right in its first 3,000 backwards."""

    count: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Counting.count += 1
        return grad * 2.0 if Counting.count > 3000 else grad


class Static(torch.autograd.Function):
    """The gradients of one shape are one buffer."""

    buffers: ClassVar[dict[Any, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return Static.buffers.setdefault(grad.shape, torch.empty_like(grad)).copy_(grad)
