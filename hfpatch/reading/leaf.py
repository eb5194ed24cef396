"""Is a leaf's code a straight line from its inputs and parameters to its result?

The samples of a proof say what a module computes where they lie. That it is the same function
everywhere else is said here: nothing that a call may vary (the rank, the mode, the time) and
nothing that somebody else may change takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.reading import surroundings
from hfpatch.reading.interpreter import Interpreter
from hfpatch.reading.operations import tally
from hfpatch.reading.values import Clamp, Tensor, Traced, Unexplained

__all__ = ["Reading", "Unexplained", "read", "still_holds"]


@dataclass(frozen=True)
class Reading:
    """What reading a leaf's forward gave.

    result: what the code computes for the inputs.
    by_rank: whether the code does one thing or another by the number of dimensions.
    own_gradient: whether it has an `autograd.Function`, whose gradient may be any.
    calls: the live children that it calls, in order, and whose result each is called with
        ("input": an argument of the forward; "": something computed).
    asked: live children whose weight's dtype the code asks for.
    counts: how many operations it has that could make a step, a bend or a bump, see `tally`.
    clamps: what it clamps, in order, and to what; no clamp changes what lies between its bounds.
    steps: all that it computes, to be compared with another reading's, see `Tally.steps`.
    found: the globals, closures and library functions that the code used, for `still_holds`.
    autocasts: types of devices, others than the inputs', for which the code branches on whether
        autocast is on; what was read is what it does while it is off.
    """

    result: Tensor
    by_rank: bool
    own_gradient: bool
    calls: tuple[tuple[str, str], ...]
    found: tuple[tuple[Any, Any, Any], ...]
    counts: Mapping[str, int]
    clamps: tuple[Clamp, ...]
    steps: tuple[Any, ...] = ()
    asked: frozenset[str] = frozenset()
    autocasts: frozenset[str] = frozenset()


def read(
    module: nn.Module,
    inputs: Sequence[Tensor],
    live: Sequence[str] = (),
    *,
    width: int | None = None,
) -> Reading:
    """Read the forward of a module's class, on a replica with the tensors of a proof.

    Args:
        module: the replica. Nothing of it is written to, and none of its code is run.
        inputs: tensors, the arguments of the forward by position.
        live: names of the children that are called, not read: modules of the proof's own.
        width: size of the last dimension of the inputs, where the result may depend on it.

    Raises:
        Unexplained: the code has something that is not known to leave the result a function of the
            inputs, the parameters and the module's settings. The message names the line.
        Exception: an operation on these tensors failed, as it does in the original.
    """
    children: dict[str, Callable[..., Any]] = {n: module._modules[n] for n in live}  # type: ignore
    reader = Interpreter(module, children, width)
    reader.device = inputs[0].device.type
    try:
        with torch.no_grad(), tally() as counts:
            args = [Traced(x, role="input", step=f"input {i}") for i, x in enumerate(inputs)]
            result = reader.forward(module, args, {})
    except Unexplained as e:
        where = getattr(e, "line", None)
        raise Unexplained(f"{e} ({where})" if where else str(e)) from e
    except RecursionError as e:
        raise Unexplained("it is nested too deep") from e
    if not isinstance(result, Traced):
        raise Unexplained(f"it returns a {type(result).__name__}, not a tensor")
    calls = tuple((name, x.role) for name, x in reader.calls)
    return Reading(
        result.tensor,
        reader.by_rank,
        reader.own_gradient,
        calls,
        tuple(reader.found),
        counts,
        tuple(counts.clamps),
        (*counts.steps, (result.step, *result.memory.writes)),
        frozenset(reader.asked),
        frozenset(reader.autocasts),
    )


def still_holds(found: Sequence[tuple[Any, Any, Any]]) -> bool:
    """Whether what a code used of its surroundings (`Reading.found`) is still what it was."""
    return surroundings.held(found)
