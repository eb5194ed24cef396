"""Python's collector is as it was after each call of hfpatch."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zoo

import hfpatch
from hfpatch.collector import young_only

_CHOSEN = (701, 11, 12)


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_CHOSEN)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_the_users_after_each_call(
    kernels_dir: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.ENTRIES["llama"].build().eval()
    seen: list[Any] = []
    plan_of = hfpatch.apply.__globals__["decide"]

    def decide(*args: Any) -> Any:
        seen.append(gc.get_threshold())
        if len(seen) == 3:
            raise RuntimeError("in between")
        return plan_of(*args)

    monkeypatch.setitem(hfpatch.apply.__globals__, "decide", decide)
    hfpatch.plan(model)
    assert gc.get_threshold() == _CHOSEN
    hfpatch.apply(model)
    assert gc.get_threshold() == _CHOSEN
    with pytest.raises(RuntimeError, match="in between"):
        hfpatch.apply(model)
    assert gc.get_threshold() == _CHOSEN and hfpatch.restore(model)
    assert [s[:2] for s in seen] == [_CHOSEN[:2]] * 3 and all(s[2] > 10**6 for s in seen)


def test_the_last_of_several_threads_sets_them_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with young_only():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    with young_only():
        leave.set()
        thread.join()
        assert gc.get_threshold()[2] > 10**6
    assert gc.get_threshold() == _CHOSEN


def test_what_somebody_sets_meanwhile_stays() -> None:
    with young_only():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_has_them_as_they_were() -> None:
    with young_only():
        child = os.fork()
        if child == 0:
            right = gc.get_threshold() == _CHOSEN
            with young_only():
                pass
            os._exit(0 if right and gc.get_threshold() == _CHOSEN else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert gc.get_threshold()[2] > 10**6
    assert gc.get_threshold() == _CHOSEN
