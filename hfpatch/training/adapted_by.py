"""Whose code stands inside decoder layers that were swapped: they step aside for it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hfpatch import swap

OP = "layer"


def stepping_aside(root: nn.Module) -> Iterator[str]:
    """A note for each kind of module that somebody else patched inside a swapped layer."""
    said: dict[str, int] = {}
    for module in root.modules():
        mark = swap.swapped(module)
        if mark is None or getattr(mark.details, "op", None) != OP:
            continue
        found = {
            f"`{type(child).__name__}`: {why}"
            for child in module.modules()
            if child is not module and (why := swap.foreign_forward(child)) is not None
        }
        for text in found:
            said[text] = said.get(text, 0) + 1
    for text, count in said.items():
        yield f"{count} decoder layers step aside, each for a {text}"
