"""Fixtures that every test may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hfpatch import kernel_build

ROOT = Path(__file__).resolve().parent.parent


#: "org/name@1": tests use this published kernel in place of the in-tree build.
PUBLISHED = os.environ.get("HFPATCH_TEST_KERNELS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--failures",
        metavar="FILE",
        help="write each failure there as it happens",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path and not hasattr(config, "workerinput"):  # not in pytest-xdist's workers
        config.pluginmanager.register(FailureLog(Path(path)))


class FailureLog:
    """A machine may be taken away, or a time limit end the run, before pytest's summary."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"### {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PUBLISHED:  # those that call the package; models are patched with the in-tree build
        ours = {"kernels_module", "kernels_dir", "library"}
        items[:] = [i for i in items if ours & set(i._fixtureinfo.argnames)]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def kernels_dir() -> Path:
    """The in-tree build, brought up to date with the sources first."""
    if PUBLISHED:
        return Path(str(_published().__file__)).parents[2]
    out = ROOT / "hfpatch" / "_kernels"
    lock = ROOT / ".cache" / "test.lock"
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # pytest-xdist runs this in several processes
        kernel_build.build(ROOT, out, ("cpu",))
        if torch.cuda.is_available():
            kernel_build.build(ROOT, out, ("cuda",), archs="native")
    return out


@pytest.fixture(scope="session")
def kernels_module(kernels_dir: Path) -> ModuleType:
    """The kernel package as `kernels` loads it."""
    import kernels

    return _published() if PUBLISHED else kernels.get_local_kernel(kernels_dir)


def _published() -> ModuleType:
    import kernels

    repo, _, version = str(PUBLISHED).partition("@")
    return kernels.get_kernel(repo, version=int(version))
