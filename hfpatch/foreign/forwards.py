"""A user's own forward for a class beside the original: what both return, write and leave."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hfpatch.foreign import reads
from hfpatch.foreign.gradients import results_of_others, upstream
from hfpatch.foreign.inside import attributes_in, parts_of, side_by_side, tensors_in
from hfpatch.foreign.memory import Held, Very, bits, form
from hfpatch.foreign.nearby import Named, named_in, shaken, stretched, unlike
from hfpatch.foreign.process import Process, unseeded
from hfpatch.foreign.questions import LARGE, Question, questions_of
from hfpatch.proof.keys import fingerprint
from hfpatch.proof.replicas import copied_apart
from hfpatch.proof.subject import version

Tensor = torch.Tensor
Forward = Callable[..., Any]

#: How far a result may be from the original's, in epsilons of its dtype relative to the largest
#: value of its row: a block's worth of roundings. Gradients: this many times as far.
LIMIT, GRADIENT = 64.0, 4.0
#: Of the largest value of a tensor, what its values are measured by at least: large terms cancel.
_FLOOR = 2.0**-10
#: Values that tell how large those of a column are.
_NEIGHBOURS = 32
#: How often the numbers are changed in place, and how often a call is repeated then.
_CHANGES, _REPEATS = 2, 6
#: Of the largest gradient, what the others may be off in answer to values that no sample has.
_GROSS = 0.05
#: Times that the original is asked about numbers that are a rounding off, and what else they are
#: multiplied by.
_SHAKES, _STRETCHES = 3, (2.0**-6, 2.0**6)
#: What begins the reasons that are found where gradients are recorded.
_RECORDED = "where gradients are recorded, "

#: What calls that record no gradients run in: `torch.no_grad` or `torch.inference_mode`.
Mode = Callable[[], Any]
#: The copy that the original runs on, and the replacement's.
_Modules = tuple[nn.Module, nn.Module]


class Different(Exception):
    """How a forward differs from the original."""


@unseeded()
def compare_forwards(
    module: nn.Module,
    original: Forward,
    replacement: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    gradients: bool,
    inference: bool = False,
    few: bool = False,
) -> tuple[float, float]:
    """Run both on copies of the module and of the inputs, again and again, and differentiate them.

    inference: whether they run under `torch.inference_mode`; the copies are made outside of it.
    few: with a handful of other values, of a call that is like one that was compared before.

    Returns the largest absolute and relative error.

    Raises:
        Different: they are not alike.
        CannotReplicateError: nothing was called, since it would write to the module or an input.
    """
    mode: Mode = torch.inference_mode if inference else torch.no_grad
    asked = _Comparison(module, original, replacement, (args, kwargs), mode)
    if asked.with_other_numbers():
        asked.with_written_results()
    asked.with_other_buffers()
    reading: list[Any] = []
    for kind in _UPSTREAMS if gradients else ():
        asked.recorded(kind)
        reading.append(reads.key_of(replacement))
    if gradients and reading[-3] != reading[-2] != reading[-1]:
        names = ", ".join(f"`{n}`" for n in reads.names_changed(*reading[-2:]))
        raise Different(f"what its backward reads changes with each call: {names}")
    asked.with_other_values(few)
    if gradients:
        asked.with_other_values(True, recorded=True)
    if not all(k.stays() for k in asked.kept):
        raise Different("a later call changed the result of an earlier one")
    return asked.worst[0], asked.worst[1]


@dataclass
class _Comparison:
    """Two forwards of one module, and a call; each question runs on copies of its own.

    Attributes:
        worst: the largest absolute and relative error so far.
        kept: results of ours, which no later call may change.
    """

    module: nn.Module
    original: Forward
    replacement: Forward
    inputs: Any
    mode: Mode
    worst: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept: list[_Kept] = field(default_factory=list)

    def _copies(self) -> tuple[_Modules, list[Any]]:
        """Of the module and of the inputs, for theirs and for ours."""
        on = copied_apart(self.module, "it"), copied_apart(self.module, "it")
        return on, [_copied(self.inputs) for _ in range(2)]

    def with_other_numbers(self) -> bool:
        """Both, again after the numbers changed in place; whether the original takes others. Ours
        again and again then."""
        on, given = self._copies()
        reading: list[Any] = []
        for again in range(_CHANGES + 1):
            if again:  # what is kept of a tensor by its address or its version is stale
                for held in (*given, *(list(m.parameters()) for m in on)):
                    _stir(held)
            if again == _CHANGES:
                _accumulate(on)
            found = self._both(on, given, again > 0)
            if found is None:
                return False
            theirs, ours = found
            reading.append(reads.key_of(self.original))
            _compare(ours, theirs, self.worst, "", LIMIT)
            _aliases(ours, theirs, given, on)
            self.kept.append(_Kept(ours, (given[1], *attributes_in(on[1]).values())))
        if reading[0] != reading[1] != reading[2]:
            names = ", ".join(f"`{n}`" for n in reads.names_changed(*reading[-2:]))
            raise Different(f"the original writes to what it does not: {names}")
        self._repeat(on, given)
        return True

    def _repeat(self, on: _Modules, given: list[Any]) -> None:
        """The same call again and again, of both: what they are given may be a cache that grows."""
        for i in range(_REPEATS):
            reading = reads.key_of(self.replacement) if i == _REPEATS - 1 else None
            try:
                theirs = self._call(self.original, on[0], given[0])
            except Exception:  # such a cache is full
                break
            ours = self._call(self.replacement, on[1], given[1])
            _compare(ours, theirs, self.worst, "called again, ", LIMIT)
            self.kept.append(_Kept(ours, (given[1], *attributes_in(on[1]).values())))
            if reading is not None and (after := reads.key_of(self.replacement)) != reading:
                names = ", ".join(f"`{n}`" for n in reads.names_changed(reading, after))
                raise Different(f"what it reads changes with each call: {names}")
        if moved := reads.iterators_of(self.replacement):
            raise Different(f"it reads iterators, which each call may move on: {', '.join(moved)}")
        if others := reads.others_of(self.replacement):
            raise Different(f"it reads what may be another at each call: {', '.join(others)}")

    def _call(self, forward: Forward, on: nn.Module, given: Any) -> Any:
        """One call; what it changes of the process is set back."""
        args, kwargs = given
        before = Process.now()
        try:
            with self.mode():
                return forward(on, *args, **kwargs)
        finally:
            before.changed()

    def with_written_results(self) -> None:
        """Both once more after what they returned was written to, as a caller may (`x += y`):
        memory that is used again is stale. Nothing is compared where the original's own result
        changes."""
        on, given = self._copies()
        found = self._both(on, given, again=True)
        if found is None:
            return
        expected = pytree.tree_map_only(Tensor, Tensor.clone, found[0])
        for result, held, arguments in zip(found, on, given, strict=True):
            _write_to(result, _storages(arguments, *attributes_in(held).values()))
        try:
            theirs = self._call(self.original, on[0], given[0])
            _compare(theirs, expected, [0.0, 0.0], "again ", 0.0)
        except Exception:  # it keeps its result, too, or is not to be called again
            return
        ours = self._call(self.replacement, on[1], given[1])
        _compare(ours, theirs, self.worst, "after its first result was written to, ", LIMIT)

    def with_other_buffers(self) -> None:
        """Both once more after the floating buffers changed: what was folded from them is stale.
        The original may not take other numbers in a buffer, which ends this comparison."""
        if not _floating_buffers(self.module):
            return
        on, given = self._copies()
        for again in (False, True):
            if again:
                for held in on:
                    _stir(_floating_buffers(held))
            found = self._both(on, given, again)
            if found is None:
                return
            what = "after its buffers changed, " if again else ""
            _compare(found[1], found[0], self.worst, what, LIMIT)
            _aliases(found[1], found[0], given, on)

    def _both(self, on: _Modules, given: list[Any], again: bool) -> tuple[Any, Any] | None:
        """(the original's result, the replacement's); None where the original does not take the
        changed values."""
        states = _State.of(on[0]), _State.of(on[1])
        writable = _Writable.of(on[0], given[0]), _Writable.of(on[1], given[1])
        before = Process.now()
        try:
            args, kwargs = given[0]
            with self.mode():
                theirs = self.original(on[0], *args, **kwargs)
        except Exception:
            if again:
                before.changed()
                return None
            raise
        after = Process.now()
        before.changed()
        try:
            args, kwargs = given[1]
            with self.mode():
                ours = self.replacement(on[1], *args, **kwargs)
            changed = after.changed()
        finally:
            before.changed()
        if changed:
            raise Different(f"it changed {', '.join(changed)}")
        _compare_written(on, given, states, writable, "")
        return theirs, ours

    def with_other_values(self, few: bool, recorded: bool = False) -> None:
        """Both with values that neither a sample nor the first call of a kind need have: as large
        and as small as the dtype holds, equal, sorted, NaN, infinite; and with other whole numbers
        and truth values. Nothing is compared where the original refuses them."""
        leaves = [t for t in pytree.tree_leaves(self.inputs) if isinstance(t, Tensor)]
        few = few or sum(t.numel() for t in leaves) > LARGE
        on: _Modules | None = None
        for question in questions_of(self.inputs, few, recorded):
            if on is None:
                on = copied_apart(self.module, "it"), copied_apart(self.module, "it")
            if self._with_values(question, on, recorded) or question.of_weights:
                on = None  # what a call wrote, e.g. a running mean that is NaN now, hides the next

    def _with_values(self, question: Question, on: _Modules, recorded: bool) -> bool:
        """Whether the original wrote to what its module holds."""
        given = [_copied(self.inputs, requires_grad=recorded) for _ in range(2)]
        if not all(question.put(m, g) for m, g in zip(on, given, strict=True)):
            return False
        writable = _Writable.of(on[0], given[0]), _Writable.of(on[1], given[1])
        what = f"with {question.what}, "
        before = Process.now()
        try:
            try:
                theirs = self._answer(self.original, on[0], given[0], recorded)
            except Exception:  # its own
                return True
            after = Process.now()
            before.changed()
            ours = self._answer(self.replacement, on[1], given[1], recorded)
            changed = after.changed()
        finally:
            before.changed()
        if changed:
            raise Different(f"{what}it changed {', '.join(changed)}")
        wrote = False
        for name, other, mine, by_original in writable[0].rows(writable[1]):
            if not by_original:
                _compare_bits(mine, other, f"{what}it wrote to {name}")
            wrote |= by_original
        if pytree.tree_structure(ours.results) != pytree.tree_structure(theirs.results):
            raise Different(f"{what}its result is built in another way than the original's")
        if unlike(ours.named(), theirs.named(), (), (), LIMIT, _scale_of) is not None:
            near, far = self._references(question, recorded)
            why = unlike(ours.named(), theirs.named(), near, far, LIMIT, _scale_of)
            if why is not None:
                raise Different(f"{what}{why}")
        if question.of_gradients and theirs.gradients is not None:
            if ours.gradients is None:
                raise Different(f"{what}its results have no gradient")
            _compare_grossly(ours.gradients, theirs.gradients, what)
        return wrote

    def _answer(self, forward: Forward, on: nn.Module, given: Any, recorded: bool) -> _Answer:
        gradients: Any = None
        if recorded:
            for p in (p for p in on.parameters() if p.is_floating_point()):
                p.requires_grad_()
            found = _Recorded(on, forward, given, "dense", False)
            results, gradients, given = found.results, found.gradients, found.called
        else:
            args, kwargs = given
            with self.mode():
                results = forward(on, *args, **kwargs)
        left = _named(given, on)
        for name, _ in on.named_parameters(remove_duplicate=False):
            left.pop(f"module.{name}", None)
        return _Answer(results, gradients, left)

    def _references(self, question: Question, recorded: bool) -> tuple[list[Named], list[Named]]:
        """What the original gives of numbers that are a rounding off, and in fp64; and of larger
        and of smaller ones."""
        near: list[Named] = []
        far: list[Named] = []
        for seed in range(_SHAKES + 1 + len(_STRETCHES)):
            before = Process.now()
            try:
                on = copied_apart(self.module, "it")
                given = _copied(self.inputs, requires_grad=recorded)
                question.put(on, given)
                if not seed:
                    on, given = on.double(), _in_fp64(given)
                elif seed <= _SHAKES:
                    shaken((given, list(on.parameters())), seed)
                else:
                    stretched(given, _STRETCHES[seed - _SHAKES - 1])
                found = self._answer(self.original, on, given, recorded).named()
            except Exception:  # it takes no fp64
                continue
            finally:
                before.changed()
            (near if seed <= _SHAKES else far).append(found)
        return near, far

    def recorded(self, kind: str) -> None:
        """Both where gradients are recorded, and their backwards: a forward can tell that case from
        others, so all that is compared without gradients is compared there as well.

        kind: of `_UPSTREAMS`.
        """
        on, given = self._to_record(kind)
        results = _no_leaves(self.inputs) if kind == "as called" else kind in _OF_RESULTS
        if kind in _ACCUMULATED:
            _accumulate(on)
        states = _State.of(on[0]), _State.of(on[1])
        before = Process.now()
        try:
            theirs = _Recorded(on[0], self.original, given[0], kind, results)
            after = Process.now()
            before.changed()
            ours = _Recorded(on[1], self.replacement, given[1], kind, results)
            changed = after.changed()
        finally:
            before.changed()
        if changed:
            raise Different(f"{_RECORDED}it changed {', '.join(changed)}")
        if not ours.kept.stays():
            raise Different("its backward changed its result")
        _compare(ours.results, theirs.results, self.worst, _RECORDED, LIMIT)
        called = [theirs.called, ours.called]
        _aliases(ours.results, theirs.results, called, on)
        _compare_written(on, called, states, (theirs.writable, ours.writable), _RECORDED)
        if theirs.gradients is not None:
            if ours.gradients is None:
                raise Different("its results have no gradient")
            far = LIMIT * GRADIENT
            try:
                _compare(ours.gradients, theirs.gradients, [0.0, 0.0], "the gradient of ", far)
            except Different:  # one may be nothing but roundings, as that of a bias of keys
                self._compare_near(ours.gradients, theirs.gradients, kind, results)
            for i in ours.upstreams.keys() & theirs.upstreams.keys():
                wrote = "its backward wrote to the gradient of its result"
                _compare_bits(ours.upstreams[i], theirs.upstreams[i], wrote)
            if theirs.second is not None:
                if ours.second is None:
                    raise Different("a second backward through the same graph failed")
                try:
                    _compare(ours.second, theirs.second, [0.0, 0.0], "the second gradient of ", far)
                except Different:
                    self._compare_near(ours.second, theirs.second, kind, results, second=True)
                if not ours.gradients_stay:
                    raise Different("its second backward changed the gradients of the first")
        self.kept.append(ours.kept)

    def _to_record(self, kind: str) -> tuple[_Modules, list[Any]]:
        """Copies whose parameters and inputs need the gradients that are asked about."""
        on = copied_apart(self.module, "it"), copied_apart(self.module, "it")
        for p in (p for m in on for p in m.parameters() if p.is_floating_point()):
            if kind != "as called":
                p.requires_grad_(kind != "inputs alone")
        needs = None if kind == "as called" else kind != "parameters alone"
        return on, [_copied(self.inputs, requires_grad=needs) for _ in range(2)]

    def _compare_near(
        self, ours: Any, theirs: Any, kind: str, results: bool | set[int], second: bool = False
    ) -> None:
        """Gradients again, with what the original's are of numbers a rounding away and in fp64."""
        near: list[Named] = []
        for seed in range(_SHAKES + 1):
            before = Process.now()
            try:
                (on, _), (given, _) = self._to_record(kind)
                if seed:
                    shaken((given, list(on.parameters())), seed)
                else:
                    on, given = on.double(), _in_fp64(given)
                found = _Recorded(on, self.original, given, kind, results)
            except Exception:  # it takes no fp64
                continue
            finally:
                before.changed()
            near.append(named_in(found.second if second else found.gradients))
        far = LIMIT * GRADIENT
        if (why := unlike(named_in(ours), named_in(theirs), near, (), far, _scale_of)) is not None:
            which = "second " if second else ""
            raise Different(f"the {which}gradient of {why}")


