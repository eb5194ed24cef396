"""Bias with activation, bias with a residual, the product with a sum; sums and products of two."""

from typing import Optional

from torch import Tensor, float32, is_grad_enabled
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import _codes
from ._ops import ops
from ._second import no_gradients

_add_bias = ops.add_bias.default
_add_gelu = ops.add_gelu.default
_add_silu = ops.add_silu.default
_mul_add = ops.mul_add.default
_add = ops.add.default
_mul = ops.mul.default
_scale = ops.scale.default
_CASTS = _codes.MODULATION_CASTS


class AddActivation(Function):
    @staticmethod
    def forward(ctx, x, bias, activation):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        if activation == _codes.SILU:
            return _add_silu(x, bias)
        return _add_gelu(x, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if grad is None:
            return no_gradients(ctx)
        x, bias = ctx.saved_tensors
        need_x, need_bias, _ = ctx.needs_input_grad
        needs = _codes.NEED_BIAS if need_bias else 0
        if ctx.activation == _codes.SILU:
            dx, dbias, _ = ops.add_silu_backward.default(grad, x, bias, needs)
        else:
            dx, dbias, _ = ops.add_gelu_backward.default(grad, x, bias, ctx.activation, needs)
        return dx if need_x else None, dbias if need_bias else None, None


class MulAdd(Function):
    """`b` is broadcast over adjacent dimensions; the gradient of a `c` of another shape is a sum of
    its own."""

    @staticmethod
    def forward(ctx, a, b, c, cast):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.cast, ctx.shape, ctx.dtype = cast, c.shape, c.dtype
        return _mul_add(a, b, c, cast)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if grad is None:
            return no_gradients(ctx)
        a, b = ctx.saved_tensors
        need_a, need_b, need_c, _ = ctx.needs_input_grad
        fused = need_c and ctx.shape == b.shape
        da = db = dc = None
        if need_a or need_b or fused:
            needs = (_codes.NEED_WEIGHT if need_b else 0) | (_codes.NEED_BIAS if fused else 0)
            da, db, dc, _ = ops.mul_add_backward.default(grad, a, b, ctx.cast, needs)
        if need_c and not fused:
            dc = _sum_to(grad, ctx.shape).to(ctx.dtype)
        return da if need_a else None, db if need_b else None, dc if need_c else None, None


def _aligned(shape, like):
    """The sizes of a modulation's leading dimensions, next to those of ``like``."""
    if len(shape) == len(like):
        return tuple(shape[:-1])
    return ((shape[0],) if len(shape) == 2 else (1,)) + (1,) * (len(like) - 2)


def _sum_to(grad, shape):
    sizes = _aligned(shape, grad.shape) if grad.dim() > 1 else ()
    over = [i for i, n in enumerate(sizes) if n == 1 and grad.shape[i] != 1]
    return (grad.sum(over, dtype=float32) if over else grad).reshape(shape)


def _adjacent(b, a):
    """Whether the dimensions that ``b`` is broadcast over follow each other."""
    if b.dim() != a.dim() or b.dim() < 4:
        return True
    reduced = [n != m for n, m in zip(b.shape[:-1], a.shape[:-1]) if m != 1]  # noqa: B905
    return sum(now and not before for before, now in zip([False, *reduced], reduced)) <= 1  # noqa: B905


def add_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` of ``x + bias``; the sum is rounded to the dtype first, as eager PyTorch does.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        bias: ``[D]`` in the dtype of ``x``.
        approximate: as in `gelu`.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: ``approximate`` is not one of the three.
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    code = _codes.GELU_APPROXIMATIONS.get(approximate)
    if code is None:
        _codes.reject("approximate", approximate, _codes.GELU_APPROXIMATIONS)
    if is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return AddActivation.apply(x, bias, code)
    return _add_gelu(x, bias, code)


def add_silu(x: Tensor, bias: Tensor) -> Tensor:
    """`silu` of ``x + bias``; the sum is rounded to the dtype first, as eager PyTorch does.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        bias: ``[D]`` in the dtype of ``x``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return AddActivation.apply(x, bias, _codes.SILU)
    return _add_silu(x, bias)


def add_bias(x: Tensor, bias: Tensor, residual: Optional[Tensor] = None) -> Tensor:
    """``x + bias + residual`` in fp32, rounded once: what follows a convolution without its bias.

    A gradient goes through the formula in plain PyTorch.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        bias: ``[D]`` in the dtype of ``x``.
        residual: shape and dtype of ``x``, or None.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    tensors = (x, bias) if residual is None else (x, bias, residual)
    if is_grad_enabled() and any(t.requires_grad for t in tensors):
        return sum(t.float() for t in tensors).to(x.dtype)
    return _add_bias(x, bias, residual)


def mul_add(a: Tensor, b: Tensor, c: Tensor, cast: str = "input") -> Tensor:
    """``a * b + c``.

    ``cast="input"`` rounds the product and the sum to the promoted dtype, as eager PyTorch;
    ``cast="none"`` rounds once, to the dtype of ``a``.

    Args:
        a: ``[..., D]``; fp32, fp16 or bf16.
        b: ``[D]``; or ``[B, D]``, one vector per sample, where ``a`` has 3 dimensions or more; or
            as many dimensions as ``a`` with sizes 1 where it is broadcast (``[B, 1, D]``,
            ``[B, S, D]``).
        c: like ``b``, same dtype; its shape may be another.
        cast: ``"input"`` or ``"none"``.

    Returns:
        A contiguous tensor of the shape of ``a``.

    Raises:
        ValueError: ``cast`` is not one of the two.
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    code = _CASTS.get(cast)
    if code is None:
        _codes.reject("cast", cast, _CASTS)
    if is_grad_enabled() and (a.requires_grad or b.requires_grad or c.requires_grad):
        return MulAdd.apply(a, b if _adjacent(b, a) else b.expand(a.shape), c, code)
    return _mul_add(a, b, c, code)


def _broadcast(b, a):
    """``b`` in the dimensions of ``a``, as the kernels take it."""
    if b.dim() != 2 or a.dim() < 3:
        return b
    return b.reshape(b.shape[0], *(1,) * (a.dim() - 2), b.shape[1])


def add(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """``a + alpha * b`` in fp32, rounded once.

    A gradient goes through the formula in plain PyTorch.

    Args:
        a: ``[..., D]``; fp32, fp16 or bf16.
        b: of the dtype of ``a``: its shape, with sizes 1 where it is broadcast, or ``[D]``.
        alpha: a factor of ``b``.

    Returns:
        A contiguous tensor of the shape and dtype of ``a``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return (a.float() + alpha * _broadcast(b, a).float()).to(a.dtype)
    return _add(a, b, alpha)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` in fp32, rounded once.

    A gradient goes through the formula in plain PyTorch.

    Args:
        a: ``[..., D]``; fp32, fp16 or bf16.
        b: of the dtype of ``a``: its shape, with sizes 1 where it is broadcast, or ``[D]``.

    Returns:
        A contiguous tensor of the shape and dtype of ``a``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return (a.float() * _broadcast(b, a).float()).to(a.dtype)
    return _mul(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """``x * factor`` in fp32, rounded once.

    A gradient goes through the formula in plain PyTorch.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        factor: finite.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if is_grad_enabled() and x.requires_grad:
        return (x.float() * factor).to(x.dtype)
    return _scale(x, factor)
