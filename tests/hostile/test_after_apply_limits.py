"""What no call can notice at a kernel's cost: the table of docs/registry-and-probe.md, row by row.

Each change leaves the patched module as it was proven, and the next `apply` sees it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch

GAIN = 1.0


def gain_of(x: torch.Tensor) -> torch.Tensor:
    return x * GAIN


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32) + 0.5, requires_grad=False), 1e-6


class GlobalRMSNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * GAIN


class CallingRMSNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return gain_of(self.weight * y)


def _closing(gain: float) -> tuple[type[Norm], Callable[[float], None]]:
    class ClosureRMSNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return ClosureRMSNorm, change


class TorchRMSNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return torch.mul(self.weight, y)


def _check(module: nn.Module, change: Callable[[], None]) -> None:
    model = nn.Sequential(module)
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert len(hfpatch.apply(model).swaps) == 1
        proven = model(x)
        change()
        torch.testing.assert_close(model(x), proven)  # as the docs say
        report = hfpatch.apply(model)
        changed = type(module).forward(module, x)
        assert not torch.allclose(changed, proven)
        assert not report.swaps and torch.equal(model(x), changed)


def test_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(GlobalRMSNorm(), lambda: monkeypatch.setitem(globals(), "GAIN", 3.0))


def test_a_global_of_a_function_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(CallingRMSNorm(), lambda: monkeypatch.setitem(globals(), "GAIN", 3.0))


def test_a_function_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * math.pi

    _check(CallingRMSNorm(), lambda: monkeypatch.setitem(globals(), "gain_of", tripled))


def test_the_code_of_a_function_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    _check(CallingRMSNorm(), lambda: monkeypatch.setattr(gain_of, "__code__", tripled.__code__))


def test_a_property_over_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    half = property(lambda self: 0.5)
    _check(TorchRMSNorm(), lambda: monkeypatch.setattr(TorchRMSNorm, "eps", half, raising=False))


def test_a_closure() -> None:
    cls, change = _closing(1.0)
    _check(cls(), lambda: change(3.0))


def test_a_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    mul = torch.mul

    def tripled(a: Any, b: Any) -> torch.Tensor:
        return mul(mul(a, b), 3.0)

    _check(TorchRMSNorm(), lambda: monkeypatch.setattr(torch, "mul", tripled))


def test_an_entry_of_the_table_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.activations import ACT2FN, NewGELUActivation
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    module = Qwen3NextRMSNormGated(32)
    model = nn.ModuleList([module])
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        assert len(hfpatch.apply(model).swaps) == 1
        proven = module(x, x)
        monkeypatch.setitem(ACT2FN, "silu", NewGELUActivation)
        torch.testing.assert_close(module(x, x), proven)
        assert not hfpatch.apply(model).swaps
        assert torch.equal(module(x, x), type(module).forward(module, x, x))


def test_an_environment_variable_is_not_read() -> None:
    class EnvironmentRMSNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import os

            gain = float(os.environ.get("GAIN", "1"))
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y * gain

    (skip,) = hfpatch.apply(nn.Sequential(EnvironmentRMSNorm())).skips
    assert skip.kind == "unexplained" and "import" in skip.reason


def test_a_parameter_written_to_past_pytorch() -> None:
    model = nn.Sequential(TorchRMSNorm())
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert len(hfpatch.apply(model).swaps) == 1
        model(x)
        model[0].weight.data.fill_(2.0)
        torch.testing.assert_close(model(x), TorchRMSNorm.forward(model[0], x))
        model[0].weight.numpy()[:] = 3.0
        torch.testing.assert_close(model(x), TorchRMSNorm.forward(model[0], x))


def test_a_dict_that_is_copied_by_hand() -> None:
    module = TorchRMSNorm()
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert len(hfpatch.apply(nn.Sequential(module)).swaps) == 1
        for by_hand in (False, True):
            other = TorchRMSNorm.__new__(TorchRMSNorm) if by_hand else copy.copy(module)
            if by_hand:
                other.__dict__.update(module.__dict__)
            other._parameters = {"weight": nn.Parameter(2 * module.weight, requires_grad=False)}
            torch.testing.assert_close(other(x), (1 if by_hand else 2) * module(x))
