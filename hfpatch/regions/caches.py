"""transformers' growing caches in a captured call: their state, and what stands for them.

What a layer of a cache holds are arguments of the call like others. The graph notes where the code
updates the cache; the fused call updates the caller's own cache by its own method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.regions import first_entries
from hfpatch.regions.guard import inside

Tensor = torch.Tensor
#: Layers whose update gives what they hold with the new entries behind it.
_GROWING = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
_HOME = "transformers.cache_utils"


@dataclass(frozen=True)
class State:
    """What code can find out of its layer of a cache without reading numbers; hashable.

    Attributes:
        pair: whether it is an `EncoderDecoderCache`; `updated` is what it notes of the layer then.
        past: whether the layer of self-attention has entries; `sliding`: in a window.
        kept: whether keys and values of cross-attention are there.
        true: whether the caches are true as a condition: whether they have any layers.
    """

    pair: bool = False
    past: bool = False
    sliding: bool = False
    kept: bool = False
    updated: bool | None = None
    true: tuple[bool, ...] = ()


def is_cache(cls: type) -> bool:
    """Whether a class is one of transformers' caches that grow."""
    return cls.__module__ == _HOME and cls.__name__ in ("DynamicCache", "EncoderDecoderCache")


def state_of(
    cache: Any, block: nn.Module, numbers: Sequence[tuple[str, str]]
) -> tuple[State, list[Tensor]] | str:
    """The state of the block's layer and the tensors that it holds, or why it is none.

    Args:
        numbers: where the block has its number: (path, attribute).
    """
    found = {inside(block, path).__dict__.get(name) for path, name in numbers}
    if len(found) != 1:
        return "it has no number, or several, to find its layer of the cache by"
    number = found.pop()
    if type(number) is not int:
        return "its number is not an `int`"
    pair = type(cache).__name__ == "EncoderDecoderCache"
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if pair else (cache,)
    tensors: list[Tensor] = []
    held: list[bool] = []
    sliding = False
    for part in parts:
        if type(part).__name__ != "DynamicCache" or part.__dict__.get("offloading"):
            return f"its cache is a `{type(part).__name__}`, or one that is offloaded"
        if number >= len(part.layers):
            held.append(False)
            continue
        layer = part.layers[number]
        kind = type(layer).__name__
        if kind not in _GROWING:
            return f"its layer of the cache is a `{kind}`"
        if type(layer) is not getattr(sys.modules.get(_HOME), kind, None):
            # one in the memory of decoding steps is shown as a plain one
            return f"its layer of the cache is another `{kind}` than transformers' own"
        keys = layer.keys if layer.is_initialized else None
        held.append(keys is not None and keys.numel() > 0)
        if held[-1]:
            if layer.__dict__.get("record_past"):
                return "its cache records what it drops"
            sliding |= layer.is_sliding
            tensors += (layer.keys, layer.values)
    updated = cache.is_updated.get(number) if pair else None
    if pair and bool(updated) is not held[1]:
        return "its cache notes another state than that of its entries"
    true = tuple(len(part.layers) > 0 for part in parts)
    return State(pair, held[0], sliding, pair and held[1], updated, true), tensors


# -------------------------------------------------------------------------------------------------
# In a capture

#: What a stand-in gives of itself; all else stops the capture.
_OWN = frozenset({"__class__", "__dict__", "update", "get_seq_length", "layers"})


class Noted:
    """What a capture's stand-in calls back.

    Args:
        number: the type of the block's number.
        refuse: makes the exception that stops a capture.
        record: puts an update in the graph, of (which, place, keys, values, past or None), and
            gives its result.
    """

    def __init__(
        self,
        number: type,
        refuse: Callable[[str], Exception],
        record: Callable[[str, Any, Any, Any, Any], Any],
    ) -> None:
        self.number, self.refuse, self.record = number, refuse, record
        self.updated: dict[str, Tensor] = {}  # the keys that each cache has after its update
        self.marked = False

    def check(self, number: Any) -> None:
        if not isinstance(number, self.number):
            raise self.refuse("its code gives its cache another number than the block's own")


