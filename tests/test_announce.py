"""Nothing degrades in silence: one warning with what to do, and a record of the logger."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch import sources
from hfpatch.announce import logger
from hfpatch.errors import KernelLoadError


@pytest.fixture(autouse=True)
def _usual_level() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def said(call: Any) -> list[str]:
    """What a call warns of, and that the logger has the same."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        logger.removeHandler(handler)
    ours = [w for w in caught if str(w.message).startswith("hfpatch: ")]
    assert all(w.category is RuntimeWarning for w in ours)
    assert all(w.filename == __file__ for w in ours), "it points at who called"
    texts = [str(w.message).removeprefix("hfpatch: ") for w in ours]
    assert texts == records
    return texts


def test_a_build_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        raise KernelLoadError("the local kernel build is damaged. Rebuild it")

    monkeypatch.setattr(sources, "local_package", broken)
    model = zoo.ENTRIES["llama"].build()
    (text,) = said(lambda: hfpatch.apply(model))
    assert text.startswith("the local kernel build is damaged. Rebuild it")
    report = hfpatch.status(model)
    assert text in report.notes


def test_a_script_module() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.LayerNorm(8)))
    (text,) = said(lambda: hfpatch.apply(scripted))
    assert "it is a ScriptModule" in text and "before torch.jit" in text


def test_unknown_classes() -> None:
    (text,) = said(lambda: hfpatch.apply(nn.Sequential(Odd())))
    assert text == (
        "nothing was swapped in `Sequential`: none of its modules is of a class that hfpatch "
        "knows; `hfpatch.register` adds one"
    )


def test_modules_that_all_stay() -> None:
    model = nn.Sequential(nn.LayerNorm(8)).double()
    (text,) = said(lambda: hfpatch.apply(model))
    assert text.startswith("nothing was swapped in `Sequential`: 1 modules stay as they are, `0` ")
    assert "torch.float64" in text


def test_nothing_is_said_where_nothing_is_lost(kernels_module: object) -> None:
    model = zoo.ENTRIES["llama"].build()
    assert said(lambda: hfpatch.apply(model)) == []
    hfpatch.restore(model)
    assert said(lambda: hfpatch.apply(model, exclude="*")) == []
    assert said(lambda: hfpatch.apply(model, kernels={"*": None})) == []
    assert said(lambda: hfpatch.plan(nn.Sequential(Odd()))) == []


def test_verbosity() -> None:
    hfpatch.set_verbosity("error")
    assert said(lambda: hfpatch.apply(nn.Sequential(Odd()))) == []
    hfpatch.set_verbosity(logging.WARNING)
    assert len(said(lambda: hfpatch.apply(nn.Sequential(Odd())))) == 1
    with pytest.raises(ValueError, match=r"`level` must be one of debug, info.*, got 'loud'"):
        hfpatch.set_verbosity("loud")
    with pytest.raises(TypeError, match="`level` must be a str or an int, got float"):
        hfpatch.set_verbosity(1.5)  # type: ignore[arg-type]


def test_nothing_is_printed_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """The logger has no handler of its own that shows what the warning shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(nn.Sequential(Odd()))
    assert capfd.readouterr().err == ""
