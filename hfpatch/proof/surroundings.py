"""PyTorch's functions that the code of modules finds by name: somebody may replace them.

A fused forward computes by itself what these computed when it was proven, so its proof is one of
the functions that stood there then. Leaves remember what their code found as it was read
(`hfpatch.reading.surroundings`); blocks are compared as a whole, so their code is searched here.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfpatch.proof.keys import Same, function_in, kept_while_planning, names_of
from hfpatch.proof.library import is_own
from hfpatch.proof.subject import class_of

#: Where code is looked into that the code of a class calls by name.
_READ = ("diffusers", "transformers", "torch.nn")
#: What holds functions beside modules: `x.softmax(-1)` is found there, whatever `x` is called.
_TENSOR: tuple[type, ...] = torch.Tensor.__mro__[:2]

#: Where names are looked up: in a class, a module, or the globals of a function.
_Holder = type | types.ModuleType | types.FunctionType
#: What a name was looked up in, that one's name where it is PyTorch's, the name, and what it was.
Found = tuple[_Holder, str, str, Any]


@dataclass(frozen=True)
class _Named:
    """What a name stood for. It is not kept alive: a function may hold the class that it is of, and
    in a closure the module that its class was made for."""

    name: str
    ref: Callable[[], Any]
    code: Any
    #: Of a property or the like, in which the function is: its type.
    around: type | None

    @classmethod
    def of(cls, name: str, value: Any) -> _Named:
        inner = function_in(value)
        around = None if inner is value else type(value)
        try:
            ref: Callable[[], Any] = weakref.ref(inner)
        except TypeError:  # None; PyTorch's own descriptors
            ref = partial(_same, inner)
        return cls(name, ref, getattr(inner, "__code__", None), around)

    def holds(self, where: Mapping[str, Any]) -> bool:
        now = where.get(self.name)
        if self.around is not None:
            if type(now) is not self.around:
                return False
            now = function_in(now)
        if now is None and type(self.ref) is weakref.ref:  # both may be gone
            return False
        return self.ref() is now and getattr(now, "__code__", None) is self.code


def _same(value: Any) -> Any:
    return value


def _names_of(holder: _Holder) -> Mapping[str, Any]:
    return holder.__globals__ if isinstance(holder, types.FunctionType) else vars(holder)


@dataclass(frozen=True)
class _Read:
    """What the code of one class, or of one function, names. It holds neither."""

    found: tuple[tuple[weakref.ref[_Holder], tuple[_Named, ...]], ...]
    key: tuple[Any, ...]
    #: A function that is not PyTorch's own.
    strange: str | None

    def holds(self) -> bool:
        """Whether every name still stands for what it did, which is asked rather than searched."""
        for of, named in self.found:
            holder = of()
            if holder is None:
                return False
            where = _names_of(holder)
            if not all(one.holds(where) for one in named):
                return False
        return True


#: Whose code is read: the classes of modules, and functions that are called by no name.
_Coded = type | types.FunctionType
_reads: WeakKeyDictionary[_Coded, _Read] = WeakKeyDictionary()


def functions_of_torch(
    modules: Iterable[nn.Module], functions: Iterable[types.FunctionType] = ()
) -> tuple[Any, ...]:
    """A key: the functions of PyTorch that the code of modules, and of the processors that they
    hold, names. Equal keys, the same functions with the same code.

    What a name belongs to is not asked, so there are more of them than are called.

    Args:
        functions: what that code finds in a table, such as a model's attention.
    """
    coded: list[_Coded] = [*_classes(modules), *functions]
    return tuple(key for of in coded for key in _read_of(of).key)


def replaced_function(
    modules: Iterable[nn.Module], functions: Iterable[types.FunctionType] = ()
) -> str | None:
    """One of those that is not PyTorch's own, as its file has it; or None."""
    coded: list[_Coded] = [*_classes(modules), *functions]
    return next((name for of in coded if (name := _read_of(of).strange) is not None), None)


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    found: dict[type, None] = {}
    for m in modules:
        found[class_of(m)] = None
        processor = m.__dict__.get("processor")
        if processor is not None:
            found[type(processor)] = None
    return list(found)


def _read_of(of: _Coded) -> _Read:
    known: dict[Any, Any] = kept_while_planning(functions_of_torch)
    if of not in known:
        read = _reads.get(of)
        if read is None or not read.holds():
            read = _reads[of] = _read(of)
        known[of] = read
    found: _Read = known[of]
    return found


def _read(of: _Coded) -> _Read:
    # most functions name much of what others do
    found: dict[int, tuple[weakref.ref[_Holder], dict[str, _Named]]] = {}
    key: dict[tuple[str, str], Any] = {}
    strange = None
    for holder, where, name, value in _named(of):
        _, named = found.setdefault(id(holder), (weakref.ref(holder), {}))
        if name not in named:
            named[name] = _Named.of(name, value)
        if where and (where, name) not in key:
            key[where, name] = (Same(value), getattr(value, "__code__", None))
            if strange is None and not _is_torchs(value):
                strange = f"{where}.{name}"
    ordered = tuple(sorted(key.items(), key=lambda item: item[0]))
    each = tuple((ref, tuple(named.values())) for ref, named in found.values())
    return _Read(each, ordered, strange)


def _is_torchs(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    if isinstance(value, types.FunctionType):
        return is_own(value)
    return (type(value).__module__ or "").partition(".")[0] in ("builtins", "torch")


def _named(of: _Coded) -> Iterator[Found]:
    left = [of] if isinstance(of, types.FunctionType) else []
    for base in () if isinstance(of, types.FunctionType) else of.__mro__:
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items():
            function = function_in(value)
            if isinstance(function, types.FunctionType) and (
                not name.startswith("__") or name == "__call__"
            ):
                left.append(function)
                yield base, "", name, value
    seen: set[int] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for cell in function.__closure__ or ():  # what a decorator stands around
            try:
                inner = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if isinstance(inner, types.FunctionType):
                left.append(inner)
        for found in _named_by(function):
            value = found[-1]
            if isinstance(value, types.FunctionType) and (value.__module__ or "").startswith(_READ):
                left.append(value)
            yield found


def _named_by(function: types.FunctionType) -> Iterator[Found]:
    names = names_of(function.__code__)
    held = function.__globals__
    home_of = sys.modules.get(held.get("__name__", ""))
    # a module's, where it is one's: that holds for all of its functions
    holder: _Holder = function
    if isinstance(home_of, types.ModuleType) and vars(home_of) is held:
        holder = home_of
    places: list[types.ModuleType] = []
    for name in names:
        value = held.get(name)
        if isinstance(value, types.ModuleType):
            places.append(value)
            yield holder, held.get("__name__", ""), name, value  # another one may stand there
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            home = value.__module__ or ""
            yield holder, home if home.partition(".")[0] == "torch" else "", name, value
        for of in _TENSOR:
            if name in vars(of):
                yield of, "torch.Tensor", name, vars(of)[name]
                break
            yield of, "", name, None  # of the class below it, by now
    seen: set[str] = set()
    while places:
        place = places.pop()
        if place.__name__.partition(".")[0] != "torch" or place.__name__ in seen:
            continue
        seen.add(place.__name__)
        for name in names & vars(place).keys():
            value = vars(place)[name]
            if isinstance(value, types.ModuleType):
                places.append(value)  # `torch.nn.functional.silu`
            elif callable(value) and not isinstance(value, type):
                yield place, place.__name__, name, value
