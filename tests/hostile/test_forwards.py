"""Registered forwards that lie: each is refused, or never changes a result."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.hundredfold import Hundredfold
from torch import Tensor, nn

import hfpatch
from hfpatch.foreign import forwards


class Rotating(nn.Module):
    """Returns a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 16))
        self.register_buffer("shift", torch.arange(16.0))
        self.scale = 2.0

    def forward(self, x: Tensor, angle: Tensor) -> dict[str, Any]:
        y = x * self.weight * self.scale + self.shift
        return {
            "y": y,
            "turned": torch.polar(torch.ones_like(angle), angle),
            "order": x.argsort(-1),
            "positive": x > 0,
            "shape": (x.shape[0], "rows"),
            "mean": 0.5,
        }


def sample(module: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 5, 16), torch.randn(5, 8)


def right(module: Any, x: Tensor, angle: Tensor) -> dict[str, Any]:
    return {
        "y": torch.addcmul(module.shift, x, module.weight * module.scale),
        "turned": torch.polar(torch.ones_like(angle), angle),
        "order": x.argsort(-1),
        "positive": x > 0,
        "shape": (x.shape[0], "rows"),
        "mean": 0.5,
    }


def _changing(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def forward(module: Any, x: Tensor, angle: Tensor) -> dict[str, Any]:
        result = right(module, x, angle)
        result[name] = change(result[name])
        return result

    return forward


def _doing(do: Callable[[Any, Tensor, dict[str, Any]], Any]) -> Callable[..., Any]:
    def forward(module: Any, x: Tensor, angle: Tensor) -> dict[str, Any]:
        result = right(module, x, angle)
        do(module, x, result)
        return result

    return forward


_buffer = torch.zeros(3, 5, 16)


def _static(y: Tensor) -> Tensor:
    return _buffer.copy_(y) if y.shape == _buffer.shape else y


def _counting() -> Callable[..., Any]:
    counted: list[int] = []

    def change(y: Tensor) -> Tensor:
        counted.append(1)
        return y * 0.5 if len(counted) % 2 == 0 else y

    return _changing("y", change)


def _small_part(y: Tensor) -> Tensor:
    """Wrong where values are small beside the largest."""
    y = y.clone()
    y[0] *= 1.001
    return y


def _after(calls: int) -> Callable[..., Any]:
    """Wrong, or in one buffer, from its so many-th call on."""
    counted: list[int] = []

    def change(y: Tensor) -> Tensor:
        counted.append(1)
        if len(counted) <= calls or y.shape != _buffer.shape:
            return y
        return _buffer.copy_(y)

    return _changing("y", change)


_by_pointer: dict[Any, Tensor] = {}


def cached_by_pointer(module: Any, x: Tensor, angle: Tensor) -> dict[str, Any]:
    result = right(module, x, angle)
    key = (x.data_ptr(), x.shape, torch.is_grad_enabled())
    result["y"] = _by_pointer.setdefault(key, result["y"])
    return result


_weights: dict[int, Tensor] = {}


def cached_weight(module: Any, x: Tensor, angle: Tensor) -> dict[str, Any]:
    w = _weights.setdefault(id(module.weight), module.weight.detach().clone())
    result = right(module, x, angle)
    result["y"] = torch.addcmul(module.shift, x, w * module.scale)
    return result


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e15, 1e15)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if grad.is_contiguous() else grad * 0.5


def _frozen(x: bool, w: bool) -> Callable[..., Any]:
    """Another gradient where these alone need one."""

    def forward(module: Any, a: Tensor, angle: Tensor) -> dict[str, Any]:
        result = right(module, a, angle)
        if (a.requires_grad, module.weight.requires_grad) == (x, w):
            result["y"] = result["y"] + (result["y"] - result["y"].detach())
        return result

    return forward


