"""A call's arguments taken apart: its tensors, and the structure that they stand in."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.regions.caches import State, is_cache

Tensor = torch.Tensor
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.Size})


class Unstructured(Exception):
    """An argument that is neither a tensor nor plain; the text names it."""


class _Place:
    """The place of a tensor in a structure, of the cache, or of what a block must not touch."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


TENSOR, CACHE, UNTOUCHED = _Place("TENSOR"), _Place("CACHE"), _Place("UNTOUCHED")


@dataclass(frozen=True)
class Structure:
    """What stands where; hashable. Plain values are part of it, tensors and caches are places.

    `cache` is the state of the block's layer of the cache, whose tensors are the call's last.
    """

    shape: Any
    cache: State | None = None


class _Taken:
    """What `take_apart` collects."""

    __slots__ = ("cache", "given", "tensors")

    def __init__(self, cache: Any = None, given: bool = True) -> None:
        self.tensors: list[Tensor] = []
        self.cache = cache
        self.given = given

    def take(self, value: Any, name: Any) -> Any:
        cls = type(value)
        if cls is Tensor or cls is nn.Parameter:
            self.tensors.append(value)
            return TENSOR
        if cls in _PLAIN:
            return (cls, value)
        if cls is tuple or cls is list:
            return (cls, tuple([self.take(v, name) for v in value]))
        if cls is dict:
            return (cls, tuple([(k, self.take(v, k)) for k, v in value.items()]))
        if isinstance(value, Tensor):  # a stand-in's
            self.tensors.append(value)
            return TENSOR
        if value is self.cache or (self.cache is None and is_cache(cls)):
            self.cache = value
            return CACHE
        if self.given and issubclass(cls, UserDict):  # what layers share: most pass it by
            return (cls, UNTOUCHED)
        where = f"argument `{name}`" if isinstance(name, str) else f"argument {name}"
        raise Unstructured(f"its {where} is a `{cls.__name__}`")


def take_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Structure, list[Tensor], Any]:
    """The structure of a call, its tensors, and its cache or None.

    Raises:
        Unstructured: an argument is something else.
    """
    taken = _Taken()
    take = taken.take
    shape = (
        tuple([take(a, i) for i, a in enumerate(args)]),
        tuple([(k, take(v, k)) for k, v in kwargs.items()]),
    )
    return Structure(shape), taken.tensors, taken.cache


def take_result(out: Any, cache: Any) -> tuple[Structure, list[Tensor]]:
    """The same of what a block returned."""
    taken = _Taken(cache, given=False)
    return Structure(taken.take(out, "result")), taken.tensors


def build(structure: Structure, tensors: Sequence[Tensor], cache: Any, handed: list[Any]) -> Any:
    """The arguments, put together again: (args, kwargs). What a block must not touch has nothing
    inside, so that code that reads it or writes to it fails; `handed` holds those."""
    left = iter(tensors)
    first, named = structure.shape

    def put(shape: Any) -> Any:
        return _put(shape, left, cache, handed)

    return tuple(put(s) for s in first), {k: put(s) for k, s in named}


def _put(shape: Any, left: Any, cache: Any, handed: list[Any]) -> Any:
    if shape is TENSOR:
        return next(left)
    if shape is CACHE:
        return cache
    cls, held = shape
    if held is UNTOUCHED:
        handed.append(cls.__new__(cls))  # a `UserDict` that was not initialised has no `data`
        return handed[-1]
    if cls is tuple or cls is list:
        return cls(_put(s, left, cache, handed) for s in held)
    if cls is dict:
        return {k: _put(s, left, cache, handed) for k, s in held}
    return held
