"""What a model computes, found out from one run of its replica: every stage explained by values.

The replica runs once in fp64 with a recording of every module's input and output. Which product
feeds the cache, which norm stands before which, what rotation, scale, window or activation lies
between two recorded tensors: each is found by computing the candidates and comparing. What no
candidate reproduces is named, and the model is left alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.decoding import cache as caches
from hfpatch.decoding import reference, spec
from hfpatch.decoding.replica import (
    VOCAB,
    Recording,
    WithoutCasts,
    head_counts,
    rope_limit,
    same,
    text_config,
    without_casts_in,
)
from hfpatch.decoding.rules import (
    AttentionRule,
    LayerRule,
    MlpRule,
    NormRule,
    Number,
    Numbers,
    OpaqueRule,
    Part,
    Recipe,
    RopeRule,
    Unexplained,
)

_ROWS, _TOKENS = 2, 14
#: What the paths of a layer's modules begin with, in a rule that is of no layer yet.
_LAYER = "\0."
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    """[rows, tokens, heads * head_dim] as [rows, heads, tokens, head_dim]."""
    return x.reshape(*x.shape[:-1], -1, head_dim).transpose(1, 2)


class Analysis:
    """One recorded run of a replica, and what explains it."""

    def __init__(self, replica: Any) -> None:
        from transformers import DynamicCache

        self.replica = replica
        self.sizes = head_counts(text_config(replica.config))
        self.numbers = Numbers(replica)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, VOCAB, (_ROWS, _TOKENS), generator=generator)
        self.positions = torch.arange(_TOKENS).expand(_ROWS, -1)
        self.cache = DynamicCache(config=replica.config)
        with torch.no_grad(), WithoutCasts(), Recording(replica) as self.run:
            self.logits = replica(
                input_ids=self.ids, use_cache=True, **{caches.NAME: self.cache}
            ).logits
        self.modules = dict(replica.named_modules())
        self.paths = {id(m): path for path, m in self.modules.items()}
        self.norms = self._all_norms()
        self.ropes = self._rope_candidates()
        self.used_ropes: list[RopeRule] = []

    # --- what modules are -------------------------------------------------------------------------

    def _all_norms(self) -> dict[str, NormRule]:
        found = {}
        for path, module in self.modules.items():
            x, y = self.run.inputs.get(path), self.run.outputs.get(path)
            if module._modules or isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            if x is None or y is None or x.shape != y.shape or self.run.calls[path] != 1:
                continue
            rule = norm_of(path, module, x, y)
            if rule is not None:
                found[path] = rule
        for path, module in self.modules.items():
            if path in self.run.inputs and (rule := self._norm_of_heads(path, module, found)):
                for index in range(len(self.modules[rule.path]._modules)):
                    del found[f"{rule.path}.{index}"]
                found[path] = rule
        return found

    def _norm_of_heads(
        self, path: str, module: nn.Module, norms: dict[str, NormRule]
    ) -> NormRule | None:
        """What a module is that holds nothing but a list with a norm for each head."""
        x, y = self.run.inputs[path], self.run.outputs[path]
        lists = [(n, m) for n, m in module._modules.items() if isinstance(m, nn.ModuleList)]
        if len(module._modules) != 1 or not lists or module._parameters or x.dim() != 4:
            return None
        ((name, each),) = lists
        inside = f"{path}.{name}"
        rules = {
            None if (rule := norms.get(f"{inside}.{i}")) is None else replace(rule, path=inside)
            for i in range(len(each))
        }
        if len(rules) != 1 or (rule := rules.pop()) is None or self.run.calls[path] != 1:
            return None
        found = replace(rule, heads="list")
        norm = found.read(self.replica)
        for axis in (1, 2):  # of the heads
            if x.shape != y.shape or x.shape[axis] != len(each):
                continue
            x_at, y_at = x.movedim(axis, 2), y.movedim(axis, 2)
            if same(reference.normed(x_at, norm), y_at):
                return found
        return None

    def _rope_candidates(self) -> list[RopeRule]:
        found = []
        limited = rope_limit(text_config(self.replica.config)) is not None
        for path, module in self.modules.items():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta:  # what text has no need of
                    continue
                if buffer.dim() != 1 or not buffer.is_floating_point():
                    continue
                if not name.endswith("inv_freq"):
                    continue
                # those that change with the length are read where they do not
                steady = name.replace("original_", "")
                kept = steady.replace("inv_freq", "original_inv_freq")
                if name != (kept if limited and kept in module._buffers else steady):
                    continue
                # where a module has frequencies of several kinds, each has its own number
                prefix = steady.removesuffix("inv_freq")
                numbers = [
                    k
                    for k, v in vars(module).items()
                    if type(v) in (int, float) and "scal" in k and k.startswith(prefix)
                ]
                for interleaved in (False, True):
                    found += [RopeRule(path, name, interleaved, n, True) for n in (*numbers, None)]
        return [replace(r, twins=tuple(o for o in found if self._is_twin(r, o))) for r in found]

    def _is_twin(self, rule: RopeRule, other: RopeRule) -> bool:
        if other.buffer == rule.buffer and other.path == rule.path:
            return False
        a, b = rule._read(self.replica), other._read(self.replica)
        same_kind = (a.dims, a.interleaved, a.scaling) == (b.dims, b.interleaved, b.scaling)
        return same_kind and rule.scaling is not None and torch.equal(a.inv_freq, b.inv_freq)

    def _linears(self, prefix: str) -> dict[str, nn.Linear]:
        return {
            path: module
            for path, module in self.modules.items()
            if path.startswith(prefix) and type(module) is nn.Linear and path in self.run.inputs
        }

    # --- the whole --------------------------------------------------------------------------------

    def recipe(self) -> Recipe:
        """What explains the run, except where it rounds.

        Raises:
            Unexplained: a stage is none that the grammar knows.
        """
        run, replica = self.run, self.replica
        embedding, head = replica.get_input_embeddings(), replica.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or id(embedding) not in self.paths:
            raise Unexplained("embedding: it is no `torch.nn.Embedding`")
        if type(head) is not nn.Linear or id(head) not in self.paths:
            raise Unexplained("head: it is no `torch.nn.Linear`")
        layers = self._layer_paths()
        first, last = run.inputs[layers[0]], run.outputs[layers[-1]]
        plain = torch.nn.functional.embedding(self.ids, embedding.weight)
        embedding_path, head_path = self.paths[id(embedding)], self.paths[id(head)]
        around = ["", layers[0].rpartition(".")[0].rpartition(".")[0], embedding_path]
        embedding_scale = self._factor(first, plain, "embedding scale", *around)
        for a, b in itertools.pairwise(layers):
            if not same(run.outputs[a], run.inputs[b]):
                raise Unexplained(f"`{b}`: its input is not the output of `{a}`")
        rules: list[LayerRule] = []
        known: dict[tuple[LayerRule, type | None], None] = {}  # most layers are like one before
        for index, path in enumerate(layers):
            likely = (
                moved(rule, _LAYER, f"{path}.")
                for rule, of in known
                if self._may_be_like(rule.mlp, of, path)
            )
            found = next((r for r in likely if self._explains(r, index, path)), None)
            if found is None:
                found = self._layer(index, path)
                known[moved(found, f"{path}.", _LAYER), self._called(found.mlp)] = None
            rules.append(found)
        y = run.inputs[head_path]
        final = self._norm_between(last, y, "", "final norm")
        logits = run.outputs[head_path]
        scale, softcap = self._logit_rules(logits, *around)
        return Recipe(
            embedding_path, embedding_scale, False, tuple(rules), tuple(self.used_ropes), final,
            head_path, scale, softcap,
        )  # fmt: skip

    def _layer_paths(self) -> list[str]:
        count = text_config(self.replica.config).num_hidden_layers
        for path, module in self.modules.items():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                paths = [f"{path}.{i}" for i in range(count)]
                if all(self.run.calls.get(p) == 1 and p in self.run.outputs for p in paths):
                    return paths
        raise Unexplained(f"layers: no list of {count} modules that are called once each")

    def _factor(self, y: Tensor, x: Tensor, what: str, *paths: str) -> Number:
        factor = float((y * x).sum() / x.square().sum()) if y.shape == x.shape else 0.0
        if not same(y, x * factor):
            raise Unexplained(f"{what}: not a factor of what comes before")
        return self.numbers.equal_to(factor, what, *paths)

    def _logit_rules(self, y: Tensor, *paths: str) -> tuple[Number, Number | None]:
        what = "logits"
        try:
            return self._factor(self.logits, y, what, *paths), None
        except Unexplained:
            for cap, value in self.numbers.named("cap", what, *paths):
                if value > 0 and same(self.logits, value * torch.tanh(y / value), 1e-7):
                    return Number((), what, 1.0), cap
            raise

    def _norm_between(self, x: Tensor, y: Tensor, prefix: str, what: str) -> NormRule | None:
        """The norm that makes `y` of `x`; None where they are the same.

        Raises:
            Unexplained: neither.
        """
        if same(y, x):
            return None
        for path, rule in self.norms.items():
            found = path.startswith(prefix) and same(self.run.outputs[path], y)
            if found and same(self.run.inputs[path], x):
                return rule
        raise Unexplained(f"{what}: no norm of a known form")

    # --- a layer ----------------------------------------------------------------------------------

    def _layer(self, index: int, path: str) -> LayerRule:
        run, prefix = self.run, f"{path}."
        x, end = run.inputs[path], run.outputs[path]
        if not self._linears(prefix):
            raise Unexplained(f"`{path}`: it has no `torch.nn.Linear`")
        attention = self._attention(index, path)
        start = run.inputs[attention.q.path]
        before_attention = self._norm_between(x, start, prefix, f"`{path}`: norm before attention")
        a, after_attention = self._normed_after(run.outputs[attention.o.path], prefix)
        mlp = self._mlp_or_opaque(path, attention)
        given, gives = mlp.paths
        m, after_mlp = self._normed_after(run.outputs[gives], prefix)
        inner = run.inputs[given]
        norms = [before_attention, after_attention, None, after_mlp]
        what = f"`{path}`: residual sum"
        around = (path, "")
        normed = [p for p in self.norms if p.startswith(prefix) and same(run.outputs[p], inner)]
        shared = same(inner, start)
        middle = run.inputs[normed[0]] if normed and not shared else inner
        parallel = shared or same(middle, x)
        if normed and not shared:
            norms[2] = self.norms[normed[0]]
        if parallel:
            if norms[2] is None and not shared:
                raise Unexplained(f"{what}: the MLP stands beside attention, without a norm")
            factor = self._factor(end - x, a + m, what, *around)
        else:
            factor = self._factor(middle - x, a, what, *around)
            if self._factor(end - middle, m, what, *around) != factor:
                raise Unexplained(f"{what}: two different factors")
        return LayerRule(attention, mlp, tuple(norms), parallel, factor)

    def _called(self, mlp: MlpRule | OpaqueRule) -> type | None:
        """The class of what a layer calls as it is."""
        return None if isinstance(mlp, MlpRule) else type(self.modules[mlp.path])

    def _may_be_like(self, mlp: MlpRule | OpaqueRule, of: type | None, path: str) -> bool:
        """Whether what is called as it is, of class `of`, is of the same class in a layer."""
        if isinstance(mlp, MlpRule):
            return True
        return of is type(self.modules.get(moved(mlp.path, _LAYER, f"{path}.")))

    def _explains(self, rule: LayerRule, index: int, path: str) -> bool:
        """Whether a layer like one before gives this one's output, keys and values."""
        try:
            layer = rule.read(self.replica, self.sizes)
        except (Unexplained, AttributeError, KeyError):  # it has no such module or attribute
            return False
        ropes = tuple(r.read(self.replica) for r in self.used_ropes)
        x = self.run.inputs[path]
        with without_casts_in(isinstance(layer.mlp, spec.Opaque)):
            y, k, v = reference.layer_result(x, layer, ropes, self.positions)
        kept = self.cache.layers[index]
        tail = kept.keys.shape[2]
        return (
            same(y, self.run.outputs[path])
            and same(k[:, :, -tail:], kept.keys)
            and same(v[:, :, -tail:], kept.values)
        )

    def _normed_after(self, y: Tensor, prefix: str) -> tuple[Tensor, NormRule | None]:
        for path, rule in self.norms.items():
            if path.startswith(prefix) and same(self.run.inputs[path], y):
                return self.run.outputs[path], rule
        return y, None

    def _mlp_or_opaque(self, path: str, attention: AttentionRule) -> MlpRule | OpaqueRule:
        """What a layer's second half is; where that is not known, the one child that may be it."""
        try:
            return self._mlp(path, attention)
        except Unexplained:
            run, width = self.run, self.run.inputs[path].shape
            beside = [
                p
                for name, _ in self.replica.get_submodule(path).named_children()
                if (p := f"{path}.{name}") not in (attention.path, *self.norms)
                and run.calls.get(p) == 1
                and p in run.outputs
            ]
            if len(beside) != 1 or run.outputs[beside[0]].shape != width:
                raise
            return OpaqueRule(beside[0])

    def _mlp(self, path: str, attention: AttentionRule) -> MlpRule:
        run = self.run
        what = f"`{path}`: MLP"
        taken = {p.path for p in (attention.q, attention.k, attention.v, attention.o)}
        left = {p: m for p, m in self._linears(f"{path}.").items() if p not in taken}
        others = {
            p
            for p, m in self.modules.items()
            if p.startswith(f"{path}.")
            and m._parameters
            and p not in left
            and p not in taken
            and p not in self.norms
            and not p.startswith(f"{attention.path}.")
            and p != attention.path
        }
        if others:
            raise Unexplained(f"{what}: `{sorted(others)[0]}` has parameters of its own")
        if any(run.calls[p] != 1 for p in left) or len(left) not in (2, 3):
            raise Unexplained(f"{what}: {len(left)} products, expected two or three")
        width = run.inputs[path].shape[-1]
        for down, linear in left.items():
            if linear.out_features != width:
                continue
            first = [p for p in left if p != down]
            for rule in _mlp_forms(first, down):
                read = rule.read(self.replica, self.sizes)
                x = run.inputs[rule.up.path]
                if rule.gate is not None and not same(x, run.inputs[rule.gate.path]):
                    continue
                if read.up.weight.shape[0] != linear.in_features:
                    continue
                if same(reference.mlp_result(x, read), run.outputs[down]):
                    return rule
        raise Unexplained(f"{what}: its activation or form is none that is known")

    # --- attention --------------------------------------------------------------------------------

    def _attention(self, index: int, path: str) -> AttentionRule:
        what = f"`{path}`: attention"
        held = self.cache.layers[index]
        keys, values = (getattr(held, name, None) for name in ("keys", "values"))
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4):
            raise Unexplained(f"{what}: it leaves no keys in the cache")
        _heads, key_heads, head_dim = self.sizes
        if keys.shape[1] != key_heads or keys.shape[3] != head_dim or keys.shape != values.shape:
            raise Unexplained(
                f"{what}: keys of shape {tuple(keys.shape)}, expected {key_heads} heads of "
                f"{head_dim}"
            )
        for v, q, k, o, clip in self._products(path, values):
            holder = v.path.rpartition(".")[0]
            rule = AttentionRule(
                holder, q, k, v, o, Number((), f"{what}: scale", 1.0), None, clip=clip
            )
            for full in self._keys(rule, keys):
                found = self._scores(full, what)
                if found is not None:
                    return found
        raise Unexplained(f"{what}: no form of it that is known gives its keys and result")

    def _products(
        self, path: str, values: Tensor
    ) -> Iterator[tuple[Part, Part, Part, Part, Number | None]]:
        """(v, q, k, o, clip) that give the cache's values."""
        run = self.run
        heads, key_heads, head_dim = self.sizes
        wide, narrow = heads * head_dim, key_heads * head_dim
        linears = self._linears(f"{path}.")
        flat = values.transpose(1, 2).flatten(2)
        tail = flat.shape[1]
        for p, linear in linears.items():
            y = run.outputs[p][:, -tail:]
            siblings = {
                s: m
                for s, m in linears.items()
                if s != p and s.rpartition(".")[0] == p.rpartition(".")[0]
            }
            ends = [s for s, m in siblings.items() if m.in_features == wide]
            clips: list[tuple[Number | None, float]] = [(None, 0.0)]
            clips += self.numbers.named("clip", f"`{path}`: clip", p.rpartition(".")[0])
            for clip, bound in clips:
                clamped = y if clip is None else y.clamp(-bound, bound)
                if linear.out_features == wide + 2 * narrow and same(clamped[..., -narrow:], flat):
                    parts = [Part(p, n) for n in ("v", "q", "k")]
                    yield from ((*parts, Part(o), clip) for o in ends)  # type: ignore[misc]
                if linear.out_features != narrow or not same(clamped, flat):
                    continue
                given = run.inputs[p]
                beside = [s for s in siblings if same(run.inputs[s], given)]
                for k in (s for s in beside if siblings[s].out_features == narrow):
                    for q in (s for s in beside if s != k and siblings[s].out_features == wide):
                        for o in (s for s in ends if s not in (k, q)):
                            yield Part(p), Part(q), Part(k), Part(o), clip

    def _raw(self, part: Part, clip: Number | None) -> Tensor:
        y = reference.product(self.run.inputs[part.path], part.read(self.replica, self.sizes))
        if clip is None:
            return y
        bound = clip.value(self.replica)
        return y.clamp(-bound, bound)

    def _keys(self, rule: AttentionRule, keys: Tensor) -> Iterator[AttentionRule]:
        """The rule with norms and rotation that give the cache's keys."""
        tail = keys.shape[2]
        for normed in self._head_norms(rule):
            a = replace(normed, scale=Number((), "", 1.0)).read(self.replica, self.sizes)
            x = self.run.inputs[rule.k.path]
            for rope in (None, *self._likely_ropes()):
                if rope is not None and 2 * self._frequencies(rope) > a.head_dim:
                    continue
                at = replace(a, rope=None if rope is None else 0)
                ropes = () if rope is None else (rope.read(self.replica),)
                _, k, _ = reference.queries_keys_values(x, at, ropes, self.positions)
                if same(k[:, :, -tail:], keys):
                    index = None if rope is None else self._index_of(rope)
                    yield replace(normed, rope=index)
                    break

    def _likely_ropes(self) -> list[RopeRule]:
        return [*self.used_ropes, *(r for r in self.ropes if r not in self.used_ropes)]

    def _frequencies(self, rope: RopeRule) -> int:
        buffer = self.replica.get_submodule(rope.path)._buffers[rope.buffer]
        return int(buffer.numel())

    def _index_of(self, rope: RopeRule) -> int:
        if rope not in self.used_ropes:
            self.used_ropes.append(rope)
        return self.used_ropes.index(rope)

    def _head_norms(self, rule: AttentionRule) -> Iterator[AttentionRule]:
        """The rule with the norms of queries and keys that its module has."""
        _, _, head_dim = self.sizes
        inside = {p: n for p, n in self.norms.items() if p.startswith(f"{rule.path}.")}
        if not inside:
            yield rule
            return
        if len(inside) != 2:
            return
        q_raw, k_raw = self._raw(rule.q, rule.clip), self._raw(rule.k, rule.clip)
        q_heads, k_heads = heads_of(q_raw, head_dim), heads_of(k_raw, head_dim)
        for q, k in (tuple(inside), tuple(inside)[::-1]):
            found = replace(rule, q_norm=inside[q], k_norm=inside[k])
            x_q, x_k = self.run.inputs[q], self.run.inputs[k]
            if same(x_q, q_raw) and same(x_k, k_raw):
                yield replace(found, norm_across=True)
            elif any(
                same(x_q, a) and same(x_k, b)
                for a, b in (
                    (q_heads, k_heads),
                    (q_heads.transpose(1, 2), k_heads.transpose(1, 2)),
                )
            ):
                yield found
            elif x_q.shape[-1] == head_dim:
                yield replace(found, norm_after_rope=True)

    def _scores(self, rule: AttentionRule, what: str) -> AttentionRule | None:
        """The rule with scale, softcap, window and sinks that give attention's result."""
        run, path = self.run, rule.path
        x, truth = run.inputs[rule.q.path], run.inputs[rule.o.path]
        ropes = tuple(r.read(self.replica) for r in self.used_ropes)
        a = rule.read(self.replica, self.sizes)
        q, k, v = reference.queries_keys_values(x, a, ropes, self.positions)
        windows = [(None, None), *self.numbers.named("window", f"{what}: window", path)]
        caps = [(None, None), *self.numbers.named("cap", f"{what}: softcap", path)]
        module = self.replica.get_submodule(path)
        sinks = [
            None,
            *(n for n, p in module._parameters.items() if p is not None and p.shape == (a.heads,)),
        ]
        scales = self._scales(path)
        for window, w in windows:
            for softcap, c in caps:
                for sink in sinks:
                    for scale in scales:
                        at = replace(
                            a,
                            scale=scale,
                            window=None if w is None else int(w),
                            softcap=c,
                            sinks=None if sink is None else module._parameters[sink],
                        )
                        seen = reference.visible(at, 0, _TOKENS, None, x.device)
                        if same(reference.attended(q, k, v, at, seen), truth):
                            number = self.numbers.equal_to(scale, f"{what}: scale", path)
                            return replace(
                                rule, scale=number, softcap=softcap, window=window, sinks=sink
                            )
        return None

    def _scales(self, path: str) -> list[float]:
        """Numbers that may be the scale of the scores, likely ones first."""
        _, _, head_dim = self.sizes
        module = vars(self.replica.get_submodule(path))
        named = [v for k, v in module.items() if type(v) in (int, float) and "scal" in k]
        others = [1.0, 1 / head_dim, *(v for _, v in self.numbers.named("scal", "", path))]
        others += [v for _, v in self.numbers.named("multiplier", "", path)]
        return list(dict.fromkeys(map(float, [*named, head_dim**-0.5, *others])))


