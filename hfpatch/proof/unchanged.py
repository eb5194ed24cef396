"""Whether a module is still as it was proven: its settings, its forward, and nobody's hooks."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.direct_calls import DIRECT, has_own_call
from hfpatch.proof.keys import (
    BLANK_NAMES,
    OWNED_BY_WRAPPERS,
    class_values,
    function_in,
    helpers_of,
    names_in_forward,
    names_read,
    overridden,
)
from hfpatch.proof.library import names_in_processor
from hfpatch.proof.subject import class_of, coded, is_dtensor

#: Values that a forward may read off its module as settings.
_PLAIN = (int, float, bool, str, type(None), torch.dtype)
#: What reading settings and comparing them raises where they are no longer what they were: one is
#: gone, or is a tensor or an array of several elements now, which have no one answer to ==.
INCOMPARABLE = (KeyError, RuntimeError, TypeError, ValueError)
#: What a forward may call that it reads off its module: a deep copy has the very same.
_CALLED = (types.FunctionType, types.BuiltinFunctionType, type)


def leaf_settings(
    module: nn.Module, known: Container[str] = ()
) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    """The same as `settings_of` of a module whose whole code is stood in for: parameters, buffers
    and children that its code asks for and that are None must stay so, except the `known` ones,
    which are looked at elsewhere; and children that it has must stay there."""
    read, settings = settings_of(module)
    named = names_read(module)
    empty = tuple(
        (kind, name)
        for kind in ("_parameters", "_buffers", "_modules")
        for name, value in module.__dict__[kind].items()
        if value is None and name in named and name not in known
    )
    there = tuple(name for name, child in module._modules.items() if child is not None)
    if not empty and not there:
        return read, settings

    def read_empty(attributes: dict[str, Any]) -> Any:
        for kind, name in empty:
            if name in attributes or attributes[kind].get(name) is not None:
                raise KeyError(name)
        for name in there:
            if attributes["_modules"].get(name) is None:
                raise KeyError(name)
        return read(attributes)

    return read_empty, settings


def settings_of(
    module: nn.Module, ignore: Container[str] = ()
) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    """What reads a module's settings off its `__dict__`, and what it reads now; without `ignore`.

    Settings are the plain attributes and functions that somebody may set while the module is
    patched, such as `eps`: what was bound to their values is no longer right when they differ; so
    are the methods of its class that its forward calls, replaced on the class or the instance. A
    name that begins with `_` is one if the class's code has it, and a list or a dict if its forward
    reaches it: others put marks on modules. The code of an attention's processor, which is given
    the attention, is read as its own.
    Reading raises KeyError where one is no attribute any more.
    """
    named = names_read(module)
    processor = module.__dict__.get("processor")
    if processor is not None:
        named = named | names_in_processor(type(processor))
    now = dict(module.__dict__)  # another thread may restore the model
    names = [
        k
        for k, v in now.items()
        if k not in BLANK_NAMES
        and k not in OWNED_BY_WRAPPERS
        and k not in ignore
        and (k in named or not k.startswith("_"))
        and (_is_setting(v) or (_is_written_to(v) and k in names_in_forward(module)))
    ]
    inherited = {
        k
        for k, v in class_values(module).items()
        if k in named and k not in ignore and _is_setting(v)
    }
    inherited |= {k for k in helpers_of(module) if k not in module.__dict__}
    read = operator.itemgetter(*names) if names else no_settings
    found: Any = read(now)
    settings = tuple(map(_held, found)) if len(names) > 1 else _held(found)
    if above := overridden(module):
        own_read, own_settings, of = read, settings, type(module)

        def read(attributes: dict[str, Any]) -> Any:
            """Also what its class reaches by `super()`, and in which order."""
            reached = [getattr(base, name, None) for base, name in above]
            return own_read(attributes), reached, of.__mro__

        settings = (own_settings, *read(now)[1:])
    if not inherited:
        return read, settings
    cls, others = type(module), tuple(sorted(inherited))
    attributes_of_class = operator.attrgetter(*others)
    codes = _codes_of(getattr(cls, n, None) for n in others)
    of_class = attributes_of_class if codes is None else _both(attributes_of_class, codes)

    def read_both(attributes: dict[str, Any]) -> Any:
        """Also what an instance has of its class, until it is given one of its own."""
        own = [name for name in others if name in attributes]
        if own:
            if any(isinstance(attributes[name], types.FunctionType) for name in own):
                raise KeyError(own[0])  # no method, though its class may have the very same
            values: Any = tuple(
                attributes[n] if n in attributes else getattr(cls, n, None) for n in others
            )
            values = values if len(others) > 1 else values[0]
            return read(attributes), values if codes is None else (values, codes())
        try:
            return read(attributes), of_class(cls)
        except AttributeError as e:  # deleted from its class
            raise KeyError(*e.args) from e

    found = attributes_of_class(cls)
    # the codes of a class's functions are asked for apart
    inherited_now = tuple(map(_bare, found)) if len(others) > 1 else _bare(found)
    if codes is not None:
        inherited_now = (inherited_now, codes())
    return read_both, (settings, inherited_now)


def _codes_of(values: Iterable[Any]) -> Callable[[], list[Any]] | None:
    """What reads the codes of the Python functions among a class's members; None if there are
    none. A code can be exchanged in the function that has it."""
    functions = [f for v in values if isinstance(f := function_in(v), types.FunctionType)]
    return (lambda: [f.__code__ for f in functions]) if functions else None


def _both(
    read: Callable[[type], Any], codes: Callable[[], list[Any]]
) -> Callable[[type], tuple[Any, list[Any]]]:
    return lambda cls: (read(cls), codes())


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):  # not of tensors, which have no one answer to ==
        return all(isinstance(v, _PLAIN) for v in value)
    if isinstance(value, functools.partial):
        return all(isinstance(v, _PLAIN) for v in (*value.args, *value.keywords.values()))
    return isinstance(value, (*_PLAIN, *_CALLED, types.MethodType))


def _is_written_to(value: Any) -> bool:
    """Whether it is a list or a dict of plain values, which is compared with what it held."""
    if type(value) is dict:
        return all(isinstance(v, _PLAIN) for v in (*value.keys(), *value.values()))
    return type(value) is list and all(isinstance(v, _PLAIN) for v in value)


def no_settings(attributes: dict[str, Any]) -> None:
    """Reads the settings of a module that has none."""


def _held(value: Any) -> Any:
    """What a setting is compared with: some are made anew where a module is copied, and the code
    of a function or the arguments of a partial can be exchanged in place."""
    if type(value) in (list, dict):  # which may be written to
        return value.copy()
    kinds = (functools.partial, types.MethodType, types.FunctionType)
    return _Held(value) if isinstance(value, kinds) else value


def _bare(value: Any) -> Any:
    return value if isinstance(value, types.FunctionType) else _held(value)


class _Held:
    """Equal to a function, also with arguments, or a method of whatever object, that is as this
    one.

    It holds no object of a method: an adapter is shared by copies of its module.
    """

    __slots__ = ("_parts",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._parts = _parts(value)

    def __eq__(self, other: object) -> bool:
        return bool(_parts(other) == self._parts)


def _parts(value: Any) -> Any:
    if type(value) is types.MethodType:
        return value.__func__, coded(value.__func__).__code__
    if type(value) is types.FunctionType:
        return value, value.__code__
    if type(value) is functools.partial:
        return value.func, value.args, dict(value.keywords)  # which may be written to
    return None


class Part:
    """A module that a fused forward reads: its class, settings and, unless it is `called` as well,
    forward and hooks; with `own_tensors` also that its tensors are of none but PyTorch's classes,
    whose operators a subclass replaces."""

    def __init__(
        self,
        module: nn.Module,
        path: tuple[str, ...] = (),
        *,
        called: bool = False,
        ignore: Container[str] = (),
        leaf: bool = False,
        own_tensors: bool = False,
    ) -> None:
        self._path, self._called = path, called
        held = (*module._parameters.values(), *module._buffers.values())
        self._own_tensors = own_tensors and any(t is not None for t in held)
        self._free, self._empty = _places_of(module)
        self._class = class_of(module) if called else type(module)
        self._forward = self._class.forward
        self._coded = coded(self._forward)
        self._code = self._coded.__code__
        self._read, self._settings = leaf_settings(module) if leaf else settings_of(module, ignore)

    def is_same(self, root: nn.Module) -> bool:
        """Whether the module at this path below `root` is as it was, and nobody's hook is on it
        that would not fire."""
        module: nn.Module | None = root
        for name in self._path:
            if module is None:
                return False
            module = module._modules.get(name)
        if module is None:
            return False
        if type(module) is not self._class and not (
            self._called and class_of(module) is self._class  # FSDP2 puts a class before it
        ):
            return False
        if not self._called and (
            self._class.forward is not self._forward
            or self._coded.__code__ is not self._code
            or calls_otherwise(self._class)
            or is_replaced(module)
        ):
            return False
        if self._own_tensors and odd_tensor(module) is not None:
            return False
        if self._free and is_taken(module.__dict__, self._free, self._empty):
            return False
        try:
            return bool(self._read(module.__dict__) == self._settings)
        except INCOMPARABLE:  # one was deleted, or is a parameter or module now
            return False


#: Code goes over what is in one of these, or takes the last.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _places_of(module: nn.Module) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """What `is_taken` is given of a module: the names of its children, and of all that is None,
    which no attribute may have; and where of these are None, which must stay so.

    An attribute of the name of a tensor is what a forward of ours reads too.
    """
    tables = ("_parameters", "_buffers", "_modules")
    held = [(table, name, v) for table in tables for name, v in module.__dict__[table].items()]
    empty = tuple((table, name) for table, name, value in held if value is None)
    names = [name for _, name in empty]
    if not isinstance(module, CONTAINERS):
        names += [name for table, name, _ in held if table == "_modules"]
    return frozenset(names), empty


def is_taken(
    attributes: dict[str, Any], free: frozenset[str], empty: Sequence[tuple[str, str]]
) -> bool:
    """Whether an attribute of a module hides one of its children, or there is a parameter, buffer
    or child now where none was."""
    if not attributes.keys().isdisjoint(free):
        return True
    return any(attributes[table].get(name) is not None for table, name in empty)


def odd_tensor(module: nn.Module) -> str | None:
    """The name of a parameter or buffer of a subclass of PyTorch's tensors, if a module has one.
    Whether one that is spread over processes is here is asked elsewhere."""
    d = module.__dict__
    for held in (d["_parameters"], d["_buffers"]):
        for name, t in held.items():  # asked at each call of a fused block, of each of its parts
            own = type(t) is nn.Parameter or type(t) is torch.Tensor or t is None
            if not own and not is_dtensor(t):
                return name  # type: ignore[no-any-return]
    return None


def same_parts(
    parts: Sequence[Part], processors: Sequence[ProcessorPart]
) -> Callable[[nn.Module], bool]:
    """A function that tells whether all parts and processors below a module are as they were.

    It asks what `is_same` of each asks, in one walk: a fused block asks at each call, of dozens of
    modules, and each is found by way of the one above it.
    """
    of_path = {part._path: part for part in parts}
    processor_of = {p._path: p for p in processors}
    every = {p[:n] for p in (*of_path, *processor_of) for n in range(len(p) + 1)}
    paths = sorted(every, key=len)
    places = {path: i for i, path in enumerate(paths)}
    rows = []
    for path in paths:
        part, processor = of_path.get(path), processor_of.get(path)
        rows.append(
            (
                places[path[:-1]],
                path[-1] if path else None,
                *(
                    (None, False, None, None, None, no_settings, None, False, None, ())
                    if part is None
                    else (
                        *(part._class, part._called, part._forward, part._coded, part._code),
                        *(part._read, part._settings, part._own_tensors, part._free, part._empty),
                    )
                ),
                None if processor is None else processor.is_proven,
            )
        )

    def same(root: nn.Module) -> bool:
        modules: list[nn.Module] = []
        try:
            for (
                above, name, cls, called, forward, own, code, read, settings, tensors, free, empty,
                is_proven,
            ) in rows:  # fmt: skip
                module = root if name is None else modules[above].__dict__["_modules"][name]
                if module is None:
                    return False
                modules.append(module)
                d = module.__dict__
                if cls is not None:
                    if called:
                        if type(module) is not cls and class_of(module) is not cls:
                            return False  # FSDP2 puts a class before it
                    elif (
                        type(module) is not cls
                        or cls.forward is not forward
                        or own.__code__ is not code
                        or cls.__call__ is not _CALL
                        or d["_forward_hooks"]
                        or d["_forward_pre_hooks"]
                        or d["_backward_hooks"]
                        or d["_backward_pre_hooks"]
                        or (("forward" in d or "_hf_hook" in d) and is_replaced(module))
                        or "_call_impl" in d
                        or (DIRECT in d and has_own_call(d))
                        or ("_diffusers_hook" in d and has_diffusers_hook(d))
                    ):
                        return False
                    if read(d) != settings or (tensors and odd_tensor(module) is not None):
                        return False
                    if free and not d.keys().isdisjoint(free):
                        return False
                    for table, key in empty:
                        if d[table].get(key) is not None:
                            return False
                if is_proven is not None and not is_proven(d.get("processor")):
                    return False
        except INCOMPARABLE:  # a module is gone, or a setting is a parameter or module now
            return False
        return True

    return same


class ProcessorPart:
    """An attention's processor, which a fused forward stands in for: class, code and settings."""

    def __init__(self, processor: Any, path: tuple[str, ...]) -> None:
        self._path, self._class = path, type(processor)
        self._call = self._class.__call__
        self._coded = coded(self._call)
        self._code = self._coded.__code__
        self._held = {k: v for k, v in vars(processor).items() if k not in READ_LIVE}

    def is_same(self, root: nn.Module) -> bool:
        """Whether the processor of the attention at this path below `root` is as it was."""
        module: Any = root
        for name in self._path:
            module = module._modules.get(name)
            if module is None:
                return False
        return self.is_proven(module.__dict__.get("processor"))

    def is_proven(self, processor: Any) -> bool:
        """Whether this is such a processor."""
        if (
            type(processor) is not self._class
            or self._class.__call__ is not self._call
            or self._coded.__code__ is not self._code
        ):
            return False
        held = processor.__dict__
        if not held:
            return not self._held
        return {k: v for k, v in held.items() if k not in READ_LIVE} == self._held


