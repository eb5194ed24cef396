"""Rotary position embedding, alone and after the RMS norm of q and k: the public functions."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import Function

from . import _codes, _functions
from ._ops import ops
from ._second import no_gradients

_rope = ops.rope.default
_rope_qk = ops.rope_qk.default
_qk_norm_rope = ops.qk_norm_rope.default
_grad_enabled = torch.is_grad_enabled


def _tables(cos, sin):
    """What the operators take: a complex table as its real view in ``cos``, without ``sin``."""
    if cos is None or not cos.is_complex():
        return cos, sin
    if sin is not None:
        raise RuntimeError(
            "`sin`: expected None next to a complex `cos`, which holds both, got a tensor"
        )
    return torch.view_as_real(cos.resolve_conj()), None


def _opposite(cos, sin):
    """The tables of the opposite angles."""
    if sin is not None:
        return cos, -sin
    return cos * cos.new_tensor([1.0, -1.0]), None


class Rope(Function):
    """A rotation's transpose is the rotation by the opposite angle: rope with -sin."""

    @staticmethod
    def forward(ctx, x, cos, sin, codes):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.codes = codes
        return _rope(x, cos, sin, *codes)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return no_gradients(ctx)
        opposite = _opposite(*ctx.saved_tensors)
        if torch.is_grad_enabled():  # a second derivative
            return Rope.apply(grad, *opposite, ctx.codes), None, None, None
        return _rope(grad, *opposite, *ctx.codes), None, None, None


def _each_turned_back(ctx, *grads):
    """Where not both have a gradient: the other stays without."""
    opposite = _opposite(*ctx.saved_tensors)
    for grad in grads:
        if grad is None:
            yield None
        elif torch.is_grad_enabled():  # a second derivative
            yield Rope.apply(grad, *opposite, ctx.codes)
        else:
            yield _rope(grad, *opposite, *ctx.codes)


class RopeQK(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, codes):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.codes = codes
        return _rope_qk(q, k, cos, sin, *codes)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        if grad_q is None or grad_k is None:
            return (*_each_turned_back(ctx, grad_q, grad_k), None, None, None)
        opposite = _opposite(*ctx.saved_tensors)
        if torch.is_grad_enabled():  # a second derivative
            return (*RopeQK.apply(grad_q, grad_k, *opposite, ctx.codes), None, None, None)
        grad_q, grad_k = _rope_qk(grad_q, grad_k, *opposite, *ctx.codes)
        return grad_q, grad_k, None, None, None


