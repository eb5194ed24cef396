"""A norm's weight or bias that is no parameter any more, or appears or vanishes, after `apply`."""

from __future__ import annotations

import warnings
from typing import Any

import autocast_cases as cases
import pytest
import torch
from autocast_cases import MODULES, WIDTH, Kernels, Pair, draw, off
from torch import nn
from torch.nn.utils import parametrize, prune

import hfpatch
from hfpatch.proof.proofs import forget_proofs

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


def _plain_tensors(norm: nn.Module) -> None:
    """As FSDP1 leaves a module: tensors beside `_parameters`."""
    for name in [k for k, p in norm._parameters.items() if p is not None]:
        value = getattr(norm, name).detach().clone()
        delattr(norm, name)
        setattr(norm, name, value)


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LayerNorm"])
@pytest.mark.parametrize(
    ("move", "used"),
    [
        (_plain_tensors, True),
        (lambda n: prune.l1_unstructured(n, "weight", amount=0.3), True),
        (lambda n: parametrize.register_parametrization(n, "weight", Same()), False),
    ],
    ids=["fsdp1", "pruned", "parametrized"],
)
def test_a_weight_that_is_no_parameter(move: Any, used: bool, name: str, mode: str) -> None:
    pair = Pair.of(MODULES[name](), mode=mode)
    for model in (pair.plain, pair.patched):
        for p in model.parameters():
            nn.init.normal_(p, 1.0, 0.5, generator=torch.Generator().manual_seed(3))
    x = draw(FP32)
    with torch.no_grad():
        pair.patched(x)
        for model in (pair.plain, pair.patched):
            move(model[0])
        for autocast in (False, True):
            with torch.autocast("cpu", BF16, enabled=autocast):
                pair.patched(x)  # proves it
                with Kernels() as seen:
                    got = pair.patched(x)
                expected = pair.plain(x)
            assert off(got, expected) <= cases.noise(FP32)
            assert bool(seen.names) == used


def test_a_bias_that_is_no_parameter() -> None:
    pair = Pair.of(nn.LayerNorm(WIDTH))
    for model in (pair.plain, pair.patched):
        nn.init.normal_(model[0].bias, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    x = draw(FP32)
    with torch.no_grad():
        pair.patched(x), pair.patched(x)
        for model in (pair.plain, pair.patched):
            prune.l1_unstructured(model[0], "bias", amount=0.3)
        assert off(pair.patched(x), pair.plain(x)) <= cases.noise(FP32)


class ScaledGELU(nn.Module):
    """Its scale is an attribute until it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
        return y if self.scale is None else y * self.scale


class ExtendedMLP(nn.Module):
    """What comes behind it is a child that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
        self.down_proj, self.act_fn = nn.Linear(96, WIDTH), nn.SiLU()
        self.register_module("behind", None)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y if self.behind is None else self.behind(y)


def _rms_norm(weight: bool) -> nn.Module:
    from diffusers.models.normalization import RMSNorm

    norm: nn.Module = RMSNorm(WIDTH, 1e-6, elementwise_affine=weight)
    return norm


def _mlp() -> nn.Module:
    mlp = MODULES["LlamaMLP"]()
    mlp.act_fn = ScaledGELU()
    return mlp


@pytest.mark.parametrize("called", [False, True], ids=["first call", "called before"])
@pytest.mark.parametrize(
    ("make", "name", "width"),
    [
        (lambda: _rms_norm(weight=False), "weight", WIDTH),
        (lambda: _rms_norm(weight=True), "bias", WIDTH),
        (ScaledGELU, "scale", WIDTH),
        (_mlp, "act_fn.scale", 96),
    ],
    ids=["weight of a norm", "bias of a norm", "activation", "activation of an MLP"],
)
def test_an_attribute_becomes_a_parameter(make: Any, name: str, width: int, called: bool) -> None:
    """Where a class says `self.weight = None`: one warning, and the original uses it."""
    forget_proofs()
    pair, x = Pair.of(make(), kernels="local"), draw(FP32)
    with torch.no_grad():
        for _ in range(2 * called):
            pair.patched(x)
        for model in (pair.plain, pair.patched):
            path, _, own = name.rpartition(".")
            module = model[0].get_submodule(path)
            setattr(module, own, nn.Parameter(torch.linspace(0.5, 1.5, width)))
        expected = pair.plain(x)
        with pytest.warns(RuntimeWarning, match="got other settings"):
            got = pair.patched(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(got, expected) and torch.equal(pair.patched(x), expected)
        if "Norm" not in type(pair.plain[0]).__name__:
            return
        hfpatch.apply(pair.patched)
        with Kernels() as seen:
            assert off(pair.patched(x), expected) <= cases.noise(FP32)
        assert seen.names == ["rms_norm"]


def test_a_child_that_was_not_there_is_noticed() -> None:
    forget_proofs()
    pair, x = Pair.of(ExtendedMLP(), kernels="local"), draw(FP32)
    assert "0" in {s.path for s in hfpatch.status(pair.patched).swaps}
    behind = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        pair.patched(x)
        for model in (pair.plain, pair.patched):
            model[0].behind = behind
        expected = pair.plain(x)
        with pytest.warns(RuntimeWarning, match="got other settings"):
            assert torch.equal(pair.patched(x), expected)