#: What diffusers looks up in a processor at each call, and so do fused forwards: the backend, and
#: the processes that share the work, which must be none.
READ_LIVE = frozenset({"_attention_backend", "_parallel_config"})


def hooks_on_all() -> bool:
    """Whether hooks on all modules are registered, or somebody's own call of a module is set on
    `nn.Module`: they fire for those alone that are called."""
    return bool(_has_any_global_hook()) or calls_otherwise(nn.Module)


_has_any_global_hook: Callable[[], Any] = torch.nn.modules.module._has_any_global_hook
#: What calling a module runs: PyTorch's own, also where somebody's was there before this file.
_CALL: Any = nn.Module._wrapped_call_impl
_CALL_IMPL: Any = nn.Module._call_impl


def calls_otherwise(cls: type[nn.Module]) -> bool:
    """Whether calling a module of this class runs more or else than PyTorch's own call does."""
    called: Any = cls
    return called.__call__ is not _CALL or called._call_impl is not _CALL_IMPL


#: Layers that fused blocks compute by themselves where they are plain, or leave out.
_LAYERS: tuple[Any, ...] = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.Dropout)
#: Their forwards, and what those of convolutions call.
_FORWARDS = tuple(
    (cls, name, getattr(cls, name), getattr(cls, name).__code__)
    for cls in _LAYERS
    for name in ("forward", "_conv_forward")
    if hasattr(cls, name)
)
_WRITTEN = all(
    sys.modules[cls.__module__].__file__ == code.co_filename for cls, _, _, code in _FORWARDS
)


