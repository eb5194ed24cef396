"""The matrix's option, its counters, and the collection of its cells."""

from __future__ import annotations

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-matrix",
        action="store_true",
        help="write docs/compatibility.md from the cells that this run sees",
    )


@pytest.fixture(scope="session", autouse=True)
def _counted(kernels_module: object) -> Iterator[None]:
    """The compiled kernels must be there, and every call of one is counted."""
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.getoption("--write-matrix", False) or hasattr(config, "workerinput"):
        return
    known = page.parse(page.PATH.read_text(encoding="utf-8")) if page.PATH.exists() else {}
    everything = {(row.title, column) for row in ROWS for column in COLUMNS}
    cells = dict.fromkeys(everything, Cell(page.UNTESTED, page.UNTESTED)) | known | _cells
    page.PATH.write_text(page.render(ROWS, cells), encoding="utf-8")
    missing = sorted(c for c in everything if cells[c].before == page.UNTESTED)
    print(f"\nwrote {page.PATH}", *missing, sep="\nuntested: ")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
