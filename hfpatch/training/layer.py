"""The forward of a decoder layer for training: its plan, and the adapter that stands on a layer.

Where all products of a half are plain linear layers the half is one function of autograd's
(stages.py). Where one is a module of another kind, as LoRA puts them in, that half calls its
modules and fuses what lies between them. Where anything else is not as it was proven, the layer's
own forward runs, and one warning says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hfpatch.announce import announce_in_call
from hfpatch.decoding.rules import LayerRule, MlpRule, NormRule, Part
from hfpatch.kernels.sources import local_package
from hfpatch.leaves.tables import hold_twice
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.proving import may_prove, quietly
from hfpatch.proof.saved import saving_is_watched
from hfpatch.proof.subject import (
    Forward,
    autocasts,
    class_of,
    coded,
    misaligned,
    plain,
    watched,
)
from hfpatch.proof.unchanged import hooks_on_all, is_hooked, layers_replaced
from hfpatch.regions.capture import numbers_of
from hfpatch.regions.guard import guard, hides
from hfpatch.training import attend, lora, stages
from hfpatch.training.deferred_mask import with_made
from hfpatch.training.remade import kept_as_recipe

_CHECKPOINTED = "forward_with_checkpointing"
#: What a layer may call its cache: transformers 5.24 calls it `cache`.
CACHES = ("past_key_values", "cache", "layer_past")
#: Arguments of a layer that are looked at here; the others go on to its attention function.
TAKEN = ("attention_mask", "position_embeddings", *CACHES)


@dataclass(frozen=True)
class LayerPlan:
    """What a layer computes. rule: its paths begin at the layer. classes: of the norms, by path.
    rotary_dim: of its RoPE, 0 for none. halves: whether the second half of a table's columns is the
    first once more. factor: of the residual sums. cache: the argument whose `update` is given keys
    and values, or None where that is not known. tells_cache: whether `update` is told the keyword
    arguments too that reach the attention function."""

    rule: LayerRule
    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    halves: bool
    factor: float
    call: attend.Call
    cache: str | None
    tells_cache: bool

    def norms(self) -> Iterator[NormRule]:
        """All that it has."""
        a = self.rule.attention
        yield from (n for n in (*self.rule.norms, a.q_norm, a.k_norm) if n is not None)

    def parts(self) -> Iterator[Part]:
        """Its products."""
        a = self.rule.attention
        yield from (a.q, a.k, a.v, a.o)
        yield from (p for p in mlp_parts(self.rule) if p is not None)


def mlp_of(rule: LayerRule) -> MlpRule:
    """A layer's gated or plain MLP; `offer` takes no layer with another second half."""
    assert isinstance(rule.mlp, MlpRule)
    return rule.mlp


def mlp_parts(rule: LayerRule) -> tuple[Part | None, Part, Part]:
    """The products of a layer's MLP."""
    m = mlp_of(rule)
    return m.gate, m.up, m.down


def unsupported(plan: LayerPlan) -> str | None:
    """Why such a layer has no function for training, or None."""
    a = plan.rule.attention
    if a.clip is not None:
        return "its queries and keys are clamped"
    if a.norm_after_rope:
        return "its queries and keys are normed behind RoPE"
    if a.q_norm is not None and a.k_norm is not None:
        q, k = a.q_norm, a.k_norm
        if q.kind != "rms" or k.kind != "rms" or q.bias is not None or k.bias is not None:
            return "the norm of its queries is no RMS norm without a bias"
        if (q.offset, q.eps, q.rounded) != (k.offset, k.eps, k.rounded):
            return "the norms of its queries and keys differ"
    for norm in plan.norms():
        if norm.kind == "layer" and norm.offset:
            return "a number is added to the weight of its layer norm"
        if norm.kind == "rms" and norm.rounded and norm.offset:
            return "a norm rounds before an offset is added to its weight"
    return None


