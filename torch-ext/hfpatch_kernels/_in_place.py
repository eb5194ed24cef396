"""Variants that write over their input, for where no gradient is wanted.

The result has the dtype of what it replaces, which must be contiguous (for RoPE: strided as it
likes). Arguments are those of the function without the underscore. A gradient that would be wanted
is an error: most of these need the values that they write over. The input's version counter is
raised, so that autograd notices where an earlier step had saved it.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _codes, _rope
from ._ops import ops


def _refuse_gradients(name, **tensors):
    if not torch.is_grad_enabled():
        return
    for argument, t in tensors.items():
        if t is not None and t.requires_grad:
            raise RuntimeError(
                "`{}_`: expected tensors that need no gradient, got `{}` with requires_grad=True; "
                "call `{}`, or wrap the call in torch.no_grad()".format(name, argument, name)
            )


def _wrote(*tensors):
    if not is_compiling():  # functionalization copies the result back, which raises it
        for t in tensors:
            torch.autograd.graph.increment_version(t)


def _code(argument, value, codes):
    code = codes.get(value)
    if code is None:
        _codes.reject(argument, value, codes)
    return code


def rms_norm_(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tensor:
    """`rms_norm` written over ``x``, which is returned; the result must have its dtype."""
    code = _code("cast", cast, _codes.CASTS)
    _refuse_gradients("rms_norm", x=x, weight=weight, bias=bias)
    ops.rms_norm_.default(x, weight, bias, eps, weight_offset, code)
    _wrote(x)
    return x


def layer_norm_(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """`layer_norm` written over ``x``, which is returned."""
    _refuse_gradients("layer_norm", x=x, weight=weight, bias=bias)
    ops.layer_norm_.default(x, weight, bias, eps)
    _wrote(x)
    return x


def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` written over ``x``, which is returned."""
    code = _code("approximate", approximate, _codes.GELU_APPROXIMATIONS)
    _refuse_gradients("gelu", x=x)
    ops.gelu_.default(x, code)
    _wrote(x)
    return x


def silu_(x: Tensor) -> Tensor:
    """`silu` written over ``x``, which is returned."""
    _refuse_gradients("silu", x=x)
    ops.silu_.default(x)
    _wrote(x)
    return x


def add_gelu_(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`add_gelu` written over ``x``, which is returned."""
    code = _code("approximate", approximate, _codes.GELU_APPROXIMATIONS)
    _refuse_gradients("add_gelu", x=x, bias=bias)
    ops.add_gelu_.default(x, bias, code)
    _wrote(x)
    return x


def add_silu_(x: Tensor, bias: Tensor) -> Tensor:
    """`add_silu` written over ``x``, which is returned."""
    _refuse_gradients("add_silu", x=x, bias=bias)
    ops.add_silu_.default(x, bias)
    _wrote(x)
    return x


def mul_add_(a: Tensor, b: Tensor, c: Tensor, cast: str = "input") -> Tensor:
    """`mul_add` written over ``a``, which is returned; the result must have its dtype."""
    code = _code("cast", cast, _codes.MODULATION_CASTS)
    _refuse_gradients("mul_add", a=a, b=b, c=c)
    ops.mul_add_.default(a, b, c, code)
    _wrote(a)
    return a


def gate_residual_(residual: Tensor, gate: Tensor, x: Tensor, cast: str = "input") -> Tensor:
    """`gate_residual` written over ``residual``, which is returned; the result must have its
    dtype."""
    code = _code("cast", cast, _codes.MODULATION_CASTS)
    _refuse_gradients("gate_residual", residual=residual, gate=gate, x=x)
    ops.gate_residual_.default(residual, gate, x, code)
    _wrote(residual)
    return residual


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tuple[Tensor, Tensor]:
    """`add_rms_norm`: the norm is written over ``x``, the sum over ``residual``; returns both."""
    code = _code("cast", cast, _codes.CASTS)
    _refuse_gradients("add_rms_norm", x=x, residual=residual, weight=weight, bias=bias)
    ops.add_rms_norm_.default(x, residual, weight, bias, eps, weight_offset, code)
    _wrote(x, residual)
    return x, residual


def add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tuple[Tensor, Tensor]:
    """`add_layer_norm`: the norm is written over ``x``, the sum over ``residual``; returns both."""
    _refuse_gradients("add_layer_norm", x=x, residual=residual, weight=weight, bias=bias)
    ops.add_layer_norm_.default(x, residual, weight, bias, eps)
    _wrote(x, residual)
    return x, residual


def rope_(
    x: Tensor,
    cos: Tensor,
    sin: Optional[Tensor] = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tensor:
    """`rope` written over ``x``, which is returned and may be strided."""
    cos, sin = _rope._tables(cos, sin)
    _refuse_gradients("rope", x=x, cos=cos, sin=sin)
    codes = (seq_dim, int(interleaved), rotary_dim, int(round_products))
    ops.rope_.default(x, cos, sin, *codes)
    _wrote(x)
    return x


def rope_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Optional[Tensor] = None,
    seq_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int = 0,
    round_products: bool = False,
) -> Tuple[Tensor, Tensor]:
    """`rope_qk` written over ``q`` and ``k``, for example views of a packed projection; returns
    both."""
    cos, sin = _rope._tables(cos, sin)
    _refuse_gradients("rope_qk", q=q, k=k, cos=cos, sin=sin)
    codes = (seq_dim, int(interleaved), rotary_dim, int(round_products))
    ops.rope_qk_.default(q, k, cos, sin, *codes)
    _wrote(q, k)
    return q, k


def qk_norm_rope_(
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
    """`qk_norm_rope` written over ``q`` and ``k``, for example views of a packed projection;
    returns both."""
    code = _code("cast", cast, _codes.CASTS)
    cos, sin = _rope._tables(cos, sin)
    _refuse_gradients(
        "qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin
    )
    norm = (eps, weight_offset, code, int(norm_across_heads))
    codes = (seq_dim, int(interleaved), rotary_dim, int(round_products))
    ops.qk_norm_rope_.default(q, k, q_weight, k_weight, cos, sin, *norm, *codes)
    _wrote(q, k)
    return q, k
