"""The public functions: names to codes, and autograd only where a gradient is wanted."""

from typing import Optional

import torch
from torch import Tensor

from . import _autograd, _codes
from ._ops import ops

_ACTIVATIONS = _codes.ACTIVATIONS
_APPROXIMATIONS = _codes.GELU_APPROXIMATIONS
_CASTS = _codes.CASTS

_rms_norm = ops.rms_norm.default
_layer_norm = ops.layer_norm.default
_gelu = ops.gelu.default
_silu = ops.silu.default
_gated = ops.gated.default
_gated_packed = ops.gated_packed.default
_gated_clamped = ops.gated_clamped.default

_grad_enabled = torch.is_grad_enabled


def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tensor:
    """Root mean square normalization over the last dimension.

    With ``xhat = x * rsqrt(mean(x**2) + eps)`` in fp32 (Zhang and Sennrich, arXiv:1910.07467):

    - ``cast="none"``: ``xhat * (weight_offset + weight) + bias`` in fp32, rounded once to the dtype
      of ``x`` (Gemma with ``weight_offset=1.0``, OLMo 2).
    - ``cast="input"``: ``xhat`` is rounded to the dtype of ``x`` first, then multiplied by
      ``weight`` in the promoted dtype, which is the result's (Llama).
    - ``cast="weight"``: ``xhat`` is rounded to the dtype of ``weight`` if that is a half type; the
      result has the dtype of ``weight`` (T5, diffusers).

    Without a weight, all three round ``xhat + bias`` once, to the dtype of ``x``.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16, on the CPU or a CUDA device.
        weight: ``[D]`` or None.
        bias: ``[D]`` or None; same dtype as ``weight``.
        eps: added to the mean square.
        weight_offset: added to ``weight``; must be 0 unless ``cast="none"``.
        cast: ``"none"``, ``"input"`` or ``"weight"``.

    Returns:
        A contiguous tensor of the shape of ``x``.

    Raises:
        ValueError: ``cast`` is not one of the three.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    code = _CASTS.get(cast)
    if code is None:
        _codes.reject("cast", cast, _CASTS)
    if _grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        codes = _codes.constants(eps, weight_offset, code)
        return _autograd.RMSNorm.apply(x, weight, bias, *codes)
    return _rms_norm(x, weight, bias, eps, weight_offset, code)


def layer_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalization over the last dimension (Ba et al., arXiv:1607.06450).

    ``(x - mean) * rsqrt(var + eps) * weight + bias`` in fp32, rounded once to the dtype of ``x``.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        weight: ``[D]`` or None, of any supported dtype.
        bias: ``[D]`` or None, of any supported dtype.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if _grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _autograd.LayerNorm.apply(x, weight, bias, *_codes.constants(eps))
    return _layer_norm(x, weight, bias, eps)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit (Hendrycks and Gimpel, arXiv:1606.08415).

    Args:
        x: any shape; fp32, fp16 or bf16.
        approximate: ``"none"`` for ``x * Phi(x)``, ``"tanh"`` for the tanh approximation,
            ``"sigmoid"`` for ``x * sigmoid(1.702 * x)``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: ``approximate`` is not one of the three.
        RuntimeError: a dtype or device that the kernel refuses.
    """
    code = _APPROXIMATIONS.get(approximate)
    if code is None:
        _codes.reject("approximate", approximate, _APPROXIMATIONS)
    if x.requires_grad and _grad_enabled():
        return _autograd.Activation.apply(x, code)
    return _gelu(x, code)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, also called Swish.

    Args:
        x: any shape; fp32, fp16 or bf16.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype or device that the kernel refuses.
    """
    if x.requires_grad and _grad_enabled():
        return _autograd.Activation.apply(x, _codes.SILU)
    return _silu(x)


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) * up``: SwiGLU, GEGLU, ReGLU (Shazeer, arXiv:2002.05202).

    ``act(gate)`` is rounded to the dtype before the product, as eager PyTorch does.

    Args:
        gate: ``[..., D]``; fp32, fp16 or bf16.
        up: same shape and dtype as ``gate``.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"gelu_sigmoid"`` or ``"relu"``.

    Returns:
        A contiguous tensor of the shape and dtype of ``gate``.

    Raises:
        ValueError: ``activation`` is not one of the five.
        RuntimeError: a dtype, device or shape that the kernel refuses.
    """
    code = _ACTIVATIONS.get(activation)
    if code is None:
        _codes.reject("activation", activation, _ACTIVATIONS)
    if _grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _autograd.Gated.apply(gate, up, code)
    return _gated(gate, up, code)


