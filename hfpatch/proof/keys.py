"""What decides what a module computes, apart from its weights, as keys that can be compared.

They are made while a model is planned, never at a call.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hfpatch.direct_calls import DIRECT

Tensor = torch.Tensor

#: Values that are their own key.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
#: Elements up to which a tensor is a key by its values; a larger one is by identity and version.
_SMALL = 1024
#: How deep containers, closures and objects are looked into, and at how many values in all: what
#: lies beyond is a key by identity.
_DEPTH, _VALUES = 8, 4096

_BLANK = nn.Module()
#: What a blank module holds.
BLANK_NAMES = frozenset(_BLANK.__dict__)
#: What hooks and patches put on an instance: no part of what the module computes.
OWNED_BY_WRAPPERS = frozenset(
    {
        *("forward", "_old_forward", "_hf_hook", "_diffusers_hook"),
        *("_replicate_for_data_parallel", "__getstate__"),  # see `hfpatch.swap`
        DIRECT,
    }
)

#: Marks a function that a swap brought to an instance as a method, such as `generate`.
BROUGHT = "__hfpatch_method__"


def is_brought(value: Any) -> bool:
    """Whether it is a method that a swap brought."""
    if type(value) is not types.MethodType:
        return False
    function = value.__func__
    return getattr(function, BROUGHT, None) is function


def held_by_class(cls: type) -> Mapping[str, Any]:
    """What a class has of its own, read past its metaclass."""
    found: Mapping[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, read past its class's own code; None if it has none, or if they
    cannot be read so."""
    for base in type(value).__mro__:
        found = held_by_class(base).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            held = found.__get__(value)
            return held if type(held) is dict else None
    return None


class Same:
    """An object in a key by its identity, for as long as it lives."""

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self._kept = False
        try:
            self.ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # a number, a list, None
            self.ref, self._kept = lambda: value, True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._kept is not other._kept:
            return False
        value = self.ref()
        return value is other.ref() and (self._kept or value is not None)

    def __hash__(self) -> int:
        return hash(self.id)


def attributes_of(module: nn.Module, ignore: Container[str] = ()) -> tuple[Any, ...]:
    """Everything but large or floating tensors that an instance adds to what its class computes.

    Its attributes (functions by their code and what it reads, containers and objects such as a
    config by content) and its buffers of whole numbers. `ignore` names attributes that the caller
    compares in another way.
    """
    own = tuple(
        (k, _Reader(objects=True).value(v))
        for k, v in sorted(module.__dict__.items())
        if k not in BLANK_NAMES and k not in OWNED_BY_WRAPPERS and k not in ignore
    )
    buffers = tuple(
        (k, _tensor(b))
        for k, b in module._buffers.items()
        if b is not None and not b.is_floating_point()
    )
    return own + buffers


def attributes_read(module: nn.Module) -> tuple[Any, ...]:
    """The same of a leaf, without numbers and texts that its forward does not name: a model may
    give each of its parts the number or the name of its layer, and all compute the same."""
    blank = BLANK_NAMES | OWNED_BY_WRAPPERS
    held = {k: v for k, v in module.__dict__.items() if k not in blank}
    plain = {k for k, v in held.items() if type(v) in (int, str, bool)}
    if not plain or any(map(_may_read, held.values())):
        return attributes_of(module)
    return attributes_of(module, plain - names_in_forward(module))


def _may_read(value: Any) -> bool:
    """Whether it is a function that may know the module which holds it."""
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__defaults__)
    return isinstance(value, (types.MethodType, functools.partial))


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """A module's attributes and, for each child module, its class, code and attributes."""
    return _fingerprint(module, attributes_of)


def fingerprint_read(module: nn.Module) -> tuple[Any, ...]:
    """The same of a leaf, see `attributes_read`."""
    return _fingerprint(module, attributes_read)


def _fingerprint(
    module: nn.Module, attributes: Callable[[nn.Module], tuple[Any, ...]]
) -> tuple[Any, ...]:
    children = tuple(
        (name, None if child is None else (*code_of(child), *_fingerprint(child, attributes)))
        for name, child in module._modules.items()
    )
    return (attributes(module), children)


def held_by(modules: Iterable[nn.Module]) -> Callable[[], Any]:
    """What the objects that modules hold contain now (a config, a list), except tensors and
    modules: equal answers mean that nothing was written to them. It holds those objects alone.

    Of a configuration of transformers what the module's code names counts: `Trainer` and losses
    write other settings to it (`use_cache`, `problem_type`).
    """
    held = [
        (v, _settings_named(m, v) if _is_configuration(v) else None)
        for m in modules
        for k, v in m.__dict__.items()
        if k not in BLANK_NAMES
        and k not in OWNED_BY_WRAPPERS
        and not isinstance(v, (*_PLAIN, Tensor, types.MethodType))
    ]

    def contents() -> Any:
        read = _Reader(objects=True).value
        return tuple(
            read(v) if names is None else tuple(read(v.__dict__.get(n)) for n in names)
            for v, names in held
        )

    return contents


