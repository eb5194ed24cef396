"""Whether a model is still the one that an engine was made for: looked at in every step.

What is looked at per step are flat lists, made once; what a look costs is in docs/decoding.md.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.decoding.likeness import what_wraps
from hfpatch.decoding.surroundings import Surroundings
from hfpatch.direct_calls import DIRECT
from hfpatch.patches.unchanged import settings_of

_DATA_PTR = torch.Tensor.data_ptr
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FORWARD, _DIRECT = operator.itemgetter("forward"), operator.itemgetter(DIRECT)


class Watch:
    """A model's modules, tensors, hooks and forwards as they were when it was made.

    It holds the modules inside of the model and its tensors, but not the model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        inside = [m for m in model.modules() if m is not model]
        self._inside = inside
        self._dicts = [m.__dict__ for m in inside]
        self._parents = [d["_modules"] for d in (model.__dict__, *self._dicts) if d["_modules"]]
        self._children = list(map(id, _values(self._parents)))
        kinds = ("_parameters", "_buffers")
        self._holders = [m.__dict__[k] for m in inside for k in kinds if m.__dict__[k]]
        self._ids = list(map(id, _values(self._holders)))
        self._tensors = [t for t in _values(self._holders) if t is not None]
        self._addresses = list(map(_DATA_PTR, self._tensors))
        self._layouts = list(map(_layout_of, self._tensors))
        self._hooks = [d[name] for d in self._dicts for name in _HOOKS]
        self._note_wrappers()
        modules = (*inside, model)
        self._classes = list(map(_class_of, modules))
        self._held = _held_by(modules)  # held, so that an id stays its own
        self._held_ids = list(map(id, self._held))
        self._versions = _versions_of(modules)
        self._settings = [settings_of(m) for m in modules]
        self._surroundings = Surroundings(model)

    def in_place(self) -> bool:
        """Whether the tensors lie where they lay: what an engine reads is there."""
        return list(map(_DATA_PTR, self._tensors)) == self._addresses

    def same_parts(self) -> bool:
        """Whether modules and tensors are those that they were."""
        return (
            list(map(id, _values(self._parents))) == self._children
            and list(map(id, _values(self._holders))) == self._ids
        )

    def wrapped(self, model: nn.Module) -> str | None:
        """Why a module inside must be called: somebody's hook or forward. Or None."""
        if self._wrappers() == self._known_wrappers:
            return None
        for path, module in model.named_modules():
            if path and (why := what_wraps(module)) is not None:
                return f"`{path}` {why}"
        self._note_wrappers()  # such as do nothing, or are gone
        return None

    def changed(self, model: nn.Module) -> bool:
        """Whether a setting, a class's code or what that finds by name is another than it was, a
        buffer was written to, of which a description may hold a copy, or a tensor is another view
        of its memory. Slower: once a sequence."""
        modules = (*self._inside, model)
        if list(map(_layout_of, self._tensors)) != self._layouts:
            return True
        if not model.__dict__.keys().isdisjoint(model._modules):  # an attribute hides a child
            return True
        if list(map(_class_of, modules)) != self._classes:
            return True
        if list(map(id, _held_by(modules))) != self._held_ids:
            return True
        if _versions_of(modules) != self._versions:
            return True
        try:
            return self._surroundings.changed(model) or any(
                read(m.__dict__) != settings
                for m, (read, settings) in zip(modules, self._settings, strict=True)
            )
        except (AttributeError, KeyError):  # one was deleted
            return True

    def trains(self) -> bool:
        """Whether a module inside is in training mode."""
        return any(d["training"] for d in self._dicts)

    def _wrappers(self) -> tuple[int, list[int], list[int]]:
        """How many hooks and attributes there are, and the forwards and calls of instances: a new
        one is a new attribute."""
        try:
            forwards = list(map(id, map(_FORWARD, self._with_forward)))
            forwards += map(id, map(_DIRECT, self._with_call))
        except KeyError:  # one was deleted
            forwards = []
        return sum(map(len, self._hooks)), list(map(len, self._dicts)), forwards

    def _note_wrappers(self) -> None:
        self._with_forward = [d for d in self._dicts if "forward" in d]
        self._with_call = [d for d in self._dicts if DIRECT in d]
        self._known_wrappers = self._wrappers()


def _class_of(module: nn.Module) -> tuple[Any, ...]:
    cls: Any = type(module)
    return cls, cls.forward, getattr(cls.forward, "__code__", None), cls.__call__, cls._call_impl


def _layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride() if t.layout is torch.strided else t.layout, t.dtype


_CONTAINERS = operator.itemgetter("_modules", "_parameters", "_buffers", *_HOOKS)


def _held_by(modules: Iterable[nn.Module]) -> list[Any]:
    """What hooks, children and tensors are put into, and the configurations."""
    dicts = [m.__dict__ for m in modules]
    found = list(itertools.chain.from_iterable(map(_CONTAINERS, dicts)))
    found += [d.get("config") for d in dicts]
    return found


def _versions_of(modules: Iterable[nn.Module]) -> list[int | None]:
    """How often the buffers were written to, as far as PyTorch counts that."""
    return [
        None if b.is_inference() else b._version
        for m in modules
        for name, b in m._buffers.items()
        # a prompt writes these, which are read from `original_inv_freq` (Described.limit)
        if b is not None and (name != "inv_freq" or m.__dict__.get("rope_type") != "longrope")
    ]


def _values(dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))
