"""Whether a block is built as the small one that is proven in its place.

A fused forward was written for one class of a library, and is compared with a small block of that
class. So a block may differ from the small one in its sizes alone: its code and that of every
module and processor that the fused forward reads through must be the library's, and their
attributes those of the small block. Layers that are called as modules may be anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.proof.keys import BLANK_NAMES, OWNED_BY_WRAPPERS, names_read
from hfpatch.proof.library import odd_code
from hfpatch.proof.subject import Tensor, class_of
from hfpatch.proof.unchanged import READ_LIVE, odd_tensor

#: Called as modules wherever they stand: an adapter or a quantized layer may be there instead.
_CALLED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Dropout, nn.Embedding, nn.Identity)
#: Floats that follow from sizes or are a dropout's, whose module is called.
_SIZED = frozenset({"scale", "dropout"})
#: What holds a model's whole configuration: the attributes made of it are compared.
_CONFIGS = frozenset({"_internal_dict", "config"})


def odd_build(
    block: nn.Module,
    tiny: nn.Module,
    idle: Container[str],
    called: Container[str] = (),
) -> str | None:
    """How `block` is built otherwise than `tiny`, a small one of its class; None if it is not.

    Args:
        idle: paths of the modules that the fused forward never calls.
        called: paths of modules that it calls as modules, beside layers.
    """
    ours, theirs = (dict(read_through(root, idle, called)) for root in (block, tiny))
    layers = {path for path, m in tiny.named_modules() if path not in theirs and m is not tiny}
    for path in dict.fromkeys((*theirs, *ours)):
        mine, small = ours.get(path), theirs.get(path)
        if small is None or mine is None:
            if any(path == layer or path.startswith(f"{layer}.") for layer in layers):
                continue  # called as a module in `tiny`, so whatever stands there is
            found = dict(block.named_modules()).get(path)
            if small is None or found is None:
                return f"it has {'a further' if small is None else 'no'} module `{path}`"
            mine = found
        where = f"`{path}`" if path else "it"
        if class_of(mine) is not type(small):
            return f"{where} is a {_named(class_of(mine))}, expected {_named(type(small))}"
        if (why := odd_code(mine) or _odd_attributes(mine, small, where)) is not None:
            return why
        if (name := odd_tensor(mine)) is not None:
            held = {**mine._parameters, **mine._buffers}[name]
            return f"{where} has a `{name}` that is a {_named(type(held))}"
    return None


def read_through(
    block: nn.Module, idle: Container[str], called: Container[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The modules, by path, that a fused forward reads: `idle` ones, and those of diffusers' and
    PyTorch's classes around layers. All others are called, whatever they are."""
    left: list[tuple[str, nn.Module]] = [("", block)]
    while left:
        path, module = left.pop()
        home = class_of(module).__module__
        if path and path not in idle:
            if path in called or isinstance(module, _CALLED):
                continue
            if not home.startswith(("diffusers.", "torch.nn.modules.")):
                continue
        yield path, module
        above = f"{path}." if path else ""
        left += [(above + n, c) for n, c in module._modules.items() if c is not None]


def _named(cls: type) -> str:
    return f"`{cls.__module__}.{cls.__qualname__}`"


def _odd_attributes(ours: nn.Module, theirs: nn.Module, where: str) -> str | None:
    mine, small = _attributes(ours), _attributes(theirs)
    named = names_read(theirs)
    for name in dict.fromkeys((*small, *mine)):
        if name in _CONFIGS:
            continue
        if name not in small:
            if name.startswith("_") and name not in named:
                continue  # somebody's mark
            return f"{where} has an attribute `{name}`, which is none of its class's"
        if name not in mine:
            return f"{where} has no attribute `{name}`"
        if name == "processor":
            why = _odd_processor(mine[name], small[name])
        else:
            why = _odd_value(mine[name], small[name], name in _SIZED)
        if why is not None:
            return f"{where} has {why.replace('VALUE', f'`{name}`')}"
    for held, other in ((ours._parameters, theirs._parameters), (ours._buffers, theirs._buffers)):
        for name in dict.fromkeys((*other, *held)):
            if name not in held or name not in other:
                which = "no" if name not in held else "a further"
                return f"{where} has {which} parameter or buffer `{name}`"
            if (held[name] is None) != (other[name] is None):
                return f"{where} has {'no' if held[name] is None else 'a'} `{name}`"
    return None


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        k: v
        for k, v in module.__dict__.items()
        if k not in BLANK_NAMES and k not in OWNED_BY_WRAPPERS
    }


def _odd_processor(ours: Any, theirs: Any) -> str | None:
    """How an attention's processor is another than that of the small block."""
    if type(ours) is not type(theirs):
        return f"a VALUE that is a {_named(type(ours))}, expected {_named(type(theirs))}"
    if (why := odd_code(ours)) is not None:
        return f"a VALUE of which {why}"
    mine, small = own_settings(ours), own_settings(theirs)
    if mine != small:
        return f"a VALUE with {mine}, expected {small}"
    return None


def own_settings(processor: Any) -> dict[str, Any]:
    """What a processor holds, except what is read at each call."""
    return {k: v for k, v in vars(processor).items() if k not in READ_LIVE}


def _odd_value(ours: Any, theirs: Any, sized: bool) -> str | None:
    """How a setting differs in more than a size; `VALUE` stands for its name."""
    if ours is theirs:
        return None
    if _is_size(ours) and _is_size(theirs):
        return None
    if type(ours) is type(theirs):
        if isinstance(ours, (tuple, list, torch.Size)) and len(ours) == len(theirs):
            odd = [_odd_value(a, b, sized) for a, b in zip(ours, theirs, strict=True)]
            return next((w for w in odd if w is not None), None)
        if isinstance(ours, float) and (sized or ours == theirs):
            return None
        if isinstance(ours, (bool, str, torch.dtype)) and ours == theirs:
            return None
    if isinstance(ours, Tensor):
        return "a tensor VALUE that is no buffer"
    return f"VALUE {ours!r:.80}, expected {theirs!r:.80}"


def _is_size(value: Any) -> bool:
    return type(value) is int
