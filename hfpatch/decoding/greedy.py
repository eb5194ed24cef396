"""Greedy tokens chosen where the step runs: a GPU goes from one step to the next by itself.

Behind a step's logits its engine chooses each row's token, writes it to where the next step reads
its ids, and adds one to positions and length. The loop of `generate` gives the chain's own tensor
as ids of each call: by it `hfpatch.decoding.step` knows the text, and a call that no engine serves
still has its tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Ends:
    """What ends a text, where rows go on without one another.

    Attributes:
        tokens: that end it.
        pad: what stands behind an end.
    """

    tokens: tuple[int, ...]
    pad: int


class Chain:
    """One text's tokens in the making.

    Attributes:
        ids: int64 `[rows, 1]`, the last chosen tokens; the next call's ids are this very tensor.
        unfinished: bool `[rows]`, the rows that have not ended; None where that changes no token.
        ends: None likewise.
        count: steps that have chosen.
    """

    def __init__(self, ids: Tensor, unfinished: Tensor, ends: Ends | None) -> None:
        self.ids = ids.clone(memory_format=torch.contiguous_format)
        self.unfinished = unfinished.clone() if ends is not None else None
        self.ends = ends
        self.count = 0

    def accept(self, chooser: Chooser) -> None:
        """A step is used: its tokens are the text's."""
        self.ids.copy_(chooser.ids)
        if self.unfinished is not None:
            self.unfinished.copy_(chooser.unfinished)
        self.count += 1


class Chooser:
    """What an engine of one token a row launches behind its logits.

    Args:
        call: the engine's C functions.
        ids: int64 `[rows, 1]`, where the next step reads its ids; written.
        counters: int64, to each of which a step adds one.
        ends: what ends texts, where it changes what is chosen.
    """

    def __init__(self, call: Any, ids: Tensor, counters: Tensor, ends: Ends | None) -> None:
        self.ids, self._call, self._counters, self._ends = ids, call, counters, ends
        rows, device = ids.shape[0], ids.device
        self.unfinished = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self._tokens = ids if ends is None else torch.empty_like(ids)
        if ends is not None:
            self._pad = torch.tensor(ends.pad, device=device)
            self._other = torch.empty_like(self.unfinished)
        self._last: tuple[weakref.ref[Chain], int] | None = None

    def begin(self, chain: Chain) -> None:
        """Take up a text whose ids were written to `ids`."""
        if chain.unfinished is not None:
            self.unfinished.copy_(chain.unfinished)

    def launch(self, logits: Tensor) -> None:
        """Choose from `[rows, 1, vocab]`, on the current stream."""
        self._call.argmax(self._tokens, logits)
        if self._ends is not None:
            torch.where(self.unfinished, self._tokens, self._pad, out=self.ids)
            for end in self._ends.tokens:
                torch.ne(self.ids, end, out=self._other)
                self.unfinished.logical_and_(self._other)
        self._counters.add_(1)

    def goes_on(self, chain: Chain) -> bool:
        """Whether ids, positions and length are those that the chain's next step reads: its last
        step was the last to write them, and was used."""
        if self._last is None:
            return False
        last, count = self._last
        return last() is chain and count == chain.count

    def left(self, chain: Chain | None) -> None:
        """A step of this chain, or one of another kind, has run: what the buffers hold now."""
        self._last = None if chain is None else (weakref.ref(chain), chain.count + 1)


class Chains:
    """The texts in the making of one model, found by their tensors of ids."""

    def __init__(self) -> None:
        self._by_ids: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()

    def begin(self, ids: Tensor, unfinished: Tensor, ends: Ends | None) -> Chain:
        """Of a text whose last tokens are `ids`, int64 `[rows, 1]`; `unfinished`: bool `[rows]`."""
        chain = Chain(ids, unfinished[:, None], ends)
        self._by_ids[id(chain.ids)] = chain
        return chain

    def of(self, ids: Tensor) -> Chain | None:
        """The chain whose tensor this is."""
        if not self._by_ids:
            return None
        chain = self._by_ids.get(id(ids))
        return chain if chain is not None and chain.ids is ids else None


def ends_of(tokens: Sequence[int], pad: int | None, rows: int) -> Ends | None:
    """What changes a chosen token: nothing where there is one row, or nothing stands behind an
    end."""
    return Ends(tuple(tokens), pad) if rows > 1 and tokens and pad is not None else None