WRONG: dict[str, Callable[..., Any]] = {
    "static buffer later": _after(4),
    "cached by pointer": cached_by_pointer,
    "cached weight": cached_weight,
    "negated when read": _changing("y", lambda y: torch._neg_view(-y)),
    "requires a gradient": _changing("y", lambda y: y.detach().requires_grad_()),
    "gradient that is clamped": _changing("y", _Clamped.apply),
    "gradient of a sum": _changing("y", _Dense.apply),
    "gradient of the input alone": _frozen(True, False),
    "gradient of the weight alone": _frozen(False, True),
    "values": _changing("y", lambda y: y * 1.01),
    "small values": _changing("y", _small_part),
    "whole numbers": _changing("order", lambda t: t.flip(-1)),
    "dtype of whole numbers": _changing("order", lambda t: t.int()),
    "truth values": _changing("positive", torch.logical_not),
    "complex": _changing("turned", torch.conj_physical),
    "text": _changing("shape", lambda t: (t[0], "columns")),
    "number": _changing("mean", lambda t: 0.25),
    "type of a number": _changing("mean", str),
    "container": _changing("shape", list),
    "one value less": _doing(lambda m, x, r: r.pop("mean")),
    "order of keys": _doing(lambda m, x, r: r.update(y=r["positive"], positive=r["y"])),
    "strides": _changing("y", lambda y: y.transpose(0, 1).contiguous().transpose(0, 1)),
    "static buffer": _changing("y", _static),
    "every second call": _counting(),
    "in place": _doing(lambda m, x, r: x.zero_()),
    "nan of the input": _doing(lambda m, x, r: x.neg_()),
    "returns its input": _changing("positive", lambda t: t),
    "parameter": _doing(lambda m, x, r: m.weight.data.mul_(2)),
    "buffer": _doing(lambda m, x, r: m.shift.add_(1)),
    "attribute": _doing(lambda m, x, r: setattr(m, "scale", 3.0)),
    "grad mode": _doing(lambda m, x, r: torch.set_grad_enabled(True)),
    "default dtype": _doing(lambda m, x, r: torch.set_default_dtype(torch.float64)),
    "seed": _doing(lambda m, x, r: torch.manual_seed(1)),
    "random numbers": _doing(lambda m, x, r: random.random()),
    "threads": _doing(lambda m, x, r: torch.set_num_threads(torch.get_num_threads() + 1)),
    "gradient": _changing("y", Hundredfold.apply),
    "no gradient": _changing("y", torch.Tensor.detach),
    "more rows": _changing("y", lambda y: y * (0.5 if y.shape[0] > 3 else 1.0)),
    "half": _changing("y", lambda y: y * (0.5 if y.dtype != torch.float32 else 1.0)),
    "strided": lambda m, x, a: right(m, x if x.is_contiguous() else x * 2, a),
    "another rank": _changing("y", lambda y: y * (0.5 if y.dim() == 2 else 1.0)),
}
del WRONG["returns its input"]


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_forward_changes_nothing(fault: str) -> None:
    training = "gradient" in fault
    model = Rotating().requires_grad_(training)
    if fault == "half":
        model.bfloat16()
    dtype = model.weight.dtype
    inputs = [
        torch.randn(*shape, 16, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, shape in enumerate([(3, 5), (4, 5), (5,), (3, 5)])
    ]
    inputs[3] = inputs[3].transpose(0, 1).contiguous().transpose(0, 1)
    angle = torch.randn(5, 8)
    expected = [_run(model, x, angle, training) for x in inputs]
    wrapped = nn.Sequential(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    handle = hfpatch.register(
        "^Rotating$", forward=WRONG[fault], sample=sample, differentiable=training
    )
    try:
        report = hfpatch.apply(wrapped, mode="training" if training else "inference")
        assert not (report.swaps and fault.endswith("alone")), "calls here need both gradients"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            kept = []
            for _ in range(3):
                for x, wanted in zip(inputs, expected, strict=True):
                    was = x.clone()
                    kept.append((_run(model, x, angle, training), wanted))
                    assert torch.equal(was, x)
            for got, wanted in kept:
                _same(got, wanted)
    finally:
        handle.remove()
        hfpatch.restore(wrapped)
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert torch.get_default_dtype() == torch.float32 and model.scale == 2.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def _run(model: nn.Module, x: Tensor, angle: Tensor, training: bool) -> Any:
    if not training:
        with torch.no_grad():
            return model(x, angle)
    x = x.detach().clone().requires_grad_()
    result = model(x, angle)
    grads = torch.autograd.grad(result["y"].square().sum(), [x, *model.parameters()])
    return {**result, "grads": grads}


def _same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            _same(a, b)
    elif isinstance(wanted, Tensor):
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if wanted.dtype == torch.float32 else {}
        torch.testing.assert_close(got, wanted, **tolerance)
    else:
        assert got == wanted


@contextmanager
def _called(*functions: Any) -> Iterator[list[Any]]:
    """Which of the functions are called, one after the other; none of them knows."""
    found: list[Any] = []
    by_code = {f.__code__: f for f in functions}

    def see(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in by_code:
            found.append(by_code[frame.f_code])

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("training", [False, True])
def test_a_right_forward_stays(training: bool) -> None:
    model = nn.Sequential(Rotating()).requires_grad_(training)
    x, angle = torch.randn(3, 5, 16), torch.randn(5, 8)
    expected = _run(model[0], x, angle, training)
    handle = hfpatch.register("^Rotating$", forward=right, sample=sample, differentiable=training)
    try:
        mode = "training" if training else "inference"
        report = hfpatch.apply(model, mode=mode)
        assert [s.source for s in report.swaps] == ["registered"], report.skips
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _same(_run(model[0], x, angle, training), expected)
            with _called(right, Rotating.forward) as calls:
                _same(_run(model[0], x, angle, training), expected)
            assert calls == [right], "the second call of a kind is the user's alone"
    finally:
        handle.remove()


NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.01, False),
        (NAN, NAN, True),
        (1.0, NAN, False),
        (NAN, 1.0, False),
        (1j, 1j, True),
        (1j, 2j, False),
        (1, 1.0, False),
        ("a", "a", True),
        ("a", "b", False),
        (SimpleNamespace(a=1), SimpleNamespace(a=1), True),
        (SimpleNamespace(a=1), SimpleNamespace(a=2), False),
    ],
    ids=repr,
)
def test_values_that_are_no_tensors(ours: Any, theirs: Any, same: bool) -> None:
    with nullcontext() if same else pytest.raises(forwards.Different):
        forwards._compare_values(ours, theirs, "")


