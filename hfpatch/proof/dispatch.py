"""What diffusers' dispatcher of attention runs: it looks that up at each call, in the processor and
in a setting of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.proof.library import called_by_forward, functions_of, reached

_DISPATCH = "diffusers.models.attention_dispatch"
_NATIVE = "scaled_dot_product_attention"


class OtherAttention(Exception):
    """Why what an attention runs now is nothing that a capture could hold."""


class SplitAttention(OtherAttention):
    """An attention's tokens are spread over several processes."""

    def __init__(self) -> None:
        super().__init__("its attention is split over several GPUs")


class ReplacedAttention(OtherAttention):
    """Somebody put a function of his own in the place of PyTorch's, which the dispatcher calls."""

    def __init__(self) -> None:
        super().__init__(f"`F.{_NATIVE}`, which its attention calls, was replaced")


def backend_of(name: Any = None) -> tuple[Any, Any]:
    """A backend and its function; without a name the one that is active: what a processor gets that
    names none. (None, None) where nothing has loaded the dispatcher."""
    registry: Any = getattr(sys.modules.get(_DISPATCH), "_AttentionBackendRegistry", None)
    if registry is None:
        return None, None
    name = registry._active_backend if name is None else name
    return name, registry._backends.get(name)


def choice_of(block: nn.Module) -> Callable[[nn.Module], Any] | None:
    """A function of a block that is built as this one: the backends that its attentions are
    dispatched to, as a key; None if its code calls no dispatcher.

    The function raises OtherAttention where an attention is spread over several processes, or calls
    a function that stands in the place of PyTorch's.
    """
    if not _dispatches(block):
        return None
    paths = [
        tuple(filter(None, path.split(".")))
        for path, m in block.named_modules()
        if hasattr(m.__dict__.get("processor"), "_attention_backend")
    ]

    def choice(block: nn.Module) -> Any:
        found = []
        for path in paths:
            module: Any = block
            for name in path:
                module = module._modules.get(name)
                if module is None:  # another block by now, which its guard sees
                    return None
            processor = module.__dict__.get("processor")
            if getattr(processor, "_parallel_config", None) is not None:
                raise SplitAttention
            found.append(getattr(processor, "_attention_backend", None))
        chosen = backend_of(), tuple(backend_of(n) if n is not None else None for n in found)
        if is_replaced():
            own = (chosen[0], *(c for c in chosen[1] if c is not None))
            if any(_NATIVE in _names_in(function) for _, function in own):
                raise ReplacedAttention
        return chosen

    return choice


def is_replaced() -> bool:
    """Whether another function stands in the place of PyTorch's attention, as of a library that
    has a faster one."""
    found: Any = torch.nn.functional.scaled_dot_product_attention
    return found is not torch._C._nn.scaled_dot_product_attention


def _names_in(function: Any) -> tuple[str, ...]:
    """The names in a function's code, of which none is known where it has none."""
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", (_NATIVE,))
    return names


def _dispatches(block: nn.Module) -> bool:
    dispatch = getattr(sys.modules.get(_DISPATCH), "dispatch_attention_fn", None)
    if dispatch is None:
        return False
    functions = []
    for m in block.modules():
        functions += called_by_forward(m)
        processor = m.__dict__.get("processor")
        if processor is not None:
            functions += [f for v in vars(type(processor)).values() for f in functions_of(v)]
    return any(found is dispatch for _, _, found in reached(functions))
