"""The two halves of a decoder layer, each one function of autograd's with a backward of its own.

`front`: the norm before attention, the products to queries, keys and values, their norms, RoPE.
`back`: attention's product, the residual sums, the norms, the MLP. Attention stands between them
and is what the model's own attention function makes of it.

What is kept for the backward is what cannot be made again for the price of reading it: the layer's
input, the sum between the halves, the results of the gate's and the MLP's first products, and what
attention keeps. Normed rows, and the product of gate and MLP, the largest tensors of a layer, are
made again. Gradients of weights are one product each, as the original's are; those of a half's
input are added up in its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.kernels.sources import local_package
from hfpatch.proof.subject import autocasts, no_gradients, only_by_operators
from hfpatch.training import low_rank

_CAST_NONE, _CAST_INPUT = 0, 1
#: Activations of the gated kernels, and their codes.
KERNEL_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 3, "relu": 4}


@dataclass(frozen=True)
class NormForm:
    """kind: "rms" or "layer"; see `hfpatch.decoding.spec.Norm`."""

    kind: str
    eps: float
    offset: float
    rounded: bool

    @property
    def cast(self) -> int:
        """The kernel's code for where it rounds."""
        return _CAST_INPUT if self.rounded else _CAST_NONE


@dataclass(frozen=True)
class FrontForm:
    """What `front` computes, without its tensors. compute: what products are computed in, the
    input's dtype or autocast's. packed: queries, keys and values are rows of one weight.
    rotary_dim: 0 where there is no RoPE. qk_norm: of queries and keys, over a head or, if
    `across`, over all of them. scales: of adapters, 0 where a product has none, or () where none
    has. autocast: whether it is on, and casts them."""

    compute: torch.dtype
    norm: NormForm | None
    qk_norm: NormForm | None
    across: bool
    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    packed: bool
    scales: tuple[float, ...] = ()
    autocast: bool = False

    def adapters(self, tensors: Any) -> list[low_rank.Pair | None]:
        """Of each product, from the flat arguments of the function."""
        cast = self.compute if self.autocast else None
        return low_rank.pairs(tensors, self.scales, cast, 1 if self.packed else 3)


@dataclass(frozen=True)
class BackForm:
    """What `back` computes, without its tensors. compute: as there. packed: gate and up are
    halves of one weight, the gate first where `gate_first`. factor: of both residual sums.
    scales, autocast: as there."""

    compute: torch.dtype
    after_attention: NormForm | None
    before_mlp: NormForm | None
    after_mlp: NormForm | None
    parallel: bool
    factor: float
    activation: str
    gated: bool
    packed: bool
    gate_first: bool
    scales: tuple[float, ...] = ()
    autocast: bool = False

    def adapters(self, tensors: Any) -> list[low_rank.Pair | None]:
        """Of attention's product, gate, up and down."""
        return low_rank.pairs(tensors, self.scales, self.compute if self.autocast else None, 4)


def _ops() -> Any:
    return local_package().module._ops.ops