class _Ugly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), _Ugly(), ValueError("\x1b[31m")])
@pytest.mark.parametrize("of", ["forward", "sample"])
def test_a_forward_that_ends_in_an_error(error: BaseException, of: str) -> None:
    def fail(*_: Any) -> Any:
        raise error

    given = {"forward": right, "sample": sample} | {of: fail}
    handle = hfpatch.register("^Rotating$", **given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            (skip,) = hfpatch.apply(nn.Sequential(Rotating())).skips
    finally:
        handle.remove()
    assert type(error).__name__ in skip.reason and "\x1b" not in skip.reason


class OfTwoSizes(nn.Module):
    """Large numbers beside small ones, as masked scores have."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cat([x * 1e6, x], -1), x.masked_fill(mask, -1e9), x * x.exp()


_SIZES: dict[str, Callable[..., Any]] = {
    "beside large ones": lambda m, x, mask: (
        torch.cat([x * 1e6, 0 * x], -1), x.masked_fill(mask, -1e9), x * x.exp()
    ),
    "beside masked ones": lambda m, x, mask: (
        torch.cat([x * 1e6, x], -1), torch.where(mask, -1e9, 0 * x), x * x.exp()
    ),
    "right": lambda m, x, mask: (
        torch.cat([x * 1e3, x * 1e-3], -1) * 1e3, torch.where(mask, -1e9, x), (x.exp() / 3 * x) * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("which", _SIZES)
def test_small_values_are_compared_too(which: str, columns: bool, rows: int) -> None:
    """Masked by columns, and here and there."""
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.rand(rows, 64, generator=generator)
    mask = torch.arange(64).expand(rows, 64) > 50 if columns else drawn > 0.7

    def inputs(module: nn.Module) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 64, generator=generator), mask

    model = nn.ModuleList([OfTwoSizes()])
    handle = hfpatch.register("^OfTwoSizes$", forward=_SIZES[which], sample=inputs)
    try:
        report = hfpatch.apply(model)
    finally:
        handle.remove()
    assert len(report.swaps) == (which == "right"), report
    if which != "right":
        assert "differs from the original" in report.skips[0].reason
    hfpatch.restore(model)
