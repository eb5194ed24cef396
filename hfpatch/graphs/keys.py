"""When a CUDA graph is good for a call: the call is of the kind that it recorded, and the model is
the one that it recorded.

The kind of a call is its key: shapes, strides, dtypes and devices of the tensors, and the values of
everything else. What a graph bakes in of the model is its signature: addresses of parameters and
buffers, processors, LoRA scales, forwards.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.direct_calls import DIRECT
from hfpatch.graphs import caches as graph_caches
from hfpatch.kernels.config import attention_choice
from hfpatch.proof.subject import Tensor
from hfpatch.proof.unchanged import has_diffusers_hook
from hfpatch.regions.listening import is_idle

#: Types whose values a graph can hold, and a key compare.
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class NotCapturable(Exception):
    """Why a call cannot be recorded; the text is for the user."""


# -------------------------------------------------------------------------------------------------
# The key of a call


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """What distinguishes this call from others, hashable, and its tensors in a fixed order.

    Raises:
        NotCapturable: an argument is neither a tensor on a GPU, a plain value nor an empty cache of
            transformers, alone or in tuples, lists and dicts; all tensors must be on one device.
    """
    tensors: list[Tensor] = []
    key = (
        tuple(_key(a, f"argument {i}", tensors) for i, a in enumerate(args)),
        tuple((k, _key(v, f"`{k}`", tensors)) for k, v in sorted(kwargs.items())),
    )
    if not tensors:
        raise NotCapturable("the call has no tensor argument")
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise NotCapturable(f"its tensors are on {', '.join(sorted(map(str, devices)))}")
    return key, tensors


def _key(value: Any, where: str, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            raise NotCapturable(f"{where} is a {type(value).__name__}")
        if not value.is_cuda:
            raise NotCapturable(f"{where} is on {value.device}, not on a GPU")
        if value.requires_grad and torch.is_grad_enabled():
            raise NotCapturable(f"{where} requires a gradient")
        tensors.append(value)
        return (Tensor, tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, PLAIN):
        return (type(value), value)
    if type(value) in (tuple, list):
        return (type(value), *(_key(v, where, tensors) for v in value))
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return (dict, *((k, _key(v, f"{where}[{k!r}]", tensors)) for k, v in sorted(value.items())))
    if graph_caches.is_cache(value):
        if (why := graph_caches.unfit(value)) is not None:
            raise NotCapturable(f"{where} is {why}")
        return (type(value), graph_caches.key_of(value))
    raise NotCapturable(f"{where} is a {type(value).__name__}, which a graph cannot tell apart")


def caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches among the arguments of a call, in the order of `call_key`."""
    ordered = (args, [v for _, v in sorted(kwargs.items())])
    leaves = torch.utils._pytree.tree_leaves(ordered, is_leaf=graph_caches.is_cache)
    return [leaf for leaf in leaves if graph_caches.is_cache(leaf)]


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The argument with other tensors in their places, in the order of `_key`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(_rebuilt(v, tensors) for v in value)
    if type(value) is dict:
        made = {k: _rebuilt(v, tensors) for k, v in sorted(value.items())}
        return {k: made[k] for k in value}  # in the caller's order
    if graph_caches.is_cache(value):
        return graph_caches.fresh(value)
    return value


