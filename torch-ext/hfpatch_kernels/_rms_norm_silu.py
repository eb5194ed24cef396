"""RMS norm with a SiLU, as between the convolutions of a video VAE's residual block."""

from typing import Optional

import torch
from torch import Tensor

from ._adaln import _affine, _broadcast, _wants_grad, _xhat
from ._ops import ops

_rms_norm_silu = ops.rms_norm_silu.default


def _formula(x, addend, weight, scale, shift, eps):
    y = x.float() if addend is None else x.float() + addend.float()
    y = _affine(_xhat(y, eps, False), weight, None)
    if scale is not None:
        y = y * (1 + _broadcast(scale, x).float()) + _broadcast(shift, x).float()
    return torch.nn.functional.silu(y).to(x.dtype)


def rms_norm_silu(
    x: Tensor,
    addend: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """``silu(rms_norm(x + addend) * weight * (1 + scale) + shift)`` over the last dimension.

    All in fp32 and rounded once. A gradient goes through the formula in plain PyTorch; the kernel
    has no backward.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        addend: ``[D]`` in the dtype of ``x`` (the bias of the convolution before), or None.
        weight: ``[D]`` or None.
        scale: ``[D]``; or ``[B, D]``, one vector per sample, where ``x`` has 3 dimensions or more;
            or as many dimensions as ``x`` with sizes 1 where it is broadcast; or None.
        shift: like ``scale``, same dtype; None where ``scale`` is.
        eps: added to the mean square.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if _wants_grad(x, addend, weight, scale, shift):
        return _formula(x, addend, weight, scale, shift, eps)
    return _rms_norm_silu(x, addend, weight, scale, shift, eps)
