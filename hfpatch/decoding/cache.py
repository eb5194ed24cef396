"""The user's `DynamicCache` over memory that decoding steps can extend in place.

An `ArenaLayer` is a cache layer whose keys and values lie in an arena. To everybody else it is what
it was: whoever reads its tensors or writes to it (`update`, `crop`, `reorder_cache`, ...) makes it
a plain layer again, and the next step takes it into a new arena. So a tensor that somebody holds is
contiguous as a plain layer's, never changes, and what is written to it later reaches no step.
Copies, deep copies and pickles are plain layers.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import weakref
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfpatch.decoding.prompt import Kept
from hfpatch.decoding.spec import Attention, CacheTable, Model

#: What a call of a model, and its output, call the cache. transformers 5.24 renamed it, and takes
#: the name before as well.
NAME = next(
    f.name
    for f in dataclasses.fields(CausalLMOutputWithPast)
    if f.name in ("cache", "past_key_values")
)
NAMES = tuple(dict.fromkeys((NAME, "past_key_values")))

#: Why a cache is left alone that no step has written to.
EMPTY = "its cache is empty"
#: New tokens that an arena has room for beside an eighth of those that are there; fewer where that
#: would be more than this share of the weights' bytes, but never fewer than the least.
_ROOM, _LEAST_ROOM = 256, 32
_SHARE = 0.02


def given(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, by whichever of its names; None where two are given."""
    found = [kwargs[name] for name in NAMES if kwargs.get(name) is not None]
    return found[0] if len(found) == 1 else None


def _no_model() -> None:
    return None


#: In the place of what an arena no longer holds.
_NOTHING = torch.empty(0)


class Arena:
    """The memory of a cache's layers: `table` is what a step reads and extends."""

    def __init__(self) -> None:
        self.table = CacheTable()
        self.rows = 0
        self.capacity = 0
        #: The larger one that its layers were moved to.
        self.next: Arena | None = None
        self._model: Callable[[], Model | None] = _no_model  # weak: a cache keeps no weights

    def fits(self, model: Model, rows: int) -> bool:
        """Whether its layers were found fit for steps of `rows` sequences of this model. Another
        may have other windows, and the arena still holds what those of its layers have left."""
        return self.rows == rows and self._model() is model

    def found_fit(self, model: Model) -> None:
        """Its layers are those that steps of this model can extend."""
        if self._model() is not model:
            self._model = weakref.ref(model)

    @property
    def length(self) -> int:
        """Tokens that were cached, also those that a window has left."""
        return self.table.length

    def holds(self, index: int) -> bool:
        """Whether the keys and values of a layer still lie here."""
        return self.table.keys[index].dim() == 4

    def release(self, index: int) -> None:
        """Hold a layer's keys and values no longer: it has left, and nobody else reads them here. A
        cache that is copied layer by layer needs memory for one layer more, not for another cache.
        """
        if self.holds(index):
            self.table.keys[index] = self.table.values[index] = _NOTHING

    def behind(self, tokens: int) -> dict[str, list[Tensor]]:
        """Copies of the keys and values of the next `tokens`, of each layer."""
        now = slice(self.length, self.length + tokens)
        table = self.table
        return {
            name: [t[:, :, now].clone() for t in memory]
            for name, memory in (("keys", table.keys), ("values", table.values))
        }

    def add(self, layer: Any, capacity: int) -> None:
        """Copy a layer's keys and values in; the layer itself is left as it is."""
        length = layer.get_seq_length()
        held_in = (self.table.keys, self.table.values)
        for kept, held in zip(_tensors_of(layer), held_in, strict=True):
            rows, heads, there, dim = kept.shape
            # in inference mode it could be written under that mode alone; leaving it records again
            with torch.inference_mode(False), torch.no_grad():
                new = torch.empty(
                    (rows, heads, capacity, dim), dtype=kept.dtype, device=kept.device
                )
                new[:, :, length - there : length] = kept
                if there < length:  # what a window has left is never read, but must not be NaN
                    new[:, :, : length - there] = 0
            held.append(new)
        self.rows, self.capacity, self.table.length = rows, capacity, length


