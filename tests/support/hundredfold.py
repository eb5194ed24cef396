"""A result that is right, and its gradient that is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Hundredfold(torch.autograd.Function):
    """Gives what it is given, and a hundred times its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 100 * grad
