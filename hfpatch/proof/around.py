"""What lies around somebody's own code, that it may write to: no copy of a module copies that."""

from __future__ import annotations

import collections
import dis
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.proof.library import INSTALLED, is_installed

#: Exactly these: what derives of one is somebody's own, or a library's.
_WRITABLE = frozenset(
    {
        *(list, dict, set, bytearray, collections.deque),
        *(collections.Counter, collections.defaultdict, collections.OrderedDict),
    }
)
#: How many functions and classes are followed.
_MOST = 256


def writable_around(module: nn.Module) -> str | None:
    """The name of something that calling a module may write to and that is no part of it: a list, a
    tensor or an object in a global, a closure or a class, a global or a class that its code sets.

    Only the code of somebody's own classes is looked at. What it names is believed to be written
    to, for nothing tells that it is only read.
    """
    classes = [c for c in type(module).__mro__ if _is_own(c)]
    functions = [f for f in module.__dict__.values() if isinstance(f, types.FunctionType)]
    left: list[Any] = [*classes, *(f for f in functions if not is_installed(f))]
    seen: set[int] = set()
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for function in [value] if isinstance(value, types.FunctionType) else _functions_of(value):
            if (name := _written_by(function, value)) is not None:
                return name
            names = {n for code in _codes(function.__code__) for n in code.co_names}
            for _, held in _held_by(function, names):
                if (isinstance(held, types.FunctionType) and not is_installed(held)) or (
                    isinstance(held, type) and _is_own(held)
                ):
                    left.append(held)
    return None


def _functions_of(cls: type) -> Iterator[types.FunctionType]:
    for member in vars(cls).values():
        inner = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for one in inner:
            function = getattr(one, "__func__", one)
            if isinstance(function, types.FunctionType) and not is_installed(function):
                yield function


def _is_own(cls: type) -> bool:
    """Whether a class is of no installed package."""
    if cls.__module__.partition(".")[0] == "hfpatch":
        return False
    home = sys.modules.get(cls.__module__)
    file = getattr(home, "__file__", None)
    if file is None:  # of Python itself, or of a session
        return cls.__module__ == "__main__"
    return not file.startswith(INSTALLED)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _set_by(function: types.FunctionType) -> tuple[set[str], set[str]]:
    """The names that a function's code sets: of globals and of a closure, and of attributes."""
    names: set[str] = set()
    attributes: set[str] = set()
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars
            ):
                names.add(str(step.argval))
            elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                attributes.add(str(step.argval))
    return names, attributes


def _written_by(function: types.FunctionType, owner: Any) -> str | None:
    """The name of what a function may write to; `owner`: the class that it stands in, if any."""
    set_names, set_attributes = _set_by(function)
    if set_names:
        return min(set_names)
    names = {n for code in _codes(function.__code__) for n in code.co_names}
    held = dict(_held_by(function, names))
    if isinstance(owner, type):
        of_class = {n: v for c in reversed(owner.__mro__) if _is_own(c) for n, v in vars(c).items()}
        held |= {n: v for n, v in of_class.items() if n in names and _may_be_written(v)}
        if not names.isdisjoint({"type", "__class__"}):
            held |= dict.fromkeys(set_attributes & of_class.keys())
    for name, value in held.items():
        if value is None or _may_be_written(value):
            return name
        if isinstance(value, type) and _is_own(value):
            for attribute, inner in vars(value).items():
                if attribute in set_attributes or (attribute in names and _may_be_written(inner)):
                    return f"{name}.{attribute}"
    return None


def _held_by(function: types.FunctionType, names: set[str]) -> Iterator[tuple[str, Any]]:
    """What a function finds in its globals, its closure and its defaults; nothing is None."""
    for name in sorted(names & function.__globals__.keys()):
        if function.__globals__[name] is not None:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            if cell.cell_contents is not None and name != "__class__":  # of `super()`
                yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (("a default", held) for held in defaults if _may_be_written(held))


def _may_be_written(value: Any) -> bool:
    if type(value) in _WRITABLE:
        return not _of_a_library(value)
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, enum.Enum):
        return False
    plain = (type, types.FunctionType, types.ModuleType, staticmethod, classmethod, property)
    return not isinstance(value, plain) and _is_own(type(value))


def _of_a_library(value: Any) -> bool:
    """Whether an installed package has it, such as a table of functions."""
    return any(
        value is held
        for module in list(sys.modules.values())
        if module.__name__.partition(".")[0] in ("diffusers", "peft", "torch", "transformers")
        for held in list(vars(module).values())
    )