def _at(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _is_plain_product(module: nn.Module, x: Tensor) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or is_hooked(module):
        return False
    if hides(module):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        weight is not None
        and plain(weight)
        and weight.dtype == x.dtype
        and weight.device == x.device
        and weight.numel() > 0
        and weight.is_contiguous()
        and (bias is None or (plain(bias) and bias.dtype == x.dtype and bias.device == x.device))
    )


def _tensors(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters.get("weight"), module._parameters.get("bias")


#: Of a product: weight and bias; A, B and scaling of its adapter, or None.
_Product = tuple[tuple[Any, Any], lora.Adapted | None]


def _parts_of(module: nn.Module, x: Tensor) -> _Product | None:
    """None where calling the module is more than a product, or one with an adapter."""
    if type(module) is nn.Linear:
        return (_tensors(module), None) if _is_plain_product(module, x) else None
    found = lora.adapted(module)
    if found is None or not _is_plain_product(found.base, x):
        return None
    if {found.a.device, found.b.device} != {x.device}:
        return None
    dtypes = {found.a.dtype, found.b.dtype}
    if autocasts(x.device.type):
        serves = dtypes <= {x.dtype, torch.float32}
    else:
        serves = dtypes == {x.dtype} or (
            dtypes == {torch.float32} and lora.widens(module, x.dtype, x.device.type)
        )
    return (_tensors(found.base), found) if serves else None


def _fits(part: _Product | None, rows: int, columns: int) -> bool:
    """Whether a product's weight, bias and adapter are of these sizes. Those of a pruned layer are
    others than its configuration says, and a half takes several products as one."""
    if part is None:
        return False
    (weight, bias), found = part
    return (
        weight.shape == (rows, columns)
        and (bias is None or bias.shape == (rows,))
        and (found is None or lora.fits(found, rows, columns))
    )


def _scales(parts: list[_Product | None]) -> tuple[float, ...]:
    if all(p is None or p[1] is None for p in parts):
        return ()
    return tuple(0.0 if p is None or p[1] is None else p[1].scaling for p in parts)


def _adapters(parts: list[_Product | None]) -> tuple[Any, ...]:
    """A and B of each in turn."""
    if not _scales(parts):
        return ()
    found: list[Any] = []
    for p in parts:
        found += (None, None) if p is None or p[1] is None else (p[1].a, p[1].b)
    return tuple(found)


class _Norm:
    """A norm of a layer: where it is, its formula, and its parameters' names."""

    def __init__(self, rule: NormRule) -> None:
        self.path, self.rule = _parts(rule.path), rule
        self._names = tuple(name for name in (rule.weight, rule.bias) if name is not None)

    def form(self, module: nn.Module) -> stages.NormForm:
        eps = self.rule.eps
        value = getattr(module, eps) if isinstance(eps, str) else eps
        return _norm_form(self.rule.kind, float(value), self.rule.offset, self.rule.rounded)

    def tensors(self, module: nn.Module) -> tuple[Any, Any]:
        p, rule = module._parameters, self.rule
        return (
            None if rule.weight is None else p[rule.weight],
            None if rule.bias is None else p[rule.bias],
        )

    def is_there(self, module: nn.Module) -> bool:
        """Whether its parameters are the module's own, for somebody may have put results of others
        in their place, as attributes; and of dtypes that kernels take: in a wider one, as of a
        layer that was made `double()`, is then all that follows it."""
        for name in self._names:
            t = module._parameters.get(name)
            if t is None or t.dtype not in KERNEL_DTYPES:
                return False
        return True

    def is_plain(self, module: nn.Module, x: Tensor, width: int) -> bool:
        """width: of its rows. A weight of another shape is one for all of a row, or for each."""
        return all(
            t is None
            or (
                plain(t)
                and t.dtype == x.dtype
                and t.device == x.device
                and t.shape == (width,)
                and not misaligned(t)
            )
            for t in self.tensors(module)
        )


@functools.lru_cache(maxsize=256)
def _norm_form(kind: str, eps: float, offset: float, rounded: bool) -> stages.NormForm:
    return stages.NormForm(kind, eps, offset, rounded)


#: The type of device, the dtype of a layer's input, and autocast's or None.
Case = tuple[str, torch.dtype, torch.dtype | None]
_Pairs = tuple[Any, Any]
_NOTHING: _Pairs = (None, None)


class Runner:
    """A plan, with all that a call would otherwise look up again.

    halves_open: which halves ("front", "back") call their modules whatever these are; for proofs.
    """

    def __init__(self, plan: LayerPlan, halves_open: tuple[str, ...] = ()) -> None:
        self.plan, self._open = plan, halves_open
        rule, a, m = plan.rule, plan.rule.attention, mlp_of(plan.rule)
        self._attention = _parts(a.path)
        norms = [None if n is None else _Norm(n) for n in (*rule.norms, a.q_norm, a.k_norm)]
        self._norms = norms
        self._before, self._after, self._before_mlp, self._after_mlp, self._q_norm, self._k_norm = (
            norms
        )
        if rule.parallel and self._before_mlp is None:
            self._before_mlp = self._before
        self._q, self._k, self._v, self._o = (_parts(p.path) for p in (a.q, a.k, a.v, a.o))
        self._gate = None if m.gate is None else _parts(m.gate.path)
        self._up, self._down = _parts(m.up.path), _parts(m.down.path)
        self._packed_qkv = a.q.part != "all"
        self._packed_mlp = m.up.part != "all"
        self._gate_first = m.gate is not None and m.gate.part != "second"

    def __call__(self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The layer's result, or None where its own forward must make it."""
        plan = self.plan
        try:
            norms = [None if n is None else _at(layer, n.path) for n in self._norms]
            q, k, v, o = (_at(layer, p) for p in (self._q, self._k, self._v, self._o))
            up, down = _at(layer, self._up), _at(layer, self._down)
            gate = None if self._gate is None else _at(layer, self._gate)
        except (KeyError, AttributeError):  # it was built anew
            return None
        pairs: Any = zip(self._norms, norms, strict=True)
        if not all(n is None or n.is_there(m) for n, m in pairs):
            return None
        tables = kwargs.get("position_embeddings")
        cos = sin = None
        if plan.rotary_dim:
            if type(tables) is not tuple or len(tables) != 2:
                return None
            cos, sin = tables
            if not _is_table(cos, sin, x, plan.rotary_dim):
                return None
            if cos.shape[-1] == plan.rotary_dim:  # each value twice
                if plan.halves and plan.interleaved:  # of which the original reads the first half
                    cos, sin = (t[..., : plan.rotary_dim // 2] for t in (cos, sin))
                elif not hold_twice((cos, sin), plan.interleaved):
                    return None
        if any(kwargs.get(name) is not None for name in CACHES if name != plan.cache):
            return None
        past = None if plan.cache is None else kwargs.get(plan.cache)
        module: Any = _at(layer, self._attention)
        given = {name: value for name, value in kwargs.items() if name not in TAKEN}
        reaching = plan.call.reaching(given)
        function = attend.function_of(module)
        if function is None or reaching is None or reaching.get("output_attentions"):
            return None
        arguments = plan.call.arguments(module, reaching)
        products = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
        queries, keys, values = self._front(layer, x, norms, products, cos, sin)
        if past is not None:
            told = {"kwargs": reaching} if plan.tells_cache else {}
            keys, values = _cached(past, keys, values, module.layer_idx, cos, x, told)
        mask = kwargs.get("attention_mask")
        attended = attend.attended(function, module, queries, keys, values, mask, arguments)
        return self._back(layer, x, attended, norms, products)

    # --- the halves -------------------------------------------------------------------------------

    def _front(
        self, layer: nn.Module, x: Tensor, norms: list[Any], products: dict[str, Any], cos: Any,
        sin: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        plan = self.plan
        names = ("q",) if self._packed_qkv else ("q", "k", "v")
        parts = [_parts_of(products[name], x) for name in names]
        used = [(n, norms[i]) for i, n in ((0, self._before), (4, self._q_norm), (5, self._k_norm))]
        hidden, wide = x.shape[-1], [n * plan.head_dim for n in (plan.heads, plan.key_heads)]
        rows = [wide[0] + 2 * wide[1]] if self._packed_qkv else [wide[0], wide[1], wide[1]]
        across = plan.rule.attention.norm_across
        widths = (hidden, *(wide if across else (plan.head_dim, plan.head_dim)))
        closed = (
            "front" not in self._open
            and all(_fits(p, n, hidden) for p, n in zip(parts, rows, strict=True))
            and all(
                n is None or n.is_plain(m, x, w) for (n, m), w in zip(used, widths, strict=True)
            )
            and (used[1][0] is None or len({n.form(m) for n, m in used[1:] if n is not None}) == 1)
        )
        (before, before_module), (q_norm, q_module), (k_norm, k_module) = used
        if closed:
            form = stages.FrontForm(
                _computed_in(x),
                None if before is None else before.form(before_module),
                None if q_norm is None else q_norm.form(q_module),
                across,
                plan.heads, plan.key_heads, plan.head_dim,
                plan.rotary_dim, plan.interleaved, self._packed_qkv, _scales(parts),
                autocasts(x.device.type),
            )  # fmt: skip
            pairs = [p[0] for p in parts if p is not None]
            return stages.front(
                form,
                x,
                *(_NOTHING if before is None else before.tensors(before_module)),
                pairs[0],
                None if self._packed_qkv else pairs[1],
                None if self._packed_qkv else pairs[2],
                None if q_norm is None else q_norm.tensors(q_module)[0],
                None if k_norm is None else k_norm.tensors(k_module)[0],
                cos,
                sin,
                _adapters(parts),
            )
        n = x if before_module is None else before_module(x)
        with _again(n, before, before_module, x):
            results = [products[name](n) for name in names]
        if self._packed_qkv:
            results = list(torch.split(results[0], [*wide, wide[1]], -1))
        for i, module in ((0, q_module), (1, k_module)):
            if module is not None and across:
                results[i] = module(results[i])
        q, k, v = (r.unflatten(-1, (-1, plan.head_dim)) for r in results)
        if q_module is not None and not across:
            q, k = q_module(q), k_module(k)
        if plan.rotary_dim:
            q, k = self._turned(q, k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _turned(self, q: Tensor, k: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
        """RoPE. Of two modules one may give a wider dtype, as adapters of some kinds do under
        autocast."""
        module, codes = local_package().module, (1, self.plan.interleaved, self.plan.rotary_dim)
        if q.dtype == k.dtype and cos.dtype in (q.dtype, torch.float32):
            return module.rope_qk(q, k, cos, sin, *codes, True)  # type: ignore[no-any-return]
        found = []
        for t in (q, k):
            c, s = (cos, sin) if cos.dtype == t.dtype else (cos.float(), sin.float())
            found.append(module.rope(t, c, s, *codes, True))
        return found[0], found[1]

    def _back(
        self,
        layer: nn.Module,
        x: Tensor,
        attended: Tensor,
        norms: list[Any],
        products: dict[str, Any],
    ) -> Tensor:
        plan = self.plan
        activation = mlp_of(plan.rule).activation
        before_mlp = norms[2]
        if plan.rule.parallel and before_mlp is None:
            before_mlp = norms[0]
        gate, up, down, o = (products[name] for name in ("gate", "up", "down", "o"))
        used = [
            (self._after, norms[1]),
            (self._before_mlp, before_mlp),
            (self._after_mlp, norms[3]),
        ]
        lone = gate is None or self._packed_mlp
        parts = [
            None if m is None else _parts_of(m, x) for m in (o, None if lone else gate, up, down)
        ]
        hidden = x.shape[-1]
        closed = (
            "back" not in self._open
            and attended.dtype == _computed_in(x)
            and self._fit(parts, hidden, attended.shape[-1])
            and all(n is None or n.is_plain(m, x, hidden) for n, m in used)
        )
        if closed:
            after, before, last = (None if n is None else n.form(m) for n, m in used)
            form = stages.BackForm(
                _computed_in(x), after, before, last, plan.rule.parallel, plan.factor, activation,
                gate is not None, self._packed_mlp, self._gate_first, _scales(parts),
                autocasts(x.device.type),
            )  # fmt: skip
            norm_tensors: Any = [_NOTHING if n is None else n.tensors(m) for n, m in used]
            of_o, of_gate, of_up, of_down = (_NOTHING if p is None else p[0] for p in parts)
            return stages.back(
                form,
                x,
                attended,
                of_o,
                None if lone else of_gate,
                of_up,
                of_down,
                norm_tensors[0],
                norm_tensors[1],
                norm_tensors[2],
                _adapters(parts),
            )
        return self._open_back(x, attended, used, gate, up, down, o)

    def _fit(self, parts: list[_Product | None], hidden: int, attended: int) -> bool:
        """Whether the products behind attention are of sizes that follow each other."""
        o, gate, up, down = parts
        if up is None:
            return False
        rows = up[0][0].shape[0]
        inner, odd = divmod(rows, 2) if self._packed_mlp else (rows, 0)
        return (
            not odd
            and _fits(o, hidden, attended)
            and (self._gate is None or self._packed_mlp or _fits(gate, rows, hidden))
            and _fits(up, rows, hidden)
            and _fits(down, hidden, inner)
        )

    def _open_back(
        self, x: Tensor, attended: Tensor, used: Any, gate: Any, up: Any, down: Any, o: Any
    ) -> Tensor:
        plan = self.plan
        (_, after), (before, before_module), (_, after_mlp) = used
        h = o(attended)
        h = h if after is None else after(h)
        h = h if plan.factor == 1.0 else h * plan.factor
        s = x if plan.rule.parallel else x + h
        n = s if before_module is None else before_module(s)
        with _again(n, before, before_module, s):
            first = up(n) if gate is None or self._packed_mlp else _both(gate, up, n)
        p, make, of = self._product_of(first)
        with _kept(p, make, of):
            y = down(p)
        y = y if after_mlp is None else after_mlp(y)
        y = y if plan.factor == 1.0 else y * plan.factor
        result: Tensor = x + h + y if plan.rule.parallel else s + y
        return result

    def _product_of(self, first: Any) -> tuple[Tensor, Callable[[], Tensor], list[Tensor | None]]:
        """The MLP's last product's input, how to make it again, and of what."""
        activation = mlp_of(self.plan.rule).activation
        module = local_package().module
        if isinstance(first, tuple):
            gate, up = first
        elif self._packed_mlp:
            gate, up = first.chunk(2, -1) if self._gate_first else reversed(first.chunk(2, -1))
        else:
            gate, up = first, None

        def make(gate: Any = gate, up: Any = up) -> Tensor:
            # two dtypes, as of queries and keys, or two widths, as behind a pruned product
            alike = up is None or (up.dtype == gate.dtype and up.shape == gate.shape)
            if up is None or not alike or activation not in stages.KERNEL_ACTIVATIONS:
                y = stages.activated(gate, activation)
                return y if up is None else y * up
            return module.gated(gate, up, activation)  # type: ignore[no-any-return]

        p = make()
        parts = [None if t is None else t.detach() for t in (gate, up)]
        return p, lambda: make(*parts), parts


def _cached(
    past: Any,
    keys: Tensor,
    values: Tensor,
    index: int,
    cos: Tensor | None,
    x: Tensor,
    told: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """What the cache gives for new keys and values. Under autocast the original's RoPE makes the
    keys wide, and it keeps them so."""
    dtype = keys.dtype
    if cos is not None and dtype != x.dtype:
        keys = keys.to(torch.promote_types(dtype, cos.dtype))
    keys, values = past.update(keys, values, index, **told)
    return keys.to(dtype), values


def _computed_in(x: Tensor) -> torch.dtype:
    """What products of `x` are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else x.dtype


def _kept(made: Tensor, make: Callable[[], Tensor], of: Sequence[Tensor | None]) -> Any:
    if not torch.is_grad_enabled() or saving_is_watched() or not made.is_contiguous():
        return nullcontext()
    return kept_as_recipe(made, make, [t for t in of if t is not None])


def _again(n: Tensor, norm: _Norm | None, module: Any, x: Tensor) -> Any:
    """A context in which `n`, the norm of `x`, is kept as a recipe."""
    if norm is None or not norm.is_plain(module, x, x.shape[-1]) or not x.is_contiguous():
        return nullcontext()
    form, own, weights = norm.form(module), x.detach(), norm.tensors(module)
    return _kept(n, lambda: stages.normed(own, form, *weights), (own, *weights))


def _both(gate: Any, up: Any, n: Tensor) -> tuple[Tensor, Tensor]:
    """What both layers make of `n`. Without gradients they may write their results to one buffer:
    the original has activated the gate's by the time that `up` is called."""
    g, u = gate(n), up(n)
    if not g.requires_grad and g.untyped_storage().data_ptr() == u.untyped_storage().data_ptr():
        g, u = gate(n).clone(), up(n)
    return g, u


def _is_table(cos: Any, sin: Any, x: Tensor, rotary_dim: int) -> bool:
    return (
        type(cos) is Tensor
        and type(sin) is Tensor
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype
        and cos.dtype in (x.dtype, torch.float32)
        and cos.device == x.device
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[1]
        and cos.shape[2] in (rotary_dim, rotary_dim // 2)
        and not cos.requires_grad
        and not sin.requires_grad
    )


# --- the adapter ----------------------------------------------------------------------------------


class Served:
    """What the layers of a model are proven for. What they were not when they were patched is
    proven at its first call: FSDP's mixed precision, `to()` of another dtype or device."""

    def __init__(
        self,
        prove: Callable[[torch.device, Case], str | None],
        proven: set[Case],
        first: Callable[[nn.Module], None],
    ) -> None:
        """`prove` returns why the layers do not serve a case, or None; `proven`: already. `first`
        is given the layer of the first call of a case, which is rare enough to look around."""
        self._prove = prove
        self._proven = proven
        self._first = first
        self._cases: set[Case] = set()  # of calls that were served
        self._refused: set[Case] = set()

    def covers(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether a call of a layer with this input is proven to be the original's."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if autocasts(kind) else None
        case = (kind, x.dtype, autocast)
        return case in self._cases or (case not in self._refused and self._late(layer, x, case))

    def _late(self, layer: nn.Module, x: Tensor, case: Case) -> bool:
        kind, dtype, autocast = case
        if case in self._proven:
            self._cases.add(case)
            self._first(layer)
            return True
        if kind not in ("cpu", "cuda") or dtype not in KERNEL_DTYPES:
            return False  # its parts say so
        if kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        with may_prove((self, case)) as may:
            if not may:
                return False
            if case in self._cases or case in self._refused:
                return case in self._cases
            with quietly(kind):
                why = self._prove(x.device, case)
            (self._cases if why is None else self._refused).add(case)
        self._first(layer)
        if why is not None:
            under = "" if autocast is None else f" under autocast to {_short(autocast)}"
            announce_in_call(
                f"`{class_of(layer).__name__}` was called with {_short(dtype)}{under} on {kind}; "
                f"such calls use its own forward: {why}",
                stacklevel=4,
            )
        return why is None


#: What tells layers of one plan apart, or is read at each call.
_LIVE = (("", "gradient_checkpointing"), ("", "_gradient_checkpointing_func"))


def unchanged(layer: nn.Module, plan: LayerPlan) -> Callable[[nn.Module], bool]:
    """A function that tells whether a layer is still as this one: the modules that a call of the
    runner does not call, which are all but the products. It holds no module."""
    products = {p.path for p in plan.parts()}
    read = [
        path
        for path, _ in layer.named_modules()
        if not any(path == p or path.startswith(f"{p}.") for p in products)
    ]
    return guard(layer, read, (), (*numbers_of(layer), *_LIVE), training=True)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def adapter(
    plan: LayerPlan,
    served: Served,
    same: Callable[[nn.Module], bool],
    original: Any,
    told: list[bool],
) -> Forward:
    """The forward of a layer for training.

    Args:
        served: what it is proven for; the layers of a model share it.
        same: of `unchanged`.
        original: the forward of the layer's class.
        told: not empty once it was said that a layer of the model is another; its layers share it.
    """
    run = Runner(plan)
    own = coded(_uncheckpointed(original))
    code = own.__code__

    def holds(self: nn.Module) -> bool:
        # that of FSDP's class is wrapped anew by transformers
        if class_of(self).forward is original and own.__code__ is code and same(self):
            return True
        if not told:
            told.append(True)
            announce_in_call(
                f"`{type(self).__name__}` got other settings, or hooks, forwards or modules "
                "inside, after it was patched; such calls use its own forward. Call "
                "`hfpatch.apply` again",
                stacklevel=4,
            )
        return False

    def inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Without checkpointing."""
        if len(args) == 1 and _serves(args[0]) and holds(self) and served.covers(self, args[0]):
            found = run(self, args[0], kwargs)
            if found is not None:
                return found
        return _uncheckpointed(type(self).forward)(self, *args, **with_made(kwargs))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training or torch.is_grad_enabled()) or is_compiling():
            return type(self).forward(self, *args, **with_made(kwargs))
        own = type(self).forward
        if not (
            _checkpoints(own)
            and self.training
            and getattr(self, "gradient_checkpointing", False)
            # transformers 5.24 asks this; before, it checkpointed without gradients too
            and (torch.is_grad_enabled() or "is_grad_enabled" not in own.__code__.co_names)
        ):
            return inside(self, *args, **kwargs)
        caches = () if getattr(self, "_can_checkpoint_with_cache", False) else CACHES
        dropped: dict[str, Any] = {"use_cache": False} if kwargs.get("use_cache") else {}
        dropped |= dict.fromkeys(n for n in caches if kwargs.get(n) is not None)
        if dropped:
            from transformers.modeling_layers import logger

            said = ", ".join(f"`{name}={value}`" for name, value in dropped.items())
            logger.warning_once(
                f"Caching is incompatible with gradient checkpointing in {type(self).__name__}. "
                f"Setting {said}."
            )
            kwargs |= dropped
        function: Any = self._gradient_checkpointing_func
        return function(functools.partial(inside, self, **kwargs), *args)

    return forward


def _checkpoints(forward: Any) -> bool:
    """Whether a class's forward is transformers' own wrapper, which checkpoints the class's."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_name == _CHECKPOINTED


def _uncheckpointed(forward: Any) -> Any:
    while _checkpoints(forward):
        forward = forward.__wrapped__
    return forward


def _serves(x: Any) -> bool:
    if type(x) is not Tensor or x.dim() != 3 or not x.numel() or x.stride(-1) != 1:
        return False
    if x.is_inference() and torch.is_grad_enabled():  # autograd may not save it
        return False
    if misaligned(x):
        return False
    return (
        not watched()
        and not torch._C._len_torch_dispatch_stack()
        and not layers_replaced()
        and not hooks_on_all()
    )
