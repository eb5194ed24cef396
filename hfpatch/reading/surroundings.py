"""What a leaf's code may use of what lies around it: libraries, predicates of the environment,
transformers' table of activations. Everything else that may change is refused."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.direct_calls import has_own_call
from hfpatch.reading.operations import FUNCTIONS
from hfpatch.reading.values import Fact, Unexplained, is_plain, plain_of

#: Functions of transformers and diffusers that say what is installed: the same in the whole
#: process. Their names and modules; they count only where they are what the module holds.
_PREDICATES = {
    "is_torch_npu_available",
    "is_torch_xla_available",
    "is_torch_mlu_available",
    "is_torch_version",
    "is_deepspeed_available",
    "is_xformers_available",
    "is_flash_attn_available",
    "is_accelerate_available",
}
_PREDICATE_HOMES = (
    "transformers.utils",
    "transformers.integrations",
    "diffusers.utils",
)
#: While these are true an adapter hands over to the original.
_NEVER = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.jit.is_tracing,  # type: ignore[attr-defined]
    torch.jit.is_scripting,  # type: ignore[attr-defined]
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLASS_HOOKS = ("__call__", "_call_impl", "__getattr__", "__getattribute__", "__setattr__")
#: How every module is called and read, as it was when hfpatch was imported.
OF_MODULES = [(nn.Module, name, getattr(nn.Module, name)) for name in _CLASS_HOOKS]


def check_library(library: types.ModuleType, name: str) -> None:
    """Raise where reading an attribute of a module object is answered by its class."""
    for base in type(library).__mro__:
        if base in (types.ModuleType, object):
            continue
        if name in vars(base) or "__getattribute__" in vars(base):
            raise Unexplained(f"`{library.__name__}.{name}` is read, which may change")


def check_class(cls: type) -> None:
    """Raise where reading an attribute or calling an instance runs code of the class's own."""
    if type(cls) is not type:
        raise Unexplained(f"`{cls.__name__}` has the metaclass `{type(cls).__name__}`")
    for name in _CLASS_HOOKS:
        for base in cls.__mro__:
            if name in base.__dict__:
                if base not in (nn.Module, object):
                    raise Unexplained(f"`{base.__name__}` has a `{name}` of its own")
                break
    for where, name, value in OF_MODULES:
        if getattr(where, name) is not value:
            raise Unexplained(f"`torch.nn.Module.{name}` was replaced")


