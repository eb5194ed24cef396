"""What was decided for a model: swaps and skips, as data that can be printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: `Skip.kind` to its meaning, for the report and the docs.
SKIP_KINDS = {
    "excluded": "left out by `exclude=`",
    "off": "its op is switched off by `kernels=`",
    "unavailable": "no source of `kernels=` gave a kernel for its op that runs here",
    "no gain": "the original is already as fast",
    "unsupported": "a class, dtype, device or state without a kernel",
    "mismatch": "the original computes something else",
    "unexplained": "its code does something that no formula accounts for, or could not be read",
    "rejected": "the kernel failed verification",
    "foreign": "somebody else replaced the module's forward",
}


#: `Swap.op` of a head whose logits are deferred, and of a fused head's function (`hfpatch.losses`).
HEAD, FUSED_HEAD = "linear_cross_entropy", "fused_head"


@dataclass(frozen=True)
class Swap:
    """One module whose forward a kernel takes over.

    `max_abs_error` and `max_rel_error` are the probe's, in the model's own dtypes: kernel against
    original, relative to each row's largest value; 0 without `verify`. `mode` is that of the apply.
    """

    path: str
    class_name: str
    op: str
    formula: str
    source: str
    version: str
    devices: tuple[str, ...]
    max_abs_error: float
    max_rel_error: float
    mode: str = "inference"


@dataclass(frozen=True)
class Refusal:
    """Why a module is not swapped, before it is said of which: what a `Skip` is made of.

    `found` is what its code used of its surroundings (`hfpatch.reading`): it may be swapped once
    that is something else.
    """

    kind: str
    reason: str
    found: tuple[Any, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Skip:
    """One nominated module that stays as it is, and why (`kind` is a key of SKIP_KINDS)."""

    path: str
    class_name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A block whose calls are captured, rewritten and proven as they come (`hfpatch.regions`).

    `state` is "at its first call" until then, "fused", or "left" to the swaps of its parts, for the
    `reason`. `found` are the ops and products that fused calls run, `before` and `after` how many
    operators a call takes, `error` and `original` how far the fused block and the original are from
    a wider dtype, relative to the result's norm: the worst over its kinds of calls.
    """

    path: str
    class_name: str
    state: str
    reason: str = ""
    found: tuple[str, ...] = ()
    before: int = 0
    after: int = 0
    error: float = 0.0
    original: float = 0.0


@dataclass(frozen=True)
class Timed:
    """Two ways to make a call, as they were timed: of a module with `gain="time"`, of a model with
    `cuda_graphs="auto"` (`op` is "cuda_graphs" then).

    Attributes:
        call: shapes and dtypes of its tensors.
        modules: how many are of this kind.
        original_ms, patched_ms: the least time of a call; None where there was none yet.
        kept: "original", "patched" or "being timed".
    """

    class_name: str
    op: str
    call: str
    modules: int
    original_ms: float | None
    patched_ms: float | None
    kept: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The decisions for one model. Printed, or bare in a REPL, it is a table.

    `mode` is the argument; in `status`, "mixed" where the swaps have several. `planned_for` is the
    device of a machine that this one is not, such as "cuda:9.0": nothing was proven there.
    """

    model: str
    mode: str
    swaps: tuple[Swap, ...]
    skips: tuple[Skip, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    planned_for: str = ""
    candidates: tuple[Candidate, ...] = ()
    times: tuple[Timed, ...] = ()

    def __str__(self) -> str:
        from hfpatch.report import as_text

        return as_text(self, applied=False)

    __repr__ = __str__

    def to_json(self, indent: int | None = 2) -> str:
        """Settings, versions, every swap and skip, as JSON."""
        from hfpatch.report import Report

        return Report(self, applied=False).to_json(indent)

    def _repr_html_(self) -> str:
        from hfpatch.report import as_html

        return as_html(self, applied=False)
