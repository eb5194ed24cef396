"""`rope`, `rope_qk`: rotary position embedding; `qk_norm_rope`: RMS norm of q and k before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfpatch.ops.base import Op, Tensor, compute_dtype
from hfpatch.ops.rms_norm import CASTS, rms_norm, rms_norm_aten


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tensor:
    """Rotary position embedding of the first columns of each head (Su et al., arXiv:2104.09864).

    Each pair of columns (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        x: `[B, S, H, D]`, `[B, H, S, D]`, `[B, S, D]`, `[S, H, D]` or `[S, D]`, floating.
        cos, sin: the shape of `x` with dimensions of size 1 where they repeat, or `[1 or B, S, *]`,
            or `[S, *]`; the last dimension is `rotary_dim / 2`, or `rotary_dim` with each value
            twice, as the pairs lie. fp32 or the dtype of `x`. Or one complex table of
            `rotary_dim / 2` columns in `cos`, complex or its real view `[..., 2]`, without `sin`;
            it needs `interleaved`.
        seq_dim: the dimension of `x` that is S.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J, diffusers) or, if false, columns i and
            i + rotary_dim / 2 (transformers' rotate_half).
        rotary_dim: the columns to rotate, even; 0 for all. The others are copied.
        round_products: round each product to the promoted dtype of `x` and the tables, as
            `x * cos + rotated * sin` does in half precision (transformers); if false, all is fp32
            and rounded once (diffusers).

    Returns:
        the shape and dtype of `x`.
    """
    if sin is None:
        cos, sin = (torch.view_as_real(cos) if cos.is_complex() else cos).unbind(-1)
    width = rotary_dim or x.shape[-1]
    rotated_part, rest = x[..., :width], x[..., width:]
    cos = _like_pairs(cos, x, seq_dim, interleaved, width)
    sin = _like_pairs(sin, x, seq_dim, interleaved, width)
    if not round_products:
        wide = compute_dtype(x, cos, sin)
        rotated_part, cos, sin = rotated_part.to(wide), cos.to(wide), sin.to(wide)
    if interleaved:
        turned = torch.stack((-rotated_part[..., 1::2], rotated_part[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotated_part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    y = (rotated_part * cos + turned * sin).to(x.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def _like_pairs(table: Tensor, x: Tensor, seq_dim: int, interleaved: bool, width: int) -> Tensor:
    """The table as it broadcasts against the rotated columns of `x`."""
    if table.dim() != x.dim():
        shape = [1] * x.dim()
        shape[-1], shape[seq_dim] = table.shape[-1], table.shape[-2]
        if table.dim() == 3:
            shape[0] = table.shape[0]
        table = table.reshape(shape)
    if table.shape[-1] == width:
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope` of q and of k, which may differ in the number of heads.

    Args and returns: see `rope`.
    """
    rest = (cos, sin, seq_dim, interleaved, rotary_dim, round_products)
    return rope(q, *rest), rope(k, *rest)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
    norm_across_heads: bool = False,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMS norm of q and k, rounded to their dtype, then `rope`.

    Args:
        q, k: as `x` of `rope`; they may differ in the number of heads.
        q_weight, k_weight: `[D]`, or `[H * D]` with `norm_across_heads`; both or neither.
        cos, sin: as in `rope`; both None for the norm alone.
        eps, weight_offset, cast: as in `rms_norm`; "input" and "weight" need weights of the dtype
            of `q`.
        norm_across_heads: normalize over all heads of a token (LTX, Wan) instead of each one.
        seq_dim, interleaved, rotary_dim, round_products: as in `rope`.

    Returns:
        q and k in their own shapes and dtype.
    """
    norm = (eps, weight_offset, cast, norm_across_heads, seq_dim)
    q = _norm_heads(rms_norm, q, q_weight, *norm)
    k = _norm_heads(rms_norm, k, k_weight, *norm)
    if cos is None:
        return q, k
    return rope_qk(q, k, cos, sin, seq_dim, interleaved, rotary_dim, round_products)


def qk_norm_rope_aten(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
    norm_across_heads: bool = False,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` with ATen's RMS norm."""
    norm = (eps, weight_offset, cast, norm_across_heads, seq_dim)
    q = _norm_heads(rms_norm_aten, q, q_weight, *norm)
    k = _norm_heads(rms_norm_aten, k, k_weight, *norm)
    if cos is None:
        return q, k
    return rope_qk(q, k, cos, sin, seq_dim, interleaved, rotary_dim, round_products)


def _norm_heads(
    norm: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    cast: str,
    across: bool,
    seq_dim: int,
) -> Tensor:
    head = {4: 3 - seq_dim, 3: 1 if seq_dim == 0 else -1}.get(x.dim(), -1)
    if not across or head < 0:
        return norm(x, weight, None, eps, weight_offset, cast).to(x.dtype)
    rows = x.movedim(head, -2)
    y = norm(rows.flatten(-2), weight, None, eps, weight_offset, cast).to(x.dtype)
    return y.view(rows.shape).movedim(-2, head)


def encode_rope(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params.get("seq_dim", 1),
        int(params.get("interleaved", False)),
        params.get("rotary_dim", 0),
        int(params.get("round_products", False)),
    )


def encode_qk_norm_rope(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params.get("eps", 1e-6),
        params.get("weight_offset", 0.0),
        CASTS[params.get("cast", "none")],
        int(params.get("norm_across_heads", False)),
        *encode_rope(params),
    )


ROPE = Op("rope", rope, rope, encode_rope, captured=True)
ROPE_QK = Op("rope_qk", rope_qk, rope_qk, encode_rope, captured=True)
QK_NORM_ROPE = Op(
    "qk_norm_rope", qk_norm_rope, qk_norm_rope_aten, encode_qk_norm_rope, captured=True
)