def _called_by(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """The functions of torch that a Python function of it names: where they are, and what."""
    names = function.__code__.co_names if isinstance(function, types.FunctionType) else ()
    return [
        (vars(home), name, vars(home)[name])
        for home in (torch, torch._C._nn)
        for name in names
        if callable(vars(home).get(name))
    ]


#: Of `F.layer_norm` and the like, as it was when hfpatch was imported.
_BELOW = {f: _called_by(f) for f in FUNCTIONS}


def below(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """What of torch a known function calls, which must be torch's own."""
    for where, name, value in _BELOW[function]:
        if where.get(name) is not value:
            raise Unexplained(f"`torch.{name}` was replaced")
    return _BELOW[function]


def usable(value: Any, name: str) -> Any:
    """`value`, found by a global name, in a closure or a library, if it cannot change by itself."""
    if isinstance(value, types.ModuleType):
        return value  # what is found in it is looked at, and remembered
    if type(value) is tuple:
        if all(is_plain(v) or isinstance(v, type) for v in value):
            return value
    elif (
        is_plain(value)
        or type(value) is torch.device
        or value is _activations()
        or (callable(value) and not isinstance(value, (int, float, str, tuple)))
    ):
        return value
    raise Unexplained(f"`{name}` is read, a {type(value).__name__}, which may change")


def asked(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> Any:
    """What a predicate of the environment says; NotImplemented for any other function.

    `device`: the type of that of the inputs.
    """
    traced = {"is_torchdynamo_compiling", "is_tracing"}
    if any(function is f for f in _NEVER) or _is_library(function, traced):
        return False
    if function is torch.is_autocast_enabled:
        said = torch.is_autocast_enabled(*(plain_of(a) for a in args))
        of = plain_of(args[0]) if args else "cuda"  # without one it is asked of that
        if of == device:
            return Fact(said, frozenset({"autocast"}))
        if said:  # calls are taken while it is off, see `Contract.autocasts`
            raise Unexplained(f"it asks whether autocast is on for {of}, which it is now")
        return Fact(said, frozenset({f"autocast on {of}"}))
    if _is_library(function, _PREDICATES) and not kwargs:
        if not all(isinstance(a, str) for a in args):
            raise Unexplained(f"`{function.__name__}` is called with other things than texts")
        return bool(function(*args))
    return NotImplemented


def _is_library(function: Any, names: set[str]) -> bool:
    """Whether this is the function of that name which transformers or diffusers defines."""
    name, home = getattr(function, "__name__", ""), getattr(function, "__module__", "") or ""
    return (
        isinstance(function, (types.FunctionType, functools._lru_cache_wrapper))
        and name in names
        and home.startswith(_PREDICATE_HOMES)
        and getattr(sys.modules.get(home), name, None) is function
    )


def looked_up(of: Any, at: Any, found: list[tuple[Any, Any, Any]]) -> Any:
    """`ACT2FN["silu"]`: transformers' activation of that name; NotImplemented for anything else."""
    table = _activations()
    if table is None or of is not table or not isinstance(at, str):
        return NotImplemented
    kind = dict.get(table, at)
    found.append((table, at, kind))
    made = table[at]
    if made.__dict__["_modules"] or made.__dict__["_parameters"] or made.__dict__["_buffers"]:
        raise Unexplained(f"the activation `{at}` holds tensors")
    return made


def _activations() -> Any:
    """transformers' `ACT2FN`, where that is imported and what it was."""
    module = sys.modules.get("transformers.activations")
    table = getattr(module, "ACT2FN", None)
    ours = getattr(module, "ClassInstantier", None)
    return table if ours is not None and type(table) is ours else None


def check_autocast_off(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless a `with` statement does nothing but to switch autocast off."""
    known = [torch.autocast, torch.amp.autocast]
    of_transformers = getattr(sys.modules.get("transformers.utils.generic"), "maybe_autocast", None)
    enabled = kwargs.get("enabled", True)  # a property of the input is a `Fact`
    if of_transformers is not None:
        known.append(of_transformers)
    if enabled is not False or not any(function is f for f in known):
        raise Unexplained("a `with` statement is in it")


def check_uncalled(module: nn.Module) -> None:
    """Raise where calling a module runs more than its class's forward: somebody's hook or own."""
    held = module.__dict__
    for name in ("forward", "_call_impl", "__call__"):
        if name in held:
            raise Unexplained(f"`{type(module).__name__}` has a `{name}` of its own")
    if has_own_call(held) or any(held.get(n) for n in _HOOKS):
        raise Unexplained(f"a `{type(module).__name__}` that is called has a hook on it")


def is_bare(module: nn.Module) -> bool:
    """Whether `check_uncalled` lets it pass."""
    try:
        check_uncalled(module)
    except Unexplained:
        return False
    return True


def held(found: Sequence[tuple[Any, Any, Any]]) -> bool:
    """Whether all that was found by name is still there, and modules among it without hooks."""
    for where, name, value in found:
        if isinstance(where, types.CellType):
            with contextlib.suppress(ValueError):
                if where.cell_contents is value:
                    continue
            return False
        if isinstance(where, nn.Module):  # one that was found by a name, and is called
            if is_bare(where):
                continue
            return False
        if isinstance(where, type):
            if getattr(where, name, where) is value:
                continue
            return False
        if not isinstance(where, dict) or dict.get(where, name, where) is not value:
            return False
    return True
