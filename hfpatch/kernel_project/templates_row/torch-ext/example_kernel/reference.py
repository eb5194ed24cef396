"""What the operators compute, in PyTorch: the tests and the benchmark compare with it."""

import torch


def rms_norm(x: torch.Tensor, weight=None, eps: float = 1e-6) -> torch.Tensor:
    """Computed in fp32, or wider where `x` is, and rounded once to the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(wide.dtype)).to(x.dtype)
