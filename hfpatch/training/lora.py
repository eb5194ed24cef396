"""Linear layers with one low-rank adapter (LoRA, arXiv:2106.09685), as PEFT puts them in.

`y = x W^T + b + scaling (x A^T) B^T`: what PEFT computes in five operations of the result's size is
one product and a small one that adds to it. That PEFT's module computes this is proven once, on a
small one that PEFT itself builds; an adapter with dropout, several at a time, merged ones and
PEFT's variants (DoRA and the like) are not of this form and run as they are. Adapters in fp32 over
a half weight, as PEFT makes them, are proven by their roundings too (`widens`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.foreign.process import matmul_precision
from hfpatch.proof.proving import may_prove, quietly
from hfpatch.proof.subject import plain
from hfpatch.proof.trial import Limits
from hfpatch.proof.unchanged import is_hooked
from hfpatch.training import low_rank


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


def fits(parts: Adapted, rows: int, columns: int) -> bool:
    """Whether an adapter's part is [.., rows] of an input [.., columns]. PyTorch adds a part of one
    column to all, and refuses others."""
    a, b = parts.a.shape, parts.b.shape
    return len(a) == len(b) == 2 and a[1] == columns and b == (rows, a[0])


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


def _built(dtype: torch.dtype) -> Any:
    """A layer [12] -> [20] of PEFT's, around one of `dtype`."""
    import peft  # type: ignore[import-not-found,unused-ignore]

    torch.default_generator.manual_seed(0)  # not those of GPUs, which nobody puts back
    plain_model = nn.Sequential(nn.Linear(12, 20)).to(dtype)
    options = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["0"], init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(plain_model, options)
    return wrapped.base_model.model[0]


def _prove(cls: type) -> bool:
    module: Any = _built(torch.float64).double()
    parts = _parts(module)
    if type(module) is not cls or parts is None:
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


# --- adapters in fp32 over a half weight ----------------------------------------------------------

# By class, its methods, dtype and device type: whether `low_rank` computes them.
_widening: dict[Any, bool] = {}


def widens(module: nn.Module, dtype: torch.dtype, device: str) -> bool:
    """Whether `low_rank` may stand for layers like `module`, which `adapted` has parts of, without
    autocast. Their adapters are fp32, their weight is of the half type `dtype`.

    It may where its result and gradients are no farther from fp64 than PEFT's own plus one
    rounding. That is proven once, on the device, with a layer that PEFT builds.
    """
    cls, held = type(module), module.__dict__
    casts = getattr(cls, "_cast_input_dtype", None)
    if casts is None or "_cast_input_dtype" in held:
        return False  # of another version, or somebody's own
    if getattr(module, "cast_input_dtype_enabled", True) is not True:
        return False
    key = (cls, cls.forward, casts, dtype, device)
    if key not in _widening:
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        with may_prove((widens, key)) as may:
            if not may:
                return False
            if key not in _widening:
                _widening[key] = _is_wide(cls, dtype, device)
    return _widening[key]


def _is_wide(cls: type, dtype: torch.dtype, device: str) -> bool:
    try:
        with quietly(device), torch.enable_grad():
            if matmul_precision() is not None:  # errors of TF32 would hide all others
                torch.set_float32_matmul_precision("highest")
            return _prove_wide(cls, dtype, device)
    except Exception:  # of a version that builds them otherwise
        return False


def _prove_wide(cls: type, dtype: torch.dtype, device: str) -> bool:
    module: Any = _built(dtype).to(device)
    made: type = type(module)
    parts = _parts(module)
    if made is not cls or parts is None or parts.a.dtype != torch.float32:
        return False
    x = torch.randn(64, 12).to(device, dtype)
    grad = torch.randn(64, 20).to(device, dtype)
    theirs = _with_gradients(module, x, grad)
    # PEFT's own in fp64: what it computes of another input, say, is not this
    truth = _with_gradients(copy.deepcopy(module).double(), x.double(), grad.double())
    base: Any = parts.base
    with torch.no_grad():
        pair = low_rank.Pair(parts.a, parts.b, parts.scaling, torch.float32)
        own = F.linear(x, base.weight, base.bias)
        low = low_rank.adapt(own, x, pair)
        dx = torch.mm(grad, base.weight)
        ours = [own, dx, *low_rank.backward(grad, x, low, pair, (True, True), dx)]
    limits = Limits()
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        if mine is None or mine.dtype != other.dtype:
            return False
        is_wide = mine.dtype == torch.float32
        more = limits.kernel_fp32 * limits.gradient if is_wide else limits.kernel_half
        error, allowed = (((t.double() - true).norm() / true.norm()).item() for t in (mine, other))
        if not error <= allowed + more * torch.finfo(mine.dtype).eps:
            return False
    return True


def _with_gradients(module: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The result, and gradients of x, A and B."""
    parts = _parts(module)
    assert parts is not None
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, parts.a, parts.b], grad)]
