"""Copies of a module that a proof runs in its place, with random weights of their own."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hfpatch.proof.copies import CannotReplicateError, deep_copied, parts_of, slots_of
from hfpatch.proof.keys import OWNED_BY_WRAPPERS, dict_of
from hfpatch.proof.subject import Tensor

#: What copies may share: nothing that is called can write to it.
_SHARED = (
    *(int, float, complex, bool, str, bytes, type(None), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
#: Elements up to which a tensor among a module's attributes is copied for a proof.
_MOST = 1 << 22
#: Values that its attributes may hold in all.
_VALUES = 4096


_T = TypeVar("_T")
#: What copies may share beside `_SHARED`: nobody's state, or no part of what is computed.
_HARMLESS = (
    *(enum.Enum, logging.Logger, functools._lru_cache_wrapper, property, types.CodeType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.GenericAlias),
)
_HOMES = ("hfpatch", "typing")


def copied_apart(value: _T, what: str) -> _T:
    """A deep copy that shares nothing with `value` that a call may write to.

    Raises:
        CannotReplicateError: there is none. A `__deepcopy__` may return its object, or be shallow.
    """
    copied = deep_copied(value, what)
    check_apart(value, copied, what)
    return copied


def check_apart(original: Any, copied: Any, what: str) -> None:
    """Raise where a copy shares a tensor's memory, a list, a dict, a set or an object with its
    original: who calls the copy would write to the original."""
    mine = dict(_writable(original))
    for key, held in _writable(copied):
        if key in mine:
            kind = "the memory of a tensor" if isinstance(held, Tensor) else _a(type(held).__name__)
            raise CannotReplicateError(
                f"a deep copy of {what} shares {kind} with it, which a proof could write to"
            )


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} `{name}`"


def _writable(root: Any) -> Iterator[tuple[Any, Any]]:
    """All that can be written to in a value, with a key that what is shared has twice."""
    seen: set[int] = set()
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, (*_SHARED, *_HARMLESS)) or id(value) in seen:
            continue
        cls = type(value)
        if cls.__module__.partition(".")[0] in _HOMES:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield from _memory(value)
            left += vars(value).values()
            continue
        if isinstance(value, types.MethodType):
            left.append(value.__self__)
            continue
        if isinstance(value, functools.partial):
            left += (value.func, *value.args, *value.keywords.values())
            continue
        writable = isinstance(value, (Mapping, list, set, collections.deque, bytearray))
        slots = any(True for _ in slots_of(value))
        left += parts_of(value)
        if (
            writable
            or slots
            or (dict_of(value) is not None and not isinstance(value, (tuple, frozenset)))
        ):
            yield id(value), value


def _memory(tensor: Tensor) -> Iterator[tuple[Any, Any]]:
    if type(tensor) not in (Tensor, nn.Parameter):  # a subclass's memory is its own affair
        yield id(tensor), tensor
        return
    if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
        yield ("memory", tensor.untyped_storage().data_ptr()), tensor
    if tensor.grad is not None:
        yield from _memory(tensor.grad)


def replicate(module: nn.Module, children: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy that shares nothing with `module` that a call may write to: no tensor, list, object,
    hook or instance forward.

    Parameters and buffers are left out for the caller to fill; `children` replaces child modules,
    others are copied too, with the values of the tensors that they have (most activations have
    none).

    Raises:
        CannotReplicateError: it holds a thread's lock, a module that is not its child, a large
            tensor, or the like.
    """
    replica = object.__new__(type(module))
    blank = nn.Module().__dict__
    copier = _Copier(module, replica)
    state = {
        k: copier.value(v, f"`{k}`")
        for k, v in module.__dict__.items()
        if k not in blank and k not in OWNED_BY_WRAPPERS
    }
    given = children or {}
    others = {n: _twin(c) for n, c in module._modules.items() if n not in given}
    replica.__dict__.update(blank)
    replica.__dict__.update(state)
    replica.__dict__["training"] = False
    replica.__dict__["_modules"] = {**dict.fromkeys(module._modules), **others, **given}
    return replica


class _Copier:
    """Copies the attributes of one module for its replica."""

    def __init__(self, module: nn.Module, replica: nn.Module) -> None:
        self._module, self._replica = module, replica
        #: As of `copy.deepcopy`: a reference to the module is one to the replica.
        self._memo: dict[int, Any] = {id(module): replica}

    def value(self, value: Any, what: str) -> Any:
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, types.MethodType) and value.__self__ is self._module:
            # it would compute with the first one's parameters
            return types.MethodType(value.__func__, self._replica)
        self._look_into(value, what)
        try:
            copied = deep_copied(value, what, self._memo)
        except CannotReplicateError:
            raise
        except Exception as e:  # any class's own
            raise CannotReplicateError(
                f"{what} cannot be copied, and a proof must not write to it "
                f"({type(e).__name__}: {e})"
            ) from e
        check_apart(value, copied, what)
        return copied

    def _look_into(self, value: Any, what: str) -> None:
        """Refuse what a deep copy would make a second time: modules, and much memory."""
        seen, left = {id(self._module)}, [value]
        while left:
            value = left.pop()
            if isinstance(value, _SHARED) or id(value) in seen:
                continue
            seen.add(id(value))
            if len(seen) > _VALUES:
                raise CannotReplicateError(f"{what} holds more than {_VALUES} values")
            if isinstance(value, nn.Module):
                raise CannotReplicateError(
                    f"{what} holds a `{type(value).__name__}`, which is no child of it"
                )
            if isinstance(value, Tensor):
                if value.numel() > _MOST:
                    raise CannotReplicateError(f"{what} holds a tensor of {value.numel()} elements")
                continue
            left += parts_of(value)


def _twin(module: nn.Module | None) -> nn.Module | None:
    if module is None:
        return None
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module)
    twin = replicate(module)
    held: Any  # parameters, or buffers
    for name in ("_parameters", "_buffers"):
        held = getattr(module, name)
        getattr(twin, name).update({n: own_copy(t) for n, t in held.items()})
    return twin


def own_copy(t: Tensor | None) -> Tensor | None:
    """The same values in memory of their own, as a parameter where it is one."""
    if t is None:
        return None
    values = t.detach().clone()
    return nn.Parameter(values, requires_grad=False) if isinstance(t, nn.Parameter) else values


def random_like(
    t: Tensor, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A random stand-in for a norm's parameter, far enough from 0 and 1 to tell `w` from `1+w`."""
    values = 1.0 + 0.5 * torch.randn(t.shape, generator=generator)
    return values.to(device, dtype)


def random_linear(
    n_in: int,
    n_out: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> nn.Linear:
    """A linear layer for a replica."""
    # skip_init: the constructor's own draws would advance the user's random state
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, n_in, n_out, bias=bias, device="cpu"
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * n_in**-0.5)
    return layer.to(device, dtype).requires_grad_(False)
