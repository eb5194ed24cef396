"""The only module that writes to a model: commit, roll back, restore.

A swap replaces the innermost forward of one instance. Where that forward lives depends on who
wrapped the module: nowhere in particular (the class's), `module._old_forward` under one of
accelerate's hooks, or a function reference under diffusers' hook registry. Wrappers stay as they
are, so their hooks go on firing, and whoever wraps the module later wraps the adapter.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hfpatch import packing
from hfpatch.direct_calls import DIRECT, Direct, is_direct
from hfpatch.errors import PatchError
from hfpatch.kernels.kernelized import kernel_of
from hfpatch.proof.keys import BROUGHT, dict_of, is_brought
from hfpatch.proof.subject import Forward

_MARK = "__hfpatch__"


@dataclass(frozen=True)
class Slot:
    """A place that holds a module's forward."""

    owner: Any  # the module, or a hook's function reference
    attribute: str

    def get(self) -> Any:
        return self.owner.__dict__.get(self.attribute)

    def set(self, value: Any) -> None:
        # straight into __dict__: nn.Module.__setattr__ would make a child of a module-valued one
        self.owner.__dict__[self.attribute] = value

    def clear(self) -> None:
        self.owner.__dict__.pop(self.attribute, None)

    def exists(self) -> bool:
        return self.attribute in self.owner.__dict__


@dataclass(frozen=True)
class Captured(Slot):
    """Where somebody's callable around the module's forward holds ours, which is the `owner`."""

    put: Callable[[Any], object]  # sets what the callable holds there

    def get(self) -> Any:
        return self.owner

    def set(self, value: Any) -> None:
        bound = isinstance(self.owner, types.MethodType)
        self.put(value if bound else getattr(value, "__func__", value))

    def clear(self) -> None:
        raise AssertionError("a wrapper needs something to call")

    def exists(self) -> bool:
        return True


@dataclass(frozen=True)
class Swapped:
    """What an adapter remembers: enough to describe it and to undo it, also on a copied module."""

    adapter: Forward  # the function that carries this: wrappers copy its attributes to themselves
    details: Any  # the report's `Swap`
    had_forward: bool  # whether the instance held a (native) forward in the slot before
    packed: tuple[tuple[weakref.ref[nn.Parameter], ...], ...] = ()  # whose memory was moved


def slots(module: nn.Module) -> Iterator[Slot]:
    """Every place that may hold `module`'s innermost forward."""
    yield Slot(module, "forward")
    yield Slot(module, "_old_forward")
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        yield Slot(reference, "original_forward")
        yield Slot(reference, "forward")
    forward = module.__dict__.get("forward")
    if forward is not None and adapter_of(forward) is None and not is_native(module, forward):
        yield from _captured(module, forward, 4, set())


def _captured(module: nn.Module, wrapper: Any, depth: int, seen: set[int]) -> Iterator[Slot]:
    """Where callables that were put around our adapter hold it: transformers' tensor parallelism
    does so, and whoever writes `old = m.forward; m.forward = lambda x: old(x)`.

    Some take the function without its module, as accelerate does for mixed precision.
    """
    if id(wrapper) in seen:
        return
    seen.add(id(wrapper))
    for held, put in held_by(wrapper):
        if (mark := adapter_of(held)) is not None:
            if isinstance(held, types.MethodType):
                own = held.__self__ is module
            else:
                own = mark.adapter.__wrapped__ is type(module).forward  # type: ignore[attr-defined]
            if own:
                yield Captured(held, "", put)
        elif depth and callable(held) and not isinstance(held, (nn.Module, type)):
            yield from _captured(module, held, depth - 1, seen)


