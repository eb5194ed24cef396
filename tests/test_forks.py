"""A process that is forked while another of its threads makes a proof: the child can go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from autocast_cases import MODULES

import hfpatch
from hfpatch import forks
from hfpatch.decoding import layer
from hfpatch.proof import proving
from hfpatch.training import proof

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks nothing"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # of Python 3.12
]


def in_child(call: Callable[[], bool]) -> bool:
    """What it says in a child, which has 10 s for it."""
    pid = os.fork()
    if not pid:  # no line of pytest's may run here
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            code = 0 if call() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextmanager
def in_a_thread(held: Any, seconds: float) -> Iterator[None]:
    """Another thread is inside of a context for so long."""
    inside, end = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            inside.set()
            end.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_fork_waits_for_a_proof(kernels_module: object) -> None:
    module, before = MODULES["LlamaRMSNorm"](), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with in_a_thread(proving.float32_default(), 0.3):

            def applies() -> bool:
                return (
                    torch.get_default_dtype() == torch.float64
                    and len(hfpatch.apply(module).swaps) == 1
                )

            assert in_child(applies)
        with proving.float32_default():  # free here too, and once alone
            pass
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("lock", [proving._lock, proof._lock, layer._lock])
def test_which_locks_a_fork_waits_for(lock: Any) -> None:
    with in_a_thread(lock, 0.2):
        assert in_child(lambda: bool(lock.acquire(timeout=0)))
    assert lock.acquire(timeout=0)
    lock.release()


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", 0.1)
    with in_a_thread(proving._lock, 10):
        assert in_child(lambda: bool(proving._lock.acquire(timeout=0)))


def test_other_locks_are_free_in_the_child() -> None:
    lock = forks.lock()
    with in_a_thread(lock, 10):
        assert in_child(lambda: bool(lock.acquire(timeout=0)))
        assert not lock.acquire(timeout=0)


def test_what_a_thread_holds_itself_it_holds_in_the_child() -> None:
    for lock in (forks.lock(), proving._lock):
        with lock:

            def releases(lock: Any = lock) -> bool:
                lock.release()
                return True

            assert in_child(releases)


def test_a_fork_holds_no_lock_while_it_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof of decoding takes its own lock and then that of all proofs."""
    inner, outer = threading.RLock(), threading.RLock()
    monkeypatch.setattr(forks, "_waited_for", [inner, outer])
    has_outer, done = threading.Event(), threading.Event()

    def prove() -> None:
        with outer:
            has_outer.set()
            time.sleep(0.3)  # the fork waits by now
            with inner:
                done.set()

    thread = threading.Thread(target=prove)
    thread.start()
    has_outer.wait()
    start = time.monotonic()
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert done.is_set() and time.monotonic() - start < 10, "each waited for the other"
    thread.join()
