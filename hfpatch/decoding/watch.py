"""Whether a model is still the one that an engine was made for: looked at in every step.

What is looked at per step are flat lists, made once; what a look costs is in docs/decoding.md.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.decoding.likeness import what_wraps
from hfpatch.decoding.surroundings import Surroundings
from hfpatch.direct_calls import DIRECT
from hfpatch.errors import HfpatchError
from hfpatch.proof.unchanged import INCOMPARABLE, settings_of

_DATA_PTR = torch.Tensor.data_ptr
_SHAPE, _DTYPE = (getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: What reads no training flag. A model in `eval` has such in training mode, for example behind
#: `resize_token_embeddings`, which makes new ones.
_WITHOUT_MODES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.ModuleDict, nn.Identity)
_TRAINING = operator.itemgetter("training")
#: What hooks, children and tensors are put into.
_CONTAINERS = operator.itemgetter("_modules", "_parameters", "_buffers", *_HOOKS)


class Watch:
    """A model's modules, tensors, hooks and forwards as they were when it was made.

    It holds the modules inside of the model and its tensors, but not the model itself. Lists are
    gone through by `map` with functions in C: while a GPU makes a first token of a small model the
    host has no more than 1.5 ms.
    """

    def __init__(self, model: nn.Module) -> None:
        inside = [m for m in model.modules() if m is not model]
        self._inside = inside
        self._dicts = [m.__dict__ for m in inside]
        self._modal = [m.__dict__ for m in inside if type(m) not in _WITHOUT_MODES]
        self._without = [m.__dict__ for m in inside if type(m) in _WITHOUT_MODES]
        self._modes = list(map(_TRAINING, self._without))
        self._parents = [d["_modules"] for d in (model.__dict__, *self._dicts) if d["_modules"]]
        self._children = list(_values(self._parents))
        kinds = ("_parameters", "_buffers")
        self._holders = [m.__dict__[k] for m in inside for k in kinds if m.__dict__[k]]
        self._in_holders = list(_values(self._holders))
        self._tensors = [t for t in self._in_holders if t is not None]
        self._addresses = list(map(_DATA_PTR, self._tensors))
        self._strided = [t for t in self._tensors if t.layout is torch.strided]
        self._others = [t for t in self._tensors if t.layout is not torch.strided]
        self._layouts = self._layouts_now()
        self._hooks = [d[name] for d in self._dicts for name in _HOOKS]
        self._look: Any = _quick_looks(self._tensors, self._addresses)
        self._note_wrappers()
        modules = (*inside, model)
        self._types = list(map(type, modules))
        self._classes = {c: _code_of(c) for c in self._types}
        dicts = [m.__dict__ for m in modules]
        self._containers = list(_containers_of(dicts))
        self._configs = list(_configs_of(dicts))
        self._buffers = [b for m in modules for b in _read_only(m)]
        self._versions = _versions_of(self._buffers)
        self._holders_of_buffers = [d["_buffers"] for d in dicts]
        self._buffer_counts = list(map(len, self._holders_of_buffers))
        found = [settings_of(m) for m in modules]
        self._readers = [read for read, _ in found]
        self._settings = [settings for _, settings in found]
        self._surroundings = Surroundings(model)

    def in_place(self) -> bool:
        """Whether the tensors lie where they lay: what an engine reads is there."""
        found: bool = self._look.lie_at(self._tensors, self._addresses)
        return found

    def same_parts(self) -> bool:
        """Whether modules and tensors are those that they were."""
        values_are = self._look.values_are
        return bool(
            values_are(self._parents, self._children)
            and values_are(self._holders, self._in_holders)
        )

    def wrapped(self, model: nn.Module) -> str | None:
        """Why a module inside must be called: somebody's hook or forward. Or None."""
        if self._same_wrappers():
            return None
        for path, module in model.named_modules():
            if path and (why := what_wraps(module)) is not None:
                return f"`{path}` {why}"
        self._note_wrappers()  # such as do nothing, or are gone
        return None

    def changed(self, model: nn.Module) -> bool:
        """Whether a setting, a class's code or what that finds by name is another than it was, a
        buffer was written to, of which a description may hold a copy, or a tensor is another view
        of its memory. Slower: once a sequence, where the parts are the same."""
        modules = (*self._inside, model)
        dicts = [*self._dicts, model.__dict__]
        if not _same(self._types, map(type, modules)) or any(
            _code_of(c) != code for c, code in self._classes.items()
        ):
            return True
        if not model.__dict__.keys().isdisjoint(model._modules):  # an attribute hides a child
            return True
        if not _same(self._containers, _containers_of(dicts)):
            return True
        if not _same(self._configs, _configs_of(dicts)):
            return True
        if list(map(len, self._holders_of_buffers)) != self._buffer_counts:
            return True
        if _versions_of(self._buffers) != self._versions:
            return True
        if list(map(_TRAINING, self._without)) != self._modes:  # a parent may read it
            return True
        try:
            if self._layouts_now() != self._layouts:
                return True
            settings = [read(d) for read, d in zip(self._readers, dicts, strict=True)]
            return settings != self._settings or self._surroundings.changed(model)
        except (AttributeError, *INCOMPARABLE):  # a tensor may have no strides any more
            return True

    def _layouts_now(self) -> tuple[Any, ...]:
        """What each tensor is a view of its memory as."""
        return (
            list(map(_SHAPE, self._tensors)),
            list(map(torch.Tensor.stride, self._strided)),
            list(map(_DTYPE, self._tensors)),
            [t.layout for t in self._others],
        )

    def trains(self, model: nn.Module) -> str | None:
        """The path of a module inside that is in training mode, or None."""
        if not any(d["training"] for d in self._modal):
            return None
        found: Iterator[str] = (
            path
            for path, m in model.named_modules()
            if path and m.training and type(m) not in _WITHOUT_MODES
        )
        return next(found)

    def _same_wrappers(self) -> bool:
        """Whether there are as many hooks and attributes as there were, and the same forwards and
        calls of instances: a new one is a new attribute."""
        look = self._look
        same: bool = (
            look.sizes_are(self._hooks, self._hook_counts)
            and look.sizes_are(self._dicts, self._attribute_counts)
            and look.items_are(self._with_forward, "forward", self._forwards)
            and look.items_are(self._with_call, DIRECT, self._calls)
        )
        return same

    def _note_wrappers(self) -> None:
        self._hook_counts = list(map(len, self._hooks))
        self._attribute_counts = list(map(len, self._dicts))
        self._with_forward = [d for d in self._dicts if "forward" in d]
        self._forwards = [id(d["forward"]) for d in self._with_forward]
        self._with_call = [d for d in self._dicts if DIRECT in d]
        self._calls = [id(d[DIRECT]) for d in self._with_call]