@dataclass(frozen=True)
class _Answer:
    """What one call gave, and what it left in its arguments and its module."""

    results: Any
    gradients: Any
    left: dict[str, Any]

    def named(self) -> Named:
        return [
            *named_in(self.results),
            *(pair for name, held in self.left.items() for pair in named_in(held, name)),
        ]


def _compare_grossly(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    """Gradients, by the largest number of all: what roundings alone make other than 0 may be large
    where the inputs are."""
    if not all(bool(g.isfinite().all()) for g in theirs):
        return
    largest = max((float(g.abs().max()) for g in theirs if g.numel()), default=0.0)
    for a, b in zip(ours, theirs, strict=True):
        if b.numel() and not bool(((a - b).abs() <= _GROSS * largest).all()):
            raise Different(f"{what}the gradient differs from the original's")


def _in_fp64(given: Any) -> Any:
    made: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            wide = value.detach().double()
            made[id(value)] = wide.requires_grad_(value.requires_grad)
        return made[id(value)]

    return pytree.tree_map(one, given)


class _Kept:
    """A result, and its bits when it was made; none of what lies in the memory of an input."""

    def __init__(self, result: Any, inputs: Any) -> None:
        places = _storages(inputs)
        self._tensors = [
            t.detach()  # and no graph
            for t in tensors_in(result)
            if t.untyped_storage().data_ptr() not in places
        ]
        self._before = [bits(t).clone() for t in self._tensors]

    def stays(self) -> bool:
        """Whether the result is what it was."""
        return all(map(torch.equal, self._before, map(bits, self._tensors)))


def _stir(inputs: Any) -> None:
    """Other numbers in the same memory, uncounted."""
    for t in pytree.tree_leaves(inputs):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel():
            with torch.inference_mode(t.is_inference()):
                extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
                t.data.as_strided((extent,), (1,), t.storage_offset()).mul_(0.75)


def _floating_buffers(module: nn.Module) -> list[Tensor]:
    """Those whose numbers can be changed in place: no quantized, sparse or other special ones."""
    return [
        b
        for b in module.buffers()
        if type(b) is Tensor
        and b.layout == torch.strided
        and (b.is_complex() or (b.is_floating_point() and b.element_size() > 1))
    ]


def _write_to(result: Any, places: set[int]) -> None:
    """Other numbers in all floating tensors of a result that lie nowhere else."""
    for t in tensors_in(result):
        dense = t.layout == torch.strided
        if dense and t.is_floating_point() and _storages(t).isdisjoint(places):
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                t.detach().fill_(0.5)


def _accumulate(on: _Modules) -> None:
    """Parameters have a gradient of a backward before, as in every step of a training but one."""
    for p in (p for m in on for p in m.parameters() if p.is_floating_point()):
        if type(p) is nn.Parameter and p.layout == torch.strided:
            p.grad = torch.ones_like(p)


@dataclass(frozen=True)
class _State:
    """What a module holds, beside the numbers of its parameters and buffers.

    Attributes:
        settings: its attributes, of all modules inside as well.
        parts: by where they are, hooks and tensors, and what can be changed of these in place.
    """

    settings: Any
    parts: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        parts: dict[str, Any] = {}
        for path, m in module.named_modules(remove_duplicate=False):
            start = f"{path}." if path else ""
            for name, held in vars(m).items():
                if name.endswith("_hooks") and isinstance(held, dict):
                    parts[start + name] = tuple(map(Very, held.values()))
            parts[f"{start}training"] = m.training
            parts[f"{start}non-persistent"] = frozenset(m._non_persistent_buffers_set)
            for name, child in m._modules.items():
                parts[start + name] = Very(child)
            for name, t in (*m._parameters.items(), *m._buffers.items()):
                plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided
                parts[start + name] = Very(t), form(t) if plain else None
        return cls(fingerprint(module), parts)

    def changed(self, now: _State) -> set[str]:
        """The names of the parts that are others now."""
        names = self.parts.keys() | now.parts.keys()
        return {n for n in names if self.parts.get(n) != now.parts.get(n)}


@dataclass(frozen=True)
class _Writable:
    """The tensors that a call can write to, by what they are called; what buffers held before, and
    how often others had been written to: PyTorch's batch norm writes to its buffers uncounted."""

    tensors: dict[str, list[Tensor]]
    before: dict[str, list[Tensor | int | None]]

    @classmethod
    def of(cls, module: nn.Module, given: Any) -> _Writable:
        tensors: dict[str, list[Tensor]] = {
            "its input": [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)],
            "the module's parameters": list(module.parameters()),
            "the module's buffers": list(module.buffers()),
        }
        before: dict[str, list[Tensor | int | None]] = {
            name: [
                t.detach().clone() if name == "the module's buffers" else version(t) for t in held
            ]
            for name, held in tensors.items()
        }
        return cls(tensors, before)

    def rows(self, other: _Writable) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
        """Of each tensor its name, itself, that of `other`, and whether this one was written to."""
        for name, held in self.tensors.items():
            for mine, its, before in zip(held, other.tensors[name], self.before[name], strict=True):
                if isinstance(before, Tensor):
                    wrote = not _same_bits(mine, before)
                else:
                    wrote = before is not None and version(mine) != before
                yield name, mine, its, wrote


