"""The graphs of patched models: what `restore` frees and `status` tells of, and what is asked for.

What records them (recording.py) is imported where graphs are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.per_object import PerObject
from hfpatch.planning.plan import Timed

#: Graphs that one model keeps; the one that was not used for longest is dropped first.
DEFAULT_LIMIT = 8
#: The ways of a race.
PLAIN_CALL, GRAPH = 0, 1

#: By model; the values are `hfpatch.graphs.recording.ModelGraphs`.
graphs: PerObject[nn.Module, Any] = PerObject()


def release(modules: Iterable[nn.Module]) -> None:
    """Free the graphs of those modules that have any."""
    for module in modules if graphs else ():
        held = graphs.pop(module, None)
        if held is not None:
            held.clear()


def notes(model: nn.Module) -> tuple[str, ...]:
    """What `status` says: how many graphs there are, and why calls did without."""
    held = graphs.get(model)
    if held is None:
        return ()
    made = f"CUDA graphs: {len(held.recorded)} recorded"
    return (made, *(f"CUDA graphs not used: {why}" for why in held.reasons))


def times(model: nn.Module) -> list[Timed]:
    """What `status` says of the calls that were timed: plain, and as a graph."""
    held = graphs.get(model)
    return [
        Timed(
            type(model).__name__,
            "cuda_graphs",
            call,
            1,
            race.milliseconds(PLAIN_CALL),
            race.milliseconds(GRAPH),
            "being timed" if race.winner is None else ("original", "patched")[race.winner],
        )
        for call, race in (held.times.values() if held is not None else ())
    ]


def check_limit(value: bool | int | str) -> tuple[int, bool]:
    """The number of graphs that `cuda_graphs=` asks for, 0: none; and whether "auto" does.

    Raises:
        TypeError, ValueError: it is no bool, no int >= 0 and not "auto".
    """
    if value == "auto":
        return DEFAULT_LIMIT, True
    if isinstance(value, bool):
        return (DEFAULT_LIMIT if value else 0), False
    if not isinstance(value, int):
        raise TypeError(
            f'`cuda_graphs` must be "auto", a bool or the most graphs to keep, got {value!r}'
        )
    if value < 0:
        raise ValueError(f"`cuda_graphs` must be at least 0, got {value}")
    return value, False
