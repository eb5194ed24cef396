"""Progress bars: on a terminal, for long work, unless somebody says no."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hfpatch
from hfpatch import progress

ROOT = Path(__file__).resolve().parent.parent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A stderr that shows bars at once."""
    seen = Terminal()
    monkeypatch.setattr(progress, "_stream", lambda: seen)
    monkeypatch.setattr(progress, "_DELAY", 0)
    monkeypatch.setattr(progress, "_disabled", False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    return seen


def model() -> nn.Module:
    return nn.Sequential(*(nn.LayerNorm(8) for _ in range(3)))


def test_apply_shows_the_modules(terminal: Terminal) -> None:
    hfpatch.apply(model())
    text = terminal.getvalue()
    assert "hfpatch: Sequential" in text and "/3" in text and "module" in text
    assert text.rstrip(" ").endswith("\r"), "it is gone when the work is done"


def test_short_work_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY", 60)
    hfpatch.apply(model())
    assert not terminal.getvalue().strip()


def test_off_a_terminal_nothing_is_shown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    hfpatch.apply(model())
    assert terminal.getvalue() == ""


def test_disabled_and_enabled(terminal: Terminal) -> None:
    hfpatch.disable_progress_bars()
    assert hfpatch.are_progress_bars_disabled()
    hfpatch.apply(model())
    assert terminal.getvalue() == ""
    hfpatch.enable_progress_bars()
    assert not hfpatch.are_progress_bars_disabled()
    hfpatch.apply(model())
    assert terminal.getvalue()


def test_the_variable_of_huggingface_wins(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    assert hfpatch.are_progress_bars_disabled()
    with pytest.warns(RuntimeWarning, match="HF_HUB_DISABLE_PROGRESS_BARS=1 is set"):
        hfpatch.enable_progress_bars()
    hfpatch.apply(model())
    assert terminal.getvalue() == ""


def test_a_notebook_shows_them(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    assert progress.shown()


def test_a_failure_takes_the_bar_away(terminal: Terminal) -> None:
    def work() -> None:
        for _ in progress.track([1, 2], "work", "piece"):
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert "work" in terminal.getvalue()


def test_parts_move_the_whole(terminal: Terminal) -> None:
    with progress.bar("whole", "B", 100, scaled=True) as whole:
        for _ in range(2):
            with progress.part_of(whole)(total=50, desc="file") as part:
                part.update(50)
        assert whole.n == 100
    assert "file" not in terminal.getvalue()


def test_parts_leave_no_thread_behind(terminal: Terminal) -> None:
    """tqdm starts one for each class that has a monitor of its own."""
    before = set(threading.enumerate())
    for _ in range(3):
        with progress.part_of(progress._Nothing())(total=1) as part:
            part.update(1)
    assert set(threading.enumerate()) == before


def test_a_command_is_quiet_in_a_pipe(tmp_path: Path) -> None:
    """Neither apply nor the benchmarks write bars to what is no terminal."""
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(ROOT)}
    code = (
        "import hfpatch, torch; hfpatch.apply(torch.nn.LayerNorm(8))\n"
        "from rich.console import Console\n"
        "from hfpatch.bench.command import _progress\n"
        "with _progress(Console(stderr=True)) as bars: bars.update(bars.add_task('x', total=1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment, cwd=tmp_path, check=True)  # fmt: skip
    assert done.stdout == "" and "\r" not in done.stderr and "it/s" not in done.stderr