def _compare_written(
    on: _Modules,
    given: list[Any],
    states: tuple[_State, _State],
    writable: tuple[_Writable, _Writable],
    what: str,
) -> None:
    """What ours wrote to that the original did not, and what both left: in the inputs, in what
    these hold, and in what the module holds."""
    theirs, ours = writable
    for name, other, mine, wrote in theirs.rows(ours):
        if not wrote:
            _compare_bits(mine, other, f"{what}it wrote to {name}")
    theirs_on, ours_on = on
    their_state, our_state = _State.of(theirs_on), _State.of(ours_on)
    if our_state.settings != states[1].settings and their_state.settings == states[0].settings:
        raise Different(f"{what}it changed attributes of the module")
    if changed := sorted(states[1].changed(our_state) - states[0].changed(their_state)):
        raise Different(f"{what}it changed the module's `{changed[0]}`")
    _compare_left(given, on, what)


def _compare_left(given: list[Any], on: _Modules, what: str) -> None:
    """What a caller finds in the inputs and in the module after the call: a cache, a loss."""
    theirs, ours = (_named(*one) for one in zip(given, on, strict=True))
    if missing := sorted(theirs.keys() ^ ours.keys()):
        raise Different(f"{what}it does not leave `{missing[0]}` as the original does")
    for argument, value in theirs.items():
        for name, a, b in side_by_side(argument, ours[argument], value):
            where = f"{what}what it leaves in `{name}` is not the original's: "
            if not isinstance(b, Tensor):
                _compare_values(a, b, where, "left")
                continue
            if a.requires_grad != b.requires_grad:
                raise Different(f"{where}one of the two requires a gradient")
            if b.layout == torch.strided and type(b) in (Tensor, nn.Parameter):
                _compare_tensors(a, b, [0.0, 0.0], where, LIMIT)


