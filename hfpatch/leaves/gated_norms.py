"""Gated norms of state-space and linear-attention layers: `forward(hidden_states, gate)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.kernels.sources import Kernel
from hfpatch.leaves.norms import NormSubject, fits, memory_order
from hfpatch.proof.contract import Contract
from hfpatch.proof.subject import (
    Combo,
    Family,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    is_dense,
    misaligned,
    watched,
)
from hfpatch.proof.unchanged import INCOMPARABLE, leaf_settings

#: The gate's name in every forward of transformers.
_GATE = "gate"


class GatedNormSubject(NormSubject):
    """A norm with a weight `[D]` and a gate. The probe's input holds both, stacked."""

    trains = False
    most: ClassVar[Mapping[str, int]] = {"special": 1, "root": 1, "over": 1}

    def __init__(self, module: nn.Module, weight: str, width: int) -> None:
        super().__init__(module, weight, "bias", width)

    def _group_sizes(self) -> list[int]:
        """All columns, or what an integer of the module says: a group's size, or how many."""
        assert self.width is not None
        found = [0]
        for value in self.module.__dict__.values():
            if type(value) is int and 1 < value < self.width and self.width % value == 0:
                found += [value, self.width // value]
        return list(dict.fromkeys(found))

    def formulas(self) -> list[Formula]:
        return [
            Formula(
                "gated_rms_norm",
                {
                    "eps": eps,
                    "group_size": group,
                    "norm_before_gate": first,
                    "cast": cast,
                    "gate_activation": act,
                },
            )
            for eps in self._epsilons()
            for group in self._group_sizes()
            for first in (False, True)
            for cast in ("input", "none")
            for act in ("silu", "sigmoid")
        ]

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        x = super().inputs(combo, torch.device("cpu"), generator)
        gate = 2 * torch.randn(x.shape, generator=generator)
        gate[0, 0, 0] = float("nan")  # must propagate alike
        gate[1, 0] *= 200  # is it clamped?
        return torch.stack((x, gate.to(x.dtype))).to(device)

    def far_inputs(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Also with a gate of every scale, beside ordinary rows."""
        far = super().far_inputs(x, generator)
        near = torch.randn(far.shape, generator=generator).to(far)
        return torch.stack((torch.cat((far[0], near[0]), 1), torch.cat((near[1], far[1]), 1)))

    def reshaped(self, x: Tensor, lead: tuple[int, ...]) -> Tensor:
        return torch.stack([super(GatedNormSubject, self).reshaped(t, lead) for t in x])

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(0)

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        weight = self.weight
        call = kernel.bind(dict(formula.params), training)

        def compute(module: nn.Module, x: Tensor) -> Tensor:
            hidden, gate = x.unbind(0)
            return call(hidden, gate, module._parameters[weight])

        return compute

    def forward(self, original: Forward, contract: Contract) -> Forward:
        weight, width = self.weight, self.width
        code = type(self.module).forward.__code__
        names = code.co_varnames[1 : code.co_argcount]
        training = contract.training
        cpu: Any = contract.cpu  # of what `entry` gave
        cuda: Any = contract.cuda
        grad_enabled, autocast = torch.is_grad_enabled, torch.is_autocast_enabled
        read, settings = leaf_settings(self.module, (weight,))

        cls, own = class_of(self.module), coded(original)
        code = own.__code__

        def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            """hidden_states and gate by position or by name; None for any other call."""
            given = dict(zip(names, args, strict=False)) | kwargs
            if len(given) != 2 or len(args) + len(kwargs) != 2:
                return None, None
            return given.get(names[0]), given.get(_GATE)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # inductor fuses the gate with its neighbours
                return original(self, *args, **kwargs)
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                return type(self).forward(self, *args, **kwargs)
            x, gate = inputs(args, kwargs)
            w = self._parameters.get(weight)
            if (
                type(x) is Tensor
                and type(gate) is Tensor
                and is_dense(x)
                and is_dense(gate)
                and w is not None
                and weight not in self.__dict__  # it would hide the parameter
                and fits(w, x)
                and x.dtype == gate.dtype
                and x.shape == gate.shape
                and x.dim() > 1
                and contract.takes(x)
                and x.shape[-1] == width
                and w.shape == x.shape[-1:]
                and x.device == gate.device
                # the original keeps it
                and (x.is_contiguous() or (x.stride(-1) == 1 and memory_order(x) is None))
                and not watched()
            ):
                run = None
                try:
                    unchanged = bool(read(self.__dict__) == settings)
                except INCOMPARABLE:  # one was deleted, or is a parameter now
                    unchanged = False
                if not unchanged:
                    contract.changed()
                # Under autograd the op is its formula in PyTorch, which gains nothing.
                elif grad_enabled() and (x.requires_grad or gate.requires_grad or w.requires_grad):
                    if not training:
                        contract.needs_grad()
                elif autocast("cuda" if x.is_cuda else "cpu"):
                    run = contract.under_autocast(x, (x.dtype, w.dtype))
                else:
                    key = (x.dtype, w.dtype)
                    table = cuda if x.is_cuda else cpu
                    run = table.get(key) if x.is_cuda or x.is_cpu else None
                    if run is None:
                        run = contract.late(x, key)
                if run is not None:
                    try:
                        return run[0](x, gate, w)
                    except RuntimeError:
                        if not misaligned(x, gate, w):
                            raise
            elif (
                type(x) is Tensor
                and type(gate) is Tensor
                and x.dtype != gate.dtype
                and not grad_enabled()
            ):
                contract.two_dtypes(x, gate)
            return original(self, *args, **kwargs)

        return forward


class GatedNorms(Family):
    name = "gated norm"
    pattern = re.compile(r"Norm\w*Gated|Gated\w*Norm")
    rank = 25

    def examine(self, module: nn.Module) -> Subject | str | None:
        if module._modules:
            return None  # AXK2's: the norm inside is a site of its own
        code = getattr(type(module).forward, "__code__", None)
        if code is None or _GATE not in code.co_varnames[2 : code.co_argcount]:
            return None
        params = {n: p for n, p in module._parameters.items() if p is not None}
        if len(params) != 1:
            return f"has parameters {sorted(params)}, expected a weight"
        ((weight, p),) = params.items()
        if p.dim() != 1 or not p.is_floating_point():
            return f"`{weight}` has shape {tuple(p.shape)}, expected a floating vector"
        return GatedNormSubject(module, weight, p.shape[0])
