"""Whether a model is still the one that an engine was made for: looked at in every step.

What is looked at per step are flat lists, made once; what a look costs is in docs/decoding.md.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        kinds = ("_parameters", "_buffers")
        self._holders = [m.__dict__[k] for m in inside for k in kinds if m.__dict__[k]]
        self._tensors = [t for t in _values(self._holders) if t is not None]
        self._strided = [t for t in self._tensors if t.layout is torch.strided]
        self._others = [t for t in self._tensors if t.layout is not torch.strided]
        self._layouts = self._layouts_now()
        self._hooks = [d[name] for d in self._dicts for name in _HOOKS]
        self._notes: Any = _notes()
        note_values = self._notes.note_values
        self._same_parts = (note_values(self._parents), note_values(self._holders))
        #: Whether the tensors lie where they lay: what an engine reads is there.
        self.in_place: Callable[[], bool] = _note_places(self._tensors)
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

    def same_parts(self) -> bool:
        """Whether modules and tensors are those that they were."""
        return all(same() for same in self._same_parts)

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
            list(map(torch.Tensor.is_neg, self._tensors)),  # with another sign than it has there
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
        return all(same() for same in self._wrappers)

    def _note_wrappers(self) -> None:
        self._wrappers = (
            self._notes.note_sizes(self._hooks),
            self._notes.note_attributes(self._dicts, ("forward", DIRECT)),
        )


class _Notes:
    """`hfpatch_kernels.calls.notes_of_dicts` in Python, which takes five to ten times as long."""

    @staticmethod
    def note_values(dicts: list[dict[str, Any]]) -> Callable[[], bool]:
        held = list(_values(dicts))
        return lambda: _same(held, _values(dicts))

    @staticmethod
    def note_sizes(dicts: list[dict[str, Any]]) -> Callable[[], bool]:
        sizes = list(map(len, dicts))
        return lambda: list(map(len, dicts)) == sizes

    @staticmethod
    def note_attributes(dicts: list[dict[str, Any]], names: tuple[str, ...]) -> Callable[[], bool]:
        def found() -> list[Any]:
            return [d.get(name) for d in dicts for name in names]

        held, same_size = found(), _Notes.note_sizes(dicts)
        return lambda: same_size() and _same(held, found())


def _notes() -> Any:
    """What notes the contents of dictionaries: the kernels' build, where it has that."""
    from hfpatch.kernels.sources import local_package

    try:
        return local_package().module.calls.notes_of_dicts() or _Notes
    except (HfpatchError, AttributeError):  # no kernels, older ones, or without Python's headers
        return _Notes


def _note_places(tensors: list[torch.Tensor]) -> Callable[[], bool]:
    """A function: whether the tensors lie where they lie now."""
    from hfpatch.kernels.sources import local_package

    try:
        noted: Callable[[], bool] | None = local_package().module.calls.note_places(tensors)
    except (HfpatchError, AttributeError):
        noted = None
    if noted is not None:
        return noted
    addresses = list(map(_address, tensors))
    return lambda: list(map(_address, tensors)) == addresses


def _address(tensor: torch.Tensor) -> int | None:
    """Where a tensor lies; None of a sparse one, say."""
    try:
        return _DATA_PTR(tensor)
    except RuntimeError:
        return None


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
