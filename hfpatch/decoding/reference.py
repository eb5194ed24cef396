"""A description (`spec.Model`) run by plain PyTorch, in any dtype: what an engine must compute.

It has the interface of the engine, and its rounding points: what the original stores in its dtype
is rounded there, norms and attention are computed in fp32 inside (in fp64 where the model is fp64).
Proofs compare models with it, tests compare engines with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.decoding.spec import Attention, CacheTable, Layer, Mlp, Model, Norm, Product, Rope


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What reductions are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """`x` [..., n] normed over its last dimension, in its dtype; [..., heads, n] where heads have
    weights of their own."""
    if norm is None:
        return x
    wide = _wide(x.dtype)
    y = x.to(wide)
    if norm.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounded:
        y = y.to(x.dtype).to(wide)
    weight = torch.stack(norm.weights) if norm.weights else norm.weight
    bias = torch.stack(norm.biases) if norm.biases else norm.bias
    if weight is not None:
        y = y * (weight.to(wide) + norm.offset)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def product(x: Tensor, p: Product) -> Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, p.weight, p.bias)


def _rotated(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """RoPE of `x` [rows, heads, tokens, head_dim] at `positions` [rows, tokens]."""
    wide = _wide(x.dtype)
    angles = positions.to(wide)[:, None, :, None] * rope.inv_freq.to(wide)
    cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
    part, rest = x[..., : rope.dims], x[..., rope.dims :]
    if rope.rounded:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    else:
        part = part.to(wide)
    if rope.interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part.chunk(2, -1)
    first, second = a * cos + (-b) * sin, b * cos + a * sin
    if rope.interleaved:
        turned = torch.stack((first, second), -1).flatten(-2)
    else:
        turned = torch.cat((first, second), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def queries_keys_values(
    x: Tensor, attention: Attention, ropes: tuple[Rope, ...], positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, heads, tokens, head_dim], k and v [rows, key_heads, tokens, head_dim] of the
    attention's input `x` [rows, tokens, hidden]: k and v are what the cache gets."""
    a = attention

    def split(y: Tensor, count: int) -> Tensor:
        return y.reshape(*y.shape[:-1], count, a.head_dim)

    def normed_heads(y: Tensor, norm: Norm | None) -> Tensor:
        """y: [rows, tokens, heads, head_dim]."""
        if a.norm_across and norm is not None:
            return split(normed(y.flatten(2), norm), y.shape[2])
        return normed(y, norm)

    def q_or_k(p: Product, norm: Norm | None, count: int) -> Tensor:
        y = product(x, p)
        if a.clip is not None:
            y = y.clamp(-a.clip, a.clip)
        y = split(y, count)
        if not a.norm_after_rope:
            y = normed_heads(y, norm)
        y = y.transpose(1, 2)
        if a.rope is not None:
            y = _rotated(y, ropes[a.rope], positions)
        if a.norm_after_rope:
            y = normed_heads(y.transpose(1, 2), norm).transpose(1, 2)
        return y

    v = product(x, a.v)
    if a.clip is not None:
        v = v.clamp(-a.clip, a.clip)
    return (
        q_or_k(a.q, a.q_norm, a.heads),
        q_or_k(a.k, a.k_norm, a.key_heads),
        split(v, a.key_heads).transpose(1, 2),
    )