def _named(given: Any, module: nn.Module) -> dict[str, Any]:
    """The arguments, and what a module holds."""
    args, kwargs = given
    found: dict[str, Any] = {f"argument {i}": a for i, a in enumerate(args)} | kwargs
    found.update((f"module.{name}", v) for name, v in attributes_in(module).items())
    return found


def _copied(inputs: Any, requires_grad: bool | None = False) -> Any:
    """The inputs with tensors of their own, of the same strides; what is one object in the inputs
    is one in the copies, since a forward may ask (`if query is key`).

    requires_grad: of the floating tensors; None for that of each.
    """
    copies: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = one(value)
        return copies[id(value)]

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copied_apart(value, f"the `{type(value).__name__}` that it is called with")
        if type(value) not in (Tensor, nn.Parameter):
            raise Different(f"an input is a {type(value).__name__}, which cannot be copied")
        scaled = value.is_floating_point() or value.is_complex()
        needs = value.requires_grad if requires_grad is None else requires_grad
        with torch.inference_mode(value.is_inference() and not needs):
            if value._is_view() or not value.is_contiguous() or value.data_ptr() % 64:
                copied = Held.like(value).tensor
            else:  # nor shall its copy be a view
                copied = value.detach().clone()
        return copied.requires_grad_() if scaled and needs else copied

    return pytree.tree_map(once, inputs)