def _refuse_table_gradients(cos, sin):
    if cos.requires_grad or (sin is not None and sin.requires_grad):
        raise RuntimeError(
            "`{}`: expected a table that needs no gradient, got requires_grad=True; "
            "call .detach()".format("cos" if cos.requires_grad else "sin")
        )


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Optional[Tensor] = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864).

    Each pair of columns ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``.

    Args:
        x: ``[B, S, H, D]``, ``[B, H, S, D]``, ``[B, S, D]``, ``[S, H, D]`` or ``[S, D]``, strided
            as it likes; fp32, fp16 or bf16.
        cos, sin: fp32 or the dtype of ``x``. The shape of ``x`` with dimensions of size 1 where
            they repeat, or ``[1 or B, S, *]``, or ``[S, *]``. The last dimension is
            ``rotary_dim / 2``, or ``rotary_dim`` with each value twice, as the pairs lie; either
            of the two is read. Or a complex table ``exp(i angle)`` of ``rotary_dim / 2`` columns in
            ``cos``, complex64 or its real view ``[..., 2]``, without ``sin``; it needs
            ``interleaved=True`` (Llama's own code, Z-Image, Qwen-Image).
        seq_dim: the dimension of ``x`` that is ``S``.
        interleaved: pairs are columns ``2 i`` and ``2 i + 1`` (GPT-J, Cohere, diffusers); if false,
            columns ``i`` and ``i + rotary_dim / 2`` (transformers' ``rotate_half``).
        rotary_dim: the columns that are rotated, even; 0 for all. The others are copied.
        round_products: round each product to the promoted dtype of ``x`` and the tables, as
            ``x * cos + rotated * sin`` does in eager PyTorch (transformers); if false, all is in
            fp32 and rounded once (diffusers).

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses, or a table that
            needs a gradient.
    """
    cos, sin = _tables(cos, sin)
    codes = (seq_dim, int(interleaved), rotary_dim, int(round_products))
    if _grad_enabled():
        _refuse_table_gradients(cos, sin)
        if x.requires_grad:
            return Rope.apply(x, cos, sin, _codes.constants(*codes))
    return _rope(x, cos, sin, *codes)


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Optional[Tensor] = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tuple[Tensor, Tensor]:
    """`rope` of ``q`` and ``k`` in one launch.

    Args:
        q, k: as ``x`` of `rope`; they may differ in the number of heads.
        cos, sin, seq_dim, interleaved, rotary_dim, round_products: as in `rope`.

    Returns:
        Contiguous tensors of the shapes and dtype of ``q`` and ``k``.

    Raises:
        RuntimeError: as `rope`.
    """
    cos, sin = _tables(cos, sin)
    codes = (seq_dim, int(interleaved), rotary_dim, int(round_products))
    if _grad_enabled():
        _refuse_table_gradients(cos, sin)
        if q.requires_grad or k.requires_grad:
            return RopeQK.apply(q, k, cos, sin, _codes.constants(*codes))
    return _rope_qk(q, k, cos, sin, *codes)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    cos: Optional[Tensor] = None,
    sin: Optional[Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
    norm_across_heads: bool = False,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tuple[Tensor, Tensor]:
    """`rms_norm` of ``q`` and ``k``, rounded to their dtype, then `rope`, in one launch.

    Where a gradient is needed these are two differentiable operators instead of one.

    Args:
        q, k: as ``x`` of `rope`, for example views of a packed projection; they may differ in the
            number of heads.
        q_weight, k_weight: ``[D]``, or ``[H * D]`` with ``norm_across_heads``; both or neither.
        cos, sin: as in `rope`; both None for the norm alone.
        eps, weight_offset, cast: as in `rms_norm`; ``"input"`` and ``"weight"`` need weights of the
            dtype of ``q``, and are then the same.
        norm_across_heads: normalize all heads of a token together (LTX, Wan), not each (Qwen3,
            Flux).
        seq_dim, interleaved, rotary_dim, round_products: as in `rope`.

    Returns:
        Contiguous tensors of the shapes and dtype of ``q`` and ``k``.

    Raises:
        ValueError: ``cast`` is not one of the three.
        RuntimeError: a dtype, device, shape or value that the kernel refuses, or a table that
            needs a gradient.
    """
    code = _codes.CASTS.get(cast)
    if code is None:
        _codes.reject("cast", cast, _codes.CASTS)
    cos, sin = _tables(cos, sin)
    if _grad_enabled():
        if cos is not None:
            _refuse_table_gradients(cos, sin)
        if any(t is not None and t.requires_grad for t in (q, k, q_weight, k_weight)):
            norm = (eps, weight_offset, cast, norm_across_heads, seq_dim)
            q, k = _norm_heads(q, q_weight, *norm), _norm_heads(k, k_weight, *norm)
            if cos is None:
                return q, k
            return rope_qk(q, k, cos, sin, seq_dim, interleaved, rotary_dim, round_products)
    return _qk_norm_rope(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        weight_offset,
        code,
        int(norm_across_heads),
        seq_dim,
        int(interleaved),
        rotary_dim,
        int(round_products),
    )


def _norm_heads(x, weight, eps, weight_offset, cast, across, seq_dim):
    head = {4: 3 - seq_dim, 3: 1 if seq_dim == 0 else -1}.get(x.dim(), -1)
    if not across or head < 0:
        return _functions.rms_norm(x, weight, None, eps, weight_offset, cast)
    rows = x.movedim(head, -2)
    y = _functions.rms_norm(rows.flatten(-2), weight, None, eps, weight_offset, cast)
    return y.view(rows.shape).movedim(-2, head).contiguous()
