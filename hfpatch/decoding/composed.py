"""A description's layers as PyTorch's products and hfpatch's kernels, one call after another, for
any number of tokens: what a prompt's graph records, and what runs for a turn of a chat.

How a layer's queries attend to keys is up to who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.decoding import reference
from hfpatch.decoding.spec import Attention, Layer, Mlp, Model, Norm, Product, Rope
from hfpatch.errors import DecodingError, HfpatchError

_GATED = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
#: Attention of a layer, by its number: of the new tokens' queries, keys and values
#: `[rows, heads, tokens, head_dim]` it gives `[rows, tokens, heads * head_dim]`.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Composed:
    """The layers of a description. It holds the model's tensors as they lie in it.

    Args:
        model: the description; all of it, no `Opaque`.
        package: the kernels' module; default: the local build.

    Raises:
        DecodingError: there are no kernels.
    """

    def __init__(self, model: Model, package: ModuleType | None = None) -> None:
        self.model = model
        self._kernels = _kernels(package)

    def _through(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the last layer gives, `[rows, tokens, hidden]`.

        Args:
            ids, positions: int64 `[rows, tokens]`.
            attend: called once for each layer, in their order.
        """
        model = self.model
        x = reference.embedded(ids, model)
        tables = [self._table(rope, positions) for rope in model.ropes]
        start = self._normed(x, model.layers[0].before_attention)
        following: list[Norm | None] = [layer.before_attention for layer in model.layers[1:]]
        for i, (layer, norm) in enumerate(zip(model.layers, (*following, None), strict=True)):
            x, start = self._layer(x, start, layer, norm, tables, partial(attend, i))
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """Of the layers' result `x` `[rows, tokens, hidden]`: `[rows, tokens, vocab]`."""
        return reference.headed(self._normed(x, self.model.final_norm), self.model)

    def _table(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * rope.inv_freq.float()
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
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The layer's result, and the norm `following` of that.

        Args:
            start: `x`, as the layer's first norm leaves it.
        """
        a, m = layer.attention, layer.residual_multiplier
        q, k = self._queries_and_keys(start, a, tables)
        v = _split(_clipped(reference.product(start, a.v), a), a.key_heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        h = reference.product(attend(q, k, v), a.o)
        h = self._normed(h, layer.after_attention)
        if layer.parallel:
            given = start if layer.before_mlp is None else self._normed(x, layer.before_mlp)
            x = x + (h if m == 1.0 else h * m)
        else:
            x, given = self._added(x, h, layer.before_mlp, m)
        assert isinstance(layer.mlp, Mlp)
        h = self._normed(self._mlp(given, layer.mlp), layer.after_mlp)
        return self._added(x, h, following, m)

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