def _compare_bits(ours: Tensor, theirs: Tensor, what: str) -> None:
    if ours.requires_grad != theirs.requires_grad or not _same_bits(ours, theirs):
        raise Different(what)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(bits(a.detach()), bits(b.detach()))


def _storages(*values: Any) -> set[int]:
    """Where tensors lie."""
    return {t.untyped_storage().data_ptr() for t in tensors_in(*values) if t.numel()}


def _aliases(ours: Any, theirs: Any, given: list[Any], on: _Modules) -> None:
    """A result in the memory of an input, of what the module holds or of another result, where the
    original's is not."""
    pairs = [
        (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr())
        for a, b in zip(tensors_in(ours), tensors_in(theirs), strict=False)
        if a.numel()
    ]
    in_theirs, in_ours = map(_storages, given)
    of_theirs, of_ours = (_storages(*attributes_in(m).values()) for m in on)
    first: dict[int, int] = {}
    for mine, other in pairs:
        if mine in in_ours and other not in in_theirs:
            raise Different("it returned a tensor in the memory of an input")
        if mine in of_ours and other not in of_theirs:
            raise Different("it returned a tensor in the memory of a parameter or a buffer")
        if first.setdefault(mine, other) != other:
            raise Different("it returned two tensors in one memory")


def _compare(ours: Any, theirs: Any, worst: list[float], what: str, limit: float) -> None:
    mine, spec = pytree.tree_flatten(ours)
    others, expected = pytree.tree_flatten(theirs)
    if spec != expected:
        if len(mine) != len(others):
            raise Different(f"it returned {len(mine)} values, the original {len(others)}")
        raise Different(f"it returned {_container(ours)}, the original {_container(theirs)}")
    for a, b in zip(mine, others, strict=True):
        if isinstance(b, Tensor):
            _compare_tensors(a, b, worst, what, limit)
        else:
            _compare_values(a, b, what)


