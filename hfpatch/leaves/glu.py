"""Gated MLPs: `down(act(gate(x)) * up(x))` from two projections or a packed one; GEGLU, SwiGLU.

The projections are called as modules, never read: a hook, an adapter, a quantizer may stand there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.kernels.sources import Kernel, reference_kernel, torch_kernel
from hfpatch.leaves.gating import dropouts_of, looks_gated, orders, others_of
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.ops.activation import ACTIVATIONS
from hfpatch.ops.gated import clamped
from hfpatch.proof.contract import Contract
from hfpatch.proof.keys import attributes_read, code_of, fingerprint_read, kept_while_planning
from hfpatch.proof.proving import cpu_default
from hfpatch.proof.replicas import random_linear, replicate
from hfpatch.proof.subject import (
    Combo,
    Family,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    dtype_of_weight,
    first_argument,
    input_name,
    is_dense,
    plain,
    readable,
    watched,
    weight_dtype,
)
from hfpatch.proof.unchanged import INCOMPARABLE, Part, hooks_on_all, leaf_settings
from hfpatch.reading.leaf import Unexplained
from hfpatch.reading.values import Clamp

_IN, _HIDDEN = 24, 40  # widths of the probe's replica
#: Bounds of clamps reach at most so far, and far samples a million times farther: they show.
_FARTHEST = 1e6
#: Below minus this an activation's slope is that of its tail; gradients are compared where nothing
#: is more than this times as far as the farthest bound.
_TAIL = 8.0
#: What is added to `up` behind its clamp.
_OFFSETS = (0.0, 1.0)


@dataclass(frozen=True)
class Roles:
    """Attribute names of a gated MLP's children; None where the class has no such child."""

    gate: str  # the packed projection when `up` is None
    up: str | None
    down: str | None
    dropout: str | None = None