class _Looks:
    """`hfpatch_kernels.calls.watcher` in Python, which takes twice to five times as long."""

    @staticmethod
    def values_are(dicts: list[dict[str, Any]], objects: list[Any]) -> bool:
        return _same(objects, _values(dicts))

    @staticmethod
    def sizes_are(dicts: list[dict[str, Any]], sizes: list[int]) -> bool:
        return list(map(len, dicts)) == sizes

    @staticmethod
    def items_are(dicts: list[dict[str, Any]], name: str, addresses: list[int]) -> bool:
        try:
            return list(map(id, map(operator.itemgetter(name), dicts))) == addresses
        except KeyError:  # one was deleted
            return False

    @staticmethod
    def lie_at(tensors: list[torch.Tensor], addresses: list[int]) -> bool:
        return list(map(_DATA_PTR, tensors)) == addresses


def _quick_looks(tensors: list[torch.Tensor], addresses: list[int]) -> Any:
    """What looks at lists: the kernels' build, where it has that and can read these tensors."""
    from hfpatch.kernels.sources import local_package

    try:
        found = local_package().module.calls.watcher()
        return found if found.lie_at(tensors, addresses) else _Looks
    except (HfpatchError, AttributeError):  # no kernels, older ones, or without Python's headers
        return _Looks


def _same(ours: Sequence[Any], theirs: Iterable[Any]) -> bool:
    """Whether these are the very objects that they were, and as many."""
    found = list(theirs)
    return len(found) == len(ours) and all(map(operator.is_, ours, found))


def _code_of(cls: Any) -> tuple[Any, ...]:
    return cls.forward, getattr(cls.forward, "__code__", None), cls.__call__, cls._call_impl


def _containers_of(dicts: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_CONTAINERS, dicts))


def _configs_of(dicts: list[dict[str, Any]]) -> Iterator[Any]:
    return map(dict.get, dicts, itertools.repeat("config"))


def _read_only(module: nn.Module) -> Iterator[torch.Tensor]:
    """The buffers that no forward writes to, of which a description may hold a copy."""
    for name, b in module._buffers.items():
        # a prompt writes these, which are read from `original_inv_freq` (Described.limit)
        if b is not None and (name != "inv_freq" or module.__dict__.get("rope_type") != "longrope"):
            yield b


def _versions_of(buffers: list[torch.Tensor]) -> list[int | None]:
    """How often the buffers were written to, as far as PyTorch counts that."""
    return [None if b.is_inference() else b._version for b in buffers]


def _values(dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))
