"""Adaptive layer norm (AdaLN; Peebles and Xie, arXiv:2212.09748) and norms of residual sums.

A gradient goes through the formula in plain PyTorch; the kernels have no backward yet.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _codes
from ._ops import ops

_NORMS = _codes.NORMS
_CASTS = _codes.CASTS
_MODULATION_CASTS = _codes.MODULATION_CASTS

_norm_modulate = ops.norm_modulate.default
_gate_residual = ops.gate_residual.default
_gate_residual_norm_modulate = ops.gate_residual_norm_modulate.default
_add_rms_norm = ops.add_rms_norm.default
_add_layer_norm = ops.add_layer_norm.default

_grad_enabled = torch.is_grad_enabled


def _wants_grad(*tensors):
    return _grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# -------------------------------------------------------------------------------------------------
# The formulas


def _broadcast(modulation, x):
    """[B, D] next to x [B, ..., D] is per sample."""
    if modulation.dim() == 2 and x.dim() > 2:
        return modulation.reshape(modulation.shape[0], *[1] * (x.dim() - 2), modulation.shape[1])
    return modulation


def _xhat(x, eps, layer):
    y = x.float()
    if layer:
        y = y - y.mean(-1, keepdim=True)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)


def _affine(y, weight, bias, offset=0.0):
    if weight is not None:
        y = y * (weight.float() + offset)
    return y if bias is None else y + bias.float()


def _norm_modulate_formula(x, scale, shift, weight, bias, eps, norm, cast):
    scale, shift = _broadcast(scale, x), _broadcast(shift, x)
    y = _affine(_xhat(x, eps, norm == "layer"), weight, bias)
    if cast == "input":
        return y.to(x.dtype) * (1 + scale) + shift
    return (y * (1 + scale.float()) + shift.float()).to(x.dtype)


def _gate_residual_formula(residual, gate, x, cast):
    gate = _broadcast(gate, residual)
    if cast == "input":
        return residual + gate * x
    return (residual.float() + gate.float() * x.float()).to(residual.dtype)


def _rms_norm_formula(x, weight, bias, eps, offset, cast):
    y = _xhat(x, eps, False)
    if weight is None or cast == "none":
        return _affine(y, weight, bias, offset).to(x.dtype)
    y = y.to(x.dtype if cast == "input" else weight.dtype) * weight
    return y if bias is None else y + bias


# -------------------------------------------------------------------------------------------------
# The functions


def norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> Tensor:
    """``norm(x) * (1 + scale) + shift``, the modulation of AdaLN.

    The norm is in fp32, its weight and bias too. Where the rest rounds:

    - ``cast="input"``: as eager PyTorch: the norm to the dtype of ``x``, ``1 + scale`` to the dtype
      of ``scale``, the product and the sum to the promoted dtype, which is the result's (Flux,
      LTX-Video).
    - ``cast="none"``: once, to the dtype of ``x`` (Wan, which computes all of it in fp32).

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        scale: ``[D]``; or ``[B, D]``, one vector per sample, where ``x`` has 3 dimensions or more;
            or as many dimensions as ``x`` with sizes 1 where it is broadcast (``[B, 1, D]``,
            ``[B, S, D]``). Chunks of a larger modulation tensor are read in place.
        shift: like ``scale``, same dtype.
        weight: ``[D]`` or None; belongs to the norm.
        bias: ``[D]`` or None; same dtype as ``weight``.
        eps: added to the variance or the mean square.
        norm: ``"layer"`` or ``"rms"``.
        cast: ``"input"`` or ``"none"``.

    Returns:
        A contiguous tensor of the shape of ``x``.

    Raises:
        ValueError: ``norm`` or ``cast`` is not one of its names.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    norm_code, cast_code = _NORMS.get(norm), _MODULATION_CASTS.get(cast)
    if norm_code is None:
        _codes.reject("norm", norm, _NORMS)
    if cast_code is None:
        _codes.reject("cast", cast, _MODULATION_CASTS)
    if _wants_grad(x, scale, shift, weight, bias):
        return _norm_modulate_formula(x, scale, shift, weight, bias, eps, norm, cast)
    return _norm_modulate(x, scale, shift, weight, bias, eps, norm_code, cast_code)


