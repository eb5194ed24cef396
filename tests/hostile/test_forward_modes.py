"""Registered forwards that are wrong in one mode, for one pattern of arguments, or later: where
gradients are recorded, in inference mode, where two arguments are one tensor, after a buffer
changed. Each is refused or falls back with its reason, and a right one beside it stays."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfpatch

F = nn.functional
WIDTH = 8


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.w)


def _right(m: Any, x: Tensor) -> Tensor:
    return torch.mul(m.w, x).sin()


def _sample(module: nn.Module) -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH),)


def _x() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@contextmanager
def _applied(
    model: nn.Module, forward: Callable[..., Any], sample: Any, training: bool = False
) -> Iterator[Any]:
    """The report, with the forward registered for the one module that the model holds."""
    name = type(model[0]).__name__  # type: ignore[index]
    handle = hfpatch.register(f"^{name}$", forward=forward, sample=sample, differentiable=training)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            report = hfpatch.apply(model, mode="training" if training else "inference")
        yield report
    finally:
        handle.remove()
        hfpatch.restore(model)


def _is_registered(report: Any) -> bool:
    return [s.source for s in report.swaps] == ["registered"]


def _is_rejected(report: Any, why: str) -> None:
    (skip,) = report.skips
    assert not report.swaps and skip.kind == "rejected" and why in skip.reason, report.skips


class _Passing(torch.autograd.Function):
    """Does something in its backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, do: Callable[[Tensor], Any]) -> Tensor:
        ctx.do = do
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        passed = grad.clone()
        ctx.do(grad)
        return passed, None


def _added(when: Callable[[Any, Tensor], bool]) -> Callable[..., Any]:
    return lambda m, x: _right(m, x) + (1.0 if when(m, x) else 0.0)


def _doing(do: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    """Only where gradients are recorded."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = _right(m, x)
        if torch.is_grad_enabled():
            with torch.no_grad():
                do(m, x)
        return y

    return forward


def _in_backward(do: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    """Called with the module, the input, the result before and the gradient of it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = _right(m, x)
        return _Passing.apply(y, lambda grad: do(m, x, y, grad))  # type: ignore[no-any-return]

    return forward


def _halve_dense(grad: Tensor) -> None:
    if grad.is_contiguous():
        grad.mul_(0.5)


def _strided(m: Any, x: Tensor) -> Tensor:
    y = _right(m, x)
    return y.mT.contiguous().mT if torch.is_grad_enabled() else y


RECORDED = "where gradients are recorded, "
#: Forwards that are right where no gradients are recorded, and why each is refused.
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "values": (_added(lambda m, x: torch.is_grad_enabled()), RECORDED + "it differs"),
    "values by the input": (_added(lambda m, x: x.requires_grad), RECORDED + "it differs"),
    "values by the weight": (
        _added(lambda m, x: m.w.requires_grad and not x.requires_grad and torch.is_grad_enabled()),
        RECORDED + "it differs",
    ),
    "values in training": (
        _added(lambda m, x: m.training and torch.is_grad_enabled()),
        RECORDED + "it differs",
    ),
    "strides": (_strided, RECORDED + "it returned strides"),
    "buffer": (_doing(lambda m, x: m.b.add_(1)), RECORDED + "it wrote to the module's buffers"),
    "parameter": (
        _doing(lambda m, x: m.w.data.mul_(2)),
        RECORDED + "it wrote to the module's parameters",
    ),
    "input": (_doing(lambda m, x: x.data.mul_(2)), RECORDED + "it wrote to its input"),
    "attribute": (
        _doing(lambda m, x: setattr(m, "more", 1)),
        RECORDED + "it changed attributes of the module",
    ),
    "hook": (
        _doing(lambda m, x: m.register_forward_hook(lambda m, a, y: y * 0)),
        RECORDED + "it changed the module's `_forward_hooks`",
    ),
    "another parameter": (
        _doing(lambda m, x: setattr(m, "w", nn.Parameter(m.w.detach().clone()))),
        RECORDED + "it changed the module's `w`",
    ),
    "another buffer": (
        _doing(lambda m, x: setattr(m, "b", m.b.clone())),
        RECORDED + "it changed the module's `b`",
    ),
    "gradient of a step before": (
        _doing(lambda m, x: m.w.grad is not None and m.w.grad.zero_()),
        RECORDED + "it changed the module's `w`",
    ),
    "values of a second step": (
        _added(lambda m, x: m.w.grad is not None),
        "it differs from the original",
    ),
    "seed": (_doing(lambda m, x: torch.manual_seed(7)), "it changed torch's random state"),
    "draws": (_doing(lambda m, x: random.random()), "it changed Python's random state"),
    "environment": (
        _doing(lambda m, x: os.environ.update(HFPATCH_TEST_LIE="1")),
        "it changed the environment",
    ),
    "seed in backward": (
        _in_backward(lambda m, x, y, grad: torch.manual_seed(7)),
        "it changed torch's random state",
    ),
    "input in backward": (
        _in_backward(lambda m, x, y, grad: x.data.copy_(grad)),
        RECORDED + "it wrote to its input",
    ),
    "result in backward": (
        _in_backward(lambda m, x, y, grad: y.data.copy_(grad)),
        "its backward changed its result",
    ),
    "upstream gradient": (
        _in_backward(lambda m, x, y, grad: _halve_dense(grad)),
        "its backward wrote to the gradient of its result",
    ),
}


