"""The matrix's option, its counters, and the collection of its cells."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import counting
import page
import pytest
import torch
from columns import COLUMNS
from harness import Cell
from rows import ROWS

_cells: dict[tuple[str, str], Cell] = {}
_writing: list[bool] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-matrix",
        action="store_true",
        help="write docs/compatibility.md from the cells that this run sees",
    )


@pytest.fixture(scope="module", autouse=True)
def _counted(kernels_module: object) -> Iterator[None]:
    """The compiled kernels must be there, and every call of one is counted. Not beyond this folder:
    a counted kernel is a Python function, and the tests behind would call no other."""
    with counting.installed():
        yield


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Offline, nothing written to the working directory, one thread."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also in the controller of xdist, which sees the workers' properties."""
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == "cell":
                row, column, before, after, reason = value
                _cells[row, column] = Cell(before, after, reason)
                if _writing and len(_cells) % 3 == 0:  # an interrupted run keeps what it saw
                    _write()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-matrix", False) and not hasattr(config, "workerinput"):
        _writing.append(True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _writing:
        return
    missing = _write()
    print(f"\nwrote {page.PATH}", *missing, sep="\nuntested: ")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write() -> list[tuple[str, str]]:
    """The page with the cells seen so far beside those that it had; returns what it lacks."""
    lock = Path(__file__).resolve().parents[2] / ".cache" / "matrix.lock"
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # groups of rows may run at the same time
        known = page.parse(page.PATH.read_text(encoding="utf-8")) if page.PATH.exists() else {}
        everything = {(row.title, column) for row in ROWS for column in COLUMNS}
        untested = dict.fromkeys(everything, Cell(page.UNTESTED, page.UNTESTED))
        cells = untested | known | _cells
        page.PATH.write_text(page.render(ROWS, cells), encoding="utf-8")
    return sorted(c for c in everything if cells[c].before == page.UNTESTED)
