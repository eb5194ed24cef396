"""The decoders of patched models: what `restore` frees and `status` tells of."""

from __future__ import annotations

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


#: By model; the values are `hfpatch.decoding.step.Decoder`.
decoders: PerObject[nn.Module, Any] = PerObject()


def release(modules: Iterable[nn.Module]) -> None:
    """Free the engines of those modules that have any."""
    for module in modules if decoders else ():
        decoders.pop(module, None)


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
    return (made, *(f"decoding steps not used: {why}" for why in held.reasons))