#: What keeps keys and values: steps write in place of their methods.
CLASSES: tuple[type, ...] = tuple(
    base
    for base in dict.fromkeys((*DynamicCache.__mro__, *DynamicSlidingWindowLayer.__mro__))
    if base.__module__.startswith("transformers.")
)


def capacity_for(length: int, model: Model | None = None, rows: int = 1) -> int:
    """How many tokens of each of `rows` sequences a new arena for `length` of them has room for.

    With a model, what is held beside a cache, a step's buffers included, is a twentieth of its
    weights. A cache that is full is copied to a larger arena, which for 32 tokens costs a few per
    cent of their steps."""
    room = length // 8 + _ROOM
    if model is not None:
        allowed = _SHARE * model.weight_bytes / (rows * model.cached_bytes)
        room = min(room, max(_LEAST_ROOM, int(allowed)))
    return length + room


#: Attributes that a layer has while it is in an arena.
_OF_AN_ARENA = frozenset({"arena", "index", "first"})


class _Viewed:
    """What `ArenaLayer` and `ArenaWindowLayer` share; before the plain class among their bases."""

    __slots__ = ()  # a layer that changes its class keeps its layout
    _plain: type
    arena: Arena
    index: int

    def in_arena(self: Any, name: str) -> Tensor:
        """The keys or the values as they are now, where they lie."""
        table = self.arena.table
        first = 0
        if self.is_sliding:
            first = max(0, table.length - self.sliding_window + 1)
            if self.record_past:  # what the window has left since then is kept
                first = self.__dict__.get("first", first)
        memory: Tensor = getattr(table, name)[self.index]
        return memory[:, :, first : table.length]

    def become_plain(self: Any, *, copied: bool = False) -> None:
        """A layer of transformers' own class, whose tensors are views of the arena as it is, which
        nothing else writes to from now on; or, `copied`, have memory of their own."""
        keys, values = self.in_arena("keys"), self.in_arena("values")
        if copied:
            keys, values = (t.clone(memory_format=torch.contiguous_format) for t in (keys, values))
        own = self.__dict__
        # Hidden by the views until the class changes: an interrupt leaves one kind of layer or the
        # other, whole.
        own.update(keys=keys, values=values)
        if self.is_sliding:  # it has another length than its keys
            own["cumulative_length"] = self.arena.length
        self.__class__ = self._plain
        arena, index = self.__dict__["arena"], self.__dict__["index"]
        for name in _OF_AN_ARENA:
            own.pop(name, None)
        if not self.is_sliding:  # else a step that is taken back needs what the window has lost
            arena.release(index)

    def get_seq_length(self) -> int:
        return self.arena.length

    def plain_state(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        """The attributes of a plain layer of the same content; with `memo`, copies of them."""
        own = {k: v for k, v in vars(self).items() if k not in _OF_AN_ARENA}
        own = copy.deepcopy(own, memo) if memo is not None else own
        keys, values = self.in_arena("keys"), self.in_arena("values")
        if memo is not None:
            keys, values = keys.contiguous().clone(), values.contiguous().clone()
        own |= {"keys": keys, "values": values}
        if issubclass(self._plain, DynamicSlidingWindowLayer):
            own["cumulative_length"] = self.arena.length
        return own

    def __copy__(self) -> Any:
        # of memory of its own: a plain layer's tensors are never written to again
        state = self.plain_state(None)
        state |= {k: state[k].clone() for k in ("keys", "values")}
        return _plain_layer(self._plain, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_layer(self._plain, self.plain_state(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # loads where hfpatch is not installed
        make: Any = copyreg._reconstructor  # type: ignore[attr-defined]
        return make, (self._plain, object, None), self.plain_state({})


class _Named(ABCMeta):
    """The class of classes that are shown as another is: who pickles one has that other."""


def _named(cls: Any) -> Any:
    return copy.copy, (cls._plain,)  # which for a class is the class itself


copyreg.pickle(_Named, _named)


def _viewed(cls: Any) -> Any:
    """The class with what `_Viewed` has. As a base it would make another layout of instances, and
    a layer could not change its class. It is shown as the plain one, `repr` included: to everybody
    else a layer is what it was."""
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(cls, name, getattr(cls._plain, name))
    for name in (
        *("become_plain", "get_seq_length", "in_arena", "plain_state"),
        *("__copy__", "__deepcopy__", "__reduce_ex__"),
    ):
        setattr(cls, name, vars(_Viewed)[name])
    for name in _WRITING:
        if hasattr(cls, name):
            setattr(cls, name, _as_plain(name))
    return cls


#: Methods of a layer that read its tensors to make others of them: no copy is needed for that.
_WRITING = (
    *("update", "lazy_initialization", "crop", "reorder_cache", "reset", "offload", "prefetch"),
    *("batch_repeat_interleave", "batch_select_indices", "activate_past_recording"),
)


def _as_plain(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.become_plain()
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def _plain_layer(cls: Any, state: dict[str, Any]) -> Any:
    layer = cls.__new__(cls)
    layer.__dict__.update(state)
    return layer


def _view(name: str) -> property:
    def get(self: Any) -> Tensor:
        self.become_plain(copied=True)
        found: Tensor = getattr(self, name)
        return found

    def put(self: Any, value: Any) -> None:
        self.become_plain()
        setattr(self, name, value)

    return property(get, put)


def _cumulative_length() -> property:
    def get(self: Any) -> int:
        return int(self.arena.length)

    def put(self: Any, value: int) -> None:
        self.become_plain()
        self.cumulative_length = value

    return property(get, put)


@_viewed
class ArenaLayer(DynamicLayer, metaclass=_Named):  # type: ignore[misc]
    """A `DynamicLayer` in an arena."""

    _plain = DynamicLayer
    keys = _view("keys")
    values = _view("values")


@_viewed
class ArenaWindowLayer(DynamicSlidingWindowLayer, metaclass=_Named):  # type: ignore[misc]
    """A `DynamicSlidingWindowLayer` in an arena, which also holds what the window has left."""

    _plain = DynamicSlidingWindowLayer
    keys = _view("keys")
    values = _view("values")
    cumulative_length = _cumulative_length()


_CLASSES: dict[type, type] = {
    DynamicLayer: ArenaLayer,
    DynamicSlidingWindowLayer: ArenaWindowLayer,
    ArenaLayer: ArenaLayer,
    ArenaWindowLayer: ArenaWindowLayer,
}


_ARENAS = frozenset({ArenaLayer, ArenaWindowLayer})
_PLAIN: dict[type, type] = {cls: getattr(cls, "_plain", cls) for cls in _CLASSES}


def is_plain(cache: Any) -> bool:
    """Whether it is a cache of the only kind that an arena may be made of."""
    return type(cache) is DynamicCache


def other_layer(config: Any) -> tuple[int, str] | None:
    """The first layer of the cache that transformers makes for a model of this configuration which
    no step can extend, as (number, class): linear attention keeps a state, a layer that reads
    another's keys nothing. None if there is none."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # any class's own; who makes it for a call will see it
        return None
    others = ((i, type(t).__name__) for i, t in enumerate(layers) if type(t) not in _CLASSES)
    return next(others, None)


def is_empty(cache: Any) -> bool:
    """Whether it is one that nothing was put into yet."""
    return is_plain(cache) and not cache.get_seq_length()


def other_kind(cls: type) -> str:
    """Why a cache of a class that is no plain one's is left alone."""
    return f"its cache is a {cls.__name__}"


def unfit(cache: Any, model: Model, rows: int) -> str | None:
    """Why a cache is none that a step of `rows` sequences can extend; None if it is one."""
    if not is_plain(cache):
        return other_kind(type(cache))
    if "update" in cache.__dict__ or any("update" in layer.__dict__ for layer in cache.layers):
        return "its cache has an `update` of its own"
    if getattr(cache, "offloading", False):
        return "its cache is offloaded"
    if not cache.layers or not all(layer.is_initialized for layer in cache.layers):
        return EMPTY
    if len(cache.layers) != len(model.layers):
        return f"its cache has {len(cache.layers)} layers, expected {len(model.layers)}"
    if len(set(map(id, cache.layers))) != len(cache.layers):
        return "its cache has one layer in several places"
    lengths = set()
    for layer, described in zip(cache.layers, model.layers, strict=True):
        if (why := _unfit_layer(layer, described.attention, model.embedding, rows)) is not None:
            return why
        lengths.add(layer.get_seq_length())
    return None if len(lengths) == 1 else "its cache's layers are of several lengths"


def _unfit_layer(layer: Any, attention: Attention, like: Tensor, rows: int) -> str | None:
    if type(layer) not in _CLASSES:
        return f"its cache has a {type(layer).__name__}"
    length = layer.get_seq_length()
    there = length
    if layer.is_sliding:
        if layer.sliding_window != attention.window:
            return f"its cache's window is {layer.sliding_window}, expected {attention.window}"
        there = min(length, layer.sliding_window - 1)
        kept = _tensors_of(layer)[0]
        if layer.record_past and isinstance(kept, Tensor) and kept.dim() == 4:
            there = min(length, max(there, kept.shape[2]))
    wanted = (rows, attention.key_heads, there, attention.head_dim)
    for t in _tensors_of(layer):
        if type(t) is not Tensor or tuple(t.shape) != wanted or not length:
            return "its cache's keys and values have other shapes"
        if t.dtype != like.dtype or t.device != like.device:
            return f"its cache is {t.dtype} on {t.device}, expected {like.dtype} on {like.device}"
    return None


def _tensors_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Its keys and values, where they lie."""
    if type(layer) in _ARENAS:
        return layer.in_arena("keys"), layer.in_arena("values")
    return layer.keys, layer.values


def held_arena(cache: Any) -> Arena | None:
    """The arena that all of a cache's layers are in, if there is one."""
    if type(cache) is not DynamicCache or not cache.layers or "update" in cache.__dict__:
        return None
    layers = cache.layers
    arena: Arena | None = layers[0].__dict__.get("arena")
    if arena is None or len(arena.table.keys) != len(layers):
        return None
    for index, layer in enumerate(layers):
        held = layer.__dict__
        # the class: of a layer that an interrupt left on its way out the attributes may be there
        if type(layer) not in _ARENAS or held["arena"] is not arena or held["index"] != index:
            return None
        if "update" in held:
            return None
    return arena


class _AsItWas(NamedTuple):
    """A layer before a step: its class and attributes, without keys and values that are only added
    to; or how many tokens of these there were. length: -1 where the attributes are all of it."""

    cls: type
    held: dict[str, Any]
    length: int


def layers_of(cache: Any, stepped: bool) -> list[_AsItWas] | Arena | None:
    """A cache's layers as they are, in no memory of their own: transformers puts other tensors in
    the place of theirs, and writes to none. None where one is of another kind.

    `stepped`: an engine has just made a step, so that their arena says all.
    """
    if stepped:
        held: Arena | None = cache.layers[0].__dict__.get("arena")
        return held
    if any(type(layer) not in _CLASSES for layer in cache.layers):
        return None
    return [_as_it_is(layer) for layer in cache.layers]


def _as_it_is(layer: Any) -> _AsItWas:
    held = dict(vars(layer))
    if layer.is_sliding or not layer.is_initialized:
        return _AsItWas(type(layer), held, -1)
    for name in ("keys", "values", *_OF_AN_ARENA):
        held.pop(name, None)
    return _AsItWas(_PLAIN[type(layer)], held, layer.get_seq_length())


def leave_arena(cache: Any) -> None:
    """Make a cache's layers plain ones before a call of the original: one after the other, as it
    updates them, an interrupt would leave some of them longer than others."""
    for layer in cache.layers:
        if type(layer) in _ARENAS:
            layer.become_plain()


def take_back(cache: Any, arena: Arena | None, kept: list[_AsItWas] | Arena | None = None) -> None:
    """Undo a step of one token, which was made in `arena`: nothing is read behind a cache's end.

    `arena`: as it was held behind the step, by a cache that somebody may have read since.
    `kept`: its layers before the step, by `layers_of`, for one that was made in no arena: a window
    has lost a key by it, and a model that trains with checkpoints has added none.
    """
    if arena is None and isinstance(kept, Arena):
        for index, layer in enumerate(cache.layers):
            _put_back(layer, kept, index)
    elif arena is None and isinstance(kept, list):
        del cache.layers[len(kept) :]
        for layer, was in zip(cache.layers, kept, strict=True):
            if was.length >= 0:
                _shorten(layer, was.length)
                was = was._replace(held=was.held | {n: vars(layer)[n] for n in ("keys", "values")})
            layer.__class__ = was.cls
            layer.__dict__.clear()
            layer.__dict__.update(was.held)
    elif arena is None:
        cache.crop(-1)
    elif held_arena(cache) is arena:
        arena.table.length -= 1
    else:
        arena.table.length -= 1
        length = arena.length
        for index, layer in enumerate(cache.layers):
            if type(layer) in _ARENAS:
                layer.become_plain()
            elif not layer.is_sliding or layer.get_seq_length() < layer.sliding_window:
                layer.crop(-1)
            else:  # it has lost the key that the window now reaches back to
                now = slice(length - layer.sliding_window + 1, length)
                layer.keys = arena.table.keys[index][:, :, now].clone()
                layer.values = arena.table.values[index][:, :, now].clone()
                layer.cumulative_length = length


def _shorten(layer: Any, length: int) -> None:
    """Leave the first `length` tokens to a layer that is no window, and make it a plain one."""
    if type(layer) in _ARENAS:
        layer.become_plain()
    if (more := layer.get_seq_length() - length) > 0:
        layer.crop(-more)


def _put_back(layer: Any, arena: Arena, index: int) -> None:
    """Let a layer be what it was in `arena`, or in one that it was moved to since."""
    home: Arena | None = arena
    while home is not None and not (len(home.table.keys) > index and home.holds(index)):
        home = home.next
    if home is None:  # it has tensors of its own, which were only added to
        _shorten(layer, arena.length)
        return
    for name in ("keys", "values", "cumulative_length"):
        layer.__dict__.pop(name, None)
    layer.__class__ = _CLASSES[type(layer)]
    layer.arena, layer.index = home, index


def take(cache: Any, tokens: int, model: Model | None = None) -> Arena:
    """An arena that all of a (fit) cache's layers are in, with room for `tokens` more, and for some
    behind these (`capacity_for`).

    Raises:
        torch.OutOfMemoryError: the cache is as it was, or in part in an arena; either is whole.
    """
    arena = held_arena(cache)
    if arena is not None and arena.length + tokens <= arena.capacity:
        return arena
    new = Arena()
    length = cache.layers[0].get_seq_length()
    rows = _tensors_of(cache.layers[0])[0].shape[0]
    capacity = capacity_for(length + tokens, model, rows)
    for index, layer in enumerate(cache.layers):
        new.add(layer, capacity)
        first = length - _tensors_of(layer)[0].shape[2]
        if type(layer) in _ARENAS:
            old, place = layer.arena, layer.index
            layer.become_plain()
            old.next = new
            old.release(place)
        _join(layer, new, index, first if layer.is_sliding and layer.record_past else None)
    return new


def _join(layer: Any, arena: Arena, index: int, first: int | None = None) -> None:
    """Put a plain layer into an arena that has its keys and values. An interrupt between two lines
    leaves one kind of layer or the other, whole."""
    own = layer.__dict__
    own.update(arena=arena, index=index)
    if first is not None:
        own["first"] = first
    layer.__class__ = _CLASSES[type(layer)]
    for name in ("keys", "values", "cumulative_length"):
        own.pop(name, None)


def unfit_for_prompt(cache: Any, model: Model) -> str | None:
    """Why a cache is none that a prompt can begin; None if it is one."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"its cache is a {type(cache).__name__}"
    if len(cache.layers) != len(model.layers):
        return f"its cache has {len(cache.layers)} layers, expected {len(model.layers)}"
    for layer, described in zip(cache.layers, model.layers, strict=True):
        if type(layer) not in _CLASSES or layer.is_initialized or layer.get_seq_length():
            return "its cache is not empty"
        if getattr(layer, "record_past", False):
            return "its cache keeps what its window has left (assisted decoding)"
        if layer.is_sliding and layer.sliding_window != described.attention.window:
            return f"its cache's window is {layer.sliding_window}"
    return None


def begin(cache: Any, kept: Kept, model: Model | None = None) -> Arena:
    """Put a prompt's keys and values into a (fit) empty cache, with room for new ones
    (`capacity_for`).

    Returns:
        the arena that its layers are in.

    Raises:
        torch.OutOfMemoryError: the cache is as it was.
    """
    new = Arena()
    with torch.inference_mode(False):
        memory = _memory_for(kept, capacity_for(kept.tokens, model, kept.rows))
    count = len(memory) // 2
    new.table.keys += memory[:count]
    new.table.values += memory[count:]
    new.rows, new.capacity, new.table.length = memory[0].shape[0], memory[0].shape[2], kept.tokens
    plain: dict[type, dict[str, Any]] = {}
    for index, layer in enumerate(cache.layers):
        _initialize(layer, memory[index], plain)
        _join(layer, new, index)
    return new


#: Bytes that the memory of each layer begins at a multiple of.
_ALIGNED = 256


def _memory_for(kept: Kept, capacity: int) -> list[Tensor]:
    """Memory for `capacity` tokens, of each layer's keys and then values; one allocation and one
    copy where all are of one size, as the first token waits for them."""
    if kept.whole is None:
        found = []
        for t in kept.each():
            memory = t.new_empty(t.shape[0], t.shape[1], capacity, t.shape[3])
            memory[:, :, : kept.tokens] = t
            found.append(memory)
        return found
    count, rows, _, heads, dim = kept.whole.shape
    used, step = rows * heads * capacity * dim, _ALIGNED // kept.whole.element_size()
    flat = kept.whole.new_empty(count, -(-used // step) * step)
    memory = flat[:, :used].view(count, rows, heads, capacity, dim)
    memory[:, :, :, : kept.tokens] = kept.whole[:, :, : kept.tokens].transpose(2, 3)
    return list(memory.unbind(0))


def _initialize(layer: Any, memory: Tensor, plain: dict[type, dict[str, Any]]) -> None:
    """What a first update does before it takes keys, which are of the form of `memory`. The second
    layer of a class is given what the first one got, where that is nothing else: all in one line,
    as an interrupt leaves a layer that was begun or one that was not."""
    got = plain.get(type(layer))
    if got is not None:
        layer.__dict__.update(got)
        return
    before = dict(layer.__dict__)
    empty = memory[:, :, :0]
    layer.lazy_initialization(empty, empty)
    now = layer.__dict__
    changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
    tensors = changed.get("keys"), changed.get("values")
    others = [v for k, v in changed.items() if k not in ("keys", "values")]
    if all(type(t) is Tensor and not t.numel() for t in tensors) and all(
        isinstance(v, (bool, torch.dtype, torch.device)) for v in others
    ):
        plain[type(layer)] = changed
