"""RMS norm of rows: one pass over memory where PyTorch takes several; also in place.

Loaded by `kernels.get_kernel`, by Python 3.9 and later: imports of this package are relative, and
need nothing but torch and the standard library.
"""

from typing import Optional

import torch

from . import layers, reference  # noqa: F401 (the tests and the benchmark use it)
from ._ops import add_op_namespace_prefix, ops

__all__ = ["layers", "rms_norm", "rms_norm_"]


def rms_norm(
    x: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467), computed
    in fp32 and rounded once.

    Args:
        x: float32, float16 or bfloat16, [..., width]; copied first if it is not contiguous.
        weight: [width], of any of these dtypes, or None.
        eps: added to the mean of squares.

    Returns:
        A contiguous tensor of the shape and dtype of `x`.
    """
    return ops.rms_norm(x, weight, eps)


def rms_norm_(
    x: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6
) -> torch.Tensor:
    """The same, written over `x`, which must be contiguous; returns `x`. It has no gradient.

    Raises:
        RuntimeError: `x` is not contiguous, or autograd would record the call.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad)
    ):
        raise RuntimeError("`rms_norm_` has no gradient; use `rms_norm`")
    ops.rms_norm_(x, weight, eps)
    return x


# What torch.compile needs to know: the results' shapes and dtypes.


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _(x, weight, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_"))
def _(x, weight, eps):
    return None


# And autograd: the gradient, by PyTorch's operators.


def _save(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normed = wide * scale
    grad = grad.float()
    weighted = grad if weight is None else grad * weight.float()
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_weight = None
    if weight is not None and ctx.needs_input_grad[1]:
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), grad_weight, None


torch.library.register_autograd(
    add_op_namespace_prefix("rms_norm"), _rms_norm_backward, setup_context=_save
)
