"""The decoders of patched models: what `restore` frees and `status` tells of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.per_object import PerObject


@dataclass(frozen=True)
class Choice:
    """The steps that `apply(decoding=…)` asked for: on devices of these types, with weights as they
    are or of 8 bits."""

    devices: frozenset[str]
    eight_bits: bool = False

    def __bool__(self) -> bool:
        return bool(self.devices)


class Decoders:
    """By model; the values are `hfpatch.decoding.step.Decoder`.

    A decoder holds its model's layers. It belongs to the model's patched forward: so Python's
    collector finds all of a deleted model at once. Held from here, the layers would stay until it
    looks again.
    """

    def __init__(self) -> None:
        self._of: PerObject[nn.Module, tuple[weakref.ref[Any], weakref.ref[Any]]] = PerObject()

    def keep(self, model: nn.Module, decoder: Any, owner: PerObject[nn.Module, Any]) -> None:
        """Let `decoder` be the one of `model` for as long as `owner` is there."""
        owner[model] = decoder
        self._of[model] = weakref.ref(decoder), weakref.ref(owner)

    def get(self, model: nn.Module) -> Any:
        """A model's decoder, or None."""
        found = self._of.get(model)
        return None if found is None else found[0]()

    def __getitem__(self, model: nn.Module) -> Any:
        decoder = self.get(model)
        if decoder is None:
            raise KeyError(f"a `{type(model).__name__}`")
        return decoder

    def __contains__(self, model: nn.Module) -> bool:
        return self.get(model) is not None

    def __len__(self) -> int:
        return len(self._of)

    def drop(self, model: nn.Module) -> None:
        """Free a model's decoder, if it has one; copies of the model may share its owner."""
        found = self._of.pop(model, None)
        owner = None if found is None else found[1]()
        if owner is not None:
            owner.pop(model, None)


decoders = Decoders()


def release(modules: Iterable[nn.Module]) -> None:
    """Free the engines of those modules that have any."""
    for module in modules if decoders else ():
        decoders.drop(module)


def notes(model: nn.Module) -> tuple[str, ...]:
    """What `status` says: how many steps there were, and why calls did without."""
    held = decoders.get(model)
    if held is None:
        return ()
    if held.refused is not None:
        return (f"decoding: left as it was: {held.refused}",)
    made = f"decoding: {held.steps} steps, {len(held.trusted)} engines"
    if held.choice.eight_bits:
        made += ", weights of 8 bits"
    if held.loops:
        made += f", {held.loops} calls of `generate` in a loop of its own"
    if held.prompts_served:
        made += f", {held.prompts_served} prompts as graphs"
    if held.turns_served:
        made += f", {held.turns_served} turns behind a cache"
    return (
        made,
        *(f"decoding steps not used: {why}" for why in held.reasons),
        *(f"decoding: turns left to the original: {why}" for why in held.turn_reasons),
        *(f"decoding: steps in transformers' own loop: {why}" for why in held.loop_reasons),
    )