def moved(rule: Any, old: str, new: str) -> Any:
    """A rule of one layer as that of another: other paths."""
    if isinstance(rule, str):
        return new + rule[len(old) :] if rule.startswith(old) else rule
    if isinstance(rule, tuple):
        return tuple(moved(r, old, new) for r in rule)
    if is_dataclass(rule) and not isinstance(rule, type):
        return type(rule)(*(moved(getattr(rule, f.name), old, new) for f in fields(rule)))
    return rule


def _mlp_forms(first: list[str], down: str) -> Iterator[MlpRule]:
    for activation in _ACTIVATIONS:
        if len(first) == 2:
            for gate, up in (first, first[::-1]):
                yield MlpRule(Part(up), Part(down), activation, Part(gate))
        else:
            (path,) = first
            yield MlpRule(Part(path), Part(down), activation, None)
            halves = Part(path, "first"), Part(path, "second")
            for gate_half, up_half in (halves, halves[::-1]):
                yield MlpRule(up_half, Part(down), activation, gate_half)


def norm_of(path: str, module: nn.Module, x: Tensor, y: Tensor) -> NormRule | None:
    """The formula that makes `y` of `x` with the module's parameters; None if there is none. Where
    these are `[heads, n]`, of `x` [rows, tokens, heads, n]."""
    params = {n: p for n, p in module._parameters.items() if p is not None}
    shapes = {p.shape for p in params.values()}
    by_head = x.dim() == 4 and shapes == {x.shape[-2:]}
    if (shapes - {x.shape[-1:]} and not by_head) or len(params) > 2:
        return None
    bias = next((n for n in params if n in ("bias", "beta")), None)
    weight = next((n for n in params if n != bias), None)
    if len(params) == 2 and bias is None:
        return None
    attributes = [k for k, v in vars(module).items() if type(v) is float and 0 < v < 0.1]
    epsilons: list[str | float] = [*attributes, 1e-5, 1e-6, 1e-8]
    for kind in ("rms", "layer"):
        for eps in epsilons:
            for offset in (0.0, 1.0) if weight is not None else (0.0,):
                value = getattr(module, eps) if isinstance(eps, str) else eps
                norm = spec.Norm(
                    kind,
                    None if weight is None else params[weight],
                    None if bias is None else params[bias],
                    value,
                    offset,
                )
                if same(reference.normed(x, norm), y):
                    rounded = _rounds(module, norm, x.shape[-2 if by_head else -1 :])
                    heads = "rows" if by_head else None
                    return NormRule(path, kind, weight, bias, offset, eps, rounded, heads)
    return None


def _rounds(module: nn.Module, norm: spec.Norm, shape: torch.Size) -> bool:
    """Whether the module rounds what it normalizes, rows of `shape`, before it multiplies with the
    weight: which of the two explains more of its bits in bf16."""
    half = copy.deepcopy(module).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, *shape, generator=generator).to(torch.bfloat16)
    with torch.no_grad():
        y = half(x)

    def narrow(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(torch.bfloat16)

    def differing(rounded: bool) -> int:
        like = replace(norm, weight=narrow(norm.weight), bias=narrow(norm.bias), rounded=rounded)
        return int((reference.normed(x, like) != y).sum())

    return differing(True) < differing(False)