def _trained(model: Any) -> list[Tensor]:
    x = _x().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), [x, model[0].w])
    return [y.detach(), x.detach(), model[0].b.clone(), *grads]


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_where_gradients_are_recorded(fault: str) -> None:
    forward, why = WRONG[fault]
    model = nn.Sequential(Wave())
    expected, state, drawn = _trained(model), torch.get_rng_state(), random.getstate()
    with _applied(model, forward, _sample, training=True) as report:
        _is_rejected(report, why)
        assert torch.equal(state, torch.get_rng_state()) and drawn == random.getstate()
        assert "HFPATCH_TEST_LIE" not in os.environ
        for got, wanted in zip(_trained(model), expected, strict=True):
            assert torch.equal(got, wanted)


class Normed(nn.Module):
    """Draws, and writes to its buffers, as its original does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x.flatten(0, -2))).view(x.shape)  # type: ignore[no-any-return]


def _normed(m: Any, x: Tensor) -> Tensor:
    n = m.norm
    if m.training:
        n.num_batches_tracked.add_(1)
    y = F.batch_norm(
        x.flatten(0, -2), n.running_mean, n.running_var, n.weight, n.bias, m.training, n.momentum
    )
    return F.dropout(y, m.drop.p, m.training).view(x.shape)


class Rotary(nn.Module):
    """Buffers of both kinds, and a result that lies in the memory of one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("position_ids", torch.arange(16)[None], persistent=False)
        self.register_buffer("table", torch.randn(16, WIDTH))
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[-2]
        angles = self.position_ids[:, :n, None].float() * self.inv_freq
        scores = (x @ x.mT + self.mask[:n, :n]).softmax(-1)
        return x * angles.cos() * self.w, angles.sin(), self.table[:n], scores


