"""Fused activations: one pass over memory where PyTorch takes several.

Loaded by `kernels.get_kernel`, by Python 3.9 and later: imports of this package are relative, and
need nothing but torch and the standard library.
"""

import torch

from . import layers, reference  # noqa: F401 (the tests and the benchmark use it)
from ._ops import add_op_namespace_prefix, ops

__all__ = ["layers", "relu_squared"]


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0) ** 2`` (Primer, arXiv:2109.08668), computed in fp32 and rounded once.

    Args:
        x: float32, float16 or bfloat16, of any shape; copied first if it is not contiguous.

    Returns:
        A contiguous tensor of the shape and dtype of `x`.
    """
    return ops.relu_squared(x)


# What torch.compile needs to know: the results' shapes and dtypes.


@torch.library.register_fake(add_op_namespace_prefix("relu_squared"))
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(add_op_namespace_prefix("relu_squared_backward"))
def _(grad, x):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


# And autograd: the gradient, by an operator of its own.


def _save_x(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _relu_squared_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return ops.relu_squared_backward(grad, x)


torch.library.register_autograd(
    add_op_namespace_prefix("relu_squared"), _relu_squared_backward, setup_context=_save_x
)
