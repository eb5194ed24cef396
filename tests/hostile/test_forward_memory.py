"""Registered forwards whose results lie in memory that is somebody else's, whose gradients are
wrong of what is no leaf or in a second backward, and that tell apart arguments of kinds that are
rare. Each is refused, or such a call is compared; a right one beside it stays."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from wrong_backwards import Counting, Scaled, Static

import hfpatch

WIDTH = 8


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("table", torch.zeros(5, WIDTH))
        self.names: Any = frozenset({"sin"})

    def forward(self, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
        y = torch.sin(x * self.w)
        if how is not None and _is_odd(how):
            y = y * 3.0
        return y, y.clone()


def _is_odd(how: Any) -> bool:
    if isinstance(how, functools.partial):
        return bool(how.args[0] == 7)
    if isinstance(how, (set, frozenset)):
        return "odd" in how
    if isinstance(how, slice):
        return bool(how.stop == 7)
    return bool(how() == 7 if callable(how) else how == 7)


def _right(m: Any, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
    y = torch.mul(m.w, x).sin()
    return y, y.clone()


def _one_memory() -> Callable[..., Any]:
    def forward(m: Any, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
        y, _ = _right(m, x)
        return y, y.view_as(y)

    return forward


def _static() -> Callable[..., Any]:
    """A table of results that are kept: right until somebody adds to one in place."""
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(m: Any, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return _right(m, x)
        for before, w, y in kept:
            if torch.equal(before, x) and torch.equal(w, m.w):
                return y, y.clone()
        y, z = _right(m, x)
        kept.append((x.clone(), m.w.detach().clone(), y))
        return y, z

    return forward


def _of_no_leaf() -> Callable[..., Any]:
    def forward(m: Any, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
        return _right(m, x if x.is_leaf else Scaled.apply(x, lambda: 0.5))

    return forward


class _Twice:
    """1 in a first backward of a graph, 0.5 in a second."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 1.0 if self.count == 1 else 0.5


def _of_a_second_backward() -> Callable[..., Any]:
    def forward(m: Any, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
        return _right(m, Scaled.apply(x, _Twice()))

    return forward


def _of_a_static_gradient() -> Callable[..., Any]:
    return lambda m, x, how=None: _right(m, Static.apply(x))


def _of_a_count() -> Callable[..., Any]:
    return lambda m, x, how=None: _right(m, Counting.apply(x))


WRONG: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "two results in one memory": (_one_memory, "two tensors in one memory"),
    "a static result": (_static, "after its first result was written to"),
    "a gradient of no leaf": (_of_no_leaf, "the gradient of"),
    "a second backward": (_of_a_second_backward, "the second gradient of"),
    "a static gradient": (_of_a_static_gradient, "changed the gradients of the first"),
    "a backward that counts": (_of_a_count, "what its backward reads changes"),
}


def _sample(module: nn.Module) -> tuple[Tensor]:
    return (torch.randn(5, WIDTH),)


def _applied(forward: Callable[..., Any], model: nn.Module, training: bool) -> Any:
    handle = hfpatch.register("^Pair$", forward=forward, sample=_sample, differentiable=training)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return hfpatch.apply(model, mode="training" if training else "inference")
    finally:
        handle.remove()


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused(what: str) -> None:
    make, why = WRONG[what]
    report = _applied(make(), nn.Sequential(Pair()), training=True)
    (skip,) = report.skips
    assert skip.kind == "rejected" and why in skip.reason, report


def test_a_result_in_the_memory_of_a_buffer() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.ones(5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.rows * 1.0

    handle = hfpatch.register("^Table$", forward=lambda m, x: m.rows, sample=_sample)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            (skip,) = hfpatch.apply(nn.Sequential(Table())).skips
    finally:
        handle.remove()
    assert "in the memory of a parameter or a buffer" in skip.reason


@pytest.mark.parametrize("training", [False, True])
def test_a_right_one_stays(training: bool) -> None:
    model = nn.Sequential(Pair())
    assert [s.source for s in _applied(_right, model, training).swaps] == ["registered"]


HOW: dict[str, tuple[Any, Any]] = {
    "set": ({"even"}, {"odd"}),
    "frozen set": (frozenset({"even"}), frozenset({"odd"})),
    "NumPy's number": (numpy.int64(2), numpy.int64(7)),
    "NumPy's array": (numpy.array(2.0), numpy.array(7.0)),
    "slice": (slice(0, 2), slice(0, 7)),
    "partial": (functools.partial(print, 2), functools.partial(print, 7)),
    "function": (lambda: 2, lambda: 7),
}


@pytest.mark.parametrize("what", HOW)
def test_arguments_that_tell(what: str) -> None:
    model, twin = Pair(), Pair()
    holder = nn.Sequential(model)
    assert _applied(_right, holder, False).swaps
    x = torch.randn(5, WIDTH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for how in (*HOW[what], *HOW[what]):
            torch.testing.assert_close(model(x, how), twin(x, how))


def test_an_attribute_that_is_a_set() -> None:
    class Named(Pair):
        def forward(self, x: Tensor, how: Any = None) -> tuple[Tensor, Tensor]:
            y, z = super().forward(x)
            return (y * 3.0, z) if "odd" in self.names else (y, z)

    handle = hfpatch.register("^Named$", forward=_right, sample=_sample)
    model, twin = Named(), Named()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert hfpatch.apply(nn.Sequential(model)).swaps
            x = torch.randn(5, WIDTH)
            for names in ({"even"}, {"odd"}, {"even"}, {"odd"}):
                model.names = twin.names = names
                torch.testing.assert_close(model(x), twin(x))
    finally:
        handle.remove()