def _container(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, Tensor) else "a tensor"


def _compare_values(a: Any, b: Any, what: str, did: str = "returned") -> None:
    if type(a) is not type(b):
        raise Different(f"{what}it {did} a {type(a).__name__}, the original a {type(b).__name__}")
    if isinstance(b, (float, complex)):
        eps = LIMIT * torch.finfo(torch.float32).eps
        same = a == b or (a != a and b != b)
        if not same and isinstance(b, float):
            same = math.isclose(a, b, rel_tol=eps)
    elif (_has_no_equality(b) or dataclasses.is_dataclass(b)) and (
        parts := parts_of(b)
    ) is not None:
        _compare(dict(parts_of(a) or ()), dict(parts), [0.0, 0.0], what, LIMIT)
        return
    else:
        try:
            same = bool(a == b)
        except Exception as e:
            raise Different(f"{what}a {type(b).__name__} of its result cannot be compared") from e
    if not same:
        raise Different(f"{what}it {did} {a!r:.60}, the original {b!r:.60}")


def _has_no_equality(value: Any) -> bool:
    equality: Any = type(value).__eq__
    return equality is object.__eq__


def _compare_tensors(a: Any, b: Tensor, worst: list[float], what: str, limit: float) -> None:
    form = f"{what}it returned {_signature(a)}, the original {_signature(b)}"
    if isinstance(a, Tensor) and not what and a.requires_grad != b.requires_grad:
        raise Different(f"{form}, of which one requires a gradient")
    if isinstance(a, Tensor) and (a.is_neg(), a.is_conj()) != (b.is_neg(), b.is_conj()):
        raise Different(f"{form}, of which one is negated or conjugated when it is read")
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        raise Different(form)
    dense = what in ("", _RECORDED)  # as the original's; gradients may have any strides
    if dense and a.numel() and b.is_contiguous() and not a.is_contiguous():
        raise Different(f"{what}it returned strides {a.stride()}, the original {b.stride()}")
    if not a.numel():
        return
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not b.is_floating_point():
        if not torch.equal(a, b):
            raise Different(f"{what}its whole numbers or truth values are not the original's")
        return
    eps = torch.finfo(b.dtype).eps
    x, y = a.detach().double(), b.detach().double()
    if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(
        x[~x.isfinite()].nan_to_num(), y[~y.isfinite()].nan_to_num()
    ):
        raise Different(f"{what}NaN or infinity comes out elsewhere than in the original")
    x, y = x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0)
    if not y.dim():
        x, y = x[None], y[None]
    distance = (x - y).abs()
    relative = float((distance / _scale_of(y)).max())
    if not relative <= limit * eps:
        raise Different(f"{what}it differs from the original by {relative:.2e} (relative)")
    worst[0], worst[1] = max(worst[0], float(distance.max())), max(worst[1], relative)


