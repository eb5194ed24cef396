"""Steps of a model whose layers' second halves are modules of its own, such as mixtures of experts.

Everything else of the layers runs in the engine's kernels: one call up to the next such module.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from hfpatch.decoding import reference
from hfpatch.decoding.engine import Call, Engine, Table
from hfpatch.decoding.spec import CacheTable, Layer, Model, Opaque
from hfpatch.errors import DecodingError

Tensor = torch.Tensor


class _Part:
    """Layers in one call: whole ones, and the attention half of the last, `ends`, if it has one."""

    def __init__(
        self,
        model: Model,
        layers: slice,
        rows: int,
        tokens: int,
        package: ModuleType | None,
    ) -> None:
        inside = list(model.layers[layers])
        self.layers = layers
        self.ends: Layer | None = None
        if isinstance(inside[-1].mlp, Opaque):
            self.ends = inside[-1]
            inside[-1] = replace(self.ends, mlp=None, before_mlp=None, after_mlp=None)
        own = replace(model, layers=tuple(inside), final_norm=None)
        self.call = Call(own, rows, tokens, package)
        self.table = Table(own, rows, tokens)
        self._device = model.device
        self._entries = self.table.entries
        self._version = -1

    def entries(self, cache: CacheTable) -> Tensor:
        """The table of these layers' keys and values, where the kernels read it.

        Raises:
            DecodingError: the cache does not fit.
        """
        own = CacheTable(cache.keys[self.layers], cache.values[self.layers], cache.length)
        self.table.take(own)
        if self._device.type == "cpu":
            return self.table.entries
        if self._version != self.table.version:
            self._entries = self.table.entries.to(self._device)
            self._version = self.table.version
        else:
            self._entries[0].fill_(cache.length)
        return self._entries


class HalvesEngine(Engine):
    """`Engine` for a description with `Opaque` second halves; the same interface.

    Its calls are launched one by one, since a module of the model's own may do anything.
    """

    def _build(self, package: ModuleType | None) -> None:
        model, rows, tokens = self.model, self.rows, self.tokens
        ends = {len(model.layers)}
        for i, layer in enumerate(model.layers):
            if isinstance(layer.mlp, Opaque):
                ends.add(i + 1)
                if layer.parallel:  # what its module is given is the layer's own input
                    ends.add(i)
        ends.discard(0)
        stops = sorted(ends)
        starts = [0, *stops[:-1]]
        self._parts = [
            _Part(model, slice(a, b), rows, tokens, package)
            for a, b in zip(starts, stops, strict=True)
        ]
        widest = max((p.call for p in self._parts), key=lambda call: call.workspace.numel())
        for part in self._parts:  # they run one after the other
            part.call.share_workspace(widest)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the tensors that the kernels read lay when the engine was made."""
        return tuple(dict.fromkeys(a for part in self._parts for a in part.call.addresses))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory that the engine holds."""
        held: Tensor = self._parts[0].call.workspace
        return int(held.numel()) * held.element_size()

    def _run(
        self,
        ids: Tensor | None,
        positions: Tensor,
        cache: CacheTable,
        logits: Tensor,
        mask: Tensor | None,
        embeds: Tensor | None,
        hidden: Tensor | None,
        chain: Any = None,
    ) -> None:
        if chain is not None:
            raise DecodingError("`chain`: expected None for a model with modules of its own")
        model = self.model
        x = embeds
        if x is None:
            assert ids is not None  # `step` has looked
            x = reference.embedded(ids, model)
        for part in self._parts:
            y = torch.empty_like(x)
            entries, keys = part.entries(cache), cache.length + self.tokens
            part.call(None, y, entries, None, x.contiguous(), positions, mask, keys)
            x = y if part.ends is None else reference.with_mlp(x, y, part.ends)
        reference.finish(x, model, logits, hidden)
