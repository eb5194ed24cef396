"""An interrupt in a capture comes when PyTorch's modes are left: between them it ended Python."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from regions.families import build

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
