"""Activations alone (`NewGELUActivation`, `QuickGELU`) or behind a projection (diffusers)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.kernels.sources import Kernel, torch_kernel
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.contract import Contract
from hfpatch.proof.keys import attributes_read
from hfpatch.proof.replicas import random_linear, replicate
from hfpatch.proof.subject import (
    Combo,
    Family,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    first_argument,
    input_name,
    is_dense,
    misaligned,
    readable,
    watched,
    weight_dtype,
)
from hfpatch.proof.unchanged import INCOMPARABLE, leaf_settings

_WIDTH = 64  # of the probe's input
_FORMULAS = [
    *(Formula("gelu", {"approximate": a}) for a in ("none", "tanh", "sigmoid")),
    Formula("silu", {}),
]


class ActivationSubject(Subject):
    """`act(x)`, or `act(proj(x))` when `projection` names a child."""

    differentiates = True

    def __init__(self, module: nn.Module, projection: str | None) -> None:
        super().__init__(module)
        self.projection = projection
        self.has_layers = projection is not None
        self.live = () if projection is None else (projection,)

    @property
    def key(self) -> tuple[Any, ...]:
        own = attributes_read(self.module)  # `act` of the transformers classes is among these
        return (self.projection, own)

    far: ClassVar[Tensor] = torch.arange(-36, 37, 3, device="cpu")

    def misread(self, calls: Sequence[tuple[str, str]]) -> str | None:
        if list(calls) != [(n, "input") for n in self.live]:
            return f"calls {[n for n, _ in calls]}, expected its projection with the input, once"
        return None

    def formulas(self) -> list[Formula]:
        return list(_FORMULAS)

    def combos(self) -> list[Combo]:
        return [Combo(t, None) for t in KERNEL_DTYPES]

    def main_combo(self) -> Combo:
        return Combo(torch.float32, None)

    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        if self.projection is None:
            return replicate(self.module)
        layer: nn.Module = nn.Identity()
        if combo.autocast is not None:  # which decides what dtype the projection gives
            layer = random_linear(_WIDTH, _WIDTH, False, combo.param or combo.x, device, generator)
        return replicate(self.module, {self.projection: layer})

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        x = torch.randn(2, 5, _WIDTH, generator=generator)
        # near zero, the bend, the tails, and far out, where a clamp shows
        x *= torch.tensor([0.3, 1.0, 5.0, 50.0, 1000.0])[:, None]
        x[0, 0, 0] = float("nan")  # must propagate; at +inf eager erf-GELU itself varies by device
        return x.to(device, combo.x)

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        call = kernel.bind(dict(formula.params), training)
        # where autograd needs the activation and the kernel has none, or where the projection
        # gives a DTensor (tensor parallel), which knows ATen's operators alone: these
        aten = replace(torch_kernel(formula.op), widens=kernel.widens).bind(dict(formula.params))
        differentiable = call if training else aten
        projection = self.projection
        # of the code's casts that are none where the projection keeps to one dtype
        casts = self.casts and projection is not None and kernel.widens is None

        def compute(module: nn.Module, x: Tensor) -> Any:
            m = module._modules
            if casts and weight_dtype(m[projection], x.dtype) != x.dtype:  # type: ignore[index]
                return NotImplemented
            h = x if projection is None else m[projection](x)  # type: ignore[misc]
            if casts and h.dtype != x.dtype:
                return NotImplemented
            if not readable(h):
                return aten(h)
            return differentiable(h) if h.requires_grad else call(h)

        return compute

    def forward(self, original: Forward, contract: Contract) -> Forward:
        name = input_name(self.module)
        cpu, cuda = contract.cpu, contract.cuda
        grad_enabled, autocast = torch.is_grad_enabled, torch.is_autocast_enabled
        training, projection = contract.training, self.projection
        read, settings = leaf_settings(self.module)

        cls, own = class_of(self.module), coded(original)
        code = own.__code__

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # inductor fuses it with its neighbours
                return original(self, *args, **kwargs)
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                return type(self).forward(self, *args, **kwargs)
            x = args[0] if len(args) == 1 and not kwargs else first_argument(args, kwargs, name)
            if (
                type(x) is Tensor
                and is_dense(x)
                and not watched()
                and contract.takes(x)
                and x.dim()
                and x.is_contiguous()  # a channels-last input keeps its layout in the original
            ):
                on_cuda = x.is_cuda
                run = None
                try:
                    unchanged = bool(read(self.__dict__) == settings)
                except INCOMPARABLE:  # one was deleted, or is a parameter or module now
                    unchanged = False
                if not unchanged:
                    contract.changed()
                elif autocast("cuda" if on_cuda else "cpu"):
                    layer = None if projection is None else self._modules[projection]
                    param = None if layer is None else weight_dtype(layer, x.dtype)
                    run = contract.under_autocast(x, (x.dtype, param), training or grad_enabled())
                else:
                    key = (x.dtype, None)
                    run = (cuda if on_cuda else cpu).get(key) if on_cuda or x.is_cpu else None
                    if run is None:
                        run = contract.late(x, key)
                if run is not None:
                    try:
                        y = run(self, x)
                    except RuntimeError:
                        if not misaligned(x):
                            raise
                        return original(self, *args, **kwargs)
                    if y is not NotImplemented:
                        return y
                    contract.odd_projections()
            return original(self, *args, **kwargs)

        return forward


class Activations(Family):
    name = "activation"
    pattern = re.compile(r"GELU|GeLU|Gelu|SiLU|Silu|Swish")
    rank = 40

    def examine(self, module: nn.Module) -> Subject | str | None:
        if module._parameters or module._buffers:
            return None
        if not module._modules:
            return ActivationSubject(module, None)
        if set(module._modules) == {"proj"}:
            return ActivationSubject(module, "proj")
        return None
