"""What lies in values: in containers, in objects, in the attributes of modules.

A forward may return tensors in an object, and write to objects that it was given or that its module
holds: a cache, a list of attentions, a loss that is read later.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.foreign import reads
from hfpatch.proof.keys import BLANK_NAMES, OWNED_BY_WRAPPERS

Tensor = torch.Tensor

#: How many values are looked at.
_VALUES = 1 << 14
#: Nothing that a call leaves something in, or that two copies share.
_OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(functools.partial, weakref.ref, torch.dtype, torch.device, torch.layout),
)
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
#: Of a module's own attributes those that hold tensors.
_OF_TENSORS = ("_parameters", "_buffers")


class Built(str):
    """How a value is built, in words."""

    def __repr__(self) -> str:
        return str(self)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in values, in the order of where they are: one in two places is there twice."""
    found: list[Tensor] = []
    left: list[tuple[Any, tuple[int, ...]]] = [(v, ()) for v in reversed(values)]
    looked_at = 0
    while left and looked_at < _VALUES:
        value, above = left.pop()
        looked_at += 1
        if isinstance(value, Tensor):
            found.append(value)
        elif id(value) not in above and (parts := parts_of(value)) is not None:
            left += [(part, (*above, id(value))) for _, part in reversed(parts)]
    return found


def attributes_in(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module and of those inside, with their tensors, by where they are."""
    found: dict[str, Any] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, held in vars(m).items():
            if name in _OF_TENSORS:
                found.update((start + n, t) for n, t in held.items())
            elif name not in BLANK_NAMES and name not in OWNED_BY_WRAPPERS:
                found[start + name] = held
    return found


def side_by_side(name: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """The tensors and plain values in two values, with their names; where the two are built in
    another way, in what."""
    seen: dict[tuple[int, int], Any] = {}
    left = [(name, ours, theirs)]
    while left and len(seen) < _VALUES:
        where, a, b = left.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen[id(a), id(b)] = a, b
        if type(a) is not type(b):
            yield where, _what(a), _what(b)
        elif isinstance(b, (Tensor, *_PLAIN)):
            yield where, a, b
        elif (others := parts_of(b)) is None:
            mine, other = reads.content_of(a), reads.content_of(b)
            if mine != other:
                yield where, Built("another one"), _what(b)
        else:
            # by name: nobody reads a dict by the order in which its keys were written
            mine, other = (sorted(p, key=lambda part: part[0]) for p in (parts_of(a) or [], others))
            if [n for n, _ in mine] != [n for n, _ in other]:
                yield where, _what(a), _what(b)
                continue
            left += [(where + n, p, o) for (n, p), (_, o) in zip(mine, other, strict=True)]


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """What a value holds, by how code reaches it; None of one that holds nothing, or that nobody
    can look into."""
    if isinstance(value, (Tensor, *_PLAIN, *_OPAQUE)):
        return None
    found: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        found += [(_key(k), v) for k, v in value.items()]
    elif isinstance(value, (list, tuple, collections.deque)):
        found += [(f"[{i}]", v) for i, v in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        plain = sorted(repr(v) for v in value if isinstance(v, _PLAIN))
        found += [("{}", (len(value), *plain))]
    held = getattr(value, "__dict__", None)
    slots = reads.slots_of(type(value))
    if isinstance(held, dict):
        found += [(f".{k}", v) for k, v in held.items() if k not in OWNED_BY_WRAPPERS]
    found += [(f".{k}", getattr(value, k)) for k in slots if hasattr(value, k)]
    is_container = isinstance(
        value, (Mapping, list, tuple, collections.deque, set, frozenset)
    ) or isinstance(held, dict)
    return found if is_container or slots else None


def _key(key: Any) -> str:
    return f"[{key!r:.40}]" if isinstance(key, _PLAIN) else f"[a {type(key).__name__}]"


def _what(value: Any) -> Built:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return Built("a tensor")
    if isinstance(value, (Mapping, list, tuple, set, frozenset, collections.deque)):
        return Built(f"a {kind} of {len(value)}")
    return Built("None" if value is None else f"a {kind}")
