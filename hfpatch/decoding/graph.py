"""A decoding step as a CUDA graph, which serves every length and every cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hfpatch.decoding.greedy import Chain, Chooser, Ends
from hfpatch.errors import DecodingError
from hfpatch.graphs.captures import recorded

Tensor = torch.Tensor

#: Keys that the mask's buffer grows by.
_MASK_STEP = 1024

#: Behind so many keys at most, few sequences have a graph of their own: in it a head's CTAs are a
#: cluster (`kClusterKeys` and `few` of decode_attention.cu).
_FEW_KEYS = 1024
_CLUSTER = 8


class StepGraphs:
    """The step's kernels in CUDA graphs: one for each set of arguments that are there, and for few
    keys.

    The kernels read ids, positions, mask, and where the cache lies and how long it is, from buffers
    of this object and write to others: a step is some small copies and one launch.

    Args:
        call: the C function with the model's arguments.
        table: the cache's table on the CPU.
    """

    def __init__(self, call: Any, table: Any) -> None:
        self._call, self._table = call, table
        model, rows, tokens = call.model, call.rows, call.tokens
        device, width = model.device, model.embedding.shape[1]
        self._device = device
        self.ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        # what grows by one from token to token lies together
        numbers = torch.zeros(rows * tokens + len(table.entries), dtype=torch.int64, device=device)
        self.positions = numbers[: rows * tokens].view(rows, tokens)
        self._entries = numbers[rows * tokens :]
        self._length = self._entries[:1]
        self._counters = numbers[: rows * tokens + 1]
        self._held = -1  # what `_length` holds
        self._version = -1  # of the table, in `_entries`
        heads = min((layer.attention.key_heads for layer in model.layers), default=1)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._few_keys = _FEW_KEYS if rows * heads * _CLUSTER <= processors else 0
        self._tokens, self._state = tokens, (rows, tokens, width)
        vocab = model.head.weight.shape[0]
        self._logits: dict[tuple[int, torch.dtype], Tensor] = {}
        self._vocab = vocab
        self._embeds: Tensor | None = None
        self._hidden: Tensor | None = None
        self._mask: Tensor | None = None
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._choosers: dict[Ends | None, Chooser] = {}

    def chooser(self, ends: Ends | None) -> Chooser:
        """What chooses the tokens of texts that end so, behind a step of one token a row."""
        if ends not in self._choosers:
            with torch.inference_mode(False):
                made = Chooser(self._call, self.ids, self._counters, ends)
            self._choosers[ends] = made
        return self._choosers[ends]

    @property
    def made(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs, in the order in which they were made."""
        return list(self._graphs.values())

    @property
    def bytes(self) -> int:
        """Of the buffers."""
        held = [self.ids, self.positions, self._entries, self._embeds, self._hidden, self._mask]
        held += self._logits.values()
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def run(
        self,
        ids: Tensor | None,
        positions: Tensor,
        logits: Tensor,
        mask: Tensor | None,
        embeds: Tensor | None,
        hidden: Tensor | None,
        chain: Chain | None = None,
    ) -> None:
        """One step on the current stream; the table was `take`n. Of a chain the tokens are chosen
        too, by its chooser."""
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise DecodingError(
                    "a step is a CUDA graph of its own: call it outside of captures"
                )
            chooser = None if chain is None else self.chooser(chain.ends)
            goes_on = chooser is not None and chain is not None and chooser.goes_on(chain)
            if not goes_on:
                if ids is not None and embeds is None:
                    self.ids.copy_(ids)
                self.positions.copy_(positions)
                if chooser is not None and chain is not None:
                    chooser.begin(chain)
            self._fill(embeds)
            if mask is not None and not (goes_on and self._holds(mask)):
                self._fill_mask(mask, chain is not None)
            for other in self._choosers.values():
                other.left(chain if other is chooser else None)
            result = self._result(logits.shape, logits.dtype)
            if hidden is not None and self._hidden is None:
                self._hidden = _own(self._state, hidden)
            own_hidden = self._hidden if hidden is not None else None
            kinds = (mask is None, embeds is None, hidden is None)
            most_keys = self._few_keys if self._held + self._tokens <= self._few_keys else 0
            key = (logits.shape[1], logits.dtype, *kinds, most_keys, chooser)
            held = self._held
            if chooser is not None:  # one more behind the launch; an interrupt may come before that
                self._held = -1  # is noted
            graph = self._graphs.get(key)
            if graph is None:

                def launch() -> None:
                    masked, embedded = mask is not None, embeds is not None
                    self._launch(result, masked, embedded, own_hidden, most_keys, chooser)

                # Not from the graph: what a kernel needs at its first launch cannot be captured.
                launch()
                # The same launches are not run: neither cache nor counters change.
                graph = self._graphs[key] = recorded(launch)
            else:
                graph.replay()
            if chooser is not None and chain is not None:
                self._held = held + 1
                chain.launched()
            if logits is not result:
                logits.copy_(result)
            if hidden is not None and own_hidden is not None:
                hidden.copy_(own_hidden)

    def logits(self, dtype: torch.dtype) -> Tensor:
        """Where a step writes each row's last logits `[rows, 1, vocab]`, until the next step."""
        return self._result((self.ids.shape[0], 1, self._vocab), dtype)

    def _fill(self, embeds: Tensor | None) -> None:
        if embeds is not None:
            if self._embeds is None:
                self._embeds = _own(self._state, embeds)
            self._embeds.copy_(embeds)
        length = int(self._table.entries[0])
        if self._version != self._table.version:
            self._entries.copy_(self._table.entries)
            self._version = self._table.version
        elif length != self._held:
            self._length.fill_(length)
        self._held = length

    def _holds(self, mask: Tensor) -> bool:
        return self._mask is not None and self._mask.shape[1] >= mask.shape[1]

    def _fill_mask(self, mask: Tensor, chained: bool) -> None:
        """`chained`: each next token is seen."""
        keys = mask.shape[1]
        if self._mask is None or not self._holds(mask):
            width = (keys // _MASK_STEP + 2) * _MASK_STEP
            self._mask = _own((mask.shape[0], width), mask, torch.bool).zero_()
            # graphs that read the old one
            self._graphs = {k: g for k, g in self._graphs.items() if k[2]}
        self._mask[:, :keys].copy_(mask)
        if chained:
            self._mask[:, keys:] = True

    def _result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        key = (shape[1], dtype)
        if key not in self._logits:
            self._logits[key] = _own(shape, self.ids, dtype)
        return self._logits[key]

    def _launch(
        self,
        logits: Tensor,
        masked: bool,
        embedded: bool,
        hidden: Tensor | None,
        most_keys: int,
        chooser: Chooser | None,
    ) -> None:
        self._call(
            logits,
            hidden,
            self._entries,
            None if embedded else self.ids,
            self._embeds if embedded else None,
            self.positions,
            self._mask if masked else None,
            most_keys,
        )
        if chooser is not None:
            chooser.launch(logits)


def _own(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer on the device of `like`, not filled, which can be written to in every mode: one made
    in inference mode could be in that alone."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)
