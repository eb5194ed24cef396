"""Several linear layers' weights in one storage, so that one product serves them all.

The parameters stay the same objects with the same values: only their memory moves, one behind the
other, so no second copy exists and whatever writes to a parameter (LoRA's merge, an optimizer,
`load_state_dict`) writes to the packed weight. Whatever gives a parameter memory of its own (`.to`,
offloading, a deep copy) unpacks it; `project` of the fused blocks looks at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.proof.unchanged import is_hooked

#: Kernels read 16 bytes at a time: each piece of weights, and of the product's rows, starts at a
#: multiple.
ALIGNMENT = 16


def ends_aligned(like: torch.Tensor, count: int) -> bool:
    """Whether what stands behind so many numbers of a row, of the dtype of `like`, is aligned."""
    return count * like.element_size() % ALIGNMENT == 0


def can_pack(linears: Sequence[nn.Module]) -> bool:
    """Whether these layers are plain, alike, on a GPU, and own their memory."""
    if not all(map(_is_bare, linears)):
        return False  # an adapter, a quantized layer, a weight that is made anew at each call
    tensors: list[tuple[Any, Any]] = [
        (m._parameters["weight"], m._parameters["bias"]) for m in linears
    ]
    kinds = {(_kind(weight), bias is None) for weight, bias in tensors}
    return (
        len({id(weight) for weight, _ in tensors}) == len(linears)
        and len(kinds) == 1
        and all(ends_aligned(weight, weight.shape[0]) for weight, _ in tensors)
        and all(_own(p) for pair in tensors for p in pair if p is not None)
    )


def _is_bare(linear: nn.Module) -> bool:
    """Whether it is PyTorch's layer with nothing around it, whose tensors are its parameters."""
    return (
        type(linear) is nn.Linear
        and linear._parameters.get("weight") is not None
        and "bias" in linear._parameters
        and linear.__dict__.keys().isdisjoint(("forward", "weight", "bias"))
        and not is_hooked(linear)
    )


def _kind(p: Any) -> tuple[object, ...]:
    return (p.dtype, p.device, p.shape[-1] if p.ndim else 0)


def _own(p: Any) -> bool:
    """A plain parameter on a GPU, alone in its storage: moving it frees what it had."""
    return bool(
        type(p) is nn.Parameter
        and p.is_cuda
        and p.is_contiguous()
        and not p.is_inference()
        and p.nbytes % ALIGNMENT == 0
        and p.untyped_storage().nbytes() == p.nbytes
    )


def pack(linears: Sequence[nn.Module]) -> list[tuple[nn.Parameter, ...]]:
    """Move the layers' weights, and their biases, one behind the other; returns what moved.

    If anything fails, nothing has moved.
    """
    moved: list[tuple[nn.Parameter, ...]] = []
    try:
        for name in ("weight", "bias"):
            if linears[0]._parameters[name] is not None:
                moved.append(_move([m._parameters[name] for m in linears]))  # type: ignore[misc]
    except BaseException:
        for parameters in moved:
            unpack(parameters)
        raise
    return moved


def _move(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    packed = torch.cat([p.detach() for p in parameters])
    start = 0
    for p in parameters:
        p.data = packed[start : start + p.shape[0]]
        start += p.shape[0]
    return tuple(parameters)


def unpack(parameters: Sequence[nn.Parameter]) -> None:
    """Give each of these its own memory again, where it still shares it."""
    storages = [p.untyped_storage().data_ptr() for p in parameters]
    for p, storage in zip(parameters, storages, strict=True):
        if storages.count(storage) > 1:
            p.data = p.data.clone()
