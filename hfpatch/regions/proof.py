"""The proof of a captured block, on the arguments of a real call.

Three things are shown. The graph as it was captured gives the original's result. The rewritten
graph, each op by its formula, gives the same as the captured one in a wider dtype, to that dtype's
precision, measured against what the block adds to its input and not against the input. And the
fused block, as it will run, is no farther from the wide result than the original, apart from one
rounding. The second and third are shown again with other numbers, behind which nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from hfpatch.regions.caches import Scratch, State
from hfpatch.regions.capture import Captured
from hfpatch.regions.disturbed import Disturbed
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.structure import take_result

Tensor = torch.Tensor

#: How much of the original's error the fused block's may exceed it by, beside one epsilon: both
#: round at the same places, except where fusing keeps fp32 longer.
_TOLERANCE = 1.25
#: Epsilons of the wide dtype by which the rewritten graph may differ from the captured one.
_WIDE = 256
#: Epsilons of its dtype by which a replay of the capture may differ from the original.
_REPLAY = 8
#: By how much more the fused block may be off with other numbers: rounding grows with them, and
#: what is looked for, another formula, is off by far more.
_DISTURBED = 4.0


class Disproved(Exception):
    """Why a captured block is not used; the text is for the report."""


class Imprecise(Disproved):
    """Two graphs differ in fp32, the wide dtype, by more than its precision. Right ones do where a
    router's best experts tie in it, or scores are in the hundreds: fp64 tells."""


@dataclass(frozen=True)
class Evidence:
    """What a proof measured: errors relative to the largest of the wide result's norms."""

    fused: float
    original: float
    wide: float


@dataclass
class Proof:
    """Half a proof: what the capture gives, narrow and wide, on the tensors of one call."""

    block: nn.Module
    tensors: list[Tensor]
    replayed: list[Tensor]
    truth: list[Tensor]
    wide: torch.dtype
    rewritten: list[Tensor]
    cache: State | None = None
    held: int = 0  # how many of the tensors are the cache's

    def run(self, graph: Graph, run: Any) -> Any:
        """Run the rewritten graph in the wide dtype, and the fused block; returns its result.

        Raises:
            Disproved: the fused block failed, or wrote to its input.
        """
        self.rewritten = Interpreter(self.block, self.wide).run(graph, self.tensors)
        before = [t.clone() for t in self.tensors]
        try:
            held = self.tensors[len(self.tensors) - self.held :]
            ours = run(self.block, list(self.tensors), Scratch(self.cache, held))
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # any kernel's own
            raise Disproved(f"the fused block failed: {type(e).__name__}: {e}") from e
        if any(not _same(a, b) for a, b in zip(before, self.tensors, strict=True)):
            raise Disproved("the fused block wrote to its input")
        return ours


def prepare_proof(
    captured: Captured,
    block: nn.Module,
    tensors: Sequence[Tensor],
    cache: State | None,
    wide: torch.dtype | None = None,
) -> Proof:
    """Run the graph as it was captured. `wide`: None: the next wider dtype."""
    given = list(tensors)
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in given) or any(
        p.dtype in (torch.float16, torch.bfloat16) for p in block.parameters()
    )
    wide = wide or (torch.float32 if half else torch.float64)
    torch.set_float32_matmul_precision("highest")
    return Proof(
        block,
        given,
        Interpreter(block, None).run(captured.graph, given),
        Interpreter(block, wide).run(captured.graph, given),
        wide,
        [],
        cache,
        0 if cache is None else 2 * (cache.past + cache.kept),
    )


def prepare_disturbed(captured: Captured, proof: Proof) -> Proof:
    """The same with other numbers in its parameters and inputs, where nothing is behind a gate of
    zeros."""
    device = next((t.device for t in proof.tensors), torch.device("cpu"))
    disturbed = Disturbed(device)
    block, given = disturbed.block(proof.block), disturbed.inputs(proof.tensors)
    return prepare_proof(captured, block, given, proof.cache, proof.wide)


def compare(proof: Proof, ours: Any, theirs: Any) -> Evidence | None:
    """What the proof shows; None where the results are not finite, so that nothing is shown.

    Raises:
        Disproved: it is wrong.
    """
    mine, mine_tensors = take_result(ours, None) if not _has_cache(ours) else (None, [])
    their, their_tensors = take_result(theirs, None) if not _has_cache(theirs) else (None, [])
    if mine is None or their is None:
        raise Disproved("its result holds its cache")
    if mine.shape != their.shape:
        raise Disproved("the fused block returned another structure")
    return _evidence(proof, mine_tensors, their_tensors)


