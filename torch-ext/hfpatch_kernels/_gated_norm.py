"""The gated norm of Mamba-2 (Dao and Gu, arXiv:2405.21060)."""

from typing import Optional

import torch
from torch import Tensor

from . import _codes
from ._ops import ops

_gated_rms_norm = ops.gated_rms_norm.default


def _formula(x, gate, weight, eps, group_size, norm_before_gate, cast, gate_activation):
    dtype = x.dtype if cast == "input" else torch.float32
    act = torch.sigmoid if gate_activation == "sigmoid" else torch.nn.functional.silu
    y = x.float()
    if gate is not None:
        gate = act(gate.float())
        if not norm_before_gate:
            y = y * gate
    grouped = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    y = grouped.flatten(-2).to(dtype)
    if weight is not None:
        y = y * (weight if cast == "input" else weight.float())
    return (y * gate if norm_before_gate and gate is not None else y).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    group_size: int = 0,
    norm_before_gate: bool = False,
    cast: str = "input",
    gate_activation: str = "silu",
) -> Tensor:
    """Root mean square normalization of each group of columns, with a gate or without one.

    A gradient goes through the formula in plain PyTorch; the kernel has no backward yet.

    - ``norm_before_gate=False``: ``weight * norm(x * act(gate))`` (Bamba, Zamba2).
    - ``norm_before_gate=True``: ``weight * norm(x) * act(gate)`` (Qwen3-Next).
    - ``gate=None``: ``weight * norm(x)``.

    The norm is in fp32. ``cast="input"`` rounds it to the dtype before the weight, and the product
    with the weight before the gate; ``cast="none"`` rounds once, at the end (Falcon-H1, Kimi
    Linear).

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        gate: shape and dtype of ``x``, or None.
        weight: ``[D]`` or None; in the dtype of ``x``, or any under ``cast="none"``.
        eps: added to the mean square.
        group_size: columns that are normalized together; divides ``D``. 0: all.
        norm_before_gate: whether the gate is applied after the norm.
        cast: ``"input"`` or ``"none"``.
        gate_activation: ``"silu"`` or ``"sigmoid"``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: ``cast`` or ``gate_activation`` is not one of its names.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    cast_code = _codes.MODULATION_CASTS.get(cast)
    if cast_code is None:
        _codes.reject("cast", cast, _codes.MODULATION_CASTS)
    gate_code = _codes.GATES.get(gate_activation)
    if gate_code is None:
        _codes.reject("gate_activation", gate_activation, _codes.GATES)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (gate is not None and gate.requires_grad)
        or (weight is not None and weight.requires_grad)
    ):
        return _formula(x, gate, weight, eps, group_size, norm_before_gate, cast, gate_activation)
    first = 1 if norm_before_gate else 0
    return _gated_rms_norm(x, gate, weight, eps, group_size, first, cast_code, gate_code)
