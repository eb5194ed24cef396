"""A user's own forward for a class, as its adapter calls it: of each new kind of call the result is
the original's, and the user's is compared with it."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import numpy
import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from hfpatch.announce import warn_in_call
from hfpatch.direct_calls import has_own_call
from hfpatch.errors import FAILURES
from hfpatch.foreign.forwards import Different, Forward, compare_forwards
from hfpatch.foreign.process import surroundings
from hfpatch.proof.keys import BLANK_NAMES, OWNED_BY_WRAPPERS, Same, content_of_cell
from hfpatch.proof.library import HOOKS, is_installed
from hfpatch.proof.proving import may_prove
from hfpatch.proof.subject import coded
from hfpatch.proof.unchanged import calls_otherwise, hooks_on_all, is_bound
from hfpatch.regions.listening import is_idle
from hfpatch.text import told

Tensor = torch.Tensor

_KINDS = 1024
#: Comparisons of calls that differ in numbers alone.
_VALUES = 64


class ForwardWatch:
    """A user's forward of one module, as its adapter calls it: the first call of each kind is the
    original's, beside which the user's runs on copies; later ones are the user's, if it was right.

    A kind is the shapes, strides, dtypes, devices and alignment of the tensors, which of them are
    one, the values of texts, numbers and truth values, those that objects and containers hold, the
    types of all else, the thread, the modes of the call, of the module and of the process, and what
    the modules hold and have around them (`Surrounded`), of tensors dtypes, shapes, strides and
    whether they need gradients. One that raises where it was right before is not used any more.
    """

    def __init__(
        self, name: str, original: Forward, replacement: Forward, around: Surrounded
    ) -> None:
        self._name, self._original, self._replacement = name, original, replacement
        self._around = around
        self._right: set[Any] = set()
        self._refused: set[Any] = set()
        #: How many values were asked of kinds that differ in no shape and type.
        self._asked: dict[Any, int] = {}
        self._lied = False
        #: Dtypes and modes in which values that calls need not have were asked about.
        self._valued: set[Any] = set()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._lied or is_compiling():  # nothing can be compared while a graph is traced
            return self._original(module, *args, **kwargs)
        around = self._around.now(module)
        if around is None:
            return self._original(module, *args, **kwargs)
        seen: dict[int, int] = {}
        kind = (
            _kind(args, seen),
            _kind(kwargs, seen),
            around,
            module.training,
            torch._C._is_any_autocast_enabled() and _autocast(),
            *surroundings(),
        )
        if kind in self._right:
            try:
                return self._replacement(module, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as e:  # as it did not when it was asked
                self._lies(f"it failed ({told(e)})")
        if kind not in self._refused and not _capturing() and self._may_ask(args, kwargs):
            with may_prove((self, kind)) as may:
                if may:
                    self._compare(kind, module, args, kwargs)
        return self._original(module, *args, **kwargs)

    def _may_ask(self, args: Any, kwargs: Any) -> bool:
        """Not without end: a counter makes a kind of each call."""
        alike = pytree.tree_map(_form, (args, kwargs))
        key = repr(alike)
        asked = self._asked[key] = self._asked.get(key, 0) + 1
        if asked == _VALUES + 1:
            self._warn(
                f"was compared for {_VALUES} calls that differ in numbers alone, of its arguments "
                "or of what the module holds; calls with further ones use the original"
            )
        if len(self._asked) > _KINDS:
            self._asked.clear()
        return asked <= _VALUES

    def _compare(
        self, kind: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        recorded = torch.is_grad_enabled()  # leaving inference mode turns it on
        inference = torch.is_inference_mode_enabled()
        alike = repr(pytree.tree_map(_dtype, (args, kwargs))), kind[2:]
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(recorded):
                compare_forwards(
                    module,
                    self._original,
                    self._replacement,
                    args,
                    kwargs,
                    gradients=recorded and not inference,
                    inference=inference,
                    few=alike in self._valued,
                )
        except torch.OutOfMemoryError:
            return  # the next call asks again
        except Different as e:
            self._lies(str(e))
        except FAILURES as e:  # a module or an input that cannot be copied, or its own
            if len(self._refused) >= _KINDS:
                self._refused.clear()
            self._refused.add(kind)
            self._warn(
                f"could not be compared with the original for a call ({told(e)}); such calls use "
                "the original"
            )
        else:
            if len(self._right) >= _KINDS:
                self._right.clear()
            self._right.add(kind)
            self._valued.add(alike)

    def _lies(self, why: str) -> None:
        self._lied = True
        self._right.clear()
        self._warn(f"is not used any more: {why}")

    def _warn(self, what: str) -> None:
        warn_in_call(
            f"hfpatch: the registered forward for {self._name} {what}", RuntimeWarning, stacklevel=6
        )


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _autocast() -> tuple[Any, ...]:
    """What autocast is on, and to which dtype."""
    kinds = [d for d in ("cpu", "cuda", "xpu") if torch.is_autocast_enabled(d)]
    return tuple((d, torch.get_autocast_dtype(d)) for d in kinds)


def _form(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _dtype(value: Any) -> Any:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _kind(value: Any, seen: dict[int, int]) -> Any:
    """seen: the tensors of the call so far, numbered, so that one that comes again is told."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            return type(value)
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.data_ptr() & 63,
            value.requires_grad,
            value.get_device(),
            value._is_view(),
            value.is_inference(),
            seen.setdefault(id(value), len(seen)),
        )
    if isinstance(value, (tuple, list)):
        return (type(value), *[_kind(v, seen) for v in value])
    if isinstance(value, dict):
        return (type(value), *[(k, _kind(v, seen)) for k, v in value.items()])
    return content(value)


