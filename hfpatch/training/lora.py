"""Linear layers with one low-rank adapter (LoRA, arXiv:2106.09685), as PEFT puts them in.

`y = x W^T + b + scaling (x A^T) B^T`: what PEFT computes in five operations of the result's size is
one product and a small one that adds to it. That PEFT's module computes this is proven once, on a
small one that PEFT itself builds; an adapter with dropout, several at a time, merged ones and
PEFT's variants (DoRA and the like) are not of this form and run as they are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfpatch.proof.proving import quietly
from hfpatch.proof.subject import plain
from hfpatch.proof.unchanged import is_hooked


class Adapted(NamedTuple):
    """base: the layer inside. a [r, in], b [out, r], scaling: of the adapter."""

    base: nn.Module
    a: Tensor
    b: Tensor
    scaling: float


def adapted(module: nn.Module) -> Adapted | None:
    """The parts of a layer of that form, or None."""
    cls: Any = type(module)
    if not is_adapted(module):
        return None
    if "forward" in module.__dict__ or is_hooked(module) or not is_proven(cls, cls.forward):
        return None
    return adapted_inside(module)


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer of PEFT's with adapters of any form."""
    cls = type(module)
    return cls.__name__ == "Linear" and cls.__module__.startswith("peft.")


def why_not(module: nn.Module) -> str:
    """Why `adapted` has no parts of a layer that `is_adapted`."""
    sides: Any = module
    try:
        active = list(sides.active_adapters)
        if sides.disable_adapters or sides.merged_adapters:
            return "its adapter is switched off, or merged into the weight"
        if len(active) != 1:
            return f"it has {len(active)} adapters at a time"
        (name,) = active
        if sides.lora_variant.get(name) is not None:
            return "its adapter is a variant of LoRA (DoRA, or another)"
        if name in sides.lora_dropout and not _is_nothing(sides.lora_dropout[name]):
            return "its adapter has dropout"
        if getattr(sides.lora_B[name], "bias", None) is not None:
            return "its adapter has a bias"
    except Exception:  # of another version
        pass
    return "its adapter is no plain one"


def adapted_inside(module: nn.Module) -> Adapted | None:
    """The same of a layer whose own forward is known to run."""
    found = _parts(module)
    if found is None:
        return None
    sides: Any = module
    name = sides.active_adapters[0]
    if name not in sides.lora_dropout or not _is_nothing(sides.lora_dropout[name]):
        return None
    layers: list[Any] = [sides.lora_A[name], sides.lora_B[name]]
    for layer in layers:
        if (
            type(layer) is not nn.Linear
            or layer._parameters.get("bias") is not None
            or is_hooked(layer)
        ):
            return None
        if "forward" in layer.__dict__ or not plain(layer.weight) or not layer.weight.numel():
            return None
    return found


def _is_nothing(dropout: Any) -> bool:
    return type(dropout) is nn.Identity


def _parts(module: Any) -> Adapted | None:
    """Whatever adapter is on; None unless it is one alone."""
    try:
        active = module.active_adapters
        if module.disable_adapters or module.merged_adapters or len(active) != 1:
            return None
        (name,) = active
        if module.lora_variant.get(name) is not None or name not in module.lora_A:
            return None
        a, b = (side[name].weight for side in (module.lora_A, module.lora_B))
        scaling: Any = module.scaling[name]
        return Adapted(module.base_layer, a, b, scaling) if type(scaling) is float else None
    except AttributeError:  # of another version
        return None


@functools.lru_cache(maxsize=16)
def is_proven(cls: type, forward: Any) -> bool:
    """Whether layers of this class, whose forward this is, compute the formula, by one that PEFT
    builds."""
    try:
        with quietly("cpu"), torch.enable_grad(), torch.device("cpu"):
            return _prove(cls)
    except Exception:  # of a version that builds them otherwise
        return False


def _prove(cls: type) -> bool:
    import peft  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    plain_model = nn.Sequential(nn.Linear(12, 20)).double()
    options = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["0"], init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(plain_model, options)
    module = wrapped.base_model.model[0].double()
    if type(module) is not cls:
        return False
    parts = _parts(module)
    if parts is None:
        return False
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    base: Any = parts.base
    leaves = [x, parts.a, parts.b]
    theirs: Any = module
    results = (
        theirs(x),
        x @ base.weight.t() + base.bias + parts.scaling * (x @ parts.a.t()) @ parts.b.t(),
    )
    grad = torch.randn(5, 20, dtype=torch.float64)
    found = [[y, *torch.autograd.grad(y, leaves, grad)] for y in results]
    return all(torch.allclose(p, q, rtol=1e-9, atol=1e-12) for p, q in zip(*found, strict=True))
