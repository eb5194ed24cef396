"""Blocks of one kind, equal except in their weights: which of their calls are fused, and how.

A call of a structure and sizes that were not seen before is captured, rewritten and proven while
the original computes it; from then on such calls of every block of the kind run fused.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.opaque import Given
from hfpatch.per_object import PerObject
from hfpatch.proof.copies import CannotReplicateError
from hfpatch.proof.dispatch import OtherAttention
from hfpatch.proof.proving import may_prove, quietly
from hfpatch.proof.subject import is_dense
from hfpatch.regions.apart import apart
from hfpatch.regions.beside import hooked, stand_beside
from hfpatch.regions.caches import state_of
from hfpatch.regions.capture import Captured, KnownLeaf, Uncapturable, capture, children, is_wall
from hfpatch.regions.deferred import is_deferred
from hfpatch.regions.emit import Bind, Run, emit
from hfpatch.regions.foreseen import Like, like_of, names_of
from hfpatch.regions.given import looks
from hfpatch.regions.guard import functions_around, guard
from hfpatch.regions.interrupts import held_back
from hfpatch.regions.nodes import groups_of
from hfpatch.regions.proof import (
    Disproved,
    Evidence,
    Imprecise,
    check_disturbed,
    compare,
    prepare_disturbed,
    prepare_proof,
)
from hfpatch.regions.rules import launches, rewrite
from hfpatch.regions.shapes import Shapes
from hfpatch.regions.structure import Structure, Unstructured, take_apart

Tensor = torch.Tensor

_NOTHING = "nothing in it was found to fuse"
#: Captures of a kind; calls of further structures or sizes run the original.
_MOST_VARIANTS = 12
#: Refusals of a kind, each of a structure: what is given another Python number at each call has one
#: at each, and would be captured anew for ever.
_MOST_REFUSED = 12
#: Captures of one structure that differ in their number of operators, as a loop over time has it.
_MOST_COUNTS = 3
_numbers = itertools.count(1)
#: Sizes that are remembered, of a long-lived server.
_MOST_SIZES = 4096
#: Proofs that found numbers which decide nothing (NaN, no memory), before it is given up.
_MOST_TRIES = 3


@dataclass(frozen=True)
class Variant:
    """One capture, ready to run."""

    shapes: Shapes
    run: Run
    packs: tuple[tuple[str, ...], ...]
    same: Callable[[nn.Module], bool]
    #: Whether numbers in its inputs are such as the graph takes for granted.
    given: Callable[[list[Tensor]], bool]
    found: tuple[str, ...]
    before: int
    after: int
    evidence: Evidence
    source: str
    #: What its results are like, if a compiled graph can be told.
    like: Like | None


@dataclass
class Kind:
    """What blocks of equal code and settings share. It holds no module."""

    name: str
    leaves: Mapping[str, KnownLeaf]
    numbers: tuple[tuple[str, str], ...]
    bind: Bind
    #: Whether calls whose cache has entries are captured too.
    past: bool = True
    #: The functions of PyTorch that its code names; captures are of these.
    around: Any = ()
    #: What diffusers' dispatcher would run for a block's attentions: a capture holds what it ran.
    backends: Callable[[nn.Module], Any] | None = None
    #: Whether a block is one of this kind still, whatever its dtype and its layers.
    as_planned: Callable[[nn.Module], bool] = field(default=lambda _: True)
    variants: dict[Any, list[Variant]] = field(default_factory=dict)
    #: Why calls of a structure are left to the original.
    refused: dict[Any, str] = field(default_factory=dict)
    #: Why calls are none that can be captured.
    unfit: str = ""
    #: Where, and why, calls of one block decide nothing now: somebody put a hook there, which may
    #: be gone at the next call.
    aside: PerObject[nn.Module, tuple[str, str]] = field(default_factory=PerObject)
    #: Blocks that were called while something in them was in training mode.
    trained: PerObject[nn.Module, bool] = field(default_factory=PerObject)
    #: Its name in compiled graphs.
    number: str = field(default_factory=lambda: str(next(_numbers)))
    #: The blocks of the kind.
    blocks: PerObject[nn.Module, bool] = field(default_factory=PerObject)
    #: What a call that was not decided yet will be like; None: the original's.
    _foreseen: dict[Any, Like | None] = field(default_factory=dict)
    _known: dict[Any, Variant | None] = field(default_factory=dict)
    _tries: dict[Any, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Kind:
        return self

    @property
    def decided(self) -> list[Variant]:
        """Every capture that calls run by."""
        # a list first: another thread may decide on a call meanwhile
        return [v for found in list(self.variants.values()) for v in found]

    @property
    def decisions(self) -> int:
        """How often a call was decided on: more of them, and there was one of a new kind."""
        return len(self.decided) + len(self.refused) + sum(self._tries.values())

    def left_to_autocast(self) -> bool:
        """True; it is noted where nothing else is known of the kind's calls."""
        self.unfit = "it is called under autocast: its parts run"
        return True

    def split(self, block: nn.Module) -> str | None:
        """Why calls of this block are none that can be captured now: others' may be."""
        try:
            if self.backends is not None:
                self.backends(block)
        except OtherAttention as e:
            return str(e)
        return None

    def lookup(self, args: Any, kwargs: Any, block: nn.Module) -> tuple[Any, Any, Any, Any]:
        """(the variant or None, the call's structure, its tensors, its cache); the structure is
        None where the call cannot be one."""
        try:
            structure, tensors, cache = take_apart(args, kwargs)
        except Unstructured as e:
            self.unfit = str(e)
            return None, None, None, None
        sizes = []
        for t in tensors:
            if (type(t) is not Tensor and type(t) is not nn.Parameter) or not is_dense(t):
                return None, None, None, None
            sizes.append((t.shape, t.dtype, t.device, t.is_contiguous() or t.stride()))
        if cache is not None:
            found = state_of(cache, block, self.numbers)
            if isinstance(found, str):
                if not is_deferred():  # a step's cache, beside which the original runs once
                    self.unfit = found
                return None, None, None, None
            state, held = found
            if state.past and not self.past:
                self.unfit = "its cache has entries; `blocks=True` captures such calls too"
                return None, None, None, None
            structure = Structure(structure.shape, state)
            tensors += held
            for i, t in enumerate(held):
                # how a past lies in memory is the cache's affair: it alone reads it
                lies = (state.past and i < 2) or t.is_contiguous() or t.stride()
                sizes.append((t.shape, t.dtype, t.device, lies))
        chosen = None
        if self.backends is not None:
            try:
                chosen = self.backends(block)
            except OtherAttention:  # see `split`
                return None, None, None, None
        key = (structure, tuple(sizes), chosen)
        try:
            return self._known[key], (structure, key), tensors, cache
        except KeyError:
            return self._find(structure, key, tensors), (structure, key), tensors, cache

    def _find(self, structure: Structure, key: Any, tensors: list[Tensor]) -> Variant | None:
        """A variant that holds for these sizes; remembered, if there is one."""
        kinds = _kind_of(structure, key)
        for variant in self.variants.get(kinds, ()):
            if variant.shapes.hold(tensors):
                return self._remember(key, variant)
        return None

    def _remember(self, key: Any, variant: Variant | None) -> Variant | None:
        if len(self._known) >= _MOST_SIZES:
            self._known.clear()
        self._known[key] = variant
        return variant

    def decide(
        self, block: nn.Module, call: Any, tensors: list[Tensor], original: Callable[[], Any]
    ) -> Any:
        """The original's result; on the way such a call is captured and proven, or refused."""
        structure, key = call
        kinds = _kind_of(structure, key)
        over = len(self.decided) >= _MOST_VARIANTS or len(self.refused) >= _MOST_REFUSED
        if over or kinds in self.refused:
            self._remember(key, None)
            return original()
        if not all(t.numel() for t in tensors):  # no numbers: nothing is proven, of others neither
            self._remember(key, None)
            return original()
        counts = {v.before for v in self.variants.get(kinds, ())}
        if len(counts) >= _MOST_COUNTS:
            self._refuse(kinds, key, "its code takes another number of operators at each size")
            return original()
        device = tensors[0].device.type if tensors else "cpu"
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            return original()
        if in_training(block) is not None:  # calls in evaluation mode are others, of all models
            self.trained[block] = True
            return original()
        place, _ = self.aside.get(block) or (None, "")
        if (found := hooked(block, place)) is not None:  # nor does it say anything of others
            self.aside[block] = found
            return original()
        if not self.as_planned(block):  # what it is now says nothing of others either
            return original()
        with may_prove((id(self), kinds)) as may:
            if not may:
                return original()
            if self._find(structure, key, tensors) is not None:
                return original()
            if functions_around(block) != self.around:
                return original()  # until the next `apply`, which makes it another kind
            result: list[Any] = []
            failed: list[BaseException] = []

            def once() -> Any:
                if not result:
                    try:
                        result.append(original())
                    except BaseException as e:
                        failed.append(e)
                        raise
                return result[0]

            try:
                variant = self._prove(block, structure, tensors, device, once)
            except (Uncapturable, Disproved) as e:
                self._refuse(kinds, key, str(e))
            except _Undecided as e:
                self._undecided(kinds, key, str(e))
            except torch.OutOfMemoryError:
                if failed:
                    raise
                self._undecided(kinds, key, "there was no memory to prove it")
            except Exception as e:  # any operator's own
                if failed:
                    raise
                self._refuse(kinds, key, _failed(e))
            else:
                self.variants.setdefault(kinds, []).append(variant)
                self._remember(key, variant)
            return once()

    def examine(
        self,
        block: nn.Module,
        args: Any,
        kwargs: Any,
        observe: Callable[[Captured, Any], None],
    ) -> Variant:
        """What one call becomes, for an explanation: nothing is kept, and no call is served by it.

        Raises:
            Uncapturable, Disproved: why it is left to its parts.
        """
        _, call, tensors, _ = self.lookup(args, kwargs, block)
        if call is None:
            raise Uncapturable(self.unfit or "a tensor of the call is of a class of its own")
        again = copy.deepcopy((args, kwargs))  # the original writes to a cache

        @functools.cache
        def original() -> Any:
            return type(block).forward(block, *again[0], **again[1])

        device = tensors[0].device.type
        return self._prove(block, call[0], tensors, device, original, observe)

    def foresee(self, given: Callable[[], Given]) -> str:
        """What a compiled graph must know of a call that may not have been decided: see
        `hfpatch.blocks.opaque.Foresight`. Nothing is proven: the operator's first call does it."""
        return apart(lambda: self._like(given()))

    def _like(self, given: Given) -> str:
        block = next((b for b, _ in self.blocks.items() if "forward" in b.__dict__), None)
        if block is None or in_training(block) is not None or hooked(block, "") is not None:
            return ""
        args, kwargs = given.apart(names_of(type(block).forward))
        variant, call, tensors, cache = self.lookup(args, kwargs, block)
        if call is None or cache is not None:
            return ""
        if variant is not None:
            like = variant.like
        else:
            structure, key = call
            if key not in self._foreseen:
                self._foreseen[key] = self._foresee(block, structure, key, tensors)
            like = self._foreseen[key]
        return "" if like is None else like.text(tensors, given.named)

    def _foresee(
        self, block: nn.Module, structure: Structure, key: Any, tensors: list[Tensor]
    ) -> Like | None:
        kinds = _kind_of(structure, key)
        over = len(self.decided) >= _MOST_VARIANTS or len(self.refused) >= _MOST_REFUSED
        if over or key in self._known or kinds in self.refused or not self.as_planned(block):
            return None
        if functions_around(block) != self.around:
            return None
        try:
            with quietly(tensors[0].device.type):
                captured = capture(
                    stand_beside(block), structure, tensors, self.leaves, self.numbers
                )
                like, before = like_of(captured), launches(captured.graph)
                _rewritten(captured, block)
        except (CannotReplicateError, Uncapturable) as e:
            self._refuse(kinds, key, str(e))
            return None
        except Exception as e:  # any operator's own
            self._refuse(kinds, key, _failed(e))
            return None
        if launches(captured.graph) >= before:
            self._refuse(kinds, key, _NOTHING)
            return None
        return like

    def _undecided(self, kinds: Any, key: Any, why: str) -> None:
        """Another call may decide it, a few times."""
        self._tries[kinds] = self._tries.get(kinds, 0) + 1
        if self._tries[kinds] >= _MOST_TRIES:
            self._refuse(kinds, key, why)

    def _refuse(self, kinds: Any, key: Any, why: str) -> None:
        self.refused[kinds] = why
        self._remember(key, None)

    def _prove(
        self,
        block: nn.Module,
        structure: Structure,
        tensors: list[Tensor],
        device: str,
        original: Callable[[], Any],
        observe: Callable[[Captured, Any], None] | None = None,
    ) -> Variant:
        """A variant, proven; `observe` is given the rewritten capture and the proof's half.
        `original` remembers what it gave."""
        given = (block, structure, tensors, device, original, observe)
        try:
            return self._prove_in(None, *given)
        except Imprecise:
            return self._prove_in(torch.float64, *given)

    def _prove_in(
        self,
        wide: torch.dtype | None,
        block: nn.Module,
        structure: Structure,
        tensors: list[Tensor],
        device: str,
        original: Callable[[], Any],
        observe: Callable[[Captured, Any], None] | None,
    ) -> Variant:
        """The same in one wide dtype (`prepare_proof`)."""
        with quietly(device):
            try:
                beside = stand_beside(block)
            except CannotReplicateError as e:
                raise Uncapturable(str(e)) from e
            captured = capture(beside, structure, tensors, self.leaves, self.numbers)
            like = like_of(captured)
            same = guard(block, captured.read, captured.called, self.numbers)
            if not same(block):
                raise Uncapturable("it is in training mode, or something was put around its parts")
            before = launches(captured.graph)
            proof = prepare_proof(captured, beside, tensors, structure.cache, wide)
            other = prepare_disturbed(captured, proof)
            found = _rewritten(captured, block)
            after = launches(captured.graph)
            if after >= before:
                raise Uncapturable(_NOTHING)
            given, tables_hold = looks(captured.graph)
            if not tables_hold(tensors):  # a gate of 0, or half types, would hide it from the proof
                raise Uncapturable("its RoPE has a table whose angles do not lie as its pairs do")
            run, source = emit(captured.graph, block, captured.result, self.bind)
            ours = proof.run(captured.graph, run)
            if tables_hold(other.tensors) and not check_disturbed(
                other, other.run(captured.graph, run)
            ):
                raise _Undecided("its results with other numbers were not finite")
            del other
        result = original()
        with quietly(device):
            evidence = compare(proof, ours, result)
        if observe is not None:
            observe(captured, proof)
        if evidence is None:
            raise _Undecided("its results were not finite")
        packs = tuple(
            paths for n in captured.graph.nodes for paths in groups_of(n.target) if len(paths) > 1
        )
        return Variant(
            captured.shapes, run, packs, same, given, tuple(found), before, after, evidence, source,
            like,
        )  # fmt: skip


