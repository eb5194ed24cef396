"""Deep copies that run no line of a stranger's class.

`copy.deepcopy` asks an object for `__deepcopy__`, `__reduce_ex__`, `__getstate__`, looks these up
by its `__getattr__` and calls its class's `__new__`. Of a class that no installed package has, that
is code that nobody asked for: the object may count, write a file or hand out itself. Here such an
object is copied by what it holds, which needs none of them; one that says itself how it is copied
is not.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import enum
import functools
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from hfpatch.proof.keys import dict_of, held_by_class
from hfpatch.proof.library import is_installed

_T = TypeVar("_T")

#: How an object says how it is copied. One of a stranger's class is not.
_COPYING = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)
#: What is run when an object is made, or asked for an attribute.
_ASKED = ("__new__", "__getattribute__", "__getattr__", "__dict__", "__class__")
#: By what classes of Python objects with hooks can be built, and what these hold is read.
_BUILT_IN = (object, dict, list, set)
#: Where this package lies.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CannotReplicateError(Exception):
    """A module holds what no copy can be made of, so that no proof may call it."""


def parts_of(value: Any) -> list[Any]:
    """What an object holds: the values of containers, attributes and slots. Of a stranger's class
    past its own code."""
    cls = type(value)
    found: list[Any] = []
    if issubclass(cls, dict):
        found += dict.values(value)
    elif issubclass(cls, list):
        found += list.__iter__(value)
    elif issubclass(cls, tuple):
        found += tuple.__iter__(value)
    elif issubclass(cls, set):
        found += set.__iter__(value)
    elif issubclass(cls, frozenset):
        found += frozenset.__iter__(value)
    elif issubclass(cls, collections.deque):
        found += collections.deque.__iter__(value)
    elif issubclass(cls, Mapping) and not _strange(cls, ("values", "__iter__", "__getitem__")):
        found += value.values()
    elif issubclass(cls, types.MethodType):
        found.append(value.__self__)
    elif cls is functools.partial:
        found += (value.func, *value.args, *value.keywords.values())
    found += (dict_of(value) or {}).values()
    found += [held for _, held in slots_of(value)]
    return found


def slots_of(value: Any) -> Iterator[tuple[types.MemberDescriptorType, Any]]:
    """The slots of an object of Python classes that are set, by their descriptors."""
    for base in type(value).__mro__:
        if not base.__flags__ & _IN_PYTHON:  # written in C
            continue
        for found in held_by_class(base).values():
            if type(found) is types.MemberDescriptorType:
                try:
                    yield found, found.__get__(value)
                except AttributeError:
                    continue


def deep_copied(value: _T, what: str, memo: dict[int, Any] | None = None) -> _T:
    """A deep copy of `value`.

    Raises:
        CannotReplicateError: something in it can be copied by a stranger's code alone.
    """
    memo = {} if memo is None else memo
    made: list[tuple[Any, Any]] = []
    for stranger in _strangers(value, memo):
        cls = type(stranger)
        whose = f"{what} is" if stranger is value else f"{what} holds"
        if (name := _own(stranger, _COPYING)) is not None:
            raise CannotReplicateError(
                f"{whose} a `{cls.__name__}` with a `{name}` of its own, which a proof does not run"
            )
        home = _built_on(cls)
        if home is None or (_own(stranger, ("__dict__",)) and dict_of(stranger) is None):
            raise CannotReplicateError(
                f"{whose} a `{cls.__name__}`, which cannot be copied without its own code"
            )
        shell = memo[id(stranger)] = home.__new__(cls)  # type: ignore[call-overload]
        made.append((stranger, shell))
    for stranger, shell in made:
        _fill(stranger, shell, memo)
    return copy.deepcopy(value, memo)


def _strangers(root: Any, memo: dict[int, Any]) -> Iterator[Any]:
    """The objects in a value whose classes have code of their own for how they are copied."""
    seen: set[int] = set(memo)
    known: dict[type, bool] = dict.fromkeys((dict, list, tuple, set, frozenset), False)
    left = [root]
    while left:
        value = left.pop()
        cls = type(value)
        if cls in _WHOLE or issubclass(cls, _NEVER) or id(value) in seen:
            continue
        seen.add(id(value))
        if cls not in known:
            known[cls] = _strange(cls, (*_COPYING, *_ASKED)) is not None
        if known[cls] or _own(value, _COPYING) is not None:
            yield value
        left += parts_of(value)
        if issubclass(cls, dict):
            left += dict.keys(value)


#: What holds nothing, and what a deep copy leaves as it is.
_WHOLE = frozenset(
    {int, float, complex, bool, str, bytes, type(None), range, slice, types.CodeType}
)
_NEVER = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)


def _own(value: Any, names: tuple[str, ...]) -> str | None:
    """Which of some methods an object has from no installed package, or None."""
    if type(value) in (dict, list, tuple, set, frozenset):
        return None
    held = dict_of(value) or {}
    for name in names:
        if name in held and not _is_known(held[name]):
            return name
    reducer = copyreg.dispatch_table.get(type(value)) if "__reduce__" in names else None
    if reducer is not None and not _is_known(reducer):
        return "reducer"
    return _strange(type(value), names)


def _strange(cls: type, names: tuple[str, ...]) -> str | None:
    """The first of some methods that a class has from no installed package, or None."""
    for name in names:
        holder = next((b for b in cls.__mro__ if name in held_by_class(b)), None)
        if holder is not None and not _is_known(held_by_class(holder)[name]):
            return name
    return None


def _is_known(method: Any) -> bool:
    """Whether what a class has under a name is Python's, an installed package's or ours."""
    if isinstance(method, (staticmethod, classmethod, types.MethodType)):
        return _is_known(method.__func__)
    if isinstance(method, functools.partial):
        return _is_known(method.func)
    if isinstance(method, property):
        return _is_known(method.fget)
    if isinstance(method, types.FunctionType):
        file = method.__code__.co_filename
        made = str(method.__globals__.get("__name__")).startswith("namedtuple_")
        return made or file.startswith((_OURS, "<frozen ")) or is_installed(method)
    if not type(method).__flags__ & _IN_PYTHON:
        return True
    return (
        _strange(type(method), ("__get__", "__call__", "__getattribute__", "__getattr__")) is None
    )


#: The flag of classes that are written in Python.
_IN_PYTHON = 1 << 9


def _built_on(cls: type) -> type | None:
    """The class of Python's that makes an instance of `cls`, with nothing in it."""
    for base in cls.__mro__:
        if not base.__flags__ & _IN_PYTHON:  # written in C
            return base if base in _BUILT_IN else None
    return None


def _fill(value: Any, made: Any, memo: dict[int, Any]) -> None:
    """Put copies of what an object holds into a new one of its class."""
    cls = type(made)
    if issubclass(cls, dict):
        for key, held in dict.items(value):
            dict.__setitem__(made, copy.deepcopy(key, memo), copy.deepcopy(held, memo))
    elif issubclass(cls, list):
        list.extend(made, [copy.deepcopy(held, memo) for held in list.__iter__(value)])
    elif issubclass(cls, set):
        set.update(made, [copy.deepcopy(held, memo) for held in set.__iter__(value)])
    ours = dict_of(made)
    if ours is not None:
        ours.update(copy.deepcopy(dict_of(value) or {}, memo))
    for slot, held in slots_of(value):
        slot.__set__(made, copy.deepcopy(held, memo))
