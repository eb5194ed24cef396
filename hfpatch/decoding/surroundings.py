"""What a model's forward finds by name around it: functions, the table of attention functions, and
its configuration. Looked at once a sequence; what of it is another, another proof answers for."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hfpatch.decoding import cache as caches
from hfpatch.decoding.replica import text_config
from hfpatch.decoding.rules import Unexplained
from hfpatch.proof.keys import contents_of, function_in, helpers_of
from hfpatch.proof.library import is_own, odd_class

#: Attention functions whose result the replica's own stands for: the same up to rounding.
_KNOWN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
_HOME = "transformers."


class Surroundings:
    """What a model's code and configuration were when this was made; it holds no module."""

    def __init__(self, model: nn.Module) -> None:
        self._names = list({(id(g), n): (g, n, g[n]) for g, n in _names_of(model)}.values())
        self._methods = _methods_of_caches()
        self._functions_of_caches = _functions_by_class(self._methods)
        self._others = [m for m in self._methods if not _is_found_as_it_is(m[2])]
        # a code can be exchanged in the function that has it
        found = (*(v for _, _, v in self._names), *(v for _, _, v in self._methods))
        self._functions = [f for v in found if isinstance(f := function_in(v), types.FunctionType)]
        self._codes = [f.__code__ for f in self._functions]
        configs = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
        self._read = contents_of(configs.values())
        self._configs = self._read()
        self._attention = _attention_of(model)

    def changed(self, model: nn.Module) -> bool:
        """Whether anything of it is not what it was."""
        return (
            any(g.get(name) is not value for g, name, value in self._names)
            or any(read(cls) != found for cls, read, found in self._functions_of_caches)
            or any(_held_by(c, name) is not value for c, name, value in self._others)
            or [f.__code__ for f in self._functions] != self._codes
            or _attention_of(model) != self._attention
            or self._read() != self._configs
        )


def _held_by(cls: type, name: str) -> Any:
    """What a class has under a name, not bound."""
    return inspect.getattr_static(cls, name, None)


def _is_found_as_it_is(value: Any) -> bool:
    """Whether a class gives what it holds: a class method is bound anew at each look."""
    return isinstance(value, (types.FunctionType, property))


def _functions_by_class(
    methods: list[tuple[type, str, Any]],
) -> list[tuple[type, Callable[[type], Any], Any]]:
    """(class, what reads its functions and properties, what that gives now)."""
    found = []
    for cls in dict.fromkeys(c for c, _, _ in methods):
        names = [n for c, n, value in methods if c is cls and _is_found_as_it_is(value)]
        if names:
            read: Callable[[type], Any] = operator.attrgetter(*names)
            found.append((cls, read, read(cls)))
    return found


def _methods_of_caches() -> list[tuple[type, str, Any]]:
    return [
        (cls, name, value)
        for cls in caches.CLASSES
        for name in dir(cls)
        if isinstance(function_in(value := inspect.getattr_static(cls, name)), types.FunctionType)
    ]


def check_cache() -> None:
    """Raises Unexplained where a cache's methods are not transformers' own."""
    for cls in caches.CLASSES:
        if (why := odd_class(cls)) is not None:
            raise Unexplained(f"cache: {why}")


def check_attention(model: Any) -> None:
    """Raises Unexplained where attention is not transformers' own."""
    name = getattr(text_config(model.config), "_attn_implementation", None) or "eager"
    if name not in _KNOWN:
        raise Unexplained(f"its attention is `{name}`, of which nothing is known")
    for function in _attention_of(model)[1:]:
        if function is not None and not (
            isinstance(function, types.FunctionType)
            and function.__module__.startswith(_HOME)
            and is_own(function)
        ):
            raise Unexplained(f"its attention, `{name}`, is not transformers' own function")


def attention_functions(model: Any) -> list[types.FunctionType]:
    """What its code finds in transformers' tables for attention and for its mask."""
    return [f for f in _attention_of(model)[1:] if isinstance(f, types.FunctionType)]


def _attention_of(model: Any) -> tuple[Any, ...]:
    """The name of its attention, and what transformers' tables have under it for attention and
    for its mask; None where they have nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(text_config(model.config), "_attn_implementation", None) or "eager"
    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return (name, *(t.get(name) for t in tables))


def _names_of(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The globals that the forwards inside a model name, and those that transformers' functions
    among these name in turn: (a module's globals, the name)."""
    classes = {type(m): m for m in model.modules()}
    left: list[Any] = []
    for cls, module in classes.items():
        if cls.__module__.partition(".")[0] == "torch":
            continue
        left += [getattr(cls, name, None) for name in ("forward", *helpers_of(module))]
    seen: set[int] = set()
    while left:
        function = left.pop()
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        for cell in function.__closure__ or ():
            try:
                left.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                yield function.__globals__, name
                if (getattr(value, "__module__", None) or "").startswith(_HOME):
                    left.append(value)


def _global_names(code: types.CodeType) -> set[str]:
    inner = [_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)
