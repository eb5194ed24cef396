"""What the results of a captured block are like: a compiled graph must know before any call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import nn

from hfpatch.proof.subject import Forward, Tensor
from hfpatch.regions.capture import Captured
from hfpatch.regions.nodes import is_tensor, same_shape
from hfpatch.regions.structure import TENSOR

#: What a tuple of results may have, as `take_result` says it.
_RESULTS = (TENSOR, (type(None), None))
_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Like:
    """Of a block that returns a tensor, or a tuple of tensors and None: for each tensor the place,
    among the call's tensors, of one that has its shape and dtype whatever the sizes are."""

    several: bool
    places: tuple[int | None, ...]

    def text(self, tensors: Sequence[Tensor], given: dict[str, Any]) -> str:
        """As `hfpatch.blocks.opaque.Foresight` gives it: "tensor" or "tuple" and the names of
        arguments; "" where one has no name of its own."""
        names = {id(value): name for name, value in given.items()}
        found = ["-" if i is None else names.get(id(tensors[i])) for i in self.places]
        if None in found:
            return ""
        return " ".join(("tuple" if self.several else "tensor", *found))  # type: ignore[arg-type]


def like_of(captured: Captured) -> Like | None:
    """What the results of a captured call are like, each another argument; None if that cannot be
    said so."""
    shape = captured.result.shape
    several = shape is not TENSOR
    if several and not (shape[0] is tuple and all(s in _RESULTS for s in shape[1])):
        return None
    given = [n for n in captured.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in captured.graph.nodes if n.op == "output")
    places: list[int | None] = []
    results = iter(output.args[0])
    for each in shape[1] if several else (TENSOR,):
        if each is not TENSOR:
            places.append(None)
            continue
        result = next(results)
        left = (i for i, n in enumerate(given) if i not in places)
        place = next((i for i in left if is_tensor(result) and same_shape(given[i], result)), None)
        if place is None:
            return None
        places.append(place)
    return Like(several, tuple(places)) if set(places) - {None} else None


def anchor_of(block: nn.Module) -> tuple[str, ...]:
    """The path of a parameter by which a compiled graph knows a block; empty if it has none."""
    paths = [p.split(".") for p, t in block.named_parameters() if type(t) is nn.Parameter]
    return tuple(min(paths, key=len, default=()))


def names_of(original: Forward) -> tuple[str, ...]:
    """The arguments that a forward takes by their place, after self."""
    parameters = list(signature(original).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in _BY_PLACE)