#: How deep objects and containers are looked into at a call, and at how many values of each.
_DEPTH, _MOST = 2, 128
_PLAIN = frozenset({int, float, complex, bool, torch.dtype, torch.device})


def content(value: Any, depth: int = _DEPTH) -> Any:
    """The plain values in a value, hashable; of all else the type."""
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Tensor):
        return kind
    if isinstance(value, (nn.Module, type, types.ModuleType)):
        return Same(value)
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):  # made anew at each look
        return kind, value.__name__, Same(value.__self__)
    if isinstance(value, (int, float, complex, str, bytes, range, numpy.generic)):
        return kind, value
    if not depth:
        return kind
    if isinstance(value, slice):
        return kind, value.start, value.stop, value.step
    if isinstance(value, (set, frozenset)):
        if len(value) > _MOST:
            return kind, len(value)
        return kind, frozenset([content(v, depth - 1) for v in value])
    if isinstance(value, functools.partial):
        return kind, *[content(v, depth) for v in (value.func, value.args, value.keywords)]
    if isinstance(value, types.FunctionType):
        cells = tuple(map(content_of_cell, value.__closure__ or ()))
        held_by_it = (cells, value.__defaults__, value.__kwdefaults__)
        return kind, value.__code__, *[content(v, depth) for v in held_by_it]
    if isinstance(value, numpy.ndarray):
        small = value.size <= _MOST and not value.dtype.hasobject
        return kind, value.shape, str(value.dtype), value.tobytes() if small else None
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(held, dict):
        if len(held) > _MOST:
            return kind, len(held)
        names = tuple(k if isinstance(k, str) else type(k) for k in held)
        return kind, names, tuple([content(v, depth - 1) for v in held.values()])
    if isinstance(value, (list, tuple)):
        if len(value) > _MOST:
            return kind, len(value)
        return kind, tuple([content(v, depth - 1) for v in value])
    slots = [s for c in kind.__mro__ for s in _listed_slots(c)]
    return kind, tuple([content(getattr(value, s, None), depth - 1) for s in slots])


def _listed_slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Surrounded:
    """What the modules of a registered forward hold that is no plain setting, and what calling the
    ones inside runs beside their forwards. It holds none of them: copies share it."""

    def __init__(self, module: nn.Module) -> None:
        self._rows: list[tuple[int, str | None, tuple[str, ...], tuple[str, ...]]] = []
        #: What calling a module of each class runs, which may be replaced for all of them.
        self._forwards: dict[Any, tuple[Any, Any, Any]] = {}
        places: dict[str, int] = {}
        for path, m in module.named_modules(remove_duplicate=False):
            above, _, name = path.rpartition(".")
            held = tuple(
                k
                for k, v in m.__dict__.items()
                if k not in BLANK_NAMES and k not in OWNED_BY_WRAPPERS and _is_holder(v)
            )
            children = tuple(m._modules.keys())
            self._rows.append((places.get(above, 0), name if path else None, held, children))
            places[path] = len(places)
            if path and (cls := type(m)) not in self._forwards:
                own = coded(cls.forward)
                self._forwards[cls] = cls.forward, own, getattr(own, "__code__", None)

    def now(self, root: nn.Module) -> Any:
        """A key of it; None where the original has to be called: somebody's hook is on a module
        inside or on all modules, which a comparison would call as well, what calling one runs was
        replaced for its class, or a module is gone or is one more."""
        if self._forwards and hooks_on_all():
            return None
        for cls, (function, own, code) in self._forwards.items():
            if cls.forward is not function or getattr(own, "__code__", None) is not code:
                return None
            if calls_otherwise(cls):
                return None
        found: list[Any] = []
        dicts: list[dict[str, Any]] = []
        tensors: list[Tensor | None] = []
        seen: set[int] = set()
        for above, name, held, children in self._rows:
            try:
                module = root if name is None else dicts[above]["_modules"][name]
                d = module.__dict__
            except (KeyError, AttributeError):
                return None
            dicts.append(d)
            if tuple(d["_modules"].keys()) != children:
                return None
            if name is not None:
                found.append(d["training"])
                if (
                    d["_forward_hooks"]
                    or d["_forward_pre_hooks"]
                    or d["_backward_hooks"]
                    or d["_backward_pre_hooks"]
                ) and not is_idle(module):
                    hooks = [h for kind in HOOKS for h in d[kind].values()]
                    if not all(map(is_installed, hooks)):
                        return None
                    found += map(Same, hooks)
                forward = d.get("forward")
                if forward is not None and not is_bound(module, forward):
                    if not is_installed(forward):
                        return None
                    found.append(Same(forward))
                if has_own_call(d):
                    return None
            tensors += d["_parameters"].values()
            tensors += d["_buffers"].values()
            for attribute in held:
                value = d.get(attribute)
                if id(value) not in seen:
                    seen.add(id(value))
                    found.append(content(value))
        return *found, _forms(tensors)


_form_of = operator.attrgetter("dtype", "requires_grad", "shape")


def _forms(tensors: list[Tensor | None]) -> Any:
    """What of the tensors that a module holds decides which kernels take them, and of which there
    are gradients."""
    try:
        return (*map(_form_of, tensors), *map(Tensor.stride, tensors))  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):  # one is None, or has no strides
        return tuple([t if t is None else _form_of(t) for t in tensors])


def _is_holder(value: Any) -> bool:
    return type(value) not in (*_PLAIN, str, type(None)) and not isinstance(
        value,
        (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    )