def held_by(wrapper: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """What a callable may call, each with what puts another in its place."""
    if isinstance(wrapper, types.MethodType):
        if not isinstance(wrapper.__self__, (nn.Module, type)):
            yield from _items(getattr(wrapper.__self__, "__dict__", None))
        wrapper = wrapper.__func__
    if isinstance(wrapper, functools.partial):
        for i, held in enumerate((wrapper.func, *wrapper.args)):
            yield held, functools.partial(_put_in_partial, wrapper, i)
        yield from _items(wrapper.keywords)
    elif isinstance(wrapper, types.FunctionType):
        for cell in wrapper.__closure__ or ():
            try:
                yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            except ValueError:  # not assigned yet
                continue
        for i, held in enumerate(wrapper.__defaults__ or ()):
            yield held, functools.partial(_put_in_defaults, wrapper, i)
        yield from _items(wrapper.__kwdefaults__)
    else:
        yield from _items(getattr(wrapper, "__dict__", None))


def _items(found: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    for key, held in list(found.items()) if isinstance(found, dict) else ():
        if key != "__wrapped__":  # which is not called
            yield held, functools.partial(found.__setitem__, key)


def _put_in_partial(wrapper: functools.partial[Any], at: int, value: Any) -> None:
    parts = [wrapper.func, *wrapper.args]
    parts[at] = value
    state = parts[0], tuple(parts[1:]), wrapper.keywords, wrapper.__dict__
    wrapper.__setstate__(state)  # type: ignore[attr-defined]


def _put_in_defaults(wrapper: types.FunctionType, at: int, value: Any) -> None:
    defaults = list(wrapper.__defaults__ or ())
    defaults[at] = value
    wrapper.__defaults__ = tuple(defaults)


def is_native(module: nn.Module, forward: Any) -> bool:
    """Whether `forward` is the class's own, bound to this module."""
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def adapter_of(forward: Any) -> Swapped | None:
    """What we wrote on `forward`, if it is ours."""
    # it may be any attribute: of an object with a `__getattr__` of its own nothing is asked
    function = forward.__func__ if type(forward) is types.MethodType else forward
    found = (dict_of(function) or {}).get(_MARK)
    return found if isinstance(found, Swapped) and found.adapter is function else None


def foreign_forward(module: nn.Module) -> str | None:
    """Who else replaced this instance's forward, so that ours would undo or bypass theirs."""
    held = [(s, s.get()) for s in slots(module) if s.get() is not None]
    if any(is_native(module, f) or adapter_of(f) is not None for _, f in held):
        return None
    if not held:
        return None
    forward = held[0][1]
    if (kernel := kernel_of(forward)) is not None:
        return f"`kernels.kernelize` gave it {kernel}, which stays"
    where = getattr(forward, "__module__", None) or type(forward).__module__
    name = getattr(forward, "__qualname__", None) or type(forward).__qualname__
    return f"its forward was already replaced by `{where}.{name}`"


def may_have_fused_head(module: nn.Module) -> bool:
    """Whether a forward stands on a model that has a head: `hfpatch.losses.taken` reads it."""
    own = "forward" in module.__dict__
    return own and getattr(type(module), "get_output_embeddings", None) is not None


def swapped(module: nn.Module) -> Swapped | None:
    """What stands in `module`, if we patched it."""
    for slot in slots(module):
        found = adapter_of(slot.get())
        if found is not None:
            return found
    return None


def _innermost(module: nn.Module) -> Slot | None:
    """The slot of the native forward or of our adapter; None if the class's forward runs bare."""
    for slot in slots(module):
        forward = slot.get()
        if forward is not None and (is_native(module, forward) or adapter_of(forward) is not None):
            return slot
    return None


@dataclass(frozen=True)
class _Undo:
    slot: Slot
    existed: bool
    value: Any

    def __call__(self) -> None:
        if self.existed:
            self.slot.set(self.value)
        else:
            self.slot.clear()


def _remember(slot: Slot) -> _Undo:
    return _Undo(slot, slot.exists(), slot.get())


def _replica(self: nn.Module) -> nn.Module:
    """`nn.DataParallel`'s copy of a module for another GPU, with the class's own forward.

    Such a copy has the `__dict__` of its module: a forward that is bound to that one, and would
    compute with its parameters, on its GPU.
    """
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)  # type: ignore[no-untyped-call]
    for attribute in ("forward", *_BESIDE):
        if _is_ours(replica.__dict__.get(attribute)):
            del replica.__dict__[attribute]
    return replica


def _state(self: nn.Module) -> Any:
    """What a pickle of any kind and `copy.copy` hold of a patched module: the unpatched one."""
    own = getattr(type(self), "__getstate__", None)  # Python 3.10's classes have none
    state = own(self) if own is not None else self.__dict__
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # with slots
        return _State(state[0], self), state[1]
    return _State(state, self) if isinstance(state, dict) else state


class _State(dict[str, Any]):
    """Attributes without ours; a deep copy, which stays patched, is given all of them."""

    def __init__(self, whole: dict[str, Any], module: nn.Module) -> None:
        super().__init__(whole)
        self._whole = whole
        for attribute in ("forward", *_BESIDE):
            if _is_ours(self.get(attribute)):
                del self[attribute]
        if _is_ours(self.get("_old_forward")):  # a hook calls it
            self["_old_forward"] = types.MethodType(type(module).forward, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._whole, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # loads where hfpatch is not installed, and under `torch.load(weights_only=True)`
        return collections.OrderedDict, (), None, None, iter(self.items())


#: What stands on a patched instance beside its forward, so that its copies are right.
_COMPANIONS = {"_replicate_for_data_parallel": _replica, "__getstate__": _state}
for _name, _function in _COMPANIONS.items():
    _function.__name__ = _name  # a pickle holds a method by this name: the class's own, then

#: Attributes of an instance that may be ours, beside its forward: a swap may bring methods.
_BESIDE = (*_COMPANIONS, "generate", DIRECT)


def _is_ours(method: Any) -> bool:
    function = getattr(method, "__func__", None)
    return (
        adapter_of(method) is not None
        or function in _COMPANIONS.values()
        or is_brought(method)
        or is_direct(method)
    )


@dataclass(frozen=True)
class Fresh:
    """A swap to make."""

    module: nn.Module
    make: Callable[[], Forward]  # its adapter
    details: Any  # the report's `Swap`
    packs: Sequence[Sequence[nn.Module]] = ()  # linear layers whose weights shall be one
    #: Methods of the instance that come with it, by name; where somebody set one it stays.
    brings: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    direct: Direct | None = None


def _pack(groups: Sequence[Sequence[nn.Module]]) -> Iterator[tuple[nn.Parameter, ...]]:
    for group in groups:
        try:
            yield from packing.pack(group)
        except torch.cuda.OutOfMemoryError:
            return  # a speed-up only: `project` calls the layers one by one


def _unpack(module: nn.Module, mark: Swapped) -> None:
    own = {id(p) for p in module.parameters()}
    for refs in mark.packed:
        alive = [p for ref in refs if (p := ref()) is not None]
        if own.isdisjoint(map(id, alive)):  # the marks of a copy tell of the original's
            continue
        packing.unpack(alive)


def _write(fresh: Fresh, done: list[Callable[[], object]]) -> None:
    """Carry out one swap; appends what undoes it, step by step."""
    module, forward = fresh.module, fresh.make()
    slot = _innermost(module)
    previous = adapter_of(slot.get()) if slot is not None else None
    if slot is None:
        slot, had = Slot(module, "forward"), False
    else:
        had = previous.had_forward if previous is not None else True
    packed: list[tuple[nn.Parameter, ...]] = []

    def take_apart() -> None:
        for group in packed:
            packing.unpack(group)

    done.append(take_apart)
    packed.extend(_pack(fresh.packs))
    kept = previous.packed if previous is not None else ()
    packed_refs = kept + tuple(tuple(weakref.ref(p) for p in group) for group in packed)
    done.append(_remember(slot))
    forward.__name__ = "forward"
    forward.__qualname__ = f"{type(module).__qualname__}.forward"
    forward.__wrapped__ = type(module).forward  # type: ignore[attr-defined]
    setattr(forward, _MARK, Swapped(forward, fresh.details, had, packed_refs))
    for attribute, function in _COMPANIONS.items():
        companion = Slot(module, attribute)
        done.append(_remember(companion))
        companion.set(types.MethodType(function, module))
    _bring(fresh, done)
    slot.set(types.MethodType(forward, module))
    direct = Slot(module, DIRECT)
    own = slot.owner is module and slot.attribute == "forward"
    if fresh.direct is None or not own or direct.exists():
        return
    if (call := fresh.direct(slot.get(), forward)) is not None:
        done.append(_remember(direct))
        direct.set(types.MethodType(call, module))


def _bring(fresh: Fresh, done: list[Callable[[], object]]) -> None:
    """Put the swap's methods on the instance; those of a swap before it go."""
    for attribute in _BESIDE:
        method = Slot(fresh.module, attribute)
        if attribute in _COMPANIONS or (method.exists() and not _is_ours(method.get())):
            continue
        done.append(_remember(method))
        method.clear()
        if (function := fresh.brings.get(attribute)) is not None:
            setattr(function, BROUGHT, function)
            method.set(types.MethodType(function, fresh.module))


def _erase(module: nn.Module, done: list[Callable[[], object]]) -> bool:
    """Take our adapter off; appends what undoes it before anything is written."""
    for slot in slots(module):
        mark = adapter_of(slot.get())
        if mark is None:
            continue
        done.append(_remember(slot))
        _erase_companions(module, done)
        _unpack(module, mark)
        undo = getattr(mark.details, "undo", None)
        if undo is not None:
            undo(module)
        if slot.owner is module and slot.attribute == "forward" and not mark.had_forward:
            slot.clear()
        else:  # under a wrapper, which needs something to call
            slot.set(types.MethodType(type(module).forward, module))
        _erase_mentions(module, done)
        return True
    return False


def _erase_mentions(module: nn.Module, done: list[Callable[[], object]]) -> None:
    """Take our adapter out of what is not called, but may be put back or read: attributes to which
    somebody saved the module's forward, and what `functools.update_wrapper` noted of ours."""
    for attribute, value in list(module.__dict__.items()):
        if attribute != "forward" and _is_adapter_of(module, value):
            saved = Slot(module, attribute)
            done.append(_remember(saved))
            saved.set(types.MethodType(type(module).forward, module))
    for slot in slots(module):  # a wrapper may hold it more than once
        if adapter_of(slot.get()) is not None:
            done.append(_remember(slot))
            slot.set(types.MethodType(type(module).forward, module))
    wrapper, left = module.__dict__.get("forward"), 64
    while left and wrapper is not None and adapter_of(wrapper) is None:
        within = getattr(wrapper, "__wrapped__", None)
        _rename(getattr(wrapper, "__func__", wrapper), module, done)
        wrapper, left = within, left - 1


def _is_adapter_of(module: nn.Module, forward: Any) -> bool:
    return adapter_of(forward) is not None and getattr(forward, "__self__", None) is module


def _rename(wrapper: Any, module: nn.Module, done: list[Callable[[], object]]) -> None:
    """Let a wrapper carry the names and attributes of the class's forward where it has ours."""
    held = getattr(wrapper, "__dict__", None)
    own = getattr(type(module), "forward", None)  # a scripted module's class has none
    if own is None or not isinstance(held, dict):
        return
    names: dict[str, Any] = {}
    new: dict[str, Any] = {}
    gone: list[str] = []
    if isinstance(mark := held.get(_MARK), Swapped):
        ours = mark.adapter
        for one in functools.WRAPPER_ASSIGNMENTS:
            if not hasattr(own, one):
                continue
            copied, right = getattr(ours, one, None), getattr(own, one)
            if getattr(wrapper, one, None) == copied:
                names[one] = right
            if one in held and held[one] == copied:  # a function around a partial has both
                new[one] = right
        # a copied wrapper has copies of ours
        gone = [k for k, v in vars(ours).items() if "__hfpatch" in k or held.get(k) is v]
        noted = getattr(own, "__dict__", {})
        new |= {k: v for k, v in noted.items() if k not in held}
    if _is_adapter_of(module, held.get("__wrapped__")):
        new["__wrapped__"] = types.MethodType(own, module)
    if not (names or new or gone):
        return
    before, named = dict(held), {name: getattr(wrapper, name) for name in names}

    def undo() -> None:
        for name, value in named.items():
            setattr(wrapper, name, value)
        for name in new.keys() - before.keys():
            del held[name]
        held.update(before)

    done.append(undo)
    for name, value in names.items():
        setattr(wrapper, name, value)
    for name in gone:
        held.pop(name, None)
    held.update(new)


def _erase_companions(module: nn.Module, done: list[Callable[[], object]]) -> None:
    for companion in (Slot(module, attribute) for attribute in _BESIDE):
        if _is_ours(companion.get()):
            done.append(_remember(companion))
            companion.clear()


def commit(
    stale: Iterable[nn.Module],
    fresh: Iterable[Fresh],
    last: Callable[[list[Callable[[], object]]], None] = lambda done: None,
) -> None:
    """Take our adapters off `stale` modules and put new ones on; all of it or nothing.

    Args:
        stale: modules that carry an adapter and shall not.
        fresh: what to put where.
        last: what else belongs to it; given a list, to which it appends what undoes it.

    Raises:
        PatchError: something failed; the model is as it was.
    """
    done: list[Callable[[], object]] = []
    try:
        for module in stale:
            _erase(module, done)
        for one in fresh:
            _write(one, done)
        last(done)
    except BaseException as e:
        failed = _each(reversed(done))
        if not isinstance(e, Exception):
            raise
        left = f", except in {len(failed)} of {len(done)} steps: {failed[0]}" if failed else ""
        raise PatchError(
            f"patching failed ({type(e).__name__}: {e}); every module was put back as it was{left}"
        ) from e


def _each(steps: Iterable[Callable[[], object]]) -> list[BaseException]:
    """Carry out every step, also behind one that fails; what was raised."""
    failed: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as e:
            failed.append(e)
    return failed


def restore(modules: Iterable[nn.Module]) -> int:
    """Take our adapters off; returns how many there were.

    An interrupt in the middle is raised when all of them are off.

    Raises:
        PatchError: an adapter could not be taken off in two attempts; all the others are.
    """
    count = 0
    errors: list[BaseException] = []
    stuck: list[str] = []
    for module in modules:
        if (mark := swapped(module)) is None:
            _erase_companions(module, [])  # where somebody wrote over the forward alone
            _erase_mentions(module, [])
            continue
        count += getattr(mark.details, "counts", True)
        attempt = functools.partial(_erase, module, [])
        failed = _each([attempt])
        if failed and swapped(module) is not None:
            failed += _each([attempt])
        errors += failed
        if swapped(module) is not None:
            stuck.append(type(module).__name__)
    interrupts = [e for e in errors if not isinstance(e, Exception)]
    if interrupts:
        raise interrupts[0]
    if stuck:
        raise PatchError(
            f"{len(stuck)} modules ({', '.join(sorted(set(stuck)))}) could not be restored "
            f"({type(errors[0]).__name__}: {errors[0]}); call `hfpatch.restore` again"
        ) from errors[0]
    return count