#: The layouts that transformers and diffusers use. A new one is a row.
LAYOUTS = (
    Roles("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, Olmo ...
    Roles("wi_0", "wi_1", "wo", "dropout"),  # T5 v1.1, UMT5, Pix2Struct
    Roles("w1", "w3", "w2"),  # Mixtral-style, Lumina
    Roles("linear_1", "linear_v", "linear_2"),
    Roles("gate_up_proj", None, "down_proj"),  # Phi-3, GLM
    Roles("Wi", None, "Wo", "drop"),  # ModernBERT
    Roles("fc1", None, "fc2"),  # Moonshine's decoder
    Roles("proj", None, None),  # diffusers GEGLU and SwiGLU
)
_ACT_NAMES = ("act_fn", "activation_fn", "act", "activation", "gelu")


#: Which half of a packed projection is the gate, where the op takes them as two tensors.
_FIRST, _SECOND = "the gate is the first half", "the gate is the second half"


class GatedSubject(Subject):
    has_layers = True
    differentiates = True

    def __init__(self, module: nn.Module, roles: Roles, act: str | None) -> None:
        super().__init__(module)
        self.roles, self.act = roles, act
        self.bypassed = (act,) if act is not None else ()
        children = (roles.gate, roles.up, roles.dropout, roles.down)
        self.live = tuple(n for n in children if n is not None)
        #: Whether the code calls `up` before `gate`: both may draw random numbers (LoRA's do).
        self.up_first = False
        #: What the code clamps, once it was read, by whose result it is: "" is the activation's.
        self.clamps: dict[str, Clamp] = {}
        self._read_clamps: tuple[Clamp, ...] | None = None

    def _child(self, name: str) -> nn.Module:
        child = self.module._modules[name]
        assert child is not None
        return child

    @property
    def key(self) -> tuple[Any, ...]:
        act = self.module._modules.get(self.act) if self.act else None
        kind = (*code_of(act), *fingerprint_read(act)) if act is not None else None
        own = attributes_read(self.module)  # the projections are called, whatever they are
        return (self.roles, self.act, kind, self._down_dtype(), own)

    def _down_dtype(self) -> torch.dtype | None:
        """dtype of the last projection when it differs from the first (T5 keeps `wo` in fp32)."""
        if self.roles.down is None:
            return None
        dtypes = [dtype_of_weight(self._child(n)) for n in (self.roles.gate, self.roles.down)]
        return dtypes[1] if dtypes[0] != dtypes[1] and dtypes[1] in KERNEL_DTYPES else None

    def misread(self, calls: Sequence[tuple[str, str]]) -> str | None:
        r = self.roles
        given = dict(calls)
        if sorted(n for n, _ in calls) != sorted(self.live):
            return f"calls {[n for n, _ in calls]}, expected each of {list(self.live)} once"
        for name in (r.gate, r.up):
            if name is not None and given[name] != "input":
                return f"calls `{name}` with something else than its input"
        if r.dropout is not None and (given[r.dropout] or given.get(r.down or "") != r.dropout):
            return f"does not call `{r.dropout}` between the product and the last layer"
        names = [n for n, _ in calls]
        self.up_first = r.up is not None and names.index(r.up) < names.index(r.gate)
        if r.dropout is None and r.down is not None and given[r.down]:
            return f"calls `{r.down}` with something else than the product"
        return None

    def misclamped(self, clamps: Sequence[Clamp]) -> str | None:
        gate, up = self.roles.gate, self.roles.up
        projected = {gate, up} if up is not None else {f"{gate}[0]", f"{gate}[1]"}
        if self._read_clamps not in (None, tuple(clamps)):
            return "clamps in one dtype or number of dimensions otherwise than in another"
        self._read_clamps = tuple(clamps)
        self.clamps = {c.role: c for c in clamps}
        if len(self.clamps) < len(clamps):
            return "clamps one tensor twice, or more than one that it computes"
        for role, clamp in self.clamps.items():
            what = f"`{role}`" if role else "what it computes"
            if role and role not in projected:
                return f"clamps {what}, no gate and nothing that multiplies it"
            if any(abs(b) > _FARTHEST for b in (clamp.low, clamp.high) if math.isfinite(b)):
                return f"clamps {what} at a bound beyond {_FARTHEST:g}, where no sample is"
            if not clamp.low < clamp.high:
                return f"clamps {what} to one value"
            if not role and clamp.low != -math.inf:  # activations have a least value of their own
                return "clamps what it computes from below, which no formula does"
        if {"", gate} <= self.clamps.keys():
            return "clamps the gate and what is computed of it"
        return None

    def possible_ops(self) -> set[str]:
        return {"gated" if self.roles.up is not None else "gated_packed", "gated_clamped"}

    def formulas(self) -> list[Formula]:
        if self.clamps:
            return self._clamped_formulas()
        if self.roles.up is not None:
            return [Formula("gated", {"activation": a}) for a in ACTIVATIONS]
        return [
            Formula("gated_packed", {"activation": a, "gate_first": first})
            for a in ACTIVATIONS
            for first in (True, False)
        ]

    def _clamped_formulas(self) -> list[Formula]:
        """With the bounds of the code; a factor inside of the sigmoid is among its settings."""
        gate, up = self.roles.gate, self.roles.up
        orders = (
            [(gate, up, "")]
            if up is not None
            else [(f"{gate}[0]", f"{gate}[1]", _FIRST), (f"{gate}[1]", f"{gate}[0]", _SECOND)]
        )
        plain = [(name, 1.0) for name in ACTIVATIONS]
        held = {v for v in self.module.__dict__.values() if type(v) is float and math.isfinite(v)}
        scaled = [("silu", v) for v in sorted(held - {0.0, 1.0, 1.702})]
        found = []
        for gate_role, up_role, how in orders:
            after = self.clamps.get("")
            if after is not None and gate_role in self.clamps:
                continue
            of_gate, of_up = after or self.clamps.get(gate_role), self.clamps.get(up_role)
            bounds = _bounds("gate", of_gate) | _bounds("up", of_up)
            for (activation, alpha), offset in itertools.product((*plain, *scaled), _OFFSETS):
                params = {"activation": activation, **bounds, "up_offset": offset, "alpha": alpha}
                params["clamp_activated"] = after is not None
                found.append(Formula("gated_clamped", params, how))
        return found

    def off_bends(self, wide: nn.Module, formula: Formula, x: Tensor, eps: float) -> Tensor:
        """Also no row of which nearly all is clamped: what is left of its gradient then is made of
        few values, small ones beside what they are sums of, and of tails of an activation."""
        if formula.op != "gated_clamped":
            return x
        known = formula.params
        after = known["clamp_activated"]
        of_gate = (known["gate_min"], known["gate_max"])
        bounds = (*of_gate, known["up_min"], known["up_max"])
        farthest = max(abs(b) for b in bounds if b is not None)
        for _ in range(64):
            gate, up = self._projected(wide, formula, x.double())
            bounded = gate
            if after:
                activate = reference_kernel("gated_clamped").fn
                ones = torch.ones_like(gate)
                bounded = activate(gate, ones, known["activation"], alpha=known["alpha"])
            near, free_gate = _at_bounds(bounded, *of_gate, eps)
            near_up, free_up = _at_bounds(up, known["up_min"], known["up_max"], eps)
            near = (near | near_up).any(-1)
            flat = ~((free_gate | free_up) & (gate > -_TAIL)).any(-1)
            flat |= torch.maximum(gate.abs(), up.abs()).amax(-1) > _TAIL * max(1.0, farthest)
            if not (near | flat).any():
                break
            x = torch.where((near & ~flat)[..., None], x * 0.96875, x)
            x = torch.where(flat[..., None], x * 0.5, x)
        return torch.where((near | flat)[..., None], torch.zeros_like(x), x)

    def _projected(self, module: nn.Module, formula: Formula, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate, and what it is multiplied with."""
        m: dict[str, Any] = module._modules
        with torch.no_grad():
            if self.roles.up is not None:
                return m[self.roles.gate](x), m[self.roles.up](x)
            first, second = m[self.roles.gate](x).chunk(2, dim=-1)
        return (first, second) if formula.how == _FIRST else (second, first)

    def combos(self) -> list[Combo]:
        return [Combo(t, t) for t in KERNEL_DTYPES]

    def main_combo(self) -> Combo:
        dtype = weight_dtype(self._child(self.roles.gate), torch.float32)
        return Combo(dtype, dtype)

    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        def linear(n_in: int, n_out: int, name: str, dtype: torch.dtype) -> nn.Linear:
            bias = getattr(self._child(name), "bias", None) is not None
            return random_linear(n_in, n_out, bias, dtype, device, generator)

        r = self.roles
        packed = 1 if r.up is not None else 2
        own = combo.param or combo.x  # another than the input's under autocast alone
        children: dict[str, nn.Module] = {r.gate: linear(_IN, packed * _HIDDEN, r.gate, own)}
        if r.up is not None:
            children[r.up] = linear(_IN, _HIDDEN, r.up, own)
        if r.down is not None:
            dtype = own if own == torch.float64 else self._down_dtype() or own
            children[r.down] = linear(_HIDDEN, _IN, r.down, dtype)
        if r.dropout is not None:
            children[r.dropout] = _Seen()
        return replicate(self.module, children)

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        """Also rows that reach far, where a clamp shows: as far as fp16 holds gate times up."""
        half = torch.float16 in (combo.x, combo.autocast)
        large = [20.0, 40.0, 40.0] if half else [30.0, 150.0, 1000.0]
        scales = torch.tensor([0.01, 0.3, 1.0, 2.0, 4.0, 8.0, *large])
        x = torch.randn(2, len(scales), _IN, generator=generator)
        return (x * scales[:, None]).to(device, combo.x)

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        return self._compute(kernel, formula, training, widened=False)

    def entry(
        self, kernel: Kernel, formula: Formula, training: bool, replica: nn.Module, x: Tensor
    ) -> Forward:
        return self._compute(kernel, formula, training, self._is_widened(replica))

    def _is_widened(self, replica: nn.Module) -> bool:
        """Whether autocast makes the activation's result, and so the product, fp32, where that of
        the layers is half: it does so with powers on a GPU."""
        last, act = self.roles.down, None if self.act is None else replica._modules[self.act]
        if last is None or act is None:
            return False
        layer: Any = replica._modules[last]
        if not torch.is_autocast_enabled(layer.weight.device.type):
            return False
        half = torch.get_autocast_dtype(layer.weight.device.type)
        h = torch.zeros(1, _HIDDEN, dtype=half, device=layer.weight.device)
        return bool(act(h).dtype != half)

    def _compute(self, kernel: Kernel, formula: Formula, training: bool, widened: bool) -> Forward:
        call = _of_halves(formula, kernel.bind(dict(formula.params), training))
        # where autograd needs the product and the kernel has none, or where a projection gives a
        # DTensor (tensor parallel), which knows ATen's operators alone: the same formula on these
        aten = _of_halves(formula, torch_kernel(formula.op).bind(dict(formula.params)))
        differentiable = call if training else aten
        gate, up, down, dropout = (
            self.roles.gate,
            self.roles.up,
            self.roles.down,
            self.roles.dropout,
        )
        cast_down = self._down_dtype() is not None
        up_first = self.up_first  # of the code that was read last: this module's
        may_differ = kernel.widens is not None  # autocast casts in linear layers, not in others

        # of the code's casts that are none where the layers keep to one dtype
        casts = self.casts and not may_differ
        first = [n for n in (gate, up) if n is not None]
        # of other dtypes than the proofs' (a layer that was quantized later) the code may do else
        asked = sorted(self.asked)

        def compute(module: nn.Module, x: Tensor) -> Any:
            m = module._modules
            if asked and any(_of_whole_numbers(m[n]) for n in asked):
                return NotImplemented
            if casts and any(weight_dtype(m[n], x.dtype) != x.dtype for n in first):
                return NotImplemented
            u: Any = m[up](x) if up_first else None  # type: ignore[index,misc]
            h = m[gate](x)  # type: ignore[misc]
            if not isinstance(h, Tensor) or (casts and h.dtype != x.dtype):
                return NotImplemented
            if widened and not _casts(m[down]):  # type: ignore[index]
                h = h.float()
                if up is not None and not up_first:
                    u = m[up](x)  # type: ignore[misc]
                h = aten(h) if up is None else aten(h, u)
            elif up is None:
                if h.shape[-1] % 2:
                    return NotImplemented
                run = aten if not readable(h) else differentiable if h.requires_grad else call
                h = run(h)
            else:
                if not up_first:
                    # the original activates it before `up` is called, which may write to it
                    writes = not _writes_nothing(m[up])
                    if h is x or (
                        writes
                        and not h.requires_grad  # else autograd says so of a write
                        and (getrefcount(h) > 2 or _of_one_memory(h, x))  # somebody else has it
                    ):
                        h = h.clone()
                    before = h._version if writes and h.requires_grad else None
                    u = m[up](x)  # type: ignore[misc]
                    if before is not None and h._version != before:
                        return NotImplemented
                if not isinstance(u, Tensor) or h.shape != u.shape:
                    return NotImplemented
                if h.dtype != u.dtype:
                    if not may_differ:
                        return NotImplemented
                    run = aten
                elif not (readable(h) and readable(u)):
                    if h is not x and _overlap(h, u):
                        return NotImplemented
                    run = aten
                elif abs(h.data_ptr() - u.data_ptr()) < h.nbytes and h is not x:
                    return NotImplemented  # layers with one workspace: the second wrote over it
                else:
                    run = differentiable if h.requires_grad or u.requires_grad else call
                h = run(h, u)
            if dropout is not None:
                h = m[dropout](h)  # type: ignore[misc]
            if down is None:
                return h
            last: Any = m[down]
            wanted = weight_dtype(last, h.dtype) if cast_down or casts else h.dtype
            y = last(h.to(wanted) if cast_down else h)
            return NotImplemented if casts and y.dtype != wanted else y

        return compute

    def forward(self, original: Forward, contract: Contract) -> Forward:
        name, act = input_name(self.module), self.act
        part = None if act is None else Part(self._child(act), leaf=True)
        read, settings = leaf_settings(self.module)
        cpu, cuda = contract.cpu, contract.cuda
        grad_enabled, autocast = torch.is_grad_enabled, torch.is_autocast_enabled
        training, gate = contract.training, self.roles.gate

        children, down = frozenset(self.module._modules), self.roles.down
        apart = _apart(self.module._modules, self.roles.gate, down)
        cls, own = class_of(self.module), coded(original)
        code = own.__code__

        def untouched(self: nn.Module) -> bool:
            """Whether the settings, and the activation, which is not called, are those proven."""
            try:
                same = bool(read(self.__dict__) == settings)
            except INCOMPARABLE:  # one was deleted, or is a parameter or module now
                same = False
            same = same and (part is None or part.is_same(self._modules[act]))  # type: ignore
            same = same and self.__dict__.keys().isdisjoint(children)  # it would hide the child
            same = same and _apart(self._modules, gate, down) is apart
            if not same:
                contract.changed()
            elif part is not None and hooks_on_all():
                contract.hooks_on_all()
                return False
            return same

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # inductor fuses the product into one pointwise kernel
                return original(self, *args, **kwargs)
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                return type(self).forward(self, *args, **kwargs)
            x = args[0] if len(args) == 1 and not kwargs else first_argument(args, kwargs, name)
            if (
                type(x) is Tensor
                and is_dense(x)
                and not watched()
                and contract.takes(x)
                and untouched(self)
            ):
                on_cuda = x.is_cuda
                if autocast("cuda" if on_cuda else "cpu"):
                    key = (x.dtype, weight_dtype(self._modules[gate], x.dtype))
                    run = contract.under_autocast(x, key, training or grad_enabled())
                else:
                    key = (x.dtype, x.dtype)
                    run = (cuda if on_cuda else cpu).get(key) if on_cuda or x.is_cpu else None
                    if run is None:
                        run = contract.late(x, key)
                if run is not None:
                    y = run(self, x)
                    if y is not NotImplemented:
                        return y
                    contract.odd_projections()
            return original(self, *args, **kwargs)

        return forward


def _writes_nothing(layer: Any) -> bool:
    """Whether a layer is PyTorch's own, with nobody's hook or forward, which writes to nothing."""
    d = layer.__dict__
    return (
        type(layer) is nn.Linear
        and "forward" not in d
        and not (d["_forward_hooks"] or d["_forward_pre_hooks"] or "_hf_hook" in d)
    )


def _of_one_memory(h: Tensor, x: Tensor) -> bool:
    if not (plain(h) and is_dense(h)):
        return False
    return h.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _overlap(h: Tensor, u: Tensor) -> bool:
    """Whether two results may lie in one memory, in parts at least; subclasses are not asked."""
    for t in (h, u):
        if not (plain(t) and is_dense(t) and t.numel()):
            return False
    if h.untyped_storage().data_ptr() != u.untyped_storage().data_ptr():
        return False
    first, second = (
        (t.data_ptr(), sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (h, u)
    )
    size = h.element_size()
    return first[0] <= second[0] + size * second[1] and second[0] <= first[0] + size * first[1]


def _of_whole_numbers(layer: Any) -> bool:
    dtype = dtype_of_weight(layer)
    return dtype is not None and not dtype.is_floating_point


def _bounds(name: str, clamp: Clamp | None) -> dict[str, float | None]:
    """As parameters of the op."""
    low, high = (-math.inf, math.inf) if clamp is None else (clamp.low, clamp.high)
    return {
        f"{name}_min": None if low == -math.inf else low,
        f"{name}_max": None if high == math.inf else high,
    }


def _at_bounds(
    t: Tensor, low: float | None, high: float | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Where values lie so near a bound that a rounding may carry them over it, and where they are
    not clamped."""
    near = torch.zeros_like(t, dtype=torch.bool)
    for bound in (low, high):
        if bound is not None:
            near |= (t - bound).abs() <= 4 * eps * abs(bound)
    return near, t == clamped(t, low, high)


def _of_halves(formula: Formula, call: Callable[..., Any]) -> Callable[..., Any]:
    """The op of two tensors, called with one that holds both, where that is how it is used."""
    if formula.how == _FIRST:
        return lambda x: call(*x.chunk(2, dim=-1))
    if formula.how == _SECOND:
        return lambda x: call(*x.chunk(2, dim=-1)[::-1])
    return call


def _apart(modules: Any, gate: str, down: str | None) -> bool:
    """Whether the first and the last layer have weights of two dtypes: code may cast for the last
    one. What has no weight of its own (an adapter, a quantized layer) is not asked."""
    if down is None:
        return False
    first, last = (
        m.__dict__["_parameters"].get("weight") if m is not None else None
        for m in (modules[gate], modules[down])
    )
    return (
        first is not None
        and last is not None
        and first.is_floating_point()  # whole numbers are a quantized layer's
        and last.is_floating_point()
        and first.dtype != last.dtype
    )


def _casts(layer: nn.Module | None) -> bool:
    """Whether autocast casts what a layer is given, so that its dtype is all the same."""
    return type(layer) is nn.Linear and plain(layer.weight)


class GatedMlps(Family):
    name = "gated mlp"
    pattern = re.compile(r"MLP|Mlp|GEGLU|SwiGLU|ReGLU|GLU$|Gated|FeedForward|DenseGatedAct|FFN|FFW")
    rank = 20

    def nominates(self, module: nn.Module) -> bool:
        return super().nominates(module) or looks_gated(module)

    def examine(self, module: nn.Module) -> Subject | str | None:
        children = {n for n, c in module._modules.items() if c is not None}
        for roles in LAYOUTS:
            named = {n for n in (roles.gate, roles.up, roles.down) if n is not None}
            if not named <= children:
                continue
            act = next((n for n in _ACT_NAMES if n in children), None)
            known = named | {act, roles.dropout} | {None}
            if children - known:
                continue
            if act is None and roles.down is not None:
                continue
            if roles.up is None and roles.down is not None and not _is_packed(module, roles):
                continue
            if roles.dropout is not None and roles.dropout not in children:
                roles = Roles(roles.gate, roles.up, roles.down)
            if module._parameters:
                return f"has parameters of its own: {sorted(module._parameters)}"
            return _odd_children(module, roles, act) or GatedSubject(module, roles, act)
        return _by_code(module) if looks_gated(module) else None


def _by_code(module: nn.Module) -> Subject | str:
    """A subject whose children's roles are told by the code, or why they cannot be."""
    dropouts, others = dropouts_of(module), others_of(module)
    act = others[0] if others else None
    if len(dropouts) > 1:
        return f"has {len(dropouts)} dropouts, {sorted(dropouts)}; the kernel's forward takes one"
    if act is not None and (why := _odd_activation(module, act)) is not None:
        return why
    dropout = dropouts[0] if dropouts else None
    known = kept_while_planning(_by_code).setdefault(class_of(module), {})
    # a class's code may take one way or another by its settings, and by which children there are
    kind = None if act is None else code_of(module._modules[act])  # type: ignore[arg-type]
    key = (tuple(module._modules), kind, attributes_read(module))
    if key not in known:
        known[key] = _roles_by_code(module, dropout, act)
    roles = known[key]
    if isinstance(roles, str):
        return roles
    return _odd_children(module, roles, act) or GatedSubject(module, roles, act)


def _roles_by_code(module: nn.Module, dropout: str | None, act: str | None) -> Roles | str:
    """The roles with which the code can be read: the projections get the input, the last layer the
    product, and doubling what `up` gives doubles the product."""
    why = ""
    for gate, up, down in orders(module):
        subject = GatedSubject(module, Roles(gate, up, down, dropout), act)
        try:
            with cpu_default():
                if _reads_as(subject):
                    return subject.roles
        except Unexplained as e:
            why = max(why, str(e), key=len)
        except Exception:  # an operation's: the sizes of other roles do not fit
            continue
    return "multiplies an activation's result, but is no gated MLP that is known" + (
        f": {why}" if why else ""
    )


def _reads_as(subject: GatedSubject) -> bool:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32
    copy = subject.replica(Combo(dtype, dtype), torch.device("cpu"), generator)
    x = torch.randn(2, 5, _IN, generator=generator)
    roles = subject.roles
    if roles.down is not None:
        last: Any = copy._modules[roles.down]
        last.bias = None
    once = subject.read(copy, x).result
    if roles.up is None:
        return True
    if subject.clamps:  # nothing is doubled
        return any(
            torch.allclose(
                subject.compute(reference_kernel(f.op), f)(copy, x), once, rtol=1e-4, atol=1e-5
            )
            for f in subject.formulas()
        )
    double: Any = copy._modules[roles.up]
    for p in double.parameters():
        p.data.mul_(2.0)
    return torch.allclose(subject.read(copy, x).result, 2.0 * once, rtol=1e-4, atol=1e-5)


class _Seen(nn.Dropout):
    """A replica's dropout, which shows whether, and where, the original calls its own: after the
    last layer the same factors would give other values. They are exact in every dtype."""

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.tensor([1.0, 0.5, 2.0], dtype=x.dtype, device=x.device)
        return x * factors.repeat(x.shape[-1] // 3 + 1)[: x.shape[-1]]


def _odd_children(module: nn.Module, roles: Roles, act: str | None) -> str | None:
    """Why the children are not what their names say, or not what the kernel takes."""
    children: dict[str, Any] = dict(module._modules)
    # a replica's is looked at as well, where a proof is made at a first call
    dropouts = (nn.Dropout, nn.Identity, _Seen)
    if roles.dropout is not None and type(children[roles.dropout]) not in dropouts:
        kind = type(children[roles.dropout]).__name__
        return f"its child `{roles.dropout}` is a `{kind}`, no `Dropout`"
    if act is not None and (why := _odd_activation(module, act)) is not None:
        return why
    if roles.down is not None and _apart(children, roles.gate, roles.down):
        dtype = children[roles.down].weight.dtype
        if dtype.is_floating_point and dtype not in KERNEL_DTYPES:
            return f"its last layer is {dtype}, the first one is not"
    if roles.up is not None:
        gate, up = children[roles.gate], children[roles.up]
        dtypes = {weight_dtype(layer, torch.float32) for layer in (gate, up)}
        if len(dtypes) > 1:
            return f"its projections are {', '.join(sorted(map(str, dtypes)))}"
        widths = [getattr(layer, "out_features", None) for layer in (gate, up)]
        if widths[0] != widths[1]:
            return f"its projections are {widths[0]} and {widths[1]} wide"
    return None


def _odd_activation(module: nn.Module, act: str) -> str | None:
    child: Any = module._modules[act]
    if all(
        t is None
        for m in child.modules()
        for held in (m._parameters, m._buffers)
        for t in held.values()
    ):
        return None
    kind = type(child).__name__
    return f"its activation `{kind}` has parameters or buffers, which the kernel does not read"


def _is_packed(module: nn.Module, roles: Roles) -> bool:
    """Whether the first projection is twice as wide as the last one's input; True if unknown."""
    width = getattr(module._modules[roles.gate], "out_features", None)
    inner = getattr(module._modules[roles.down or ""], "in_features", None)
    return width is None or inner is None or width == 2 * inner