def stand_in(state: State, given: Sequence[Tensor], noted: Noted) -> Any:
    """What code of a block is given in place of its cache.

    Args:
        given: what stands for the tensors of `state_of`.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    left = list(given)
    past = (left.pop(0), left.pop(0)) if state.past else None
    kept = (left.pop(0), left.pop(0)) if state.kept else None

    class Layer:
        keys, values = kept or (None, None)

    class Layers:
        def __getitem__(self, number: Any) -> Layer:
            noted.check(number)
            return Layer()

    class One(DynamicCache):
        which: str
        past: Any
        true: bool

        def __init__(self) -> None:
            """None of a cache's own."""

        def __getattribute__(self, name: str) -> Any:
            if name not in _OWN or (
                name == "layers" and (self.__dict__["which"] != "cross" or kept is None)
            ):
                raise noted.refuse(f"its code reads `{name}` of its cache")
            return Layers() if name == "layers" else object.__getattribute__(self, name)

        def update(self, keys: Any, values: Any, number: Any, *args: Any, **kwargs: Any) -> Any:
            noted.check(number)
            which = self.__dict__["which"]
            if which in noted.updated or (which == "cross" and kept is not None):
                raise noted.refuse("its code updates its cache twice")
            out = noted.record(which, number.place, keys, values, self.__dict__["past"])
            noted.updated[which] = out[0]
            return out

        def get_seq_length(self, number: Any = None) -> Any:
            noted.check(number)
            if self.__dict__["which"] == "cross" or (state.past and state.sliding):
                raise noted.refuse("its code asks for the length of its cache")
            held = noted.updated.get(self.__dict__["which"])
            if held is None and self.__dict__["past"] is not None:
                held = self.__dict__["past"][0]
            return 0 if held is None else held.shape[-2]

        def __bool__(self) -> bool:
            return bool(self.__dict__["true"])

        def __len__(self) -> int:
            raise noted.refuse("its code asks for the length of its cache")

    def one(which: str, past: Any, true: bool) -> Any:
        made: Any = object.__new__(One)
        made.__dict__.update(which=which, past=past, true=true)
        return made

    if not state.pair:
        return one("", past, state.true[0])
    both = one("self", past, state.true[0]), one("cross", None, state.true[1])

    class Updated:
        def get(self, number: Any, default: Any = None) -> Any:
            noted.check(number)
            return default if state.updated is None else state.updated

        def __setitem__(self, number: Any, value: Any) -> None:
            noted.check(number)
            if value is not True:
                raise noted.refuse("its code notes in its cache that it has nothing")
            noted.marked = True

    class Pair(EncoderDecoderCache):
        def __init__(self) -> None:
            """None of a cache's own."""

        def __getattribute__(self, name: str) -> Any:
            if name == "self_attention_cache":
                return both[0]
            if name == "cross_attention_cache":
                return both[1]
            if name == "is_updated":
                return Updated()
            if name == "get_seq_length":
                return both[0].get_seq_length
            if name == "__class__":
                return object.__getattribute__(self, name)
            raise noted.refuse(f"its code reads `{name}` of its cache")

        def __bool__(self) -> bool:
            return bool(state.true[0])

        def __len__(self) -> int:
            raise noted.refuse("its code asks for the length of its cache")

    made: Any = object.__new__(Pair)
    return made


# -------------------------------------------------------------------------------------------------
# At run time


def update(cache: Any, keys: Tensor, values: Tensor, number: int) -> Any:
    """New entries of a cache's layer, as the cache itself takes them."""
    found = first_entries.taken(cache, keys, values, number)
    return cache.update(keys, values, number) if found is None else found


def update_self(cache: Any, keys: Tensor, values: Tensor, number: int) -> Any:
    """The same of the self-attention of a decoder behind an encoder."""
    return update(cache.self_attention_cache, keys, values, number)


def update_cross(cache: Any, keys: Tensor, values: Tensor, number: int) -> Any:
    """The same of its cross-attention, which is noted, since it is done once."""
    found = update(cache.cross_attention_cache, keys, values, number)
    cache.is_updated[number] = True
    return found


class Scratch:
    """Takes a proof's keys and values in the place of the user's cache."""

    def __init__(self, state: State | None, held: Sequence[Tensor]) -> None:
        past = held[:2] if state is not None and state.past else None
        self.self_attention_cache = _Layer(past)
        self.cross_attention_cache = _Layer(None)
        self.is_updated: dict[int, bool] = {}
        self.update = self.self_attention_cache.update


class _Layer:
    def __init__(self, past: Sequence[Tensor] | None) -> None:
        self._past = past

    def update(self, keys: Tensor, values: Tensor, number: int) -> Any:
        return with_past(keys, values, *(self._past or ()))


def with_past(keys: Tensor, values: Tensor, *past: Tensor) -> tuple[Tensor, Tensor]:
    """What the update of a growing layer gives."""
    if not past:
        return keys, values
    return torch.cat((past[0], keys), -2), torch.cat((past[1], values), -2)
