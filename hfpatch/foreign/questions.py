"""What a registered forward is asked about beside its sample: values in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfpatch.foreign.values import (
    FEW,
    FINITE,
    OF_GRADIENTS,
    OF_PLACES,
    OF_TRUTHS,
    OF_WEIGHTS,
    PARTING,
    SPECIAL,
    fill,
    is_a_table,
    put,
)

#: Elements of the inputs from which on a handful of other values is asked about.
LARGE = 1 << 20
#: How many inputs are changed one by one with each.
_INPUTS = 4


@dataclass(frozen=True)
class Question:
    """Values to be put in the place of others.

    Attributes:
        what: what they are called.
        put: puts them into a module and its inputs; False where these do not take them.
        of_weights: whether it changes the module.
        of_gradients: whether gradients are compared, where they are recorded.
    """

    what: str
    put: Callable[[nn.Module, Any], bool]
    of_weights: bool = False
    of_gradients: bool = False


def questions_of(inputs: Any, few: bool, recorded: bool) -> Iterator[Question]:
    """Of all floating inputs at once and of each by itself; of weights; of each one of whole
    numbers, where a place that is not there is an exception, as on a CPU, and of truth values."""
    leaves = pytree.tree_leaves(inputs)
    firsts: dict[int, int] = {}
    for i, t in enumerate(leaves):
        if isinstance(t, Tensor) and type(t) in (Tensor, nn.Parameter) and t.numel():
            firsts.setdefault(id(t), i)
    floats = [i for i in firsts.values() if leaves[i].is_floating_point()]
    no_tables = [i for i in floats if not is_a_table(leaves[i])]
    for name, pattern in (FINITE | SPECIAL).items():
        if few and name not in FEW and not (recorded and name in OF_GRADIENTS):
            continue
        taking = no_tables if name in PARTING else floats
        together = [taking] if taking else []
        alone = [[i] for i in taking[:_INPUTS]] if len(taking) > 1 else []
        for places in (*together, *alone):
            where = "" if len(places) == len(floats) else f" in input {places[0]}"

            def into(on: Any, given: Any, places: Any = places, pattern: Any = pattern) -> bool:
                held = pytree.tree_leaves(given)
                return all(fill(held[i], pattern) for i in places)

            yield Question(f"{name}{where}", into, of_gradients=name in OF_GRADIENTS)
    if recorded:
        return
    for name, pattern in OF_WEIGHTS.items() if not few else ():

        def weights(on: nn.Module, given: Any, pattern: Any = pattern) -> bool:
            held = [p for p in on.parameters() if type(p) is nn.Parameter]
            return sum(fill(p, pattern) for p in held) > 0

        yield Question(f"{name} in its parameters", weights, of_weights=True)
    for i in firsts.values():
        t = leaves[i]
        is_place = not t.is_floating_point() and not t.is_complex() and t.device.type == "cpu"
        of = OF_TRUTHS if t.dtype == torch.bool else OF_PLACES if is_place else {}
        for name, change in of.items() if t.dim() and t.layout == torch.strided else ():

            def others(on: nn.Module, given: Any, i: int = i, change: Any = change) -> bool:
                held = pytree.tree_leaves(given)[i]
                return put(held, change(held.clone()))

            yield Question(f"{name} in input {i}", others)
