"""Whose forward stands above a head, where it takes the head's weight itself, or may.

A head's logits are deferred where the head is called. TRL's trainers and Liger put a forward of
their own on the model, or on its class, which reads the head's weight in place of calling the head.
The swap of the head has no effect then, and nothing but the forward's code tells.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch import swap
from hfpatch.planning.plan import HEAD, Swap
from hfpatch.proof.keys import names_of
from hfpatch.proof.subject import class_of
from hfpatch.proof.unchanged import is_hooked

#: Where a stand-in keeps its note.
STAND_IN = "__hfpatch_fused_head__"

_GETTER = "get_output_embeddings"
_DEPTH = 6  # of callables that hold one another
_MOST = 200  # functions that are looked at
#: What is read of a weight by who does not take it: `lm_head(x.to(lm_head.weight.dtype))`.
_METADATA = frozenset({"dtype", "device", "shape", "ndim", "requires_grad", "is_meta"})
#: Instructions between a name that is loaded and what becomes of the value: a call of it.
_CALLS = frozenset({"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD", "PUSH_NULL", "NOP"})


def head_of(owner: Any) -> nn.Module | None:
    """The head of a model that makes a loss of its logits, by its own `get_output_embeddings`."""
    get = getattr(type(owner), _GETTER, None)
    # the class first: transformers' property warns in models that have no loss
    if get is None or not any(hasattr(o, "loss_function") for o in (type(owner), owner)):
        return None
    try:
        head = get(owner)
    except Exception:  # a base class that has none raises
        return None
    return head if isinstance(head, nn.Module) else None


def called_by(head: nn.Module) -> nn.Module:
    """What a call of a head calls in its place: PEFT's wrapper of one that is trained and saved
    whole (`modules_to_save`) calls the copy that its active adapter has. Else the head itself."""
    wrapper: Any = head
    cls = type(head)
    if cls.__name__ != "ModulesToSaveWrapper" or not cls.__module__.startswith("peft."):
        return head
    if "forward" in head.__dict__ or is_hooked(head):
        return head
    try:
        active = list(wrapper.active_adapters)
        if wrapper.disable_adapters or not active:
            found = wrapper.original_module
        else:
            found = wrapper.modules_to_save[active[0]]
    except (AttributeError, KeyError):  # of another version
        return head
    return found if isinstance(found, nn.Module) else head


def heads_among(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, nn.Module, str, set[str]]]:
    """(model, head, the head's path, names that the model's forward may call it by) of each model
    among `modules` whose head is there too."""
    paths: dict[int, str] = {}
    owners = []
    for path, module in modules:
        paths.setdefault(id(module), path)
        if (head := head_of(module)) is not None:
            owners.append((module, head))
    for owner, head in owners:
        inner = called_by(head)
        if id(inner) in paths:
            names = {p.rpartition(".")[2] for p, m in owner.named_modules() if m is head}
            yield owner, inner, paths[id(inner)], {_GETTER, *names}


def takers(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """(model, head, what to say) of each head among `modules`, by path, whose swap a forward above
    it may leave without effect. Nothing is run."""
    for owner, head, path, names in heads_among(modules):
        if (found := _taken(owner, names)) is not None:
            yield owner, head, f"`{path}`: {found}"


def unheard(model: nn.Module, said: frozenset[str]) -> list[str]:
    """Texts about swapped heads in `model` that are not in `said`."""
    return [
        text
        for _, head, text in takers(model.named_modules())
        if text not in said and is_swapped(head)
    ]


def is_swapped(head: nn.Module) -> bool:
    """Whether a head has our swap of heads."""
    mark = swap.swapped(head)
    return mark is not None and getattr(mark.details, "op", None) == HEAD


def _taken(owner: nn.Module, names: set[str]) -> str | None:
    walk = _Forwards(owner)
    cls = f"`{class_of(owner).__name__}`"
    for function in walk.own:
        if _reads_weight(function.__code__, names):
            return (
                f"the forward of {cls} takes the head's weight itself; in calls that do so the "
                "head's swap has no effect"
            )
    for function in walk.others:
        if any(_reads_weight(f.__code__, names) for f in reached(function)):
            return (
                f"`{_name(function)}` stands in for the forward of {cls} and takes the head's "
                "weight itself; in calls that do so its own loss runs and the head's swap has no "
                "effect"
            )
    touching = [f for f in walk.others if not names.isdisjoint(names_of(f.__code__))]
    if not walk.own:
        touching += [f for f in walk.others if f not in touching]
    if touching:
        return (
            f"`{_name(touching[0])}` stands in for the forward of {cls} and may take the head's "
            "weight itself; in calls that do so the head's swap has no effect"
        )
    return None


def _name(function: types.FunctionType) -> str:
    """By its code: `functools.wraps` gives a function the name of another."""
    return f"{_home(function)}.{function.__code__.co_name}"


def _home(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__", "?"))


@dataclass(frozen=True)
class StandIn:
    """On a function of ours: itself, the forward that it stands in for, and the report's entry."""

    function: Callable[..., Any]
    forward: types.FunctionType
    entry: Swap


def stand_in_of(forward: Any) -> StandIn | None:
    """What is noted on a stand-in of ours, bound or not; wrappers copy it to themselves."""
    function = forward.__func__ if type(forward) is types.MethodType else forward
    if not isinstance(function, types.FunctionType):
        return None
    found = vars(function).get(STAND_IN)
    return found if isinstance(found, StandIn) and found.function is function else None