def layers_replaced() -> bool:
    """Whether somebody's own forward or call stands in one of PyTorch's layer classes, for all of
    its instances."""
    if not _WRITTEN:  # before hfpatch was imported
        return True
    for cls, name, function, code in _FORWARDS:
        if (
            function.__code__ is not code
            or getattr(cls, name, None) is not function
            or cls.__call__ is not _CALL
        ):
            return True
    return False


def is_replaced(module: nn.Module) -> bool:
    """Whether calling `module` runs more or else than its class's forward: a hook's, an own one."""
    forward = module.__dict__.get("forward")
    return (forward is not None and not is_bound(module, forward)) or is_hooked(module)


def is_bound(module: nn.Module, forward: Any) -> bool:
    """Whether an instance's forward is its class's, as hooks leave it when they go, or ours."""
    function = getattr(forward, "__func__", None)
    ours = getattr(getattr(function, "__hfpatch__", None), "adapter", None)
    return getattr(forward, "__self__", None) is module and (
        function is type(module).forward or (ours is not None and ours is function)
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether calling `module` would run somebody's hook, or call of their own."""
    d = module.__dict__
    return bool(
        has_own_call(d)
        or d.get("_forward_hooks")
        or d.get("_forward_pre_hooks")
        or d.get("_backward_hooks")
        or d.get("_backward_pre_hooks")
        or "_hf_hook" in d
        or has_diffusers_hook(d)
    )


def has_diffusers_hook(attributes: dict[str, Any]) -> bool:
    """Whether one of diffusers' hooks is on the module: their registry stays when they go."""
    registry = attributes.get("_diffusers_hook")
    return registry is not None and bool(registry.hooks)