def _rotary(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[-2]
    angles = torch.outer(m.position_ids[0, :n].to(m.inv_freq.dtype), m.inv_freq)[None]
    scores = torch.softmax(m.mask[:n, :n] + torch.matmul(x, x.transpose(-1, -2)), -1)
    return x * (angles.cos() * m.w), angles.sin(), m.table[:n], scores


RIGHT: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "plain": (Wave, _right),
    "a backward of its own": (Wave, _in_backward(lambda m, x, y, grad: None)),
    "another formula where gradients are recorded": (
        Wave,
        lambda m, x: torch.sin(x * m.w) if torch.is_grad_enabled() else _right(m, x),
    ),
    "dropout and running statistics": (Normed, _normed),
    "buffers": (Rotary, _rotary),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("what", RIGHT)
def test_right_in_each_mode(what: str, train: bool) -> None:
    cls, forward = RIGHT[what]
    model = nn.Sequential(cls()).train(train)
    twin = copy.deepcopy(model)
    with _applied(model, forward, _sample, training=True) as report, warnings.catch_warnings():
        assert _is_registered(report), report.skips
        warnings.simplefilter("error")
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for _ in range(2):
                found = []
                for m in (model, twin):
                    torch.manual_seed(3)
                    with mode():
                        found.append(m(_x()))
                torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_forward_that_aliases_its_input_where_gradients_are_recorded() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x.clone()

    def lying(m: Any, x: Tensor) -> Tensor:
        return x.view_as(x) if torch.is_grad_enabled() else x.clone()

    model = nn.Sequential(Copied())
    with _applied(model, lying, _sample, training=True) as report:
        _is_rejected(report, "in the memory of an input")
    with _applied(model, lambda m, x: x * 1, _sample, training=True) as report:
        assert _is_registered(report), report.skips


@pytest.mark.parametrize("made_inside", [False, True])
def test_wrong_in_inference_mode(made_inside: bool) -> None:
    model = nn.Sequential(Wave())
    expected = model(_x()).detach()
    lying = _added(lambda m, x: torch.is_inference_mode_enabled())
    with _applied(model, lying, _sample) as report:
        assert _is_registered(report)
        x = _x()
        with torch.inference_mode(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                assert torch.equal(model(_x() if made_inside else x), expected)
        assert ["is not used any more: it differs" in str(w.message) for w in said] == [True]


def test_a_write_in_inference_mode() -> None:
    def lying(m: Any, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            m.b.add_(1)
        return _right(m, x)

    model = nn.Sequential(Wave())
    with _applied(model, lying, _sample) as report:
        assert _is_registered(report)
        with torch.inference_mode():
            with pytest.warns(RuntimeWarning, match="module's buffers"):
                model(_x())
            model(_x())
        assert not model[0].b.any()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * self.scale, -1) @ k


def _attending(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax((q * m.scale) @ k.mT, -1) @ k


def _forgets_the_scale(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ k if q is k else _attending(m, q, k)


def _two(m: Any) -> tuple[Tensor, Tensor]:
    return _x(), _x() + 1


def _twice(m: Any) -> tuple[Tensor, Tensor]:
    x = _x()
    return x, x


@pytest.mark.parametrize("named", [False, True])
def test_wrong_where_two_arguments_are_one_tensor(named: bool) -> None:
    model = nn.Sequential(Attending())
    x, other = _x(), _x()
    with torch.no_grad(), _applied(model, _forgets_the_scale, _two) as report:
        assert _is_registered(report)
        expected = Attending()(x, x)
        for _ in range(2):  # the kind of two tensors is right, and no other one's
            torch.testing.assert_close(model[0](x, other), expected)
        args, named_args = ((x,), {"k": x}) if named else ((x, x), {})
        with pytest.warns(RuntimeWarning, match="is not used any more: it differs"):
            found = model[0](*args, **named_args)
        for _ in range(2):
            torch.testing.assert_close(found, expected)
            found = model[0](*args, **named_args)


def test_a_sample_of_one_tensor_twice() -> None:
    model = nn.Sequential(Attending())
    with _applied(model, _forgets_the_scale, _twice) as report:
        _is_rejected(report, "it differs")
    x, other = _x(), _x()
    for sample in (_two, _twice):
        with _applied(model, _attending, sample, training=True) as report:
            assert _is_registered(report), report.skips
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for k in (other, x, other, x):
                    q = x.requires_grad_()
                    torch.testing.assert_close(model[0](q, k), Attending()(q, k))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("var", torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight / torch.sqrt(self.var + 1e-5)


class Picky(Scaled):
    """Takes no other numbers in its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if float(self.var[0]) != 0.5:
            raise ValueError("another buffer")
        return super().forward(x)


def _scaled(m: Any, x: Tensor) -> Tensor:
    return x * (m.weight * torch.rsqrt(m.var + 1e-5))


@pytest.mark.parametrize("cls", [Scaled, Picky])
def test_a_value_folded_from_a_buffer(cls: type[nn.Module]) -> None:
    folded: dict[int, Tensor] = {}

    def lying(m: Any, x: Tensor) -> Tensor:
        if id(m) not in folded:
            folded[id(m)] = torch.rsqrt(m.var + 1e-5)
        return x * (m.weight * folded[id(m)])

    model = nn.Sequential(cls())
    before = model[0].var.clone()
    if cls is Scaled:
        with _applied(model, lying, _sample) as report:
            _is_rejected(report, "after its buffers changed, it differs")
    with _applied(model, _scaled, _sample) as report:
        assert _is_registered(report), report.skips
        assert torch.equal(model[0].var, before)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(_x()), Scaled()(_x()))