@dataclass(frozen=True)
class Place:
    """Where a callable is held, and what puts another there."""

    held: Any
    put: Callable[[Any], object]

    @property
    def function(self) -> Any:
        """The Python function in it, if it is one."""
        return self.held.__func__ if type(self.held) is types.MethodType else self.held

    def exchange(self, function: Any, done: list[Callable[[], object]]) -> None:
        """Put a function there, bound where what is held is; appends what undoes it."""
        done.append(functools.partial(self.put, self.held))
        bound = type(self.held) is types.MethodType
        self.put(types.MethodType(function, self.held.__self__) if bound else function)


def entry_of(module: nn.Module) -> Swap | None:
    """The report's entry of a model whose fused head is served now."""
    if not swap.may_have_fused_head(module):
        return None
    marks = (stand_in_of(place.held) for place in forwards_of(module).places)
    return next((mark.entry for mark in marks if mark is not None), None)


def put_back(module: nn.Module, done: list[Callable[[], object]]) -> int:
    """Put the forward of a fused head back where ours stands, and appends what undoes it; how many
    were ours: one, or none."""
    if not swap.may_have_fused_head(module):
        return 0
    saved = [Place(v, swap.Slot(module, k).set) for k, v in list(module.__dict__.items())]
    count = 0
    for place in (*forwards_of(module).places, *saved):
        if (mark := stand_in_of(place.held)) is not None:
            place.exchange(mark.forward, done)
            count = 1
    return count


def forwards_of(owner: nn.Module) -> _Forwards:
    """What a call of a model runs before its modules."""
    return _Forwards(owner)


class _Forwards:
    """What a call of a model runs before its modules. own: forwards as its classes were written
    with them; others: what stands around them, or in their place; places: where others are."""

    def __init__(self, owner: nn.Module) -> None:
        self.own: list[types.FunctionType] = []
        self.others: list[types.FunctionType] = []
        self.places: list[Place] = []
        self._owner = owner
        self._homes = {c.__module__ for c in type(owner).__mro__ if "forward" in vars(c)}
        self._homes.discard(nn.Module.__module__)
        self._seen: set[int] = set()
        held = [slot for slot in swap.slots(owner) if slot.get() is not None]
        for slot in held:
            self._walk(slot.get(), slot.set, _DEPTH)
        if not held:
            self._walk(type(owner).forward, _nowhere, _DEPTH)

    def _walk(self, forward: Any, put: Callable[[Any], object], depth: int) -> None:
        if id(forward) in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(id(forward))
        if swap.adapter_of(forward) is not None:  # ours calls the class's
            return self._walk(type(self._owner).forward, _nowhere, depth)
        if swap.is_native(self._owner, forward):
            return self._walk(forward.__func__, _nowhere, depth)
        if (ours := stand_in_of(forward)) is not None:
            self.places.append(Place(forward, put))
            self._seen.add(id(ours.forward))
            return self._held_in(ours.forward, depth)
        function = forward
        if isinstance(forward, types.MethodType):
            function = forward.__func__
        elif not isinstance(forward, types.FunctionType) and callable(forward):
            function = type(forward).__call__
        if isinstance(function, types.FunctionType):
            if function.__code__.co_name == "forward" and _home(function) in self._homes:
                self.own.append(function)
                return None
            self.others.append(function)
            if type(forward) in (types.FunctionType, types.MethodType) and put is not _nowhere:
                self.places.append(Place(forward, put))
        return self._held_in(forward, depth)

    def _held_in(self, forward: Any, depth: int) -> None:
        for held, put in swap.held_by(forward) if depth else ():
            if callable(held) and not isinstance(held, (nn.Module, type)):
                self._walk(held, put, depth - 1)


def _nowhere(_: Any) -> None:
    raise AssertionError("a class's forward stays")


def reached(function: types.FunctionType) -> list[types.FunctionType]:
    """It, and the functions of its package that it and they find by their names."""
    package = _home(function).partition(".")[0]
    found = [function]
    for f in found:
        for name in sorted(names_of(f.__code__)):
            value = f.__globals__.get(name)
            if (
                isinstance(value, types.FunctionType)
                and value not in found
                and _home(value).partition(".")[0] == package
                and len(found) < _MOST
            ):
                found.append(value)
    return found


def _reads_weight(code: types.CodeType, names: set[str]) -> bool:
    """Whether code has `<head>.weight` for more than its dtype and the like. The head is an
    attribute or a variable of one of `names`, or a variable that such a value was stored in."""
    steps = [i for i in dis.get_instructions(code) if i.opname not in _CALLS]
    known = set(names)
    for step, then in itertools.pairwise(steps):
        if _loaded(step) in known and then.opname.startswith("STORE_"):
            known |= {n for n in _names_in(then.argval) if isinstance(n, str)}
    for i, step in enumerate(steps[:-1]):
        if _loaded(step) in known and _attribute(steps[i + 1]) == "weight":
            after = steps[i + 2] if i + 2 < len(steps) else None
            if after is None or _attribute(after) not in _METADATA:
                return True
    return any(_reads_weight(c, names) for c in code.co_consts if isinstance(c, types.CodeType))


def _loaded(step: dis.Instruction) -> Any:
    """The name of the value that an instruction leaves on top: the last of two."""
    return _names_in(step.argval)[-1] if step.opname.startswith("LOAD_") else None


def _names_in(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) and argval else (argval,)


def _attribute(step: dis.Instruction) -> Any:
    return step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