def _rewritten(captured: Captured, block: nn.Module) -> list[str]:
    """Rewrite the graph of a capture by the rules; what was found."""
    linears = frozenset(p for p in captured.called if isinstance(block.get_submodule(p), nn.Linear))
    with held_back():  # it computes with sizes that are symbols
        return rewrite(captured.graph, linears)


@contextmanager
def runs_seen(kinds: Iterable[Kind]) -> Iterator[set[int]]:
    """The ids of blocks that ran fused meanwhile. A kind that is decided says so little of a block:
    the call that decides it, and one that its guard refuses, are the original's."""
    seen: set[int] = set()

    def watched(variant: Variant) -> Variant:
        def run(block: nn.Module, tensors: list[Tensor], cache: Any) -> Any:
            seen.add(id(block))
            return variant.run(block, tensors, cache)

        return replace(variant, run=run)

    every = list({id(k): k for k in kinds}.values())
    own = {id(v): v for kind in every for v in kind.decided}
    watching = {at: watched(v) for at, v in own.items()}
    for kind in every:
        _replace(kind, watching)
    try:
        yield seen
    finally:  # what was decided meanwhile stays
        back = {id(w): own[at] for at, w in watching.items()}
        for kind in every:
            _replace(kind, back)


def _replace(kind: Kind, others: Mapping[int, Variant]) -> None:
    """Other variants, by the ids of those that they replace."""
    for found in list(kind.variants.values()):
        found[:] = [others.get(id(v), v) for v in found]
    for key, variant in list(kind._known.items()):  # in place: the adapters hold it
        if variant is not None:
            kind._known[key] = others.get(id(variant), variant)


def in_training(module: nn.Module, path: str = "") -> str | None:
    """The path of a module that a capture reads and that is in training mode, "" for the block
    itself: no fused call stands in for it. None where there is none."""
    if module.training:
        return path
    for below, child in children(module, path):
        if not is_wall(child) and (found := in_training(child, below)) is not None:
            return found
    return None


def _failed(e: Exception) -> str:
    said = (str(e).splitlines() or [""])[0]  # further lines hold numbers
    return f"its proof failed: {type(e).__name__}: {said}"


class _Undecided(Exception):
    """What came out decides nothing; another call may."""


def _kind_of(structure: Structure, key: Any) -> Any:
    """The structure, and all of its tensors but their sizes; and the backends of its attentions."""
    return structure, tuple((len(s), d, v, c) for s, d, v, c in key[1]), key[2]
