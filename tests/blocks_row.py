"""What a row of the tests of fused blocks is; see blocks_single.py and blocks_families.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Draw = Callable[..., Tensor]
Call = dict[str, Any]
#: Of (draw, batch, tokens).
MakeCall = Callable[[Draw, int, int], Call]


@dataclass(frozen=True)
class Row:
    """One kind of block.

    `make()` builds it; `calls` are functions of (draw, batch, tokens) that give the arguments of a
    call by name, the first of them the usual one; `fp32_parts` are kept in fp32 in half precision;
    `aside` names modules whose hooks must fire, so that the block steps aside; `linear` is the path
    of a projection, if it has any; `inside` is a module that a fused forward never calls;
    `handed_back` are calls that the original must take; `waits`: it waits for the GPU; `captured`:
    its class's file is out of reach (support/captured.py).
    """

    make: Callable[[], nn.Module]
    calls: Mapping[str, MakeCall]
    fp32_parts: tuple[str, ...] = ()
    aside: tuple[str, ...] = ("norm1", "attn1")
    linear: str = "attn1.to_q"
    inside: str = "attn1"
    waits: bool = False
    handed_back: Mapping[str, MakeCall] = field(default_factory=dict)
    captured: bool = False


def tables(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin with each value twice, fp32 in every model."""
    angles = draw(*shape[:-1], shape[-1] // 2).float().repeat_interleave(2, -1)
    return angles.cos(), angles.sin()