def check_disturbed(proof: Proof, ours: Any) -> bool:
    """The same with other numbers (`prepare_disturbed`), where the original is the graph as it was
    captured: that it gives the original's result is shown by `compare`. Whether anything is shown.

    Raises:
        Disproved: it is wrong.
    """
    _, tensors = take_result(ours, None)
    try:
        return _evidence(proof, tensors, proof.replayed, _DISTURBED) is not None
    except Disproved as e:
        raise type(e)(f"with other numbers in its parameters and inputs {e}") from e


def _evidence(
    proof: Proof, mine_tensors: list[Tensor], their_tensors: list[Tensor], slack: float = 1.0
) -> Evidence | None:
    worst = [0.0, 0.0, 0.0]
    groups = (mine_tensors, their_tensors, proof.replayed, proof.truth, proof.rewritten)
    if len({len(g) for g in groups}) != 1:
        raise Disproved("the fused block returned another number of tensors")
    for fused, eager, replay, truth, again in zip(*groups, strict=True):
        if (fused.shape, fused.dtype, fused.device) != (eager.shape, eager.dtype, eager.device):
            raise Disproved(
                f"the fused block returned {list(fused.shape)} {fused.dtype}, expected "
                f"{list(eager.shape)} {eager.dtype}"
            )
        if eager.is_contiguous() and not fused.is_contiguous():
            raise Disproved("the fused block returned a tensor whose elements lie apart")
        if not eager.is_floating_point():
            if not torch.equal(fused, eager):
                raise Disproved("the fused block returned other whole numbers")
            continue
        found = _errors(proof, fused, eager, replay, truth, again, slack)
        if found is None:
            return None
        worst = [max(a, b) for a, b in zip(worst, found, strict=True)]
    return Evidence(*worst)


def _has_cache(result: Any) -> bool:
    return not isinstance(result, (Tensor, tuple, list, dict))


def _errors(
    proof: Proof,
    fused: Tensor,
    eager: Tensor,
    replay: Tensor,
    truth: Tensor,
    again: Tensor,
    slack: float,
) -> tuple[float, float, float] | None:
    wide = truth.dtype
    finite = _is_finite(eager)
    if not torch.equal(finite, _is_finite(fused)):
        raise Disproved("the fused block is not finite where the original is, or the reverse")
    if not finite.all():  # a mask's -inf, or the least number: no error can be added up of it
        outside = ~finite
        if not torch.equal(fused[outside].isnan(), eager[outside].isnan()):
            raise Disproved(
                "the fused block is no number where the original is one, or the reverse"
            )
        zero = torch.zeros((), dtype=wide, device=truth.device)
        fused, eager, replay, truth, again = (
            torch.where(finite, t.to(wide), zero).to(t.dtype)
            for t in (fused, eager, replay, truth, again)
        )
    size = truth.norm()
    if not torch.isfinite(size):
        return None
    if not size:  # nothing to be relative to
        return (0.0, 0.0, 0.0) if torch.equal(fused, eager) and not again.any() else None
    # the stream that passes a block by may be much larger than what the block adds to it
    added = size
    for t in proof.tensors:
        if t.shape == truth.shape and t.is_floating_point():
            added = torch.minimum(added, (truth - t.to(wide)).norm())
    eps, narrow = torch.finfo(wide).eps, torch.finfo(eager.dtype).eps
    apart = (again.to(wide) - truth).norm()
    if not apart <= _WIDE * eps * (added + 0.05 * size):
        kind = Imprecise if wide == torch.float32 else Disproved
        raise kind(f"its rewritten graph is off by {float(apart / added):.1e} in {_short(wide)}")
    error = (fused.to(wide) - truth).norm() / size
    limit = (eager.to(wide) - truth).norm() / size
    if not torch.equal(replay, eager):
        drift = (replay.to(wide) - eager.to(wide)).norm() / size
        if not drift <= _REPLAY * narrow or not limit <= 4 * _REPLAY * narrow:
            raise Disproved(
                f"a replay of its capture is off by {float(drift):.1e} from the original"
            )
    allowed = float(limit * _TOLERANCE + narrow) * slack
    if not error <= allowed:
        raise Disproved(f"the fused block is off by {float(error):.2e}, expected <= {allowed:.2e}")
    return float(error), float(limit), float(apart / added)


def _is_finite(x: Tensor) -> Tensor:
    """Whether a number is one that errors can be measured of."""
    return x.isfinite() & (x.abs() < _HUGE.get(x.dtype, 1e30))


#: What masks are filled with is larger.
_HUGE = {torch.float16: 6e4}


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