def _scale_of(y: Tensor) -> Tensor:
    """What each value of a result may be off in proportion to: the largest value of its row, or of
    its columns with their neighbours, whichever is less. A number that masks, such as -1e9, is
    measured by itself."""
    size = y.abs()
    masks = torch.zeros_like(size, dtype=torch.bool)
    top = size.max()
    at_top = size == top
    below = size.masked_fill(at_top, 0.0)
    if int(at_top.sum()) > 1 and 0 < float(below.max()) < float(top) * _FLOOR:
        masks, own, size = at_top, size, below
    rows = size.amax(-1, keepdim=True)
    columns = size.reshape(-1, size.shape[-1]).amax(0)
    wide = -(-_NEIGHBOURS // size[..., 0].numel()) | 1
    if wide > 1:
        columns = F.max_pool1d(columns[None, None], wide, 1, wide // 2)[0, 0]
    scale = torch.minimum(rows, columns)
    scale = torch.maximum(scale, _FLOOR * size.max()).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(masks, own, scale) if bool(masks.any()) else scale


def _signature(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return type(value).__name__


class _Recorded:
    """A call that records gradients, and its backward.

    Attributes:
        results: what it returned.
        kept: that, as it was before the backward.
        upstreams: what its backward was given, by the position of the result.
        writable: what it could write to.
        called: the inputs that it was given.
        gradients: by the floating inputs and parameters, zeros where there is none; None if nothing
            has one.
        second: those of half the gradients of its results, through the same graph; None if it has
            no second backward.
        gradients_stay: whether the first ones were the same after it.
    """

    def __init__(
        self, module: nn.Module, run: Forward, inputs: Any, kind: str, results_of: bool | set[int]
    ) -> None:
        """results_of: whether its inputs are results of other operators, or the places of such."""
        params = list(module.parameters())
        self.second: list[Tensor] | None = None
        with torch.enable_grad():
            self.called = results_of_others(inputs, results_of)
            args, kwargs = self.called
            self.writable = _Writable.of(module, self.called)
            self.results = run(module, *args, **kwargs)
            held = attributes_in(module).values()
            self.kept = _Kept(self.results, (inputs, self.called, *held))
            # with what it left: a loss beside its result
            places = tensors_in(self.results, self.called, *held)
            given = {id(t) for t in tensors_in(inputs, self.writable.tensors)}
            results = {
                i: y
                for i, y in enumerate(places)
                if y.requires_grad and not (y.is_leaf or id(y) in given)
            }
            # by identity: an argument can be given twice, or be a parameter
            leaves = {
                id(t): t
                for t in (*pytree.tree_leaves(inputs), *params)
                if isinstance(t, Tensor) and t.requires_grad
            }.values()
            self.upstreams = {i: upstream(y, kind, i) for i, y in results.items()}
            self.gradients: list[Tensor] | None = None
            if not results or not leaves:
                return
            ends, ups = list(results.values()), list(self.upstreams.values())
            wanted = list(leaves)
            found = torch.autograd.grad(ends, wanted, ups, allow_unused=True, retain_graph=True)
            first = _filled(found, wanted)
            self.gradients = [g.clone() for g in first]
            try:
                again = torch.autograd.grad(ends, wanted, [0.5 * u for u in ups], allow_unused=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # checkpoints of the older kind have one backward
                return
            self.second = _filled(again, wanted)
        self.gradients_stay = all(map(torch.equal, map(bits, first), map(bits, self.gradients)))


def _filled(gradients: Sequence[Tensor | None], of: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, of, strict=True)]


def _no_leaves(inputs: Any) -> set[int]:
    """The places of the inputs that are results of other operators."""
    return {
        i
        for i, t in enumerate(pytree.tree_leaves(inputs))
        if isinstance(t, Tensor) and not t.is_leaf
    }


#: What gradients are of (see `upstream`), by all that floats or, of a dense one, by half of it, and
#: by what needs one in the call itself.
_UPSTREAMS = (
    *("as called", "parameters alone", "inputs alone", "transposed", "cut out", "summed"),
    *("small", "huge", "dense"),  # alike but for their numbers: what a backward reads is as it was
)
#: Those with which inputs are results of other operators, as in a model; else they are leaves.
_OF_RESULTS = ("summed", "small", "inputs alone")
#: Those where parameters have a gradient of a backward before.
_ACCUMULATED = ("transposed", "cut out")
