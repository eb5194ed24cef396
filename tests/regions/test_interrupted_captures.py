"""An interrupt in a capture comes when PyTorch's modes are left: between them it ended Python."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from regions.families import build
from torch.fx.experimental.sym_node import SymNode

import hfpatch
from hfpatch.regions import capture
from hfpatch.regions.interrupts import held_back
from hfpatch.regions.offer import forget


def test_a_capture_ends_first(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    model, inputs = build("bert")
    with torch.no_grad():
        expected = model(**inputs(2, 9))[0]
    hfpatch.apply(model, decoding=False, blocks=True)
    own, calls = capture._Counted.__torch_function__, []

    def and_interrupts(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(capture._Counted, "__torch_function__", and_interrupts)
    handler = signal.getsignal(signal.SIGINT)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(**inputs(2, 9))
    assert len(calls) > 10
    assert signal.getsignal(signal.SIGINT) is handler
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs(2, 9))[0], expected)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    hfpatch.restore(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs(2, 9))[0], expected)


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGVTALRM"])
def test_an_interrupt_in_the_code_of_a_size_is_none_of_an_operator(
    name: str, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch made `TypeError: empty_strided(): argument 'stride' failed to unpack` of it: the call
    went on, and the blocks were left to their parts for good."""
    forget()
    model, inputs = build("bert")
    hfpatch.apply(model, decoding=False, blocks=True)
    own, calls = SymNode.is_int, []

    def and_interrupts(self: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(number)
        return own(self)

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SymNode, "is_int", and_interrupts)
    number = getattr(signal, name)
    before = signal.signal(number, handler)
    try:
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(**inputs(2, 9))
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    with torch.no_grad():
        model(**inputs(2, 9))
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


def test_every_handler_runs() -> None:
    """One that raises is not the last: a scheduler's notice came behind an interrupt."""
    ran: list[int] = []

    def handler(number: int, frame: Any) -> None:
        ran.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def in_a_capture() -> None:
        with held_back():
            for number in both:
                signal.raise_signal(number)

    both = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, handler) for number in both]
    try:
        with pytest.raises(KeyboardInterrupt):
            in_a_capture()
        assert ran == list(both)
    finally:
        for number, own in zip(both, before, strict=True):
            signal.signal(number, own)


def test_other_threads_have_no_signals() -> None:
    handlers: list[Any] = []

    def look() -> None:
        with held_back():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [before]
