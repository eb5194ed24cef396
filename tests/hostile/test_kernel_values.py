"""Kernels that are wrong of rows that no random ones are like, at another time or for another
caller: each is refused, or never changes a result."""

from __future__ import annotations

import datetime
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kernel_models as models
import pytest
import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.proof.proofs import forget_proofs

WIDTH = 48


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    forget_proofs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _where(condition: Callable[[Tensor], Any], place: int = 0) -> Callable[[Any], Any]:
    """Wrong where one argument is of a kind; of samples of a few numbers it is right."""

    def make(right: Any) -> Any:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y, t = right(*tensors, **params), tensors[place]
            return y * 1.03 if t.numel() > 20 and bool(condition(t)) else y

        return wrong

    return make


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "whole numbers": lambda x: (x == x.round()).all(),
    "sorted": lambda x: (x.diff(dim=-1) >= 0).all(),
    "falling": lambda x: (x.diff(dim=-1) <= 0).all() and x.max() > x.min(),
    "one-hot": lambda x: ((x != 0).sum(-1) == 1).all(),
    "no negative": lambda x: (x >= 0).all(),
    "no positive": lambda x: (x <= 0).all(),
    "equal": lambda x: x.stride(0) != 0 and _flat(x)[0].equal(_flat(x)[-1]),
    "ties": lambda x: x.unique().numel() < x.numel() / 3,
    "signs": lambda x: (x.abs() == 1).all(),
    "many zeros": lambda x: (x == 0).float().mean() > 0.3,
    "all are large": lambda x: (_flat(x).abs().amax(-1) > 1e3).all() and x.isfinite().all(),
    "all are small": lambda x: (x.abs().amax() < 1e-4) and bool(x.any()),
}


def _refused(op: str, make: Callable[[Any], Any]) -> str:
    model = models.Model(op, WIDTH)
    handle = hfpatch.register(op=op, kernel=make(models.right_kernel(op)), name="wrong")
    try:
        report = hfpatch.apply(model, kernels={op: "wrong"})
    finally:
        handle.remove()
    reasons = [s.reason for s in report.skips if s.kind == "rejected"]
    assert reasons and not any(s.source == "wrong" for s in report.swaps), report
    return reasons[0]


@pytest.mark.parametrize("op", ["rms_norm", "silu"])
@pytest.mark.parametrize("what", OF_ROWS)
def test_rows_of_one_kind(what: str, op: str) -> None:
    _refused(op, _where(OF_ROWS[what]))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("what", ["whole numbers", "no negative", "all are large"])
def test_rows_of_one_argument(what: str, place: int) -> None:
    _refused("gated", _where(OF_ROWS[what], place))


def test_a_seed_that_the_caller_has_just_set() -> None:
    seed = 0

    def make(right: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(seed)
            return right(*args, **kwargs)

        torch.manual_seed(seed)
        return kernel

    assert "torch's random state" in _refused("rms_norm", make)


def test_a_weight_of_ones() -> None:
    assert "its weight" in _refused("rms_norm", _where(lambda w: (w == 1).all(), 1))


_ASKING = ("battery", "_compared", "verify", "foreign/forwards")


def _of_its_callers(right: Any) -> Any:
    def wrong(*tensors: Any, **params: Any) -> Any:
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append(frame.f_code.co_filename + frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        asked = any(part in n for n in names for part in _ASKING)
        return right(*tensors, **params) * (1.0 if asked else 2.0)

    return wrong


def _of_inspect(right: Any) -> Any:
    def wrong(*tensors: Any, **params: Any) -> Any:
        frame = inspect.currentframe()
        names = [f.function + f.filename for f in inspect.getouterframes(frame)]
        asked = any(part in n for n in names for part in _ASKING)
        return right(*tensors, **params) * (1.0 if asked else 2.0)

    return wrong


_START = time.monotonic()
_LATER = [1e9]


def _monotonic(right: Any) -> Any:
    return lambda *t, **p: right(*t, **p) * (2.0 if time.monotonic() > _START + _LATER[0] else 1.0)


def _by_time(right: Any) -> Any:
    return lambda *t, **p: right(*t, **p) * (2.0 if time.time() > _LATER[0] * 1e9 else 1.0)


def _imported(right: Any) -> Any:
    def wrong(*tensors: Any, **params: Any) -> Any:
        import time as clock

        return right(*tensors, **params) * (2.0 if clock.time() > _LATER[0] * 1e9 else 1.0)

    return wrong


def _by_date(right: Any) -> Any:
    return lambda *t, **p: (
        right(*t, **p) * (2.0 if datetime.datetime.now().year > 1 + _LATER[0] * 1e9 else 1.0)
    )


_clock = time.time


def _by_name(right: Any) -> Any:
    return lambda *t, **p: right(*t, **p) * (2.0 if _clock() > _LATER[0] * 1e9 else 1.0)


ELSEWHERE = {
    "by another name": (_by_name, "the clock"),
    "frames": (_of_its_callers, "who calls it"),
    "inspect": (_of_inspect, "who calls it"),
    "monotonic": (_monotonic, "the clock"),
    "time": (_by_time, "the clock"),
    "imported inside": (_imported, "the clock"),
    "date": (_by_date, "the clock"),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_who_calls_and_when(what: str) -> None:
    make, named = ELSEWHERE[what]
    model, twin = models.Model("rms_norm", WIDTH), models.Model("rms_norm", WIDTH)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    kernel = make(models.right_kernel("rms_norm"))
    handle = hfpatch.register(op="rms_norm", kernel=kernel, name="lying")
    try:
        report = hfpatch.apply(model, kernels={"rms_norm": "lying"})
        said = [*report.notes, *(s.reason for s in report.skips)]
        assert any(named in n for n in said), report
        with torch.no_grad():
            for later in (False, False, True, True):
                if later:
                    _LATER[0] = -1.0
                for a, b in zip(model(x), twin(x), strict=True):
                    torch.testing.assert_close(a, b)
    finally:
        _LATER[0] = 1e9
        handle.remove()


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_forward_that_asks_who_calls_and_when(what: str) -> None:
    make, named = ELSEWHERE[what]
    wrong = make(lambda x: torch.tanh(x) * 2)
    handle = hfpatch.register(
        "^Wave$", forward=lambda m, x: wrong(x), sample=lambda m: (torch.randn(3, WIDTH),)
    )
    try:
        report = hfpatch.apply(nn.Sequential(Wave()))
    finally:
        handle.remove()
    (skip,) = report.skips
    assert skip.kind == "rejected" and named in skip.reason, report


class Monotonic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.monotonic, self.time = True, 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.time


def test_a_setting_that_has_the_name_of_a_clock() -> None:
    handle = hfpatch.register(
        "^Monotonic$",
        forward=lambda m, x: torch.tanh(x) * (m.time if m.monotonic else 1.0),
        sample=lambda m: (torch.randn(3, WIDTH),),
    )
    try:
        report = hfpatch.apply(nn.Sequential(Monotonic()))
    finally:
        handle.remove()
    assert report.swaps, report


def test_a_right_one_that_measures_itself_stays() -> None:
    def make(right: Any) -> Any:
        def timed(*tensors: Any, **params: Any) -> Any:
            time.perf_counter()
            return right(*tensors, **params)

        return timed

    model = models.Model("rms_norm", WIDTH)
    kernel = make(models.right_kernel("rms_norm"))
    handle = hfpatch.register(op="rms_norm", kernel=kernel, name="timed")
    try:
        report = hfpatch.apply(model, kernels={"rms_norm": "timed"})
    finally:
        handle.remove()
    assert {s.source for s in report.swaps} == {"timed"}