def contents_of(objects: Iterable[Any]) -> Callable[[], Any]:
    """What objects contain now, every setting of a configuration too; as in `held_by`."""
    held = list(objects)
    return lambda: tuple(_Reader(objects=True).value(v) for v in held)


def _is_configuration(value: Any) -> bool:
    home: Any = sys.modules.get("transformers.configuration_utils")
    return home is not None and isinstance(value, home.PreTrainedConfig)


def _settings_named(module: nn.Module, config: Any) -> list[str]:
    """Where a configuration has the settings that a module's code names: its class's, and that of
    the functions which this calls by a global name and may hand the configuration to."""
    named = names_read(module).copy()
    for base in _bases(module):
        for _, value in _members(base):
            for function in functions_in(value):
                known = function.__globals__
                for name in names_of(function.__code__) & known.keys():
                    if isinstance(called := known[name], types.FunctionType):
                        named |= _names_in(called)
    other_names = type(config).attribute_map
    found = named | {f"_{n}" for n in named} | {other_names[n] for n in named & other_names.keys()}
    return sorted(found)


class _Token:
    """Stands for the code of a class; the same one for equal code."""


_tokens: weakref.WeakValueDictionary[Any, _Token] = weakref.WeakValueDictionary()
_plan = threading.local()


@contextmanager
def classes_read_once() -> Iterator[None]:
    """While one model is planned, in which no class changes, each class is read once."""
    before = getattr(_plan, "kept", None)
    _plan.kept = {}
    try:
        yield
    finally:
        _plan.kept = before


def kept_while_planning(what: Any) -> dict[type, Any]:
    """What was found of classes while this model is planned; an empty dict at any other time."""
    kept = getattr(_plan, "kept", None)
    found: dict[type, Any] = {} if kept is None else kept.setdefault(what, {})
    return found


def code_of(module: nn.Module) -> tuple[Any, ...]:
    """The code that a module's forward can run: its class, every method's code with what that
    reads (closures, defaults, globals), and the class's plain values.

    The class is not kept alive: that of a parametrized module holds the module.
    """
    cls = type(module)
    known = kept_while_planning(code_of)
    if cls in known:
        found: tuple[Any, ...] = known[cls]
        return found
    parts = tuple(
        (k, _Reader(objects=False).value(v)) for base in _bases(module) for k, v in _members(base)
    )
    found = known[cls] = (Same(cls), _tokens.setdefault(parts, _Token()))
    return found


def _bases(module: nn.Module) -> list[type]:
    return [b for b in type(module).__mro__ if b not in (nn.Module, object)]


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """A class's functions and values, without what every class has."""
    for name, value in vars(cls).items():
        if not name.startswith("__") or isinstance(value, types.FunctionType):
            yield name, value


def class_values(module: nn.Module) -> dict[str, Any]:
    """What an instance reads off its class where it has no attribute of that name; no functions."""
    known = kept_while_planning(class_values)
    if type(module) not in known:
        found: dict[str, Any] = {}
        for base in reversed(_bases(module)):
            for name, value in _members(base):
                found.pop(name, None)
                if not hasattr(value, "__get__"):
                    found[name] = value
        known[type(module)] = found
    return {k: v for k, v in known[type(module)].items() if k not in module.__dict__}


def names_read(module: nn.Module) -> set[str]:
    """Every name, attribute and short text in the code of a module's class; behind decorators, of
    what its forward may reach: others have methods for the user, such as one that fuses layers."""
    known = kept_while_planning(names_read)
    if type(module) in known:
        read: set[str] = known[type(module)]
        return read
    found: set[str] = known.setdefault(type(module), set())
    reached = {"forward"} | helpers_of(module)
    for base in _bases(module):
        for name, value in _members(base):
            if name in reached:
                found |= _names_in(value)
            elif (code := getattr(function_in(value), "__code__", None)) is not None:
                found |= names_of(code)
    return found


def names_in_forward(module: nn.Module) -> set[str]:
    """The same of what its forward may reach alone: no name that only `__init__` has."""
    reached = {"forward"} | helpers_of(module)
    members = [v for base in _bases(module) for n, v in _members(base) if n in reached]
    return set().union(*map(_names_in, members))


def _names_in(value: Any) -> set[str]:
    return set().union(*(names_of(f.__code__) for f in functions_in(value)))


def functions_in(value: Any) -> list[types.FunctionType]:
    """The function in what a class holds and those that decorators put in it."""
    found: list[types.FunctionType] = []
    left = [function_in(value)]
    while left and len(found) < _DEPTH:
        function = left.pop()
        if not isinstance(function, types.FunctionType) or function in found:
            continue
        found.append(function)
        left += [
            *map(content_of_cell, function.__closure__ or ()),
            getattr(function, "__wrapped__", None),
        ]
    return found


def helpers_of(module: nn.Module) -> frozenset[str]:
    """The methods and properties of its class that a module's forward may reach, by name; what a
    base class has under a name counts too, since `super()` may reach it."""
    known = kept_while_planning(helpers_of)
    if type(module) in known:
        helpers: frozenset[str] = known[type(module)]
        return helpers
    members: dict[str, list[Any]] = {}
    for base in _bases(module):
        for name, value in _members(base):
            members.setdefault(name, []).append(value)
    found: set[str] = set()
    left = ["forward"]
    while left:
        for value in members.get(left.pop(), ()):
            names = _names_in(value)
            reached = {n for n in names if n in members and hasattr(members[n][0], "__get__")}
            left += reached - found
            found |= reached
    helpers = known[type(module)] = frozenset(found - {"forward"})
    return helpers