def attended(q: Tensor, keys: Tensor, values: Tensor, attention: Attention, seen: Tensor) -> Tensor:
    """Attention's result [rows, tokens, heads * head_dim], before the output product.

    q [rows, heads, tokens, head_dim]; keys, values [rows, key_heads, length, head_dim]; seen: bool
    [rows, 1, tokens, length].
    """
    wide = _wide(q.dtype)
    groups = attention.heads // attention.key_heads
    keys, values = (t.to(wide).repeat_interleave(groups, 1) for t in (keys, values))
    scores = q.to(wide) @ keys.transpose(-1, -2) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if attention.sinks is not None:
        sinks = attention.sinks.to(wide)[None, :, None, None]
        highest = torch.maximum(highest, sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    if attention.sinks is not None:
        total = total + (sinks - highest).exp()
    # a row that sees no key gets 0
    y = (weights @ values) / total.masked_fill(total == 0, 1)
    return y.to(q.dtype).transpose(1, 2).flatten(2)


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation of that name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        return F.relu(x).square()
    raise ValueError(f"`activation`: {activation!r} is none of silu, gelu, gelu_tanh, relu, relu2")


def mlp_result(x: Tensor, mlp: Mlp) -> Tensor:
    """`mlp` of `x` [..., hidden]."""
    if mlp.gate is None:
        return product(activated(product(x, mlp.up), mlp.activation), mlp.down)
    gated = activated(product(x, mlp.gate), mlp.activation) * product(x, mlp.up)
    return product(gated, mlp.down)


def visible(
    layer: Attention, length: int, tokens: int, mask: Tensor | None, device: torch.device
) -> Tensor:
    """Which of `length + tokens` keys the new tokens see: bool [rows or 1, 1, tokens, keys]."""
    key = torch.arange(length + tokens, device=device)
    query = torch.arange(length, length + tokens, device=device)[:, None]
    seen = key <= query
    if layer.window is not None:
        seen = seen & (key > query - layer.window)
    seen = seen[None, None]
    if mask is not None:
        seen = seen & mask[:, None, None, : length + tokens].bool()
    return seen


class Reference:
    """The engine's interface over plain PyTorch.

    Args:
        model: the description; its tensors are read at every step.
        rows: sequences of a step.
        tokens: new tokens of each row in a step.
    """

    def __init__(self, model: Model, rows: int, tokens: int = 1) -> None:
        self.model, self.rows, self.tokens = model, rows, tokens
        self.device = model.device
        self.workspace_bytes = 0
        self.addresses: tuple[int, ...] = ()  # it holds none

    @torch.no_grad()
    def step(
        self,
        ids: Tensor | None,
        positions: Tensor,
        cache: CacheTable,
        logits: Tensor,
        mask: Tensor | None = None,
        embeds: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        """New tokens of all rows: writes the cache behind `cache.length`, and `logits`.

        Args:
            ids, positions: int64 [rows, tokens]; ids may be None where `embeds` is given.
            cache: keys and values [rows, key_heads, capacity, head_dim] of each layer, with room
                for `tokens` more than `length`, which is left as it is.
            logits: [rows, tokens, vocab], or [rows, 1, vocab] for the last token's only; written.
            mask: bool or integers [rows, >= length + tokens]; keys where it is 0 are not seen.
            embeds: [rows, tokens, hidden], taken as they are in place of the scaled embedding.
            hidden: [rows, tokens, hidden] or None; receives what the final norm gives.
        """
        m = self.model
        if embeds is not None:
            x = embeds
        else:
            assert ids is not None
            x = embedded(ids, m)
        start, end = cache.length, cache.length + x.shape[1]
        for layer, keys, values in zip(m.layers, cache.keys, cache.values, strict=True):
            past = keys[:, :, :start], values[:, :, :start]
            x, k, v = layer_result(x, layer, m.ropes, positions, past, mask)
            keys[:, :, start:end], values[:, :, start:end] = k, v
        finish(x, m, logits, hidden)


def embedded(ids: Tensor, model: Model) -> Tensor:
    """The hidden state [rows, tokens, hidden] that the layers are given."""
    x = F.embedding(ids, model.embedding)
    return x if model.embedding_scale == 1.0 else x * model.embedding_scale


def finish(x: Tensor, model: Model, logits: Tensor, hidden: Tensor | None) -> None:
    """Write the logits of the layers' result `x`, and what the final norm gives."""
    x = normed(x, model.final_norm)
    if hidden is not None:
        hidden.copy_(x)
    logits.copy_(headed(x[:, -logits.shape[1] :], model))


def headed(x: Tensor, model: Model) -> Tensor:
    """The logits of what the final norm gives."""
    y = product(x, model.head)
    if model.logit_scale != 1.0:
        y = y * model.logit_scale
    if model.logit_softcap is not None:
        y = torch.tanh(y / model.logit_softcap) * model.logit_softcap
    return y


def layer_result(
    x: Tensor,
    layer: Layer,
    ropes: tuple[Rope, ...],
    positions: Tensor,
    past: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's output [rows, tokens, hidden], and the new keys and values.

    Args:
        past: keys and values before; None: there are none.
        mask: see `Reference.step`.
    """
    a, m = layer.attention, layer.residual_multiplier
    start = normed(x, layer.before_attention)
    q, k, v = queries_keys_values(start, a, ropes, positions)
    length = 0 if past is None else past[0].shape[2]
    keys, values = (
        (k, v) if past is None else (torch.cat(kv, 2) for kv in zip(past, (k, v), strict=True))
    )
    seen = visible(a, length, k.shape[2], mask, x.device)
    h = product(attended(q, keys, values, a, seen), a.o)
    h = normed(h, layer.after_attention)
    return with_mlp(x, x + _times(h, m), layer), k, v


def with_mlp(x: Tensor, y: Tensor, layer: Layer) -> Tensor:
    """A layer's result of its input `x` and of what it is behind attention, `y`."""
    if layer.mlp is None:
        return y
    given = x if layer.parallel else y
    shared = layer.parallel and layer.before_mlp is None
    given = normed(given, layer.before_attention if shared else layer.before_mlp)
    h = mlp_result(given, layer.mlp) if isinstance(layer.mlp, Mlp) else layer.mlp(given)
    return y + _times(normed(h, layer.after_mlp), layer.residual_multiplier)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
