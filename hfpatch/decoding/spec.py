"""What a decoder is, as data: all that a decoding step computes, with the model's own tensors.

A description is made from a model by the grammar's probe, proven, and then run by the engine. It
holds live tensors (parameters as they lie in the model, never copies) and plain numbers.

Rounding: where the model computes in a half type, every result that its own code stores in that
type is rounded there. `Norm.rounded` and the order of the stages below say which those are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """`y = normalize(x) * (weight + offset) + bias`, in fp32, over the last dimension.

    kind: "rms" (x / sqrt(mean(x^2) + eps)) or "layer" (mean subtracted first, torch's LayerNorm).
    rounded: whether normalize(x) is rounded to x's dtype before it is multiplied with the weight.
    weight, bias: [n]; of queries or keys also [heads, n], a row for each head.
    weights, biases: of queries or keys, in the place of weight and bias: [n] of each head, where
    each has tensors of its own.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    rounded: bool = True
    weights: tuple[Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()

    @property
    def by_head(self) -> bool:
        """Whether heads have weights or biases of their own."""
        rows = any(t is not None and t.dim() == 2 for t in (self.weight, self.bias))
        return rows or bool(self.weights or self.biases)


@dataclass(frozen=True, eq=False)
class Product:
    """`x @ weight.T + bias`. weight: [out, in], rows contiguous (row stride may be larger than in),
    or of 8 bits, as `quantized.rows_of_bytes` makes it.

    Packed projections are several products whose weights are views of one tensor.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of the first `dims` of a head.

    inv_freq: fp32 [dims / 2]; angle = position * inv_freq, cosines and sines times `scaling`,
    rounded to the model's dtype where `rounded`. interleaved: pairs are neighbours (0,1), (2,3), …;
    else halves (0, dims/2), …
    """

    inv_freq: Tensor
    dims: int
    interleaved: bool = False
    scaling: float = 1.0
    rounded: bool = True


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention with a cache. `heads` queries share `key_heads` keys.

    q_norm, k_norm: per head (weight [head_dim], or each head's own, see `Norm`), or over all heads
    at once where `norm_across`.
    norm_after_rope: the norm comes behind the rotation. rope: index into `Model.ropes`; None: none.
    scale: of the scores. softcap: scores become softcap * tanh(scores / softcap). window: keys that
    a query sees, itself among them. sinks: [heads], one more score of each head's softmax, or None.
    """

    q: Product
    k: Product
    v: Product
    o: Product
    heads: int
    key_heads: int
    head_dim: int
    scale: float
    rope: int | None = 0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_across: bool = False
    norm_after_rope: bool = False
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    clip: float | None = None  # q, k and v clamped to ±clip behind their products (OLMo)


@dataclass(frozen=True, eq=False)
class Mlp:
    """`down(activation(gate(x)) * up(x))`; without a gate `down(activation(up(x)))`.

    activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" (relu squared).
    """

    up: Product
    down: Product
    activation: str
    gate: Product | None = None


@dataclass(frozen=True, eq=False)
class Opaque:
    """A layer's second half of which only what it is given and gives is known, such as a mixture of
    experts: the model's own module, called with `[rows, tokens, hidden]`; of several results the
    first counts."""

    module: torch.nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """The module's result."""
        y = self.module(x)
        result: Tensor = y[0] if isinstance(y, tuple) else y
        return result


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer. Every norm may be missing; together they say the placement:

        h = after_attention(attention(before_attention(x)));  x = x + residual_multiplier * h
        h = after_mlp(mlp(before_mlp(x)));                    x = x + residual_multiplier * h

    parallel: attention and MLP both start from the layer's input, and x = x + attention + mlp;
    where `before_mlp` is None they share `before_attention`'s result.
    mlp None: x behind attention is the layer's result.
    """

    attention: Attention
    mlp: Mlp | Opaque | None
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True, eq=False)
class Model:
    """A whole decoder, from token ids to logits.

    embedding: [vocab, hidden]; its rows times `embedding_scale` (rounded to the dtype first where
    the model does so: give the rounded number). logits = head(final_norm(x)) * logit_scale, then
    logit_softcap * tanh(logits / logit_softcap).
    """

    embedding: Tensor
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    final_norm: Norm | None
    head: Product
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @functools.cached_property
    def whole(self) -> bool:
        """Whether all of it is described: no layer calls a module of the model."""
        return not any(isinstance(layer.mlp, Opaque) for layer in self.layers)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Of the embedding and of all products; not of what an `Opaque` has."""
        held = {self.embedding, self.head.weight}
        for layer in self.layers:
            a, mlp = layer.attention, layer.mlp
            held |= {p.weight for p in (a.q, a.k, a.v, a.o)}
            if isinstance(mlp, Mlp):
                held |= {p.weight for p in (mlp.gate, mlp.up, mlp.down) if p is not None}
        return sum(w.numel() * w.element_size() for w in held)

    @functools.cached_property
    def cached_bytes(self) -> int:
        """What a cache holds of each token of a sequence."""
        numbers = sum(2 * a.key_heads * a.head_dim for a in (t.attention for t in self.layers))
        return numbers * self.embedding.element_size()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, hidden states and cache."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the model lies, whole."""
        return self.embedding.device


@dataclass(eq=False)
class CacheTable:
    """The memory of all layers' keys and values in one step.

    keys, values: per layer [rows, key_heads, capacity, head_dim], contiguous; capacity may differ
    by layer. length: keys that are there before this step, the same for all rows (left padding is
    in the mask). A step writes the new keys at `length` and then sees `length + tokens` of them.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0
