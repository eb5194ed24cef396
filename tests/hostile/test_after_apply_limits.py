"""What no call can notice at a kernel's cost: the table of docs/registry-and-probe.md, row by row.

Each change leaves the patched module as it was proven, and the next `apply` sees it.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from leaves import OwnSwish
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


def test_a_method_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    power = torch.Tensor.pow

    def fourfold(x: torch.Tensor, exponent: Any) -> torch.Tensor:
        return power(x, exponent) * 4.0

    _check(TorchRMSNorm(), lambda: monkeypatch.setattr(torch.Tensor, "pow", fourfold))


class NamingLayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.LayerNorm.forward(self, x)


def test_a_method_of_a_class_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, forward = NamingLayerNorm(32).requires_grad_(False), nn.LayerNorm.forward
    model, x = nn.Sequential(module), torch.randn(3, 32)

    def tripled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * 3.0

    with torch.no_grad():
        hfpatch.apply(model, kernels="local")
        proven = model(x)
        monkeypatch.setattr(nn.LayerNorm, "forward", tripled)
        found = model(x)  # as proven, or as the original: bases of a class are looked at
        assert any(torch.allclose(found, y, atol=1e-5) for y in (proven, 3 * proven))
        hfpatch.apply(model, kernels="local")
        torch.testing.assert_close(model(x), 3 * proven)


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


def test_an_equal_setting_of_another_type() -> None:
    class OwnRMSNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y

    module: Any = OwnRMSNorm()
    model = nn.Sequential(module)
    x = torch.randn(3, 32) * 1e-3
    with torch.no_grad():
        assert len(hfpatch.apply(model).swaps) == 1
        proven = model(x)
        module.eps = numpy.float16(1e-6)
        assert module.eps == 1e-6
        torch.testing.assert_close(model(x), proven)
        assert not hfpatch.apply(model).swaps
        assert not torch.allclose(model(x), proven)


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


def test_a_property_over_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnRMSNorm(TorchRMSNorm):
        pass

    def twice(self: nn.Module) -> torch.Tensor:
        return 2 * self._parameters["weight"]

    module = OwnRMSNorm()
    _check(
        module, lambda: monkeypatch.setattr(OwnRMSNorm, "weight", property(twice), raising=False)
    )


def test_a_property_over_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(32, 64, bias=False) for _ in range(2))
            self.down_proj, self.act_fn = nn.Linear(64, 32, bias=False), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def other(self: nn.Module) -> nn.Module:
        return nn.Tanh()

    _check(OwnMLP(), lambda: monkeypatch.setattr(OwnMLP, "act_fn", property(other), raising=False))


@pytest.mark.parametrize("name", ["__getattr__", "__getattribute__"])
@pytest.mark.parametrize("on", ["class", "nn.Module"])
def test_how_attributes_are_read(name: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnRMSNorm(TorchRMSNorm):
        pass

    cls = OwnRMSNorm if on == "class" else nn.Module
    before = getattr(nn.Module, name)

    def read(self: nn.Module, asked: str) -> Any:
        found = before(self, asked)
        return 2 * found if asked == "weight" and isinstance(self, OwnRMSNorm) else found

    if name == "__getattribute__":  # parameters are found by `__getattr__` then

        def read(self: nn.Module, asked: str) -> Any:
            found = before(self, asked)
            return 0.25 if asked == "eps" and isinstance(self, OwnRMSNorm) else found

    _check(OwnRMSNorm(), lambda: monkeypatch.setattr(cls, name, read, raising=False))


def test_what_a_function_of_an_instance_closes_over() -> None:
    def made(gain: float) -> tuple[Callable[..., torch.Tensor], Callable[[float], None]]:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * gain

        def change(value: float) -> None:
            nonlocal gain
            gain = value

        return scaled, change

    class HoldingRMSNorm(Norm):
        def __init__(self, scaled: Callable[..., torch.Tensor]) -> None:
            super().__init__()
            self.scaled = scaled

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.scaled(self.weight * y)

    scaled, change = made(1.0)
    _check(HoldingRMSNorm(scaled), lambda: change(3.0))

    def by_default(x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return x * gain

    _check(HoldingRMSNorm(by_default), lambda: by_default.__kwdefaults__.update(gain=3.0))


def test_the_forward_of_an_autograd_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnSiLU(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OwnSwish.apply(x)

    def negative(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return -x

    _check(OwnSiLU(), lambda: monkeypatch.setattr(OwnSwish, "forward", staticmethod(negative)))


def test_what_a_function_of_torch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.layer_norm

    class OwnLayerNorm(nn.LayerNorm):
        pass

    module = OwnLayerNorm(32).requires_grad_(False)
    _check(module, lambda: monkeypatch.setattr(torch, "layer_norm", lambda *a: 2 * own(*a)))


def _louder() -> float:
    return float(os.environ.get("HFPATCH_TEST_GAIN", "1"))


def by_environment(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * float(os.getenv("HFPATCH_TEST_GAIN", "1"))


def by_a_helper(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * _louder()


@pytest.mark.parametrize("kernel", [by_environment, by_a_helper])
def test_the_next_apply_sees_the_environment_of_a_users_kernel(
    kernel: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = hfpatch.register(op="silu", kernel=kernel, name="by_environment")
    try:
        model, x = nn.Sequential(nn.SiLU()), torch.randn(3, 32)
        assert hfpatch.apply(model, kernels={"silu": "by_environment"}).swaps
        model(x)
        monkeypatch.setenv("HFPATCH_TEST_GAIN", "5")
        report = hfpatch.apply(model, kernels={"silu": "by_environment"})
        assert not report.swaps and report.skips, report
        torch.testing.assert_close(model(x), torch.nn.functional.silu(x))
    finally:
        handle.remove()