def gated_packed(x: Tensor, activation: str = "silu", gate_first: bool = True) -> Tensor:
    """`gated` of the two halves of one tensor, without copying them apart.

    Args:
        x: ``[..., 2 * D]``; fp32, fp16 or bf16.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"gelu_sigmoid"`` or ``"relu"``.
        gate_first: the gate is the first half if true, the second if false.

    Returns:
        A contiguous tensor ``[..., D]`` of the dtype of ``x``.

    Raises:
        ValueError: ``activation`` is not one of the five.
        RuntimeError: a dtype, device or shape that the kernel refuses.
    """
    code = _ACTIVATIONS.get(activation)
    if code is None:
        _codes.reject("activation", activation, _ACTIVATIONS)
    if x.requires_grad and _grad_enabled():
        return _autograd.GatedPacked.apply(x, code, 1 if gate_first else 0)
    return _gated_packed(x, code, 1 if gate_first else 0)


#: Of what is not clamped: below, above.
_NO_BOUNDS = (float("-inf"), float("inf")) * 2


def _clamped(x, low, high):
    return x if low is None and high is None else x.clamp(low, high)


def _clamped_formula(
    gate, up, activation, gate_min, gate_max, up_min, up_max, up_offset, alpha, clamp_activated
):
    if not clamp_activated:
        gate = _clamped(gate, gate_min, gate_max)
    if activation == "silu" and alpha == 1.0:
        act = torch.nn.functional.silu(gate)
    elif activation == "relu":
        act = torch.nn.functional.relu(gate)
    elif activation in ("silu", "gelu_sigmoid"):  # in fp32 and rounded once, as the kernel
        wide = gate.float()
        factor = alpha if activation == "silu" else 1.702
        act = (wide * torch.sigmoid(factor * wide)).to(gate.dtype)
    else:
        kind = "tanh" if activation == "gelu_tanh" else "none"
        act = torch.nn.functional.gelu(gate, approximate=kind)
    if clamp_activated:
        act = _clamped(act, gate_min, gate_max)
    up = _clamped(up, up_min, up_max)
    return act * (up if up_offset == 0 else up + up_offset)


def gated_clamped(
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    gate_min: Optional[float] = None,
    gate_max: Optional[float] = None,
    up_min: Optional[float] = None,
    up_max: Optional[float] = None,
    up_offset: float = 0.0,
    alpha: float = 1.0,
    clamp_activated: bool = False,
) -> Tensor:
    """``act(clamp(gate)) * (clamp(up) + up_offset)``, as in DeepSeek-V4, GPT-OSS and MiniMax-M3.

    ``act(gate)``, the sum and the product are rounded to the dtype, as eager PyTorch does, and NaN
    stays NaN. A gradient goes through the formula in plain PyTorch; the kernel has no backward.

    Args:
        gate: ``[..., D]``; fp32, fp16 or bf16.
        up: same shape and dtype as ``gate``.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"gelu_sigmoid"`` or ``"relu"``.
        gate_min: lower bound of ``gate``, or None.
        gate_max: upper bound of ``gate``, or None.
        up_min: lower bound of ``up``, or None.
        up_max: upper bound of ``up``, or None.
        up_offset: added to ``up`` after it is clamped.
        alpha: with ``"silu"``, ``x * sigmoid(alpha * x)``; 1 with the others.
        clamp_activated: the bounds of ``gate`` are of ``act(gate)`` (Step-3.7), not of ``gate``.

    Returns:
        A contiguous tensor of the shape and dtype of ``gate``.

    Raises:
        ValueError: ``activation`` is not one of the five, or has no ``alpha``.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    code = _ACTIVATIONS.get(activation)
    if code is None:
        _codes.reject("activation", activation, _ACTIVATIONS)
    if alpha != 1.0 and activation != "silu":
        raise ValueError("`alpha` must be 1 with {!r}, got {}".format(activation, alpha))
    bounds = (gate_min, gate_max, up_min, up_max)
    if _grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _clamped_formula(gate, up, activation, *bounds, up_offset, alpha, clamp_activated)
    limits = [_NO_BOUNDS[i] if b is None else b for i, b in enumerate(bounds)]
    return _gated_clamped(gate, up, code, alpha, *limits, up_offset, 1 if clamp_activated else 0)
