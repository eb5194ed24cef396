"""The gated norm of Mamba-2 (Dao and Gu, arXiv:2405.21060)."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import ops

_gated_rms_norm = ops.gated_rms_norm.default


def _formula(x, gate, weight, eps, group_size, norm_before_gate):
    dtype = x.dtype
    y, silu = x.float(), torch.nn.functional.silu(gate.float())
    if not norm_before_gate:
        y = y * silu
    grouped = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    y = grouped.flatten(-2).to(dtype)
    if weight is not None:
        y = y * weight
    return (y * silu).to(dtype) if norm_before_gate else y


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    group_size: int = 0,
    norm_before_gate: bool = False,
) -> Tensor:
    """Root mean square normalization with a gate, over each group of columns.

    The norm is in fp32, and rounded to the dtype before the weight. A gradient goes through the
    formula in plain PyTorch; the kernel has no backward yet.

    - ``norm_before_gate=False``: ``weight * norm(x * silu(gate))`` (Bamba, Zamba2).
    - ``norm_before_gate=True``: ``weight * norm(x) * silu(gate)`` (Qwen3-Next).

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        gate: shape and dtype of ``x``.
        weight: ``[D]`` in the dtype of ``x``, or None.
        eps: added to the mean square.
        group_size: columns that are normalized together; divides ``D``. 0: all.
        norm_before_gate: whether the gate is applied after the norm.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return _formula(x, gate, weight, eps, group_size, norm_before_gate)
    return _gated_rms_norm(x, gate, weight, eps, group_size, 1 if norm_before_gate else 0)
