"""What the reader's variables hold beside plain Python values."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


#: What may be computed with as it is. Exactly these: a class derived of one may answer as it likes.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of such."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_plain, value))
    return type(value) in PLAIN


#: Whose values are true, and equal to others, as Python or PyTorch says.
_CERTAIN = frozenset({*PLAIN, torch.device, types.FunctionType, types.BuiltinFunctionType, type})


def is_certain(value: Any) -> bool:
    """Whether no code of anybody's own answers what a value is equal to, and whether it is true: an
    object that can be called, or a class with a metaclass, may say one thing now and another one at
    the next call. No tensor is one of these."""
    if isinstance(value, Fact):
        return is_certain(value.value)
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_certain, value))
    if type(value) is dict:
        return all(map(is_certain, value.values()))  # of keywords
    return type(value) in _CERTAIN


class Unexplained(Exception):
    """Something in a module's code that no formula accounts for; the message says what."""


class Memory:
    """Of a tensor and of all its views: whether it may be written to, since nobody else sees it,
    as a polynomial of what degree it was made, and which steps of the code wrote to it."""

    __slots__ = ("degree", "owned", "writes")

    def __init__(self, owned: bool = False, degree: int = 1) -> None:
        self.owned, self.degree = owned, degree
        self.writes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor of the module's call: what it is in this run, and what may be done to it.

    memory: shared with all that may be a view of it.
    role: the child that returned it ("input" for an argument, "" for anything computed); of the
        halves of that "child[0]" and "child[1]".
    step: the one of the code that made it, see `Tally.steps`, or what it is.
    """

    tensor: Tensor
    memory: Memory = field(default_factory=Memory)
    role: str = ""
    step: int | str = ""


@dataclass(frozen=True)
class Clamp:
    """One clamp of a code: whose result it is of, as a `Traced`'s role says, and its bounds, which
    are infinite where there is none."""

    role: str
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ChildWeight:
    """The weight of a child that is called: the code may ask for its dtype and device alone, for
    the rest of it is the child's."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Halves:
    """A packed projection seen as `[..., 2, width / 2]`, of which one half is taken."""

    halves: tuple[Traced, Traced]


@dataclass(frozen=True, eq=False)
class Fact:
    """A value that was read off a tensor or a mode, and of what kinds.

    "dtype", "device", "autocast": the same in every call that the proof is for.
    "width": the size of the last dimension; "lead": all sizes before it.
    "training", "rank", "grad", "layout", "size": what calls are free to vary.
    """

    value: Any
    kinds: frozenset[str]


#: What a proof is by, so that a branch on it is always the same.
FIXED = frozenset({"dtype", "device", "autocast"})


@dataclass(frozen=True, eq=False)
class Method:
    """A Python function with the module that it is called on."""

    function: Any
    module: nn.Module


@dataclass(frozen=True, eq=False)
class TensorMethod:
    """A method of a traced tensor, not called yet."""

    tensor: Traced
    name: str


@dataclass(frozen=True, eq=False)
class Super:
    """`super()` in a method of class `after`."""

    after: type
    module: nn.Module


class Context:
    """The `ctx` of an `autograd.Function`: what its forward saves for its backward."""

    saved: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Handler:
    """A function that the reader computes by itself."""

    call: Callable[..., Any]


def kinds_of(*values: Any) -> frozenset[str]:
    """The kinds of all facts in these values, in tuples and lists too."""
    found: frozenset[str] = frozenset()
    for value in values:
        if isinstance(value, Fact):
            found |= value.kinds
        elif isinstance(value, (tuple, list)):
            found |= kinds_of(*value)
    return found


def plain_of(value: Any) -> Any:
    """The value without the marks of the reader: tensors, numbers, tuples of them."""
    if isinstance(value, (Traced, ChildWeight)):
        return value.tensor
    if isinstance(value, Fact):
        return value.value
    if isinstance(value, tuple):
        return tuple(plain_of(v) for v in value)
    if isinstance(value, list):
        return [plain_of(v) for v in value]
    return value


def fact(value: Any, kinds: frozenset[str]) -> Any:
    """`value`, marked where it has kinds."""
    return Fact(value, kinds) if kinds else value