def rebuild_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with `tensors` in place of its own, in the order of `call_key`, and caches of its
    own."""
    left = iter(tensors)
    new_args = tuple(_rebuilt(a, left) for a in args)
    made = {k: _rebuilt(v, left) for k, v in sorted(kwargs.items())}
    return new_args, {k: made[k] for k in kwargs}


def global_state() -> tuple[Any, ...]:
    """Settings outside of the model that choose kernels."""
    backend = None
    registry = _attention_registry()
    if registry is not None:
        backend = registry.get_active_backend()[0]
    cuda: Any = torch.backends.cuda
    return (
        backend,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        torch.get_default_dtype(),
        attention_choice(),
    )


def _attention_registry() -> Any:
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return getattr(dispatch, "_AttentionBackendRegistry", None)


# -------------------------------------------------------------------------------------------------
# What a graph bakes in of the model

#: Attributes of a PEFT layer that are numbers in the recorded kernels' arguments.
_ADAPTER_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


class Watch:
    """A model's modules, flat: a step of a few milliseconds must not spend some on walking them.

    It holds the modules inside of the model, so that no other gets the address of one, but neither
    the model nor its `__dict__`, whose bound methods lead back to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inside = [m for m in model.modules() if m is not model]
        self._dicts = [m.__dict__ for m in self._inside]
        self._plain = [found for m in self._inside if (found := _settings_of(m)) is not None]
        self._lists = [
            (d, k)
            for m, d in zip(self._inside, self._dicts, strict=True)
            for k, v in d.items()
            if _is_short_list(v) and not _is_torchs(m)
        ]
        self._children = self._look(model)
        dicts = (model.__dict__, *self._dicts)
        self._held = [h for d in dicts for h in (d["_parameters"], d["_buffers"]) if h]

    def addresses(self) -> list[int] | None:
        """Of the parameters and buffers of the modules that were there at first."""
        return _addresses(t for t in _values(self._held) if t is not None)

    def _look(self, model: nn.Module) -> list[int]:
        return list(map(id, _values(d["_modules"] for d in (model.__dict__, *self._dicts))))

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model still consists of these modules."""
        return self._look(model) == self._children

    def signature(self, model: nn.Module) -> list[Any]:
        """See `model_signature`."""
        inside = self._dicts
        for d, module in zip(inside, self._inside, strict=True):
            if (
                d["_forward_hooks"]
                or d["_forward_pre_hooks"]
                or "_hf_hook" in d
                or has_diffusers_hook(d)
            ) and not is_idle(module):  # which, where the call itself asks, fill its own output
                name = type(module).__name__
                raise NotCapturable(f"a `{name}` inside has hooks (offload, cache …)")
        dicts = (model.__dict__, *inside)
        held = (d[kind] for d in dicts for kind in ("_parameters", "_buffers"))
        tensors = [t for t in _values(held) if t is not None]
        if not all(map(_IS_CUDA, tensors)):
            where = next(t.device for t in tensors if not t.is_cuda)
            raise NotCapturable(f"some of its weights are on {where}")
        addresses = _addresses(tensors)
        if addresses is None:
            raise NotCapturable("some of its weights are not plain tensors (sharded, fake …)")
        processors = [p for d in dicts if (p := d.get("processor")) is not None]
        return [
            addresses,  # ADDRESSES
            list(map(_DTYPE, tensors)),
            list(map(_SHAPE, tensors)),  # with the strides: another view of the same memory
            list(map(torch.Tensor.stride, tensors)),
            [d["training"] for d in dicts],
            [_read(d, get) for d, get in self._plain],
            [repr(d.get(name)) for d, name in self._lists],
            list(map(len, inside)),  # a setting that was not there, such as FreeU's
            _plain_of(model),
            _plain_of(model.__dict__.get("config")),
            [type(model), type(model).forward, *map(type, self._inside)],
            [_identity(d.get(name)) for d in inside for name in ("forward", DIRECT)],
            [(id(p), getattr(p, "_attention_backend", None), _state_of(p)) for p in processors],
            [repr([d.get(name) for name in _ADAPTER_STATE]) for d in dicts if "scaling" in d],
        ]


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is a layer of PyTorch's, of whose many attributes only numbers matter."""
    return type(module).__module__.startswith("torch.nn.")


def _settings_of(module: nn.Module) -> tuple[dict[str, Any], Any] | None:
    """Where a module's settings are, and what reads them: plain values, which a recording has baked
    in. In PyTorch's own layers sizes are no settings."""
    of_torch, d = _is_torchs(module), module.__dict__
    names = [
        k
        for k, v in d.items()
        if k != "training" and (type(v) is float if of_torch else isinstance(v, PLAIN))
    ]
    return (d, operator.itemgetter(*names)) if names else None


def _read(attributes: dict[str, Any], get: Any) -> Any:
    try:
        return get(attributes)
    except KeyError:  # one was deleted
        return None


def _is_short_list(value: Any) -> bool:
    """Lists of numbers, such as the scales of an IP adapter, which are written to in place."""
    return type(value) in (list, tuple) and len(value) <= 64


def _plain_of(holder: Any) -> Any:
    """The plain values among an object's attributes, or a dict's."""
    if holder is None:
        return None
    held = holder if isinstance(holder, dict) else vars(holder)
    return {k: v for k, v in held.items() if k != "training" and isinstance(v, PLAIN)}


def _state_of(processor: Any) -> Any:
    """What a processor holds beside its backend."""
    held = getattr(processor, "__dict__", None)
    if not held or isinstance(processor, nn.Module):  # a module is looked at as those inside are
        return None
    return [
        (k, repr(v) if _is_short_list(v) else v)
        for k, v in held.items()
        if isinstance(v, PLAIN) or _is_short_list(v)
    ]


#: The place of the addresses in a signature.
ADDRESSES = 0
_IS_CUDA, _DTYPE = operator.attrgetter("is_cuda"), operator.attrgetter("dtype")
_SHAPE = operator.attrgetter("shape")
_DATA_PTR = operator.methodcaller("data_ptr")


def _addresses(tensors: Iterable[Tensor]) -> list[int] | None:
    """None if one of them has no memory of its own, as a DTensor."""
    try:
        return list(map(_DATA_PTR, tensors))
    except RuntimeError:
        return None


def _values(dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))


def model_signature(model: nn.Module) -> list[Any]:
    """Addresses of all parameters and buffers, and the settings that a graph cannot read later.

    Raises:
        NotCapturable: a module inside has hooks, or weights off the GPU. Hooks on `model` itself
            are fine: they run outside of the graph.
    """
    return Watch(model).signature(model)


def _identity(forward: Any) -> int:
    return id(getattr(forward, "__func__", forward))