def overridden(module: nn.Module) -> list[tuple[type, str]]:
    """The methods that a module's forward may reach by `super()`: the classes that have them."""
    if "super" not in names_read(module):
        return []
    names = sorted({"forward"} | helpers_of(module))
    holders = {n: [b for b in _bases(module) if n in vars(b)] for n in names}
    return [(b, n) for n, found in holders.items() for b in found[1:]]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    texts = [c for c in code.co_consts if isinstance(c, str) and c.isidentifier()]
    return frozenset(code.co_names).union(texts, *inner)


def function_in(value: Any) -> Any:
    """The function in a property, a static or a class method."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__func__", value)


class _Reader:
    """Makes one key. `objects`: those of Python classes are by content, not by identity."""

    def __init__(self, *, objects: bool) -> None:
        self._objects = objects
        self._left = _VALUES

    def value(self, value: Any, depth: int = _DEPTH, follow: int = 1) -> Any:
        """`follow`: through how many functions that are globals of another one."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        self._left -= 1
        if isinstance(value, Tensor):
            return _tensor(value)
        if depth <= 0 or self._left <= 0 or isinstance(value, (type, types.ModuleType, nn.Module)):
            return Same(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth, follow)
        if isinstance(value, types.MethodType):
            if isinstance(value.__self__, nn.Module):
                return (types.MethodType, self.value(value.__func__, depth, follow))
            parts: tuple[Any, ...] = (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            parts = (value.__func__,)
        elif isinstance(value, (property, functools.cached_property)):
            parts = (function_in(value),)
        elif type(value) in (tuple, list):
            parts = tuple(value)
        elif type(value) is dict:
            parts = tuple(x for item in value.items() for x in item)
        elif type(value) in (set, frozenset):
            return (type(value), frozenset(self.value(v, depth - 1, follow) for v in value))
        elif self._objects and isinstance(value, (tuple, list, dict)):
            parts = (tuple(_contents(value)), dict_of(value) or {})
        elif self._objects and is_transparent(type(value)) and (rest := dict_of(value)) is not None:
            parts = (rest,)
        else:
            return Same(value)
        return (type(value), *(self.value(p, depth - 1, follow) for p in parts))

    def _function(self, function: types.FunctionType, depth: int, follow: int) -> Any:
        cells = tuple(map(content_of_cell, function.__closure__ or ()))
        rest = (cells, function.__defaults__, function.__kwdefaults__)
        code, found = function.__code__, function.__globals__
        used = [(k, found[k]) for k in names_of(code) if k in found]
        return (
            code,
            *(self.value(r, depth, follow) for r in rest),
            frozenset(
                (k, self._global(v, depth, follow))
                for k, v in used
                if not isinstance(v, types.ModuleType)
            ),
        )

    def _global(self, value: Any, depth: int, follow: int) -> Any:
        if isinstance(value, types.FunctionType) and follow <= 0:
            return value.__code__
        return self.value(value, min(depth - 1, 2), follow - 1)


def _contents(value: Any) -> Iterator[Any]:
    """What a container holds, past the code of its class."""
    if issubclass(type(value), dict):
        yield from dict.items(value)
    elif issubclass(type(value), (list, tuple)):
        kind: Any = list if issubclass(type(value), list) else tuple
        yield from kind.__iter__(value)


def content_of_cell(cell: types.CellType) -> Any:
    """What a closure's cell holds; the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return cell


def is_transparent(cls: type) -> bool:
    """Whether instances hold all they have in their `__dict__`: Python classes without slots."""
    made: Any = cls.__new__
    return made in (object.__new__, types.SimpleNamespace.__new__) and all(
        base in (object, types.SimpleNamespace)
        or (base.__flags__ & (1 << 9) and not vars(base).get("__slots__"))  # written in Python
        for base in cls.__mro__
    )


def is_given_back(x: Tensor) -> bool:
    """Whether an ordinary tensor's memory was taken from it, as FSDP1 does between calls
    (`untyped_storage().resize_(0)`): to read its values would end the process."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or not x.numel():
        return False
    return x.device.type != "meta" and not x.untyped_storage().nbytes()


def _tensor(tensor: Tensor) -> Any:
    head = (type(tensor), tensor.dtype, tuple(tensor.shape))
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"
    small = plain and tensor.numel() <= _SMALL and tensor.layout == torch.strided
    if small and not is_given_back(tensor):
        return (*head, repr(tensor.tolist()))  # a text: NaN is not equal to itself
    return (*head, Same(tensor), None if tensor.is_inference() else tensor._version)


def value_key(value: Any) -> Any:
    """A key of one value: containers and objects of Python classes by content, to some depth."""
    reader = _Reader(objects=True)
    reader._left = 300
    return reader.value(value, 4)
