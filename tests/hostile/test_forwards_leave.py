"""What a registered forward leaves behind beside its result: in a cache or a list that it is called
with, in attributes of its module, in an object that it returns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.hundredfold import Hundredfold
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import hfpatch

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.held = SimpleNamespace(loss=torch.zeros(()))
        self.loss, self.by_name = torch.zeros(()), {"loss": torch.zeros(())}
        self.register_buffer("mean", torch.zeros(WIDTH))


class Attribute(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.loss = y.square().mean()
        return 2 * y


class Child(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.loss = y.square().mean()
        return 2 * y


class Object(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.held.loss = self.by_name["loss"] = y.square().mean()
        return 2 * y


class Running(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return 2 * y


class Statistics(Layer):
    """PyTorch writes to a batch norm's buffers in its kernel, which autograd does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Cached(Layer):
    def forward(self, x: Tensor, cache: Any = None, at: int = 0) -> Tensor:
        y = self.inner(x)
        if cache is not None:
            cache.rows[at : at + len(y)] = y
            cache.times.append(y.mean())
            y = y + cache.rows[: at + len(y)].sum(0)
        return 2 * y


class Growing(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y = self.inner(x)
        if cache is not None:
            cache.rows = torch.cat([*([cache.rows] if len(cache.rows) else []), y])
            y = torch.softmax(x @ cache.rows.T, -1) @ cache.rows
        return 2 * y


class Listed(Layer):
    def forward(self, x: Tensor, found: Any = None, named: Any = None) -> Tensor:
        y = self.inner(x)
        if found is not None:
            found.append(y)
            named["y"] = y
        return 2 * y


class Into(Layer):
    def forward(self, x: Tensor, out: Any = None) -> Tensor:
        y = self.inner(x)
        if out is not None:
            out.copy_(y)
        return 2 * y


_log: list[Tensor] = []


class Logged(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        _log.append(y.mean())
        return 2 * y


def _y(m: Any, x: Tensor) -> Tensor:
    return x @ m.inner.weight.T + m.inner.bias


def _alone(m: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return 2 * _y(m, x)


def _reads_cache(m: Any, x: Tensor, cache: Any = None, at: int = 0) -> Tensor:
    y = _y(m, x)
    return 2 * (y if cache is None else y + torch.cat([cache.rows[:at], y]).sum(0))


def _calls(m: Any) -> Any:
    x = _x()
    return [m(x), m(2 * x)], m.loss, m.inner.loss if hasattr(m.inner, "loss") else None


def _with_cache(m: Any) -> Any:
    cache = SimpleNamespace(rows=torch.zeros(9, WIDTH), times=[])
    return [m(i * _x(), cache, 3 * i) for i in range(3)], cache.rows, cache.times


def _with_growing_cache(m: Any) -> Any:
    cache = SimpleNamespace(rows=torch.zeros(0, WIDTH))
    return [m(i * _x(), cache) for i in range(4)], cache.rows


def _with_lists(m: Any) -> Any:
    found: list[Tensor] = []
    named: dict[str, Tensor] = {}
    return [m(_x(), found, named=named), found, named]


def _with_out(m: Any) -> Any:
    out = torch.zeros(3, WIDTH)
    return m(_x(), out=out), out


def _with_what_it_holds(m: Any) -> Any:
    return m(_x()), m.held.loss, m.by_name["loss"], m.mean.clone()


def _x() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


WRONG: dict[str, tuple[type[nn.Module], Callable[..., Any], Callable[[Any], Any]]] = {
    "an attribute": (Attribute, _alone, _calls),
    "an attribute of a module inside": (Child, _alone, _calls),
    "an object of the module": (Object, _alone, _with_what_it_holds),
    "a buffer": (Running, _alone, _with_what_it_holds),
    "a cache": (Cached, _reads_cache, _with_cache),
    "a list and a dict": (Listed, _alone, _with_lists),
    "an output that is given": (Into, _alone, _with_out),
    "a global list": (Logged, _alone, lambda m: (m(_x()), _taken())),
}


def _taken() -> list[Tensor]:
    found = _log.copy()
    _log.clear()
    return found


def _applied(
    cls: type[nn.Module], forward: Callable[..., Any], training: bool = False
) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(cls()).eval()
    twin = copy.deepcopy(model)
    handle = hfpatch.register(
        f"^{cls.__name__}$", forward=forward, sample=lambda m: (_x(),), differentiable=training
    )
    try:
        report = hfpatch.apply(model, mode="training" if training else "inference")
    finally:
        handle.remove()
    return model[0], twin[0], report


@pytest.mark.parametrize("what", WRONG)
def test_what_it_does_not_leave(what: str) -> None:
    cls, forward, call = WRONG[what]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RuntimeWarning)
        model, twin, _ = _applied(cls, forward)
        _log.clear()
        for _ in range(3):
            torch.testing.assert_close(call(model), call(twin), rtol=1e-4, atol=1e-4)


def _right_running(m: Any, x: Tensor) -> Tensor:
    y = _y(m, x)
    m.mean.copy_(0.9 * m.mean + 0.1 * y.sum(0) / len(y))
    return 2 * y


def _own_statistics(m: Any, x: Tensor) -> Tensor:
    norm = m.norm
    if not m.training:
        return norm(x)  # type: ignore[no-any-return]
    mean, variance = x.mean(0), x.var(0, unbiased=False)
    with torch.no_grad():
        norm.running_mean.mul_(0.9).add_(0.1 * mean)
        norm.running_var.mul_(0.9).add_(0.1 * variance * len(x) / (len(x) - 1))
        norm.num_batches_tracked += 1
    return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


def _in_training(m: Any) -> Any:
    m.train()
    found = m(_x()), m(2 * _x()), *(b.clone() for b in m.norm.buffers())
    m.eval()
    return (*found, m(_x()))


def _right_cached(m: Any, x: Tensor, cache: Any = None, at: int = 0) -> Tensor:
    y = _y(m, x)
    if cache is not None:
        cache.rows[at : at + len(y)] = y
        cache.times.append(y.mean())
        y = y + cache.rows[: at + len(y)].sum(0)
    return 2 * y


def _right_growing(m: Any, x: Tensor, cache: Any = None) -> Tensor:
    y = _y(m, x)
    if cache is not None:
        cache.rows = torch.cat([*([cache.rows] if len(cache.rows) else []), y])
        y = torch.softmax(x @ cache.rows.T, -1) @ cache.rows
    return 2 * y


def _right_listed(m: Any, x: Tensor, found: Any = None, named: Any = None) -> Tensor:
    y = _y(m, x)
    if found is not None:
        found.append(y)
        named["y"] = y
    return 2 * y


def _right_into(m: Any, x: Tensor, out: Any = None) -> Tensor:
    y = _y(m, x)
    if out is not None:
        torch.add(x @ m.inner.weight.T, m.inner.bias, out=out)
    return 2 * y


RIGHT: dict[str, tuple[type[nn.Module], Callable[..., Any], Callable[[Any], Any]]] = {
    "a buffer": (Running, _right_running, _with_what_it_holds),
    "statistics": (Statistics, _own_statistics, _in_training),
    "a cache": (Cached, _right_cached, _with_cache),
    "a cache that grows": (Growing, _right_growing, _with_growing_cache),
    "a list and a dict": (Listed, _right_listed, _with_lists),
    "an output that is given": (Into, _right_into, _with_out),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_it_leaves_as_the_original_does(what: str) -> None:
    cls, forward, call = RIGHT[what]
    called: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not comparing:
            called.append(1)
        return forward(*args, **kwargs)

    comparing = True
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model, twin, report = _applied(cls, counted)
        assert [s.source for s in report.swaps] == ["registered"]
        for _ in range(3):
            torch.testing.assert_close(call(model), call(twin), rtol=1e-4, atol=1e-4)
        comparing = False
        torch.testing.assert_close(call(model), call(twin), rtol=1e-4, atol=1e-4)
    assert called, "it is used"


@dataclass
class Output:
    y: Tensor
    z: Tensor


@dataclass(eq=False)
class Unlike:
    y: Tensor
    z: Tensor


@dataclass
class Slots:
    __slots__ = ("y", "z")
    y: Tensor
    z: Tensor


class Plain(Layer):
    made: Any = Output

    def forward(self, x: Tensor) -> Any:
        return self.made(y=self.inner(x), z=2 * x)


class PlainUnlike(Plain):
    made = Unlike


class PlainSlots(Plain):
    made = Slots


class Doubled(Layer):
    def forward(self, x: Tensor) -> Any:
        return BaseModelOutput(self.inner(x), hidden_states=(2 * x, self.inner(x)))


def _in_one_buffer() -> Callable[..., Any]:
    static = torch.zeros(3, WIDTH)

    def forward(m: Any, x: Tensor) -> Any:
        y = _y(m, x)
        return m.made(y=y if torch.is_grad_enabled() else static.copy_(y), z=2 * x)

    return forward


IN_OBJECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "a gradient": (lambda m, x: m.made(Hundredfold.apply(_y(m, x)), 2 * x), "the gradient of"),
    "values": (lambda m, x: m.made(_y(m, x), 3 * x), "differs"),
}


@pytest.mark.parametrize("cls", [Plain, PlainUnlike, PlainSlots])
@pytest.mark.parametrize("what", [*IN_OBJECTS, "one buffer"])
def test_tensors_in_an_object_that_is_returned(what: str, cls: type[nn.Module]) -> None:
    forward, why = IN_OBJECTS[what] if what in IN_OBJECTS else (_in_one_buffer(), "later call")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _, _, report = _applied(cls, forward, training=True)
    (skip,) = report.skips
    assert skip.kind == "rejected" and why in skip.reason, report


@pytest.mark.parametrize("cls", [Plain, PlainUnlike, PlainSlots])
def test_an_object_that_is_returned_as_the_original_does(cls: type[nn.Module]) -> None:
    _, _, report = _applied(cls, lambda m, x: m.made(y=_y(m, x), z=2 * x), training=True)
    assert [s.source for s in report.swaps] == ["registered"], report


def test_one_tensor_in_two_places() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = _y(m, x)
        return BaseModelOutput(y, hidden_states=(2 * x, y))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _, _, report = _applied(Doubled, forward)
    (skip,) = report.skips
    assert "two tensors in one memory" in skip.reason, report


def test_the_gradient_of_what_it_leaves() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = _y(m, x)
        m.loss = y.detach().square().mean() + (y - y.detach()).sum()
        return 2 * y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _, _, report = _applied(Attribute, forward, training=True)
    (skip,) = report.skips
    assert "the gradient of" in skip.reason, report
