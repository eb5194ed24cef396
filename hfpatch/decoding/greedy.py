"""Greedy tokens chosen where the step runs: a GPU goes from one step to the next by itself.

Behind a step's logits its engine chooses each row's token, writes it to where the next step reads
its ids, and adds one to positions and length, in one launch (`hfp_decode_choose`). The same launch
writes it to the text's own memory, and on a GPU to the host's, which reads it there: nothing else
is queued between two steps. The loop of `generate` gives the text's own tensor as ids of each call:
by it `hfpatch.decoding.step` knows the text, and a call that no engine serves still has its tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.capi import CONSTANTS

Tensor = torch.Tensor

#: A text's last tokens that are kept. One step is begun before the token of the last is read, and
#: may be of no use.
SLOTS = CONSTANTS["HFP_DECODE_SLOTS"]


@dataclass(frozen=True)
class Ends:
    """What ends a text, where rows go on without one another.

    Attributes:
        tokens: that end it.
        pad: what stands behind an end.
    """

    tokens: tuple[int, ...]
    pad: int


class Slots:
    """Memory of one text in the making, which steps write to: of step n slot n % SLOTS.

    Attributes:
        tokens: int64 `[SLOTS, rows]`, on the model's device.
        unfinished: bool `[SLOTS, rows]`, likewise.
        report: int64 `[SLOTS, rows]`, memory of the host's that a GPU writes to; None on a CPU.
        events: behind the step that wrote a slot; none on a CPU.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self.tokens = torch.zeros(SLOTS, rows, dtype=torch.int64, device=device)
            self.unfinished = torch.ones(SLOTS, rows, dtype=torch.bool, device=device)
            self.report = (
                torch.zeros(SLOTS, rows, dtype=torch.int64, pin_memory=True, device="cpu")
                if cuda
                else None
            )
        self.events: list[Any] = [torch.cuda.Event() for _ in range(SLOTS if cuda else 0)]  # type: ignore[no-untyped-call]

    def addresses(self) -> list[int]:
        """As `hfp_decode_choose` takes them."""
        report = 0 if self.report is None else self.report.data_ptr()
        return [self.tokens.data_ptr(), self.unfinished.data_ptr(), report]

    def is_idle(self) -> bool:
        """Whether no step that was launched will write to it."""
        return all(event.query() for event in self.events)


#: Of texts that are gone, by rows and device. PyTorch would give a GPU's report to the next who
#: asks while a step may still write to it: it does not know of that.
_free: dict[tuple[int, torch.device], list[Slots]] = {}


def _slots(rows: int, device: torch.device) -> Slots:
    free = _free.setdefault((rows, device), [])
    for _ in range(len(free)):
        try:
            slots = free.pop(0)
        except IndexError:  # another thread took it
            break
        if slots.is_idle():
            return slots
        free.append(slots)
    return Slots(rows, device)


class Chain:
    """One text's tokens in the making.

    Attributes:
        ends: what ends a row; None where that changes no token.
        count: steps that have chosen, and were used.
    """

    def __init__(self, ids: Tensor, unfinished: Tensor, ends: Ends | None) -> None:
        rows = ids.shape[0]
        self.ends = ends
        self.count = 0
        self._slots = _slots(rows, ids.device)
        weakref.finalize(self, _free[rows, ids.device].append, self._slots)
        self.views = [tokens.unsqueeze(1) for tokens in self._slots.tokens]
        self.ids.copy_(ids)
        if ends is not None:
            self._slots.unfinished[0].copy_(unfinished)

    @property
    def ids(self) -> Tensor:
        """int64 `[rows, 1]`, the last chosen tokens; the next call's ids are this very tensor."""
        found: Tensor = self.views[self.count % SLOTS]
        return found

    @property
    def unfinished(self) -> Tensor | None:
        """bool `[rows]`, the rows that have not ended; None where that changes no token."""
        return None if self.ends is None else self._slots.unfinished[self.count % SLOTS]

    def entries(self) -> list[int]:
        """The next step's `text`."""
        return [self.count + 1] * len(self.views[0]) + self._slots.addresses()

    def launched(self) -> None:
        """The next step was launched, on the current stream."""
        if self._slots.events:
            self._slots.events[(self.count + 1) % SLOTS].record()

    def accept(self) -> None:
        """That step is used: its tokens are the text's."""
        self.count += 1

    def tokens_of(self, number: int) -> list[int]:
        """What a step has chosen, one of the last SLOTS - 1; it is waited for."""
        slots, slot = self._slots, number % SLOTS
        if slots.report is None:
            return slots.tokens[slot].tolist()
        slots.events[slot].synchronize()
        return slots.report[slot].tolist()


class Chooser:
    """What an engine of one token a row launches behind its logits.

    Args:
        call: the engine's C functions.
        ids: int64 `[rows, 1]`, where the next step reads its ids; written.
        counters: int64, to each of which a step adds one.
        ends: what ends texts, where it changes what is chosen.
    """

    def __init__(self, call: Any, ids: Tensor, counters: Tensor, ends: Ends | None) -> None:
        rows, device = ids.shape[0], ids.device
        self._call = call
        self._text = torch.zeros(rows + 3, dtype=torch.int64, device=device)
        self._ends = None
        if ends is not None:
            self._ends = torch.tensor(ends.tokens, dtype=torch.int64, device=device)
        self._written = (ids[:, 0], counters if len(counters) else None, self._text)
        self._pad = 0 if ends is None else ends.pad
        self._last: tuple[weakref.ref[Chain], int] | None = None

    def begin(self, chain: Chain) -> None:
        """Take up a text whose ids were written to `ids`."""
        self._text.copy_(torch.tensor(chain.entries(), device="cpu"))

    def launch(self, logits: Tensor) -> None:
        """Choose from `[rows, 1, vocab]`, on the current stream."""
        self._call.choose(*self._written, logits, self._ends, self._pad)

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
        chain = Chain(ids, unfinished, ends)
        for view in chain.views:
            self._by_ids[id(view)] = chain
        return chain

    def of(self, ids: Tensor) -> Chain | None:
        """The chain whose last tokens this very tensor holds."""
        if not self._by_ids:
            return None
        chain = self._by_ids.get(id(ids))
        return chain if chain is not None and chain.ids is ids else None


def ends_of(tokens: Sequence[int], pad: int | None, rows: int) -> Ends | None:
    """What changes a chosen token: nothing where there is one row, or nothing stands behind an
    end."""
    return Ends(tuple(tokens), pad) if rows > 1 and tokens and pad is not None else None
