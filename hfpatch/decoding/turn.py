"""New tokens behind a cache: a turn of a chat, what follows a prefix, many candidates of an
assistant.

How long the cache is changes from call to call, and a CUDA graph has one length. So the calls run
one by one, for as many tokens as there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfpatch.attention import attention
from hfpatch.decoding import reference
from hfpatch.decoding.composed import Composed
from hfpatch.decoding.spec import Attention, CacheTable

#: New tokens of each row, and of all rows together, at most.
MOST_OF_A_ROW, MOST_TOKENS = 512, 4096
#: Where PyTorch has no kernel for a mask and fewer heads of keys than of queries: it would be given
#: a copy of the keys for each head.
_FOLDED = frozenset({"cuda"})


def is_short(rows: int, tokens: int) -> bool:
    """Whether a turn has no more tokens than are served."""
    return tokens <= MOST_OF_A_ROW and rows * tokens <= MOST_TOKENS


class TurnEngine(Composed):
    """Runs turns of any number of rows and tokens. It has no memory of its own.

    Args:
        model: the description; all of it, no `Opaque`.
        package: the kernels' module; default: the local build.

    Raises:
        DecodingError: there are no kernels.
    """

    @torch.no_grad()
    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        table: CacheTable,
        all_logits: bool,
    ) -> Tensor:
        """The tokens' logits. Keys and values are written to `table` behind its length, which is
        left as it is.

        Args:
            ids: int64 `[rows, tokens]`.
            positions: int64 `[rows or 1, tokens]`.
            mask: `[rows, length + tokens]`, 0 where a key is not seen; None: all are.
            table: with room for the tokens; of this model's layers, rows, dtype and device.
            all_logits: of every token; else of the last one.

        Returns:
            `[rows, tokens or 1, vocab]`, of the model's dtype.

        Raises:
            torch.OutOfMemoryError: nothing before `table.length` was written to.
        """
        rows, tokens = ids.shape
        length, end = table.length, table.length + tokens
        mask = None if mask is None else mask.bool()
        masks: dict[tuple[int | None, int], Tensor] = {}

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            a = self.model.layers[i].attention
            keys, values = table.keys[i], table.values[i]
            torch._foreach_copy_([keys[:, :, length:end], values[:, :, length:end]], [k, v])
            # what no query's window reaches is not read
            first = 0 if a.window is None else max(0, length - a.window + 1)
            keys, values = keys[:, :, first:end], values[:, :, first:end]
            if mask is None and a.sinks is None:
                y = attention(
                    q, keys, values, causal=True, scale=a.scale, window=a.window, softcap=a.softcap
                )
                return y.transpose(1, 2).flatten(2)
            folded = q.device.type in _FOLDED and a.softcap is None and a.sinks is None
            groups = a.heads // a.key_heads if folded else 1
            seen = masks.get((a.window, groups))
            if seen is None:
                seen = _seen(q, first, length, a.window, mask)
                seen = seen if groups == 1 else seen.repeat(1, 1, groups, 1)
                masks[a.window, groups] = seen
            if a.sinks is not None:
                return reference.attended(q, keys, values, a, seen)
            return _masked(q, keys, values, a, seen, groups)

        x = self._through(ids, positions.expand(rows, -1), attend)
        return self._logits(x if all_logits else x[:, -1:])


def _masked(q: Tensor, k: Tensor, v: Tensor, a: Attention, seen: Tensor, groups: int) -> Tensor:
    """Attention's result; `groups` heads of queries, which share keys, are as many times the tokens
    of one, each with its own rows of the mask."""
    heads, tokens = q.shape[1:3]
    q = q.reshape(q.shape[0], heads // groups, groups * tokens, -1) if groups > 1 else q
    y = attention(q, k, v, mask=seen, scale=a.scale, softcap=a.softcap)
    y = y.reshape(y.shape[0], heads, tokens, -1) if groups > 1 else y
    return y.transpose(1, 2).flatten(2)


def _seen(q: Tensor, first: int, length: int, window: int | None, mask: Tensor | None) -> Tensor:
    """Which of the keys from `first` on the queries see, of which the first stands at `length`:
    bool `[rows or 1, 1, tokens, keys]`."""
    end = length + q.shape[2]
    key = torch.arange(first, end, device=q.device)
    query = torch.arange(length, end, device=q.device)[:, None]
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if mask is None:
        return seen[None, None]
    seen = seen & mask[:, None, None, first:end]
    # padding that sees nothing sees itself, so that it is a number
    return seen | ((key == query) & ~seen.any(-1, keepdim=True))
