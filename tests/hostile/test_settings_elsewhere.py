"""Leaves whose numbers stand elsewhere: on a child, in a plain tensor, a list, a config, behind a
property or in a helper. Whatever they are when a call comes, the result is the original's."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import PlainRMSNorm, SomeMLP, drawn
from torch import Tensor, nn

import hfpatch

WIDTH = 48


class MultipliedMLP(SomeMLP):
    """A setting of a child is read by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj.multiplier = 1.0

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) * self.gate_proj.multiplier
        return self.down_proj(F.silu(gate) * self.up_proj(x))


class MuPMLP(SomeMLP):
    """Scaled by its width (mu-P)."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h) * (32 / h.shape[-1])


class RandomlyTrainedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.training and random.random() < 0.5 else y


class TensorSwish(nn.Module):
    """The beta is a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class ListSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.betas = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.betas[0] * x)


class DictRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"gain": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings["gain"]


class ConfiguredRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.gain


class ForwardingRMSNorm(PlainRMSNorm):
    """A property that `__getattr__` makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(gain=1.0)

    def __getattr__(self, name: str) -> Any:
        return self.held.gain if name == "gain" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class HelpedRMSNorm(PlainRMSNorm):
    def gained(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.gained(super().forward(x))


class RowWeightRMSNorm(PlainRMSNorm):
    """A weight of the shape [1, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH))


class FixedGEGLU(nn.Module):
    """Halves of a width that the code says."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        return h[..., :32] * F.gelu(h[..., 32:64])


def _doubled(self: Any, y: Tensor) -> Tensor:
    return y * 2


def _helper(m: Any) -> None:
    m.gained = types.MethodType(_doubled, m)


def _wider(m: Any) -> None:
    m.proj = drawn(nn.Linear(WIDTH, 96)).requires_grad_(False)


#: A leaf, and what changes: before `apply`, or after it.
LEAVES: dict[type[nn.Module], Callable[[Any], Any]] = {
    MultipliedMLP: lambda m: setattr(m.gate_proj, "multiplier", 3.0),
    MuPMLP: lambda m: None,
    RandomlyTrainedRMSNorm: lambda m: m.train(),
    TensorSwish: lambda m: m.beta.fill_(1.7),
    ListSwish: lambda m: m.betas.__setitem__(0, 1.7),
    DictRMSNorm: lambda m: m.settings.update(gain=3.0),
    ConfiguredRMSNorm: lambda m: setattr(m.config, "gain", 3.0),
    ForwardingRMSNorm: lambda m: setattr(m.held, "gain", 3.0),
    HelpedRMSNorm: _helper,
    RowWeightRMSNorm: lambda m: None,
    FixedGEGLU: _wider,
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("when", ["before", "after", "before a second apply"])
@pytest.mark.parametrize("leaf", LEAVES, ids=lambda c: c.__name__)
def test_whatever_it_is_when_a_call_comes(leaf: type[nn.Module], when: str, mode: Any) -> None:
    model = nn.Sequential(drawn(leaf())).eval()
    twin = copy.deepcopy(model)
    if when == "before":
        for m in (model, twin):
            LEAVES[leaf](m[0])
    hfpatch.apply(model, mode=mode)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))

    def result(m: nn.Module) -> list[Tensor]:
        random.seed(4)
        inputs = x.clone().requires_grad_(mode == "training")
        with torch.set_grad_enabled(mode == "training"):
            y = m(inputs)
        return [y.detach()] + ([] if mode == "inference" else [_gradient(y, inputs)])

    if when != "before":
        result(model)
        for m in (model, twin):
            LEAVES[leaf](m[0])
    if when == "before a second apply":
        hfpatch.apply(model, mode=mode)
    for _ in range(3):
        for ours, theirs in zip(result(model), result(twin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y.square().sum(), x)
    return found
