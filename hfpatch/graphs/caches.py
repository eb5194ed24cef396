"""transformers' caches as arguments and results of a recorded call: empty when it begins, and what
a replay leaves in them is the caller's own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hfpatch.proof.subject import Tensor

#: Classes of `transformers.cache_utils` that hold nothing but what their layers were given.
_CACHES = ("DynamicCache", "EncoderDecoderCache")
_LAYERS = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, type)


def is_cache(value: Any) -> bool:
    """Whether `value` is one of transformers' caches, of any kind."""
    cache = _class("Cache")
    return cache is not None and isinstance(value, cache)


def _class(name: str) -> Any:
    module = sys.modules.get("transformers.cache_utils")
    return None if module is None else getattr(module, name, None)


def unknown(cache: Any) -> str | None:
    """What a cache is if it cannot be copied here; None where it can."""
    if not any(type(cache) is _class(name) for name in _CACHES):
        return f"a {type(cache).__name__}"
    for part in _parts(cache):
        for layer in _layers(part):
            if not any(type(layer) is _class(name) for name in _LAYERS):
                kind = type(layer).__name__
                # one in the memory of decoding steps is shown as a plain one
                another = f"another {kind} than transformers' own"
                return f"a cache with {another if kind in _LAYERS else f'a {kind}'}"
    return None


def unfit(cache: Any) -> str | None:
    """Why a call that is given this cache cannot be recorded; None where it can."""
    if (what := unknown(cache)) is not None:
        return f"{what}, which a graph cannot tell apart"
    for part in _parts(cache):
        if getattr(part, "offloading", False):
            return "a cache that is offloaded to the CPU"
        if any(map(_started, _layers(part))):
            return "a cache that is not empty: it grows with every call, so that no two are alike"
    return None


def _started(layer: Any) -> bool:
    for name, value in vars(layer).items():
        if name.startswith("is_") and name.endswith("initialized"):
            # of a layer with several states: of each; a dummy has none
            flags = value.values() if isinstance(value, dict) else [value]
            if any(flags) and type(layer) is not _class("DummyLayer"):
                return True
    return False


def key_of(cache: Any) -> tuple[Any, ...]:
    """What distinguishes an empty cache from others, hashable."""
    return tuple(
        (type(part), tuple((type(layer), _plain(vars(layer))) for layer in _layers(part)))
        for part in _parts(cache)
    )


def fresh(cache: Any) -> Any:
    """A cache as empty as this one, and independent of it."""
    return copy.deepcopy(cache)


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """The tensors that its layers hold."""
    for part in _parts(cache):
        for layer in _layers(part):
            yield from _tensors(layer)


def copied(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The cache with every tensor in it changed, as another object."""
    made = copy.copy(cache)
    if _parts(cache) != [cache]:
        for name, part in vars(cache).items():
            made.__dict__[name] = copied(part, change) if is_cache(part) else copy.copy(part)
        return made
    made.layers = [_copied_layer(layer, change) for layer in cache.layers]
    return made


def fill(theirs: Any, ours: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Make the caller's cache what the call made of `ours`, with every tensor changed."""
    if _parts(ours) != [ours]:
        for name, part in vars(ours).items():
            if is_cache(part):
                fill(getattr(theirs, name), part, change)
            else:
                theirs.__dict__[name] = copy.copy(part)
        return
    for i, layer in enumerate(ours.layers):
        made = _copied_layer(layer, change)
        if i < len(theirs.layers):
            theirs.layers[i].__dict__.update(made.__dict__)
        else:  # it makes its layers as they are needed
            theirs.layers.append(made)


def _parts(cache: Any) -> list[Any]:
    """A cache's caches, of a decoder's own keys and of its encoder's, or itself."""
    inside = [v for v in vars(cache).values() if is_cache(v)]
    return inside or [cache]


def _layers(cache: Any) -> list[Any]:
    return list(getattr(cache, "layers", ()))


def _copied_layer(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    made = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            made.__dict__[name] = change(value)
        elif isinstance(value, (dict, list, tuple)):
            made.__dict__[name] = tree_map(
                lambda v: change(v) if isinstance(v, Tensor) else v, value
            )
    return made


def _tensors(layer: Any) -> Iterator[Tensor]:
    for value in vars(layer).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from (v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Tensor))


def _plain(values: dict[str, Any]) -> tuple[Any, ...]:
    """Of a layer that holds no tensor but small ones on the CPU."""
    return tuple((name, _value(v)) for name, v in values.items())


def _value(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return (value.dtype, value.device, tuple(value.flatten().tolist()))
    if isinstance(value, dict):
        return tuple((k, _value(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_value, value))
    return id(value)