def _without_autocast(device: str) -> Any:
    """The casts are in the stages."""
    if autocasts(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# --- norms ----------------------------------------------------------------------------------------


def normed(x: Tensor, form: NormForm | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`x` [..., n] normed, by the kernel; `x` itself where there is no norm."""
    if form is None:
        return x
    if form.kind == "layer":
        return _ops().layer_norm.default(x, weight, bias, form.eps)  # type: ignore[no-any-return]
    return _ops().rms_norm.default(x, weight, bias, form.eps, form.offset, form.cast)  # type: ignore[no-any-return]


def _norm_backward(
    grad: Tensor,
    x: Tensor,
    form: NormForm | None,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias; needs: of weight and bias."""
    if form is None:
        return grad, None, None
    code = int(needs[0]) + 2 * int(needs[1])
    grad = grad.to(_result_dtype(x, form, weight))
    if form.kind == "layer":
        dx, dw, db, _ = _ops().layer_norm_backward.default(grad, x, weight, bias, form.eps, code)
    else:
        dx, dw, db, _ = _ops().rms_norm_backward.default(
            grad, x, weight, bias, form.eps, form.offset, form.cast, code
        )
    return dx, dw if needs[0] else None, db if needs[1] else None


def _result_dtype(x: Tensor, form: NormForm, weight: Tensor | None) -> torch.dtype:
    """Where the normalized value is rounded first, its product with the weight is promoted."""
    if weight is None or form.kind == "layer" or not form.rounded:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _formula_norm(
    x: Tensor, form: NormForm | None, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The same by PyTorch's operators, for gradients of gradients."""
    if form is None:
        return x
    y = x.float()
    if form.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + form.eps)
    if form.rounded:
        y = y.to(x.dtype).float()
    if weight is not None:
        y = y * (weight.float() + form.offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


# --- products -------------------------------------------------------------------------------------


def _product_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    weight = weight.to(out.dtype)
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias.to(out.dtype), x, weight.t(), out=out)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in the dtype of `x`, as autocast has it."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _weight_gradient(d: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """d [T, out], x [T, in] -> [out, in], in the dtype of the parameter."""
    return torch.mm(d.t(), x).to(weight.dtype)


def _bias_gradient(d: Tensor, bias: Tensor) -> Tensor:
    return d.sum(0, dtype=torch.float32).to(bias.dtype)


def _rows(x: Tensor) -> Tensor:
    """[..., n] as [T, n], its last dimension dense."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _recorded(formula: Any, ctx: Any, inputs: list[Any], *grads: Tensor | None) -> list[Any]:
    """Gradients of a formula's results by its inputs, by PyTorch's operators: autograd may record
    them in turn, and `vmap` has rules for them."""
    graph = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[1:]
    own = [
        None if t is None else t.view_as(t) if graph else t.detach().requires_grad_(need)
        for t, need in zip(inputs, needed, strict=True)
    ]
    place = [i for i, need in enumerate(needed) if need]
    with torch.enable_grad():
        results = formula(ctx.form, *own)
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None]
    gradient: Any = torch.autograd.grad
    found = gradient(
        [y for y, _ in pairs],
        [own[i] for i in place],
        [g for _, g in pairs],
        create_graph=graph,
        allow_unused=True,
    )
    answer: list[Any] = [None] * len(own)
    for i, g in zip(place, found, strict=True):
        answer[i] = g
    return answer


# --- the front ------------------------------------------------------------------------------------


def front(
    form: FrontForm,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    q: tuple[Tensor, Tensor | None],
    k: tuple[Tensor, Tensor | None] | None,
    v: tuple[Tensor, Tensor | None] | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    adapters: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, heads, S, head_dim], keys and values [B, key_heads, S, head_dim] of the layer's
    input `x` [B, S, hidden].

    Args:
        q, k, v: weight and bias of each product; where `form.packed` all are `q`'s.
        cos, sin: [B or 1, S, rotary_dim], or None.
        adapters: A and B of q, k and v in turn (of all in one where `form.packed`), each None where
            there is none; or ().
    """
    k, v = k or (None, None), v or (None, None)  # type: ignore[assignment]
    apply: Any = _Front.apply
    with _without_autocast(x.device.type):
        found: tuple[Tensor, Tensor, Tensor] = apply(
            form, x, norm_weight, norm_bias, *q, *k, *v, q_norm, k_norm, cos, sin, *adapters
        )  # type: ignore[misc]
    return found


class _Front(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: FrontForm,
        x: Tensor,
        nw: Tensor | None,
        nb: Tensor | None,
        qw: Tensor,
        qb: Tensor | None,
        kw: Tensor | None,
        kb: Tensor | None,
        vw: Tensor | None,
        vb: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        *adapters: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        weight, bias = _together(form, (qw, kw, vw), (qb, kb, vb))
        n = _rows(normed(x, form.norm, nw, nb)).to(form.compute)
        whole = n.new_empty(len(n), len(weight))
        _product_into(whole, n, weight, bias)
        pieces = torch.split(whole, _sizes(form), 1)
        low = [
            low_rank.adapt(out, n, pair)
            for out, pair in zip(pieces, form.adapters(adapters), strict=True)
        ]
        q, k, v = _heads(whole, x.shape, form)
        raw_q = raw_k = None
        if form.qk_norm is not None:
            raw_q, raw_k = q, k
            q, k = _normed_rotated(form, q, k, q_norm, k_norm, cos, sin)
        elif form.rotary_dim:
            _rotate_into(form, (q, k), q, k, cos, sin)
        ctx.form = form
        inputs = (x, nw, nb, qw, qb, kw, kb, vw, vb, q_norm, k_norm, cos, sin)
        ctx.save_for_backward(*inputs, *adapters, raw_q, raw_k, *low)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
    ) -> tuple[Any, ...]:
        if dq is None and dk is None and dv is None:
            return no_gradients(ctx)
        form: FrontForm = ctx.form
        saved, count = ctx.saved_tensors, 13 + 2 * len(form.scales)
        inputs, (raw_q, raw_k, *low) = list(saved[:count]), saved[count:]
        if only_by_operators(dq, dk, dv):
            found = _recorded(_front_formula, ctx, inputs, dq, dk, dv)
            return None, *_reached(form, found, dq, dk, dv)
        x, nw, nb, qw, qb, kw, kb, vw, vb, q_norm, k_norm, cos, sin, *adapters = inputs
        need = ctx.needs_input_grad[1:]
        need_x, need_nw, need_nb, *need_products = need[:9]
        whole = x.new_empty(x.shape[0] * x.shape[1], _width(form), dtype=form.compute)
        parts = _heads(whole, x.shape, form)
        given = [None if d is None else _dense(d.transpose(1, 2)) for d in (dq, dk, dv)]
        d_q, d_k, d_v = (
            torch.zeros_like(into) if d is None else d for d, into in zip(given, parts, strict=True)
        )
        d_qn = d_kn = None
        if form.rotary_dim and form.qk_norm is None:
            assert sin is not None
            _rotate_into(form, parts[:2], d_q, d_k, cos, -sin)
        elif form.qk_norm is not None:
            if q_norm is not None and q_norm.dtype != d_q.dtype:
                d_q, d_k = d_q.to(q_norm.dtype), d_k.to(q_norm.dtype)
            if form.rotary_dim:
                turned = torch.empty_like(d_q), torch.empty_like(d_k)
                _rotate_into(form, turned, d_q, d_k, cos, -sin)
                d_q, d_k = turned
            d_q, d_qn = _qk_norm_backward(form, d_q, raw_q, q_norm, need[9])
            d_k, d_kn = _qk_norm_backward(form, d_k, raw_k, k_norm, need[10])
        done = 2 if form.rotary_dim and form.qk_norm is None else 0
        for into, d in list(zip(parts, (d_q, d_k, d_v), strict=True))[done:]:
            into.copy_(d)
        weights = [None] * 6
        dx = dnw = dnb = n = None
        if any(need_products) or any(need[13::2]):
            n = _rows(normed(x, form.norm, nw, nb)).to(form.compute)
        if n is not None and any(need_products):
            weights = _products_backward(form, whole, n, (qw, kw, vw), (qb, kb, vb), need_products)
        dn = None
        if need_x or need_nw or need_nb:
            weight, _ = _together(form, (qw, kw, vw), (None, None, None))
            dn = torch.mm(whole, weight.to(form.compute))
        of_adapters: list[Any] = []
        pieces = torch.split(whole, _sizes(form), 1)
        for i, pair in enumerate(form.adapters(adapters) if adapters else ()):
            wanted = need[13 + 2 * i : 15 + 2 * i]
            of_adapters += low_rank.backward(pieces[i], n, low[i], pair, wanted, dn)
        del n, whole, pieces, parts
        if dn is not None:
            dn = dn.view(x.shape).to(x.dtype)
            dx, dnw, dnb = _norm_backward(dn, x, form.norm, nw, nb, (need_nw, need_nb))
        found = [dx, dnw, dnb, *weights, d_qn, d_kn, None, None, *of_adapters]
        return None, *_reached(form, found, dq, dk, dv)


def _reached(form: FrontForm, found: list[Any], *grads: Tensor | None) -> list[Any]:
    """Gradients of the front's tensors, without those of parameters that stand before nothing but
    queries, or keys, or values, where these have none. All three are parts of one tensor here, for
    which zeros are made; in the original they are only where `form.packed`."""
    for i, grad in enumerate(grads):
        if grad is not None:
            continue
        if i < 2:
            found[9 + i] = None  # the norm
        if not form.packed:
            found[3 + 2 * i : 5 + 2 * i] = None, None
            if form.scales:
                found[13 + 2 * i : 15 + 2 * i] = None, None
    return found


def _sizes(form: FrontForm) -> list[int]:
    """Columns of each product."""
    if form.packed:
        return [_width(form)]
    return [c * form.head_dim for c in (form.heads, form.key_heads, form.key_heads)]


def _width(form: FrontForm) -> int:
    return (form.heads + 2 * form.key_heads) * form.head_dim


def _together(
    form: FrontForm, weights: tuple[Any, Any, Any], biases: tuple[Any, Any, Any]
) -> tuple[Tensor, Tensor | None]:
    """The three weights, and biases, as one: one product in place of three small ones is worth the
    copy, a few microseconds."""
    if form.packed:
        return weights[0], biases[0]
    present = [b for b in biases if b is not None]
    if present and len(present) < 3:
        filled = [
            w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)
        ]
    else:
        filled = present
    return torch.cat(weights), torch.cat(filled) if filled else None


def _heads(whole: Tensor, shape: torch.Size, form: FrontForm) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, S, heads, head_dim] of [T, all of them]."""
    counts = (form.heads, form.key_heads, form.key_heads)
    parts = torch.split(whole.view(*shape[:-1], -1), [c * form.head_dim for c in counts], -1)
    q, k, v = (p.view(*shape[:-1], c, -1) for p, c in zip(parts, counts, strict=True))
    return q, k, v


def _dense(x: Tensor) -> Tensor:
    """As kernels walk it: a gradient may be expanded, or laid out in any order."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _rotate_into(
    form: FrontForm, into: Any, q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None
) -> None:
    codes = (1, int(form.interleaved), form.rotary_dim, 1)
    if into[0] is q:
        _ops().rope_qk_.default(q, k, cos, sin, *codes)
    else:
        _ops().rope_qk_out.default(*into, q, k, cos, sin, *codes)


def _normed_rotated(
    form: FrontForm, q: Tensor, k: Tensor, q_norm: Any, k_norm: Any, cos: Any, sin: Any
) -> tuple[Tensor, Tensor]:
    norm = form.qk_norm
    assert norm is not None
    if not form.rotary_dim:
        cos = sin = None
    if q_norm is not None and q_norm.dtype != q.dtype:  # under autocast
        wide_q, wide_k = (
            _across(form, t, lambda rows, w=w: normed(rows, norm, w, None))
            for t, w in ((q, q_norm), (k, k_norm))
        )
        if form.rotary_dim:
            _rotate_into(form, (wide_q, wide_k), wide_q, wide_k, cos, sin)
        return wide_q.to(q.dtype), wide_k.to(k.dtype)
    found: tuple[Tensor, Tensor] = _ops().qk_norm_rope.default(
        q, k, q_norm, k_norm, cos, sin, norm.eps, norm.offset, norm.cast, int(form.across),
        1, int(form.interleaved), form.rotary_dim, 1,
    )  # fmt: skip
    return found


def _across(form: FrontForm, x: Tensor, norm: Any) -> Tensor:
    """A norm of [B, S, heads, head_dim], over a head or over all of them."""
    found: Tensor = norm(x.flatten(-2)).view(x.shape) if form.across else norm(x)
    return found


def _qk_norm_backward(
    form: FrontForm, grad: Tensor, raw: Tensor, weight: Tensor | None, need: bool
) -> tuple[Tensor, Tensor | None]:
    shape = grad.shape
    if form.across:
        grad, raw = grad.flatten(-2), raw.flatten(-2)
    dx, dw, _ = _norm_backward(grad, raw, form.qk_norm, weight, None, (need, False))
    return dx.view(shape), dw


def _products_backward(
    form: FrontForm, d: Tensor, x: Tensor, weights: Any, biases: Any, need: list[bool]
) -> list[Any]:
    """Gradients of weight and bias of q, k and v in turn."""
    sizes = _sizes(form)
    need_weights = [n for n, w in zip(need[::2], weights, strict=True) if w is not None]
    pieces = torch.split(d, sizes, 1)
    if all(need_weights):
        of_weights: list[Any] = list(torch.split(torch.mm(d.t(), x), sizes))
    else:
        of_weights = [
            torch.mm(p.t(), x) if n else None for p, n in zip(pieces, need_weights, strict=True)
        ]
    found: list[Any] = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        dw = of_weights[i] if weight is not None and need[2 * i] else None
        found.append(None if dw is None else dw.to(weight.dtype))
        found.append(_bias_gradient(pieces[i], bias) if need[2 * i + 1] else None)
    return found


def _front_formula(
    form: FrontForm, x: Any, nw: Any, nb: Any, qw: Any, qb: Any, kw: Any, kb: Any, vw: Any, vb: Any,
    q_norm: Any, k_norm: Any, cos: Any, sin: Any, *adapters: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n = _formula_norm(x, form.norm, nw, nb).to(form.compute)
    products = ((qw, qb),) if form.packed else ((qw, qb), (kw, kb), (vw, vb))
    pairs = form.adapters(adapters)
    whole = torch.cat(
        [low_rank.formula(n, w, b, pair) for (w, b), pair in zip(products, pairs, strict=True)], -1
    )
    q, k, v = _heads(_rows(whole), x.shape, form)
    if form.qk_norm is not None:
        if form.across:
            q, k = (
                _formula_norm(t.flatten(-2), form.qk_norm, w, None).view_as(t)
                for t, w in ((q, q_norm), (k, k_norm))
            )
        else:
            q = _formula_norm(q, form.qk_norm, q_norm, None)
            k = _formula_norm(k, form.qk_norm, k_norm, None)
    if form.rotary_dim:
        q, k = (_formula_rotated(t, form, cos, sin) for t in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _formula_rotated(x: Tensor, form: FrontForm, cos: Tensor, sin: Tensor) -> Tensor:
    r = form.rotary_dim
    part, rest = x[..., :r], x[..., r:]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if form.interleaved:
        step = 2 if cos.shape[-1] == r else 1
        cos, sin = cos[..., ::step], sin[..., ::step]
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        cos, sin = cos[..., : r // 2], sin[..., : r // 2]
        a, b = part.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


# --- the back -------------------------------------------------------------------------------------


def back(
    form: BackForm,
    x: Tensor,
    attended: Tensor,
    o: tuple[Tensor, Tensor | None],
    gate: tuple[Tensor, Tensor | None] | None,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    after_attention: tuple[Tensor | None, Tensor | None],
    before_mlp: tuple[Tensor | None, Tensor | None],
    after_mlp: tuple[Tensor | None, Tensor | None],
    adapters: tuple[Tensor | None, ...] = (),
) -> Tensor:
    """The layer's result [B, S, hidden].

    Args:
        x: the layer's input [B, S, hidden].
        attended: attention's result [B, S, heads * head_dim].
        o, gate, up, down: weight and bias of each product; where `form.packed`, gate and up are
            `up`'s.
        after_attention, before_mlp, after_mlp: weight and bias of the norms.
        adapters: A and B of o, gate, up and down in turn, each None where there is none; or ().
    """
    apply: Any = _Back.apply
    last: list[Callable[[Tensor], Any]] = []
    with _without_autocast(x.device.type):
        found: Tensor = apply(
            (form, last), x, attended, *o, *(gate or (None, None)), *up, *down,
            *after_attention, *before_mlp, *after_mlp, *adapters,
        )  # fmt: skip
        if last:
            with torch.no_grad():
                last.pop()(found)
    return found


class _Back(torch.autograd.Function):
    """Where no norm follows the MLP, `forward` leaves its last product to what it puts into `last`:
    all that is kept is known before it, and checkpointing, which makes a layer's forward again for
    what was kept, ends it there."""

    @staticmethod
    def forward(
        ctx: Any, given: tuple[BackForm, list[Any]], x: Tensor, a: Tensor, ow: Tensor, ob: Any,
        gw: Any, gb: Any, uw: Tensor, ub: Any, dw: Tensor, db: Any, aw: Any, ab: Any, bw: Any,
        bb: Any, mw: Any, mb: Any, *adapters: Any,
    ) -> Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        form, last = given
        to_o, to_gate, to_up, to_down = form.adapters(adapters)
        raw_h = _product(a, ow, ob)
        low_o = low_rank.adapt(_rows(raw_h), _rows(a), to_o)
        h = normed(raw_h, form.after_attention, aw, ab)
        if form.factor != 1.0:
            h = h * form.factor
        s: Tensor | None
        if form.parallel:
            s, n = None, normed(x, form.before_mlp, bw, bb)
        elif form.before_mlp is not None and h.dtype == x.dtype:
            n, s = _sum_normed(x, h, form.before_mlp, bw, bb)
        else:
            s = x + h
            n = normed(s, form.before_mlp, bw, bb)
        if form.after_attention is None:
            raw_h = None  # type: ignore[assignment]
        n = _rows(n).to(form.compute)
        first = _first_products(form, n, gw, gb, uw, ub)
        of_gate, of_up = _halves(form, first)
        low_g = low_rank.adapt(of_gate, n, to_gate)
        low_u = low_rank.adapt(of_up, n, to_up)
        del n, of_gate, of_up
        p = _activated(form, first)
        low_d = low_rank.low_of(p, to_down)
        raw_y = None

        def product() -> Tensor:
            y = _product(p, dw, db)
            low_rank.add(y, low_d, to_down)
            return y.view(x.shape)

        def summed(y: Tensor, out: Tensor | None = None) -> Tensor:
            if form.factor != 1.0:
                y = y * form.factor
            return torch.add(x + h if s is None else s, y, out=out)

        if form.after_mlp is None:
            of_sum = torch.promote_types(x.dtype, h.dtype)
            out = x.new_empty(x.shape, dtype=torch.promote_types(of_sum, form.compute))
            last.append(lambda into: summed(product(), into))
        else:
            raw_y = product()
            out = summed(normed(raw_y, form.after_mlp, mw, mb))
        ctx.form = form
        ctx.save_for_backward(
            x, a, ow, ob, gw, gb, uw, ub, dw, db, aw, ab, bw, bb, mw, mb, *adapters,
            s, first, raw_h, raw_y, low_o, low_g, low_u, low_d,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return no_gradients(ctx)
        form: BackForm = ctx.form
        *inputs, s, first, raw_h, raw_y, low_o, low_g, low_u, low_d = ctx.saved_tensors
        if only_by_operators(grad):
            return None, *_recorded(_back_formula, ctx, inputs, grad)
        x, a, ow, ob, gw, gb, uw, ub, dw, db, aw, ab, bw, bb, mw, mb, *adapters = inputs
        to_o, to_gate, to_up, to_down = form.adapters(adapters)
        (
            need_x, need_a, need_ow, need_ob, need_gw, need_gb, need_uw, need_ub, need_dw, need_db,
            need_aw, need_ab, need_bw, need_bb, need_mw, need_mb, *need_adapters,
        ) = ctx.needs_input_grad[1:]  # fmt: skip
        need_o, need_g, need_u, need_d = (
            (need_adapters or [False] * 8)[i : i + 2] for i in (0, 2, 4, 6)
        )
        grad = grad.contiguous()
        # the MLP, from its end
        dy = grad if form.factor == 1.0 else grad * form.factor
        d_after, d_mw, d_mb = _norm_backward(dy, raw_y, form.after_mlp, mw, mb, (need_mw, need_mb))
        dy2 = _rows(d_after.to(form.compute))
        d_dw = d_db = p = None
        if need_dw or need_d[0]:
            p = _activated(form, first)
        if p is not None and need_dw:
            d_dw = _weight_gradient(dy2, p, dw)
        if need_db:
            d_db = _bias_gradient(dy2, db)
        dp = torch.mm(dy2, dw.to(form.compute))
        of_down = low_rank.backward(dy2, p, low_d, to_down, need_d, dp)
        del p
        d_first = _activated_backward(form, dp, first)
        del dp, dy, dy2, d_after
        middle = x if s is None else s
        d_gw = d_gb = d_uw = d_ub = n = None
        if need_gw or need_uw or need_g[0] or need_u[0]:
            n = _rows(normed(middle, form.before_mlp, bw, bb)).to(form.compute)
        d_gate, d_up = _halves(form, d_first)
        d_gw = _weight_gradient(d_gate, n, gw) if need_gw and n is not None else None
        d_uw = _weight_gradient(d_up, n, uw) if need_uw and n is not None else None
        if need_gb:
            d_gb = _bias_gradient(d_gate, gb)
        if need_ub:
            d_ub = _bias_gradient(d_up, ub)
        dn = torch.mm(d_up, uw.to(form.compute))
        if form.gated and not form.packed:
            dn.addmm_(d_gate, gw.to(form.compute))
        of_gate = low_rank.backward(d_gate, n, low_g, to_gate, need_g, dn)
        of_up = low_rank.backward(d_up, n, low_u, to_up, need_u, dn)
        del d_first, d_gate, d_up, n
        dn, d_bw, d_bb = _norm_backward(
            dn.view(x.shape).to(x.dtype), middle, form.before_mlp, bw, bb, (need_bw, need_bb)
        )
        # the sums
        dx = dn.add_(grad)
        dh = grad if form.parallel else dx
        if form.factor != 1.0:
            dh = dh * form.factor
        # attention's product
        dh, d_aw, d_ab = _norm_backward(dh, raw_h, form.after_attention, aw, ab, (need_aw, need_ab))
        dh2 = _rows(dh.to(form.compute))
        d_ow = _weight_gradient(dh2, _rows(a), ow) if need_ow else None
        d_ob = _bias_gradient(dh2, ob) if need_ob else None
        da = torch.mm(dh2, ow.to(form.compute)) if need_a else None
        of_o = low_rank.backward(dh2, _rows(a), low_o, to_o, need_o, da)
        da = None if da is None else da.view(a.shape)
        of_adapters = (*of_o, *of_gate, *of_up, *of_down) if adapters else ()
        return (
            None, dx if need_x else None, da, d_ow, d_ob, d_gw, d_gb, d_uw, d_ub, d_dw, d_db,
            d_aw, d_ab, d_bw, d_bb, d_mw, d_mb, *of_adapters,
        )  # fmt: skip


def _sum_normed(
    x: Tensor, h: Tensor, form: NormForm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(norm(x + h), x + h)"""
    if form.kind == "layer":
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            s = x + h
            return normed(s, form, weight, bias), s
        found = _ops().add_layer_norm.default(h, x, weight, bias, form.eps)
    else:
        found = _ops().add_rms_norm.default(h, x, weight, bias, form.eps, form.offset, form.cast)
    return found  # type: ignore[no-any-return]


def _first_products(form: BackForm, n: Tensor, gw: Any, gb: Any, uw: Tensor, ub: Any) -> Tensor:
    """The MLP's first products, gate and up beside each other: [T, I] or [T, 2 I]."""
    if not form.gated or form.packed:
        return _product(n, uw, ub)
    both = n.new_empty(len(n), len(gw) + len(uw))
    _product_into(both[:, : len(gw)], n, gw, gb)
    _product_into(both[:, len(gw) :], n, uw, ub)
    return both


def _halves(form: BackForm, first: Tensor) -> tuple[Tensor, Tensor]:
    """What the gate's and the up product gave; where they are one, or there is no gate, all of it
    is the latter's."""
    if form.gated and not form.packed:
        gate, up = first.chunk(2, 1)
        return gate, up
    return first[:, :0], first


def _activated(form: BackForm, first: Tensor) -> Tensor:
    """The MLP's last product's input, [T, I]."""
    code = KERNEL_ACTIVATIONS.get(form.activation)
    if form.gated and code is not None:
        return _ops().gated_packed.default(first, code, int(form.gate_first))  # type: ignore[no-any-return]
    if form.activation == "silu" and not form.gated:
        return _ops().silu.default(first)  # type: ignore[no-any-return]
    if form.activation in ("gelu", "gelu_tanh") and not form.gated:
        return _ops().gelu.default(first, code)  # type: ignore[no-any-return]
    return _formula_activated(form, first)


def _activated_backward(form: BackForm, grad: Tensor, first: Tensor) -> Tensor:
    code = KERNEL_ACTIVATIONS.get(form.activation)
    if form.gated and code is not None:
        return _ops().gated_packed_backward.default(grad, first, code, int(form.gate_first))  # type: ignore[no-any-return]
    if form.activation == "silu" and not form.gated:
        return _ops().silu_backward.default(grad, first)  # type: ignore[no-any-return]
    if form.activation in ("gelu", "gelu_tanh") and not form.gated:
        return _ops().gelu_backward.default(grad, first, code)  # type: ignore[no-any-return]
    with torch.enable_grad():
        own = first.detach().requires_grad_()
        (found,) = torch.autograd.grad(_formula_activated(form, own), own, grad)
    return found


def _formula_activated(form: BackForm, first: Tensor) -> Tensor:
    if not form.gated:
        return activated(first, form.activation)
    gate, up = first.chunk(2, -1)
    if not form.gate_first:
        gate, up = up, gate
    return activated(gate, form.activation) * up


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation of that name, by PyTorch's operators."""
    if activation == "relu2":
        return F.relu(x).square()
    if activation.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.silu(x) if activation == "silu" else F.relu(x)


def _back_formula(
    form: BackForm, x: Any, a: Any, ow: Any, ob: Any, gw: Any, gb: Any, uw: Any, ub: Any, dw: Any,
    db: Any, aw: Any, ab: Any, bw: Any, bb: Any, mw: Any, mb: Any, *adapters: Any,
) -> Tensor:  # fmt: skip
    to_o, to_gate, to_up, to_down = form.adapters(adapters)
    h = _formula_norm(low_rank.formula(a, ow, ob, to_o), form.after_attention, aw, ab) * form.factor
    s = x if form.parallel else x + h
    n = _formula_norm(s, form.before_mlp, bw, bb).to(form.compute)
    if form.gated and not form.packed:
        gate = low_rank.formula(n, gw, gb, to_gate)
        first = torch.cat((gate, low_rank.formula(n, uw, ub, to_up)), -1)
    else:
        first = low_rank.formula(n, uw, ub, to_up)
    y = low_rank.formula(_formula_activated(form, first), dw, db, to_down)
    y = _formula_norm(y, form.after_mlp, mw, mb) * form.factor
    return x + h + y if form.parallel else s + y  # type: ignore[no-any-return]