def gate_residual(residual: Tensor, gate: Tensor, x: Tensor, cast: str = "input") -> Tensor:
    """``residual + gate * x``.

    ``cast="input"`` rounds the product and the sum to the promoted dtype, as eager PyTorch;
    ``cast="none"`` rounds once, to the dtype of ``residual`` (Wan).

    Args:
        residual: ``[..., D]``; fp32, fp16 or bf16.
        gate: like ``scale`` of `norm_modulate`.
        x: shape and dtype of ``residual``.
        cast: ``"input"`` or ``"none"``.

    Returns:
        A contiguous tensor of the shape of ``residual``.

    Raises:
        ValueError: ``cast`` is not one of the two.
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    cast_code = _MODULATION_CASTS.get(cast)
    if cast_code is None:
        _codes.reject("cast", cast, _MODULATION_CASTS)
    if _wants_grad(residual, gate, x):
        return _gate_residual_formula(residual, gate, x, cast)
    return _gate_residual(residual, gate, x, cast_code)


def gate_residual_norm_modulate(
    residual: Tensor,
    gate: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    norm: str = "layer",
    cast: str = "input",
) -> tuple[Tensor, Tensor]:
    """`gate_residual`, then `norm_modulate` of its result, in one pass over memory.

    The norm is that of the rounded sum. Two kernels run where ``gate`` has another dtype than
    ``scale``, or than ``residual`` under ``cast="input"``.

    Args: those of the two functions.

    Returns:
        ``(sum, y)``: ``residual + gate * x`` and its modulated norm.

    Raises:
        ValueError: ``norm`` or ``cast`` is not one of its names.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    norm_code, cast_code = _NORMS.get(norm), _MODULATION_CASTS.get(cast)
    if norm_code is None:
        _codes.reject("norm", norm, _NORMS)
    if cast_code is None:
        _codes.reject("cast", cast, _MODULATION_CASTS)
    if (
        gate.dtype != scale.dtype
        or (cast_code == _codes.CAST_INPUT and gate.dtype != residual.dtype)
        or _wants_grad(residual, gate, x, scale, shift, weight, bias)
    ):
        total = gate_residual(residual, gate, x, cast)
        return total, norm_modulate(total, scale, shift, weight, bias, eps, norm, cast)
    return _gate_residual_norm_modulate(
        residual, gate, x, scale, shift, weight, bias, eps, norm_code, cast_code
    )


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> tuple[Tensor, Tensor]:
    """``sum = x + residual``, rounded to the dtype, and `rms_norm` of it in one pass over memory.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        residual: shape and dtype of ``x``.
        weight, bias, eps, weight_offset, cast: those of `rms_norm`.

    Returns:
        ``(y, sum)``, contiguous.

    Raises:
        ValueError: ``cast`` is not one of the three.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    code = _CASTS.get(cast)
    if code is None:
        _codes.reject("cast", cast, _CASTS)
    if _wants_grad(x, residual, weight, bias):
        total = x + residual
        return _rms_norm_formula(total, weight, bias, eps, weight_offset, cast), total
    return _add_rms_norm(x, residual, weight, bias, eps, weight_offset, code)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``sum = x + residual``, rounded to the dtype, and `layer_norm` of it in one pass over memory.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        residual: shape and dtype of ``x``.
        weight: ``[D]`` or None, of any supported dtype.
        bias: ``[D]`` or None; same dtype as ``weight``.
        eps: added to the variance.

    Returns:
        ``(y, sum)``, contiguous, in the dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if _wants_grad(x, residual, weight, bias):
        total = x + residual
        return _affine(_xhat(total, eps, True), weight, bias).to(x.dtype), total
    return _add_layer_norm(x, residual, weight, bias, eps)
