"""How a description is read off a model: paths, names and numbers, found on a small replica.

A rule says where something is (`model.layers.3.self_attn.q_proj`, rows of the queries) and is read
off the replica and off the model alike, so that what is proven of one holds for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.decoding import spec
from hfpatch.decoding.replica import NoReplica, head_counts, text_config

#: What the names of factors hold, where several numbers are equal by chance.
_SCALES = ("scal", "multiplier")


class Unexplained(Exception):
    """What the grammar has no words for; the text names the stage and is for the report."""


@dataclass(frozen=True)
class Number:
    """A number, and every place that says it: all of them must agree."""

    places: tuple[tuple[str, ...], ...]  # ("constant",) first has `constant`; see `_read`
    what: str
    constant: float | None = None

    def value(self, model: nn.Module) -> float:
        """Its value in `model`.

        Raises:
            Unexplained: places that agree on the replica differ here.
        """
        if self.constant is not None:
            return self.constant
        found = [_read(model, place) for place in self.places]
        first = found[0][0]
        # a buffer of a half type says it to that type's precision
        tolerance = max(precision for _, precision in found)
        if any(not math.isclose(first, other, rel_tol=tolerance) for other, _ in found):
            places = ", ".join(".".join(p[1:]) for p in self.places)
            raise Unexplained(f"{self.what}: {places} differ, and only one of them is read")
        return first


def _read(model: nn.Module, place: tuple[str, ...]) -> tuple[float, float]:
    """A number, and how precisely that place says it."""
    how, kind, *where = place
    if kind == "config":
        value = getattr(text_config(model.config), where[0])
    elif kind == "attribute":
        value = getattr(model.get_submodule(where[0]), where[1])
    else:
        _heads, _, head_dim = head_counts(text_config(model.config))
        value = {"head_dim": head_dim, "hidden": text_config(model.config).hidden_size}[kind]
    if type(value) not in (int, float) and not isinstance(value, Tensor):
        raise Unexplained(f"`{'.'.join(where)}` is {value!r}, expected a number")
    precision = 1e-6
    if isinstance(value, Tensor) and value.is_floating_point():
        precision = max(precision, torch.finfo(value.dtype).eps)
    value = float(value)
    if (value == 0.0 and how.startswith("1/")) or (value < 0.0 and how.endswith("sqrt")):
        raise Unexplained(f"`{'.'.join(where)}` is {value}, of which `{how}` is no number")
    return _SAID[how](value), precision


#: What is read off a place, of the number that it says.
_SAID: dict[str, Callable[[float], float]] = {
    "": lambda value: value,
    "1/": lambda value: 1 / value,
    "sqrt": math.sqrt,
    "1/sqrt": lambda value: 1 / math.sqrt(value),
}


class Numbers:
    """All numbers that a module and those around it have, to find out which one a stage uses."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._of_config: list[tuple[tuple[str, ...], float]] = [
            (("config", name), float(value))
            for name, value in vars(text_config(model.config)).items()
            if type(value) in (int, float) and value != 0
        ]

    def at(self, *paths: str) -> list[tuple[tuple[str, ...], float]]:
        """The numbers of the modules at these paths, and of the configuration."""
        found: list[tuple[tuple[str, ...], float]] = []
        for path in paths:
            found += [(("attribute", path, name), v) for name, v in self._of_module(path)]
        return found + self._of_config

    def _of_module(self, path: str) -> list[tuple[str, float]]:
        module = self._model.get_submodule(path)
        held = {**vars(module), **module._buffers}
        found = []
        for name, value in held.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                value = float(value)
            if type(value) in (int, float) and value != 0 and name[0] != "_":
                found.append((name, float(value)))
        return found

    def equal_to(self, target: float, what: str, *paths: str) -> Number:
        """The places that say `target`.

        Raises:
            Unexplained: none does.
        """
        if math.isclose(target, 1.0, rel_tol=1e-8):
            return Number((), what, 1.0)
        _heads, _, head_dim = head_counts(text_config(self._model.config))
        sizes = [
            (("head_dim",), head_dim),
            (("hidden",), text_config(self._model.config).hidden_size),
        ]
        places: list[tuple[str, ...]] = []
        for place, value in self.at(*paths):
            for how in ("", "1/"):
                if _close(value if not how else 1 / value, target):
                    places.append((how, *place))
        named = [p for p in places if any(hint in p[-1] for hint in _SCALES)]
        places = named or places
        if not places:
            for place, value in sizes:
                for how, v in (("sqrt", value**0.5), ("1/sqrt", value**-0.5), ("1/", 1 / value)):
                    if _close(v, target):
                        places.append((how, *place))
        if not places:
            raise Unexplained(f"{what} is {target:.6g}, which neither attribute nor config says")
        return Number(tuple(dict.fromkeys(places)), what)

    def named(self, hint: str, what: str, *paths: str) -> list[tuple[Number, float]]:
        """The numbers whose names hold `hint`, as rules, those of one value together."""
        by_value: dict[float, list[tuple[str, ...]]] = {}
        for place, value in self.at(*paths):
            if hint not in place[-1] or place[-1][0] == "_":
                continue
            by_value.setdefault(value, []).append(("", *place))
        return [(Number(tuple(places), what), value) for value, places in by_value.items()]


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-7)


