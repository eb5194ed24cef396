"""What diffusers' dispatcher of attention runs: it looks that up at each call, in the processor and
in a setting of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from hfpatch.proof.library import called_by_forward, functions_of, reached

_DISPATCH = "diffusers.models.attention_dispatch"


class SplitAttention(Exception):
    """An attention's tokens are spread over several processes."""

    def __init__(self) -> None:
        super().__init__("its attention is split over several GPUs")


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

    The function raises SplitAttention where an attention is spread over several processes.
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
        return backend_of(), tuple(backend_of(name) if name is not None else None for name in found)

    return choice


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
