"""A short prompt as one CUDA graph: what a description computes, by PyTorch's products and
attention and hfpatch's kernels, for a length to which prompts are filled up on the right.

A token sees none behind it, so what fills a prompt up changes nothing of it. On a CPU the same
calls run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.decoding import reference
from hfpatch.decoding.spec import Attention, Layer, Mlp, Model, Norm, Product, Rope
from hfpatch.errors import DecodingError, HfpatchError
from hfpatch.graphs.captures import Pool, recorded, unowned

#: Lengths that prompts are filled up to, and tokens of all rows together at most.
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
MOST_TOKENS = 4096
#: From this many on, keys and values are put together layer by layer: they lie in memory once then,
#: for a launch a layer.
_MANY_TOKENS = 512
_GATED = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Kept:
    """A prompt's keys and values.

    whole: `[2 layers, rows, length, heads, head_dim]`, the keys of all layers and then the values;
        None where layers differ in size.
    parts: of each layer, in the same order, `[rows, heads, length, head_dim]`; empty where there is
        a whole.
    tokens: how many of `length` are the prompt's.
    """

    whole: Tensor | None
    parts: tuple[Tensor, ...]
    tokens: int

    @property
    def rows(self) -> int:
        return self.parts[0].shape[0] if self.whole is None else self.whole.shape[1]

    def each(self) -> list[Tensor]:
        """Of each layer, the keys of all and then the values: `[rows, heads, tokens, head_dim]`."""
        parts = self.parts
        if self.whole is not None:
            parts = self.whole.transpose(2, 3).unbind(0)
        return [t[:, :, : self.tokens] for t in parts]


def bucket_for(rows: int, tokens: int) -> int | None:
    """The length that a prompt is filled up to; None where it is too long."""
    found = next((b for b in BUCKETS if b >= tokens), None)
    return None if found is None or rows * found > MOST_TOKENS else found


class PromptEngine:
    """Runs prompts of `rows` sequences of up to `length` tokens.

    It holds the model's tensors as they lie in it.

    Args:
        model: the description; all of it, no `Opaque`.
        rows: sequences.
        length: tokens of each that there is room for.
        masked: whether prompts have a mask.
        pool: where its graph is recorded; graphs that never run at the same time may share one.
        package: the kernels' module; default: the local build.

    Raises:
        DecodingError: there are no kernels.
    """

    def __init__(
        self,
        model: Model,
        rows: int,
        length: int,
        masked: bool,
        pool: Pool | None = None,
        package: ModuleType | None = None,
    ) -> None:
        self.model, self.rows, self.length = model, rows, length
        self._kernels = _kernels(package)
        self._head = replace(model, final_norm=None)
        self._pool = pool
        device = model.device
        # zeros are an id and a position like others
        self._ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._mask: Tensor | None = None
        if masked:
            self._mask = torch.ones(rows, length, dtype=torch.bool, device=device)
        self._graph: Any = None
        self._results: tuple[Tensor, Kept] | None = None

    @torch.no_grad()
    def run(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """The last token's logits, and all keys and values.

        Args:
            ids, positions: int64 `[rows, tokens]`.
            mask: `[rows, tokens]`, 0 where a key is not seen; where the engine was made for one.

        Returns:
            logits `[rows, 1, vocab]`, and what was kept, which holds until the next call.
        """
        tokens = ids.shape[1]
        self._ids[:, :tokens].copy_(ids)
        self._positions[:, :tokens].copy_(positions)
        self._last.fill_(tokens - 1)
        if self._mask is not None and mask is not None:
            self._mask[:, :tokens].copy_(mask)
        if self.model.device.type == "cuda":
            with torch.cuda.device(self.model.device):
                self._replay()
        else:
            self._compute()
        assert self._results is not None
        logits, kept = self._results
        return logits, replace(kept, tokens=tokens)

    def _replay(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise DecodingError("a prompt is a CUDA graph of its own: call it outside of captures")
        if self._graph is None:
            self._compute()  # what is made at a first launch cannot be captured
            self._graph = recorded(self._compute, self._pool)
            assert self._results is not None
            # so that the memory of all prompts' graphs is that of the largest
            logits, kept = self._results
            whole = None if kept.whole is None else unowned(kept.whole)
            parts = tuple(map(unowned, kept.parts))
            self._results = unowned(logits), replace(kept, whole=whole, parts=parts)
        self._graph.replay()

    def _compute(self) -> None:
        self._results = self._computed()

    # --- what is computed ------------------------------------------------------------------------

    def _computed(self) -> tuple[Tensor, Kept]:
        model = self.model
        x = reference.embedded(self._ids, model)
        tables = [self._table(rope) for rope in model.ropes]
        seen: dict[int | None, Tensor | None] = {}
        keys, values = [], []
        count = len(model.layers)
        alike = len({(m.attention.key_heads, m.attention.head_dim) for m in model.layers}) == 1
        early = alike and self.rows * self.length >= _MANY_TOKENS
        whole: Tensor | None = None
        start = self._normed(x, model.layers[0].before_attention)
        for i, layer in enumerate(model.layers):
            following = model.layers[i + 1] if i + 1 < count else None
            a = layer.attention
            window = None if a.window is None or a.window >= self.length else a.window
            if window not in seen:
                seen[window] = self._seen(window)
            norm = None if following is None else following.before_attention
            x, start, k, v = self._layer(x, start, layer, norm, tables, seen[window])
            if early:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
                whole = k.new_empty(2 * count, *k.shape) if whole is None else whole
                torch._foreach_copy_([whole[i], whole[count + i]], [k, v])
                continue
            keys.append(k)
            values.append(v)
        x = self._normed(x.index_select(1, self._last), model.final_norm)
        logits = x.new_empty(self.rows, 1, model.head.weight.shape[0])
        reference.finish(x, self._head, logits, None)
        parts = (*keys, *values)
        if not alike:
            return logits, Kept(None, parts, self.length)
        if whole is None:  # as products and kernels leave them: one launch
            whole = torch.stack([t.transpose(1, 2) for t in parts])
        return logits, Kept(whole, (), self.length)

    def _seen(self, window: int | None) -> Tensor | None:
        """Which keys a query sees, `[rows or 1, 1, length, length]`; None: all before it."""
        if window is None and self._mask is None:
            return None
        at = torch.arange(self.length, device=self.model.device)
        seen = at <= at[:, None]
        if window is not None:
            seen = seen & (at > at[:, None] - window)
        if self._mask is None:
            return seen[None, None]
        # what is padding sees itself, so that it is a number
        return (seen & self._mask[:, None, None]) | (at == at[:, None])

    def _table(self, rope: Rope) -> tuple[Tensor, Tensor]:
        angles = self._positions[..., None].float() * rope.inv_freq.float()
        cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
        if rope.rounded:
            cos, sin = cos.to(self.model.dtype), sin.to(self.model.dtype)
        return cos, sin

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if (cast := self._cast(norm, x)) is not None:
            y: Tensor = self._kernels.rms_norm(
                x, norm.weight, norm.bias, norm.eps, weight_offset=norm.offset, cast=cast
            )
            return y
        rounded = norm.rounded and norm.weight is not None and x.dtype != torch.float32
        if norm.kind == "layer" and not rounded and not norm.offset and not norm.by_head:
            return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        return reference.normed(x, norm)

    def _cast(self, norm: Norm, x: Tensor) -> str | None:
        """How an RMS norm's kernel rounds; None: it has no kernel."""
        rounded = norm.rounded and norm.weight is not None and x.dtype != torch.float32
        if norm.kind != "rms" or norm.by_head or (rounded and norm.offset):
            return None
        return "input" if rounded else "none"

    def _added(self, x: Tensor, h: Tensor, norm: Norm | None, m: float) -> tuple[Tensor, Tensor]:
        """`x + m h`, and the norm of that: one launch, where there is a kernel for both."""
        cast = None if norm is None or m != 1.0 or h.dtype != x.dtype else self._cast(norm, x)
        if cast is None or norm is None:
            x = x + (h if m == 1.0 else h * m)
            return x, self._normed(x, norm)
        y, x = self._kernels.add_rms_norm(
            h, x, norm.weight, norm.bias, norm.eps, weight_offset=norm.offset, cast=cast
        )
        return x, y

    def _layer(
        self,
        x: Tensor,
        start: Tensor,
        layer: Layer,
        following: Norm | None,
        tables: list[tuple[Tensor, Tensor]],
        seen: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The layer's result, the norm `following` of that; keys and values.

        Args:
            start: `x`, as the layer's first norm leaves it.
        """
        a, m = layer.attention, layer.residual_multiplier
        q, k = self._queries_and_keys(start, a, tables)
        v = _split(_clipped(reference.product(start, a.v), a), a.key_heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        h = reference.product(self._attended(q, k, v, a, seen), a.o)
        h = self._normed(h, layer.after_attention)
        if layer.parallel:
            given = start if layer.before_mlp is None else self._normed(x, layer.before_mlp)
            x = x + (h if m == 1.0 else h * m)
        else:
            x, given = self._added(x, h, layer.before_mlp, m)
        assert isinstance(layer.mlp, Mlp)
        h = self._normed(self._mlp(given, layer.mlp), layer.after_mlp)
        return *self._added(x, h, following, m), k, v

    def _queries_and_keys(
        self, x: Tensor, a: Attention, tables: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Normed and rotated, `[rows, length, count, head_dim]`: by one launch, where their norms
        are alike."""
        norms = (a.q_norm, a.k_norm)
        if a.rope is not None and not a.norm_after_rope and not a.norm_across:
            q, k = (_clipped(reference.product(x, p), a) for p in (a.q, a.k))
            q, k = _split(q, a.heads), _split(k, a.key_heads)
            turn = self._turn(a)
            if norms == (None, None):
                found: tuple[Tensor, Tensor] = self._kernels.rope_qk(q, k, *tables[a.rope], **turn)
                return found
            form = self._shared_form(norms, x)
            if form is not None:
                weights = [None if n is None else n.weight for n in norms]
                turned: tuple[Tensor, Tensor] = self._kernels.qk_norm_rope(
                    q, k, *weights, *tables[a.rope], **form, **turn
                )
                return turned
        return (
            self._heads(x, a, a.q, a.q_norm, a.heads, tables),
            self._heads(x, a, a.k, a.k_norm, a.key_heads, tables),
        )

    def _shared_form(self, norms: tuple[Norm | None, Norm | None], x: Tensor) -> Any:
        """The parameters of two norms that one kernel computes, or None."""
        q, k = norms
        if q is None or k is None or q.bias is not None or k.bias is not None or k.by_head:
            return None
        if (q.kind, q.eps, q.offset, q.rounded) != (k.kind, k.eps, k.offset, k.rounded):
            return None
        cast = self._cast(q, x)
        if cast is None or (q.weight is None) != (k.weight is None):
            return None
        return {"eps": q.eps, "weight_offset": q.offset, "cast": cast}

    def _turn(self, a: Attention) -> dict[str, Any]:
        assert a.rope is not None
        rope = self.model.ropes[a.rope]
        return {
            "seq_dim": 1,
            "interleaved": rope.interleaved,
            "rotary_dim": rope.dims,
            "round_products": rope.rounded,
        }

    def _heads(
        self,
        x: Tensor,
        a: Attention,
        p: Product,
        norm: Norm | None,
        count: int,
        tables: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Queries or keys, normed and rotated: `[rows, length, count, head_dim]`."""
        y = _clipped(reference.product(x, p), a)
        if a.norm_across and not a.norm_after_rope:
            y = self._normed(y, norm)
        y = _split(y, count)
        if not a.norm_across and not a.norm_after_rope:
            y = self._normed(y, norm)
        if a.rope is not None:
            y = self._kernels.rope(y, *tables[a.rope], **self._turn(a))
        if a.norm_after_rope and norm is not None:
            if a.norm_across:
                y = _split(self._normed(y.flatten(2), norm), count)
            else:
                y = self._normed(y, norm)
        return y

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, a: Attention, seen: Tensor | None
    ) -> Tensor:
        if a.softcap is not None or a.sinks is not None:
            if seen is None:
                at = torch.arange(self.length, device=q.device)
                seen = (at <= at[:, None])[None, None]
            return reference.attended(q, k, v, a, seen)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=a.scale,
            enable_gqa=a.heads != a.key_heads,
        )  # fmt: skip
        return y.transpose(1, 2).flatten(2)

    def _mlp(self, x: Tensor, mlp: Mlp) -> Tensor:
        if mlp.gate is None or mlp.activation not in _GATED:
            return reference.mlp_result(x, mlp)
        gate, up = reference.product(x, mlp.gate), reference.product(x, mlp.up)
        return reference.product(self._kernels.gated(gate, up, _GATED[mlp.activation]), mlp.down)


def _split(x: Tensor, heads: int) -> Tensor:
    """[..., heads * head_dim] as [..., heads, head_dim]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def _clipped(x: Tensor, a: Attention) -> Tensor:
    return x if a.clip is None else x.clamp(-a.clip, a.clip)


def _kernels(package: ModuleType | None) -> Any:
    """The kernels' module.

    Raises:
        DecodingError: there is none.
    """
    from hfpatch.kernels.sources import local_package

    try:
        return local_package().module if package is None else package
    except HfpatchError as e:
        raise DecodingError(f"no kernels: {e}") from e
