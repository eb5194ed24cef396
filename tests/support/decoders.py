"""Random small decoders as `spec.Model`, and what a step of one gives, in any dtype's rounding.

The step is written from the definitions in `spec.py` alone, in fp64, and shares no code with
what it is a test of.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from hfpatch.decoding import spec

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """The sizes and choices of a random decoder."""

    layers: int = 2
    width: int = 64
    inner: int = 96
    vocab: int = 131
    heads: int = 4
    key_heads: int = 2
    dim: int = 16
    norm: str = "rms"
    norm_bias: bool = False
    offset: float = 0.0
    rounded: bool = True
    bias: bool = False
    placement: str = "before"  # "before", "after", "both", "parallel", "parallel_two"
    qk_norm: str | None = None  # "head", "across", "after_rope"
    rope_dims: int | None = -1  # None: no rope; -1: all of a head
    interleaved: bool = False
    rope_rounded: bool = True
    rope_scaling: float = 1.0
    ropes: int = 1  # layers take them in turn
    softcap: float | None = None
    windows: tuple[int | None, ...] = (None,)  # layers take them in turn
    sinks: bool = False
    clip: float | None = None
    activation: str = "silu"
    gated: bool = True
    multiplier: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    packed: bool = False
    final_norm: bool = True
    of_heads: str | None = None  # "rows", "list": each head's own; with qk_norm, not across


def decoder(shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> spec.Model:
    """A decoder with random weights of fair size."""
    g = torch.Generator().manual_seed(seed)

    def rand(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=g) * scale).to(dtype).to(device)

    def product(out: int, given: int, bias: bool | None = None) -> spec.Product:
        has = shape.bias if bias is None else bias
        weight = rand(out, given, scale=given**-0.5)
        return spec.Product(weight, rand(out, scale=0.3) if has else None)

    def norm(width: int) -> spec.Norm:
        weight = (1 - shape.offset + 0.2 * torch.randn(width, generator=g)).to(dtype).to(device)
        bias = rand(width, scale=0.1) if shape.norm_bias else None
        eps = 1e-5 if shape.norm == "layer" else 1e-6
        return spec.Norm(shape.norm, weight, bias, eps, shape.offset, shape.rounded)

    def head_norm(heads: int) -> spec.Norm | None:
        if s.qk_norm is None or s.qk_norm == "across" or s.of_heads is None:
            return norm(s.dim * (heads if s.qk_norm == "across" else 1)) if s.qk_norm else None
        own = [norm(s.dim) for _ in range(heads)]
        weights = tuple(n.weight for n in own if n.weight is not None)
        biases = tuple(n.bias for n in own if n.bias is not None)
        if s.of_heads == "list":
            return replace(own[0], weight=None, bias=None, weights=weights, biases=biases)
        bias = torch.stack(biases) if biases else None
        return replace(own[0], weight=torch.stack(weights), bias=bias)

    s, w = shape, shape.width
    rope_dims = s.dim if s.rope_dims == -1 else s.rope_dims
    ropes = ()
    if rope_dims:
        exponents = torch.arange(0, rope_dims, 2, dtype=torch.float32) / rope_dims
        ropes = tuple(
            spec.Rope(
                (10000.0 * (r + 1)) ** -exponents.to(device),
                rope_dims,
                s.interleaved,
                s.rope_scaling,
                s.rope_rounded,
            )
            for r in range(s.ropes)
        )
    layers = []
    for i in range(s.layers):
        q_out, k_out = s.heads * s.dim, s.key_heads * s.dim
        q, k, v = product(q_out, w), product(k_out, w), product(k_out, w)
        gate, up = product(s.inner, w), product(s.inner, w)
        if s.packed:
            whole = torch.cat([q.weight, k.weight, v.weight])
            parts = whole.split([q_out, k_out, k_out])
            q, k, v = (replace(p, weight=x) for p, x in zip((q, k, v), parts, strict=True))
            wide = torch.stack([gate.weight, up.weight], 1)  # rows of both in turn: strided
            gate, up = replace(gate, weight=wide[:, 0]), replace(up, weight=wide[:, 1])
        attention = spec.Attention(
            q, k, v, product(w, q_out),
            s.heads, s.key_heads, s.dim,
            scale=s.dim**-0.5,
            rope=i % s.ropes if ropes else None,
            q_norm=head_norm(s.heads),
            k_norm=head_norm(s.key_heads),
            norm_across=s.qk_norm == "across",
            norm_after_rope=s.qk_norm == "after_rope",
            softcap=s.softcap,
            window=s.windows[i % len(s.windows)],
            sinks=rand(s.heads) if s.sinks else None,
            clip=s.clip,
        )  # fmt: skip
        mlp = spec.Mlp(up, product(w, s.inner), s.activation, gate if s.gated else None)
        before = s.placement != "after"
        after = s.placement in ("after", "both")
        parallel = s.placement.startswith("parallel")
        layers.append(
            spec.Layer(
                attention,
                mlp,
                before_attention=norm(w) if before else None,
                after_attention=norm(w) if after else None,
                before_mlp=norm(w) if before and s.placement != "parallel" else None,
                after_mlp=norm(w) if after else None,
                parallel=parallel,
                residual_multiplier=s.multiplier,
            )
        )
    embedding = rand(s.vocab, w)
    head = spec.Product(embedding) if s.tied else product(s.vocab, w)
    return spec.Model(
        embedding, tuple(layers), ropes, norm(w) if s.final_norm else None, head,
        s.embedding_scale, s.logit_scale, s.logit_softcap,
    )  # fmt: skip


def table(
    model: spec.Model, rows: int, length: int, capacity: int, seed: int = 1
) -> spec.CacheTable:
    """A cache with `length` random keys, NaN behind them."""
    g = torch.Generator().manual_seed(seed)
    found = spec.CacheTable(length=length)
    for layer in model.layers:
        a = layer.attention
        for kept in (found.keys, found.values):
            memory = torch.full((rows, a.key_heads, capacity, a.head_dim), math.nan)
            memory[:, :, :length] = torch.randn(rows, a.key_heads, length, a.head_dim, generator=g)
            kept.append(memory.to(model.dtype).to(model.device))
    return found


def copied(cache: spec.CacheTable) -> spec.CacheTable:
    return copy.deepcopy(cache)


def random_shape(seed: int) -> Shape:
    """Any choice of the grammar, together."""
    r = random.Random(seed)
    dim = r.choice([8, 16, 24, 20, 64, 80, 128])
    key_heads = r.choice([1, 2, 3])
    group = r.choice([1, 2, 3, 8] if dim < 64 else [1, 2, 3])
    return Shape(
        layers=r.choice([1, 2, 3]),
        width=r.choice([32, 64, 72, 40, 100]),
        inner=r.choice([48, 96, 104, 33]),
        vocab=r.choice([17, 131, 256]),
        heads=key_heads * group,
        key_heads=key_heads,
        dim=dim,
        norm=r.choice(["rms", "rms", "layer"]),
        norm_bias=r.random() < 0.3,
        offset=r.choice([0.0, 0.0, 1.0]),
        rounded=r.random() < 0.5,
        bias=r.random() < 0.4,
        placement=r.choice(["before", "before", "after", "both", "parallel", "parallel_two"]),
        qk_norm=r.choice([None, None, "head", "across", "after_rope"]),
        rope_dims=r.choice([-1, -1, -1, dim // 2 // 2 * 2, None]),
        interleaved=r.random() < 0.3,
        rope_rounded=r.random() < 0.7,
        rope_scaling=r.choice([1.0, 1.0, 1.25]),
        ropes=r.choice([1, 1, 2]),
        softcap=r.choice([None, None, 3.0]),
        windows=r.choice([(None,), (None,), (7,), (5, None), (70, None)]),
        sinks=r.random() < 0.25,
        clip=r.choice([None, None, 1.0]),
        activation=r.choice(["silu", "gelu", "gelu_tanh", "relu", "relu2"]),
        gated=r.random() < 0.7,
        multiplier=r.choice([1.0, 1.0, 0.22]),
        embedding_scale=r.choice([1.0, 1.0, 8.0]),
        logit_scale=r.choice([1.0, 1.0, 0.0625]),
        logit_softcap=r.choice([None, None, 2.0]),
        tied=r.random() < 0.4,
        packed=r.random() < 0.3,
        final_norm=r.random() < 0.9,
        of_heads=r.choice([None, "rows", "list"]),
    )


# --- the step ------------------------------------------------------------------------------------


def _wide(thing: Any) -> Any:
    """The same description in fp64."""
    if isinstance(thing, Tensor):
        return thing.detach().cpu().double() if thing.is_floating_point() else thing.cpu()
    if isinstance(thing, tuple):
        return tuple(_wide(x) for x in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _wide(getattr(thing, f.name)) for f in fields(thing)})
    return thing


class Oracle:
    """A decoder in fp64. `dtype`: every result that is stored is rounded to it; None: none is."""

    def __init__(self, model: spec.Model, dtype: torch.dtype | None = None) -> None:
        self.given, self.model, self.dtype = model, _wide(model), dtype

    def round(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype).double()

    def norm(self, norm: spec.Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        if norm.rounded:
            y = self.round(y)
        weight = torch.stack(norm.weights) if norm.weights else norm.weight
        bias = torch.stack(norm.biases) if norm.biases else norm.bias
        if weight is not None:
            y = y * (weight + norm.offset)
        return self.round(y if bias is None else y + bias)

    def product(self, product: spec.Product, x: Tensor) -> Tensor:
        y = x @ product.weight.T
        return self.round(y if product.bias is None else y + product.bias)

    def rotate(self, rope: spec.Rope, positions: Tensor, x: Tensor) -> Tensor:
        """x: [rows, tokens, heads, dim]."""
        # the angle is an fp32 number in every model
        angle = (positions.float()[..., None] * rope.inv_freq.float()).double()
        c, s = angle.cos() * rope.scaling, angle.sin() * rope.scaling
        if rope.rounded:
            c, s = self.round(c), self.round(s)
        c, s = c[:, :, None], s[:, :, None]
        step = self.round if rope.rounded else (lambda v: v)
        y = x.clone()
        if rope.interleaved:
            at = (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
        else:
            at = (slice(0, rope.dims // 2), slice(rope.dims // 2, rope.dims))
        a, b = x[..., at[0]], x[..., at[1]]
        y[..., at[0]] = self.round(step(a * c) - step(b * s))
        y[..., at[1]] = self.round(step(b * c) + step(a * s))
        return y

    def heads(
        self, a: spec.Attention, norm: spec.Norm | None, x: Tensor, count: int, positions: Tensor
    ) -> Tensor:
        shape = (*x.shape[:2], count, a.head_dim)
        if norm is not None and a.norm_across:
            x = self.norm(norm, x)
        x = x.reshape(shape)
        if norm is not None and not a.norm_across and not a.norm_after_rope:
            x = self.norm(norm, x)
        if a.rope is not None:
            x = self.rotate(self.model.ropes[a.rope], positions, x)
        if norm is not None and a.norm_after_rope:
            x = self.norm(norm, x)
        return x

    def attention(
        self, a: spec.Attention, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
        length: int, mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rows, tokens = x.shape[:2]

        def clipped(y: Tensor) -> Tensor:
            return y if a.clip is None else y.clamp(-a.clip, a.clip)

        q = self.heads(a, a.q_norm, clipped(self.product(a.q, x)), a.heads, positions)
        k = self.heads(a, a.k_norm, clipped(self.product(a.k, x)), a.key_heads, positions)
        v = clipped(self.product(a.v, x)).reshape(rows, tokens, a.key_heads, a.head_dim)
        end = length + tokens
        keys[:, :, length:end], values[:, :, length:end] = k.transpose(1, 2), v.transpose(1, 2)
        group = a.heads // a.key_heads
        every_k = keys[:, :, :end].repeat_interleave(group, 1)
        every_v = values[:, :, :end].repeat_interleave(group, 1)
        scores = (q.transpose(1, 2) @ every_k.transpose(-1, -2)) * a.scale
        if a.softcap is not None:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        at = torch.arange(end)
        last = length + torch.arange(tokens)[:, None]
        seen = at <= last
        if a.window is not None:
            seen = seen & (at > last - a.window)
        seen = seen[None, None]
        if mask is not None:
            seen = seen & (mask[:, None, None, :end] != 0)
        scores = scores.masked_fill(~seen, -math.inf)
        if a.sinks is not None:
            sinks = a.sinks[None, :, None, None].expand(rows, -1, tokens, 1)
            scores = torch.cat([scores, sinks], -1)
        shares = torch.softmax(scores, -1)[..., :end].nan_to_num(0.0)
        out = self.round(shares @ every_v).transpose(1, 2).reshape(rows, tokens, -1)
        return self.product(a.o, out)

    def mlp(self, mlp: spec.Mlp, x: Tensor) -> Tensor:
        acts = {
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
            "relu": torch.relu,
            "relu2": lambda v: torch.relu(v).square(),
        }
        up = self.product(mlp.up, x)
        if mlp.gate is None:
            return self.product(mlp.down, self.round(acts[mlp.activation](up)))
        gate = self.round(acts[mlp.activation](self.product(mlp.gate, x)))
        return self.product(mlp.down, self.round(gate * up))

    def step(
        self, ids: Tensor, positions: Tensor, cache: spec.CacheTable, mask: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """Logits, the final norm's result, and the caches' keys and values, all fp64."""
        m = self.model
        keys = [k.cpu().double() for k in cache.keys]
        values = [v.cpu().double() for v in cache.values]
        positions = positions.cpu()
        mask = None if mask is None else mask.cpu()
        if embeds is None:
            x = m.embedding[ids.cpu()]
            x = self.round(x * m.embedding_scale) if m.embedding_scale != 1 else x
        else:
            x = embeds.cpu().double()

        def add(x: Tensor, h: Tensor, by: float) -> Tensor:
            return self.round(x + (self.round(h * by) if by != 1 else h))

        for i, layer in enumerate(m.layers):
            given = self.norm(layer.before_attention, x)
            h = self.attention(
                layer.attention, given, positions, keys[i], values[i], cache.length, mask
            )
            h = self.norm(layer.after_attention, h)
            start = x
            x = add(x, h, layer.residual_multiplier)
            if layer.parallel:
                given = given if layer.before_mlp is None else self.norm(layer.before_mlp, start)
            else:
                given = self.norm(layer.before_mlp, x)
            h = self.norm(layer.after_mlp, self.mlp(layer.mlp, given))
            x = add(x, h, layer.residual_multiplier)
        hidden = self.norm(m.final_norm, x)
        logits = self.product(m.head, hidden)
        if m.logit_scale != 1:
            logits = self.round(logits * m.logit_scale)
        if m.logit_softcap is not None:
            cap = m.logit_softcap
            logits = self.round(self.round(torch.tanh(self.round(logits / cap))) * cap)
        return logits, hidden, keys, values


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, in the 2-norm."""
    got, want = got.detach().cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
