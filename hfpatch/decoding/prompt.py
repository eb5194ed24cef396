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
from hfpatch.decoding.composed import Composed
from hfpatch.decoding.spec import Attention, Model
from hfpatch.errors import DecodingError
from hfpatch.graphs.captures import Pool, recorded, unowned

#: Lengths that prompts are filled up to, and tokens of all rows together at most.
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
MOST_TOKENS = 4096
#: From this many on, keys and values are put together layer by layer: they lie in memory once then,
#: for a launch a layer.
_MANY_TOKENS = 512


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


class PromptEngine(Composed):
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
        super().__init__(model, package)
        self.rows, self.length = rows, length
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
        layers = self.model.layers
        seen: dict[int | None, Tensor | None] = {}
        keys, values = [], []
        count = len(layers)
        alike = len({(m.attention.key_heads, m.attention.head_dim) for m in layers}) == 1
        early = alike and self.rows * self.length >= _MANY_TOKENS
        whole: Tensor | None = None

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal whole
            a = layers[i].attention
            if early:
                kept = k.transpose(1, 2), v.transpose(1, 2)
                whole = k.new_empty(2 * count, *kept[0].shape) if whole is None else whole
                torch._foreach_copy_([whole[i], whole[count + i]], list(kept))
            else:
                keys.append(k)
                values.append(v)
            window = None if a.window is None or a.window >= self.length else a.window
            if window not in seen:
                seen[window] = self._seen(window)
            return self._attended(q, k, v, a, seen[window])

        x = self._through(self._ids, self._positions, attend)
        logits = self._logits(x.index_select(1, self._last))
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
