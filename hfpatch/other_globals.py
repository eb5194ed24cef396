"""A function's code that finds values of ours under some of its global names.

Nothing is written to a module: the function made here has the code, the defaults and the closure of
the one that is there, and reads all its other globals from where that one reads them.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Mapping
from typing import Any

from hfpatch.proof.keys import names_of

#: By which code sees its globals as a whole.
_ODD = frozenset({"globals", "locals", "vars", "eval", "exec"})


def takes_others(code: types.CodeType) -> bool:
    """Whether code does nothing to its globals but read them by their names."""
    if not _ODD.isdisjoint(names_of(code)):
        return False
    return all(
        i.opname not in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(code)
    )


class _Globals(dict[str, Any]):
    """A function's globals, read anew each time, except some names. Code whose globals are no plain
    dict asks by `__getitem__`."""

    def __init__(self, live: dict[str, Any], others: Mapping[str, Any]) -> None:
        # those that Python reads past `__getitem__`
        kept: dict[str, Any] = {"__builtins__": builtins}
        for key in ("__builtins__", "__name__", "__package__"):
            if key in live:
                kept[key] = live[key]
        super().__init__({**kept, **others})
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


def with_globals(own: types.FunctionType, others: Mapping[str, Any]) -> types.FunctionType:
    """The same function with `others`, values by name, among its globals."""
    return _again(own, _Globals(own.__globals__, others), own.__closure__)


def with_closure(
    own: types.FunctionType, closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    """The same function with other cells."""
    return _again(own, own.__globals__, closure)


def _again(
    own: types.FunctionType, values: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    made = types.FunctionType(own.__code__, values, own.__name__, own.__defaults__, closure)
    made.__kwdefaults__ = own.__kwdefaults__
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(own, name):
            setattr(made, name, getattr(own, name))
    made.__dict__.update(own.__dict__)  # what it wraps, by which its signature is read
    return made