@dataclass(frozen=True)
class Part:
    """A linear layer, or some of its rows: `start` and `rows` in units of sizes (see `_rows`)."""

    path: str
    part: str = "all"  # "q", "k", "v" of packed ones; "first" and "second" half

    def read(self, model: nn.Module, sizes: tuple[int, int, int]) -> spec.Product:
        """The live weight and bias: the parameters themselves, so that the memory of a model that
        is moved is not held here, or views of them."""
        linear: Any = model.get_submodule(self.path)
        weight, bias = linear.weight, linear.bias
        start, end = _rows(self.part, weight.shape[0], sizes)
        if (start, end) != (0, weight.shape[0]):
            weight, bias = (None if t is None else t.detach()[start:end] for t in (weight, bias))
        return spec.Product(weight, bias)


def _rows(part: str, rows: int, sizes: tuple[int, int, int]) -> tuple[int, int]:
    heads, key_heads, head_dim = sizes
    q, k = heads * head_dim, key_heads * head_dim
    return {
        "all": (0, rows),
        "first": (0, rows // 2),
        "second": (rows // 2, rows),
        "q": (0, q),
        "k": (q, q + k),
        "v": (q + k, q + 2 * k),
    }[part]


@dataclass(frozen=True)
class NormRule:
    """A norm's module and formula; `eps` is an attribute's name or the number itself.

    heads: "rows" where weight and bias have a row for each head; "list" where `path` is that of a
    `ModuleList` with a norm for each head.
    """

    path: str
    kind: str
    weight: str | None
    bias: str | None
    offset: float
    eps: str | float
    rounded: bool
    heads: str | None = None

    def read(self, model: nn.Module) -> spec.Norm:
        """The live weights and biases."""
        module: Any = model.get_submodule(self.path)
        modules = list(module) if self.heads == "list" else [module]
        weights, biases = (
            () if name is None else tuple(m._parameters[name] for m in modules)
            for name in (self.weight, self.bias)
        )
        eps = getattr(modules[0], self.eps) if isinstance(self.eps, str) else self.eps
        form = (float(eps), self.offset, self.rounded)
        if self.heads == "list":
            return spec.Norm(self.kind, None, None, *form, weights, biases)
        (weight,), (bias,) = weights or (None,), biases or (None,)
        return spec.Norm(self.kind, weight, bias, *form)


@dataclass(frozen=True)
class RopeRule:
    """A buffer of frequencies and the number that its cosines are multiplied with."""

    path: str
    buffer: str
    interleaved: bool
    scaling: str | None  # an attribute's name
    rounded: bool
    twins: tuple[RopeRule, ...] = ()  # those that give the same on the replica

    def read(self, model: nn.Module) -> spec.Rope:
        """The live frequencies in fp32.

        Raises:
            Unexplained: it has none, or one of `twins` has others here.
        """
        rope = self._read(model)
        for twin in self.twins:
            other = twin._read(model)
            if other.scaling != rope.scaling or not torch.equal(other.inv_freq, rope.inv_freq):
                raise Unexplained(
                    f"RoPE: `{self.buffer}` and `{twin.buffer}` differ, and only one is read"
                )
        return rope

    def _read(self, model: nn.Module) -> spec.Rope:
        try:
            module = model.get_submodule(self.path)
        except AttributeError as e:
            raise Unexplained(f"RoPE: {e}") from e
        frequencies: Any = module._buffers.get(self.buffer)
        if frequencies is None:
            kind = type(module).__name__
            raise Unexplained(f"RoPE: `{self.path}` is a `{kind}` without a buffer `{self.buffer}`")
        wide = frequencies if frequencies.dtype == torch.float64 else frequencies.float()
        scaling = 1.0 if self.scaling is None else getattr(module, self.scaling, None)
        if not isinstance(scaling, (int, float)):
            raise Unexplained(f"RoPE: `{self.path}.{self.scaling}` is {scaling!r:.40}, no number")
        dims = 2 * frequencies.numel()
        return spec.Rope(wide.contiguous(), dims, self.interleaved, scaling, self.rounded)


@dataclass(frozen=True)
class AttentionRule:
    """See `spec.Attention`."""

    path: str
    q: Part
    k: Part
    v: Part
    o: Part
    scale: Number
    rope: int | None
    q_norm: NormRule | None = None
    k_norm: NormRule | None = None
    norm_across: bool = False
    norm_after_rope: bool = False
    softcap: Number | None = None
    window: Number | None = None
    sinks: str | None = None
    clip: Number | None = None

    def read(self, model: nn.Module, sizes: tuple[int, int, int]) -> spec.Attention:
        """The live tensors.

        Raises:
            Unexplained: sizes that the configuration says are not those of the weights.
        """
        heads, key_heads, head_dim = sizes
        q, k, v, o = (p.read(model, sizes) for p in (self.q, self.k, self.v, self.o))
        shapes = [tuple(p.weight.shape) for p in (q, k, v, o)]
        width, wide, narrow = o.weight.shape[0], heads * head_dim, key_heads * head_dim
        if shapes != [(wide, width), (narrow, width), (narrow, width), (width, wide)]:
            raise Unexplained(f"`{self.path}`: products of shapes {shapes} for {sizes}")

        def norm(rule: NormRule | None) -> spec.Norm | None:
            return None if rule is None else rule.read(model)

        def number(rule: Number | None) -> float | None:
            return None if rule is None else rule.value(model)

        window = number(self.window)
        sinks = (
            None if self.sinks is None else model.get_submodule(self.path)._parameters[self.sinks]
        )
        return spec.Attention(
            q, k, v, o, heads, key_heads, head_dim,
            self.scale.value(model), self.rope, norm(self.q_norm), norm(self.k_norm),
            self.norm_across, self.norm_after_rope, number(self.softcap),
            None if window is None else int(window),
            sinks, number(self.clip),
        )  # fmt: skip


@dataclass(frozen=True)
class MlpRule:
    """See `spec.Mlp`."""

    up: Part
    down: Part
    activation: str
    gate: Part | None

    def read(self, model: nn.Module, sizes: tuple[int, int, int]) -> spec.Mlp:
        """The live tensors."""
        gate = None if self.gate is None else self.gate.read(model, sizes)
        up, down = self.up.read(model, sizes), self.down.read(model, sizes)
        return spec.Mlp(up, down, self.activation, gate)

    @property
    def paths(self) -> tuple[str, str]:
        """Of what is given its input, and of what gives its result."""
        return self.up.path, self.down.path


@dataclass(frozen=True)
class OpaqueRule:
    """See `spec.Opaque`."""

    path: str

    def read(self, model: nn.Module, sizes: tuple[int, int, int]) -> spec.Opaque:
        """The live module."""
        return spec.Opaque(model.get_submodule(self.path))

    @property
    def paths(self) -> tuple[str, str]:
        """Of what is given its input, and of what gives its result."""
        return self.path, self.path


@dataclass(frozen=True)
class LayerRule:
    """See `spec.Layer`."""

    attention: AttentionRule
    mlp: MlpRule | OpaqueRule
    norms: tuple[NormRule | None, ...]  # before and after attention, before and after the MLP
    parallel: bool
    residual_multiplier: Number

    def read(self, model: nn.Module, sizes: tuple[int, int, int]) -> spec.Layer:
        """The live tensors."""
        attention, mlp = self.attention.read(model, sizes), self.mlp.read(model, sizes)
        read = [None if n is None else n.read(model) for n in self.norms]
        before_attention, after_attention, before_mlp, after_mlp = read
        return spec.Layer(
            attention, mlp, before_attention, after_attention, before_mlp, after_mlp,
            self.parallel, self.residual_multiplier.value(model),
        )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How to read a `spec.Model` off a model of one class and configuration."""

    embedding: str
    embedding_scale: Number
    scale_rounded: bool
    layers: tuple[LayerRule, ...]
    ropes: tuple[RopeRule, ...]
    final_norm: NormRule | None
    head: str
    logit_scale: Number
    logit_softcap: Number | None

    @property
    def opaque(self) -> tuple[str, ...]:
        """The paths of the modules that are called as they are."""
        return tuple(r.mlp.path for r in self.layers if isinstance(r.mlp, OpaqueRule))

    @property
    def lists(self) -> frozenset[str]:
        """The paths of lists with a norm for each head."""
        norms = (n for r in self.layers for n in (r.attention.q_norm, r.attention.k_norm))
        return frozenset(n.path for n in norms if n is not None and n.heads == "list")

    def read(self, model: nn.Module) -> spec.Model:
        """The description, with the model's live tensors.

        Raises:
            Unexplained: the model is built otherwise than the replica.
        """
        try:
            sizes = head_counts(text_config(model.config))
        except NoReplica as e:
            raise Unexplained(str(e)) from e
        embedding: Any = model.get_submodule(self.embedding).weight
        scale = self.embedding_scale.value(model)
        if self.scale_rounded:
            scale = float(torch.tensor(scale, dtype=torch.float64).to(embedding.dtype))
        return spec.Model(
            embedding,
            tuple(layer.read(model, sizes) for layer in self.layers),
            tuple(rope.read(model) for rope in self.ropes),
            None if self.final_norm is None else self.final_norm.read(model),
            Part(self.head).read(model, sizes),
            scale,
            self.logit_scale.value(model),
            None if self.logit_softcap is None else self.logit_softcap.value(model),
        )
