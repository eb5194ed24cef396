"""Fixtures that every test may use."""

from __future__ import annotations

import fcntl
import gc
import getpass
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.thinning import thin_out

from hfpatch import announce, kernel_build

ROOT = Path(__file__).resolve().parent.parent

# The keys of inductor's cache do not tell PyTorch's instruction sets apart (2.13): what it wrote
# for one would be compiled for another, which fails, or adds up in another order.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    _own = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_own))


# Tests start pytest of other projects, to which what was meant for this run is unknown.
os.environ.pop("PYTEST_ADDOPTS", None)

#: "org/name@1": tests use this published kernel in place of the in-tree build.
PUBLISHED = os.environ.get("HFPATCH_TEST_KERNELS")
#: Another number, other random values: in GPU tests, and in those of the C interface.
SEED = int(os.environ.get("HFPATCH_TEST_SEED", "0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hfpatch", "runs that may be cut off")
    group.addoption("--failures", metavar="FILE", help="write each failure there as it happens")
    group.addoption(
        "--results",
        metavar="FILE",
        help="add a JSON line there for each test as it ends; those that passed there before are "
        "left out, and those that failed go first",
    )
    group.addoption(
        "--first", metavar="WORDS", help="tests whose ids contain one of these, in this order"
    )
    group.addoption("--shard", metavar="I/N", help="every N-th test from the I-th, counted from 0")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist: the first process writes
        return
    if path := config.getoption("--failures"):
        config.pluginmanager.register(FailureLog(Path(path)))
    if path := config.getoption("--results"):
        # Workers that are started later, for one that died, must see what the first ones saw.
        before, path = _before(path), Path(path)
        written = path.read_bytes() if path.exists() else b""
        before.write_bytes(written)
        if written and not written.endswith(b"\n"):  # cut off in the middle of a line
            path.write_bytes(written + b"\n")
        config.pluginmanager.register(ResultLog(path))


def _before(path: str) -> Path:
    return Path(f"{path}.before")


class FailureLog:
    """A machine may be taken away, or a time limit end the run, before pytest's summary."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"### {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}\n")


class ResultLog:
    """One line for each test: its id, outcome, seconds and the end of what it raised."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._open.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0}
        )
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.outcome != "passed" and row["outcome"] != "failed":
            row["outcome"] = report.outcome
            row["message"] = report.longreprtext[-500:]
        # a worker that dies has no teardown to report
        if report.when == "teardown" or report.when not in ("setup", "call"):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._open.pop(report.nodeid)) + "\n")


def outcomes(path: Path) -> dict[str, str]:
    """The last outcome of each test in a file of `--results`; a line that was cut off is none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["test"]] = row["outcome"]
    return found


def arrange(items: list[pytest.Item], config: pytest.Config) -> None:
    """Order, and leave out, tests as `--results`, `--first` and `--shard` say."""
    path, words, shard = (config.getoption(f"--{n}") for n in ("results", "first", "shard"))
    if not (path or words or shard):
        return
    known = outcomes(_before(path)) if path else {}
    wanted = words.split(",") if words else []

    def place(item: pytest.Item) -> tuple[bool, int]:
        first = (i for i, word in enumerate(wanted) if word in item.nodeid)
        return known.get(item.nodeid) != "failed", next(first, len(wanted))

    kept = sorted((i for i in items if known.get(i.nodeid) != "passed"), key=place)
    if shard:
        index, count = map(int, shard.split("/"))
        kept = kept[index::count]
    left = {id(i) for i in kept}
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in left])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    thin_out(items)
    yield  # `-m` and `-k`
    if PUBLISHED:  # those that call the package; models are patched with the in-tree build
        ours = {"kernels_module", "kernels_dir", "library"}
        items[:] = [i for i in items if ours & set(i._fixtureinfo.argnames)]
    arrange(items, config)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Collecting leaves a million objects that stay until the end. Python's full collections of
    garbage would visit all of them, for half a second or more each, some hundred times."""
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_COLLECTIONS)


class _Collections:
    """How long Python's last full collection of garbage took."""

    #: Seconds from which on what is left is not visited again: libraries' caches, mostly.
    LONG = 0.15

    def __init__(self) -> None:
        self._start = self.seconds = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        elif info["generation"] == 2:
            self.seconds = time.perf_counter() - self._start


_COLLECTIONS = _Collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Between two tests, where nobody holds a model whose end somebody waits for. Not on a GPU: a
    fixture's model that is frozen would keep its memory there."""
    if nextitem is None or torch.cuda.is_initialized():
        return
    if _COLLECTIONS.seconds > _Collections.LONG:
        gc.collect()
        gc.freeze()
        _COLLECTIONS.seconds = 0.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """A kernel's fault stays with its process, whose later tests would all fail: in a worker of
    pytest-xdist it ends, and another takes its place."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    if "/gpu/" in nodeid:
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            print(f"{nodeid} left the GPU's context broken: {e}", file=sys.stderr, flush=True)
            os._exit(70)


@pytest.fixture(autouse=True)
def _same_random_numbers(request: pytest.FixtureRequest) -> None:
    """A GPU test draws the same whatever ran before it in its process, so a failure comes again."""
    if "gpu" in request.keywords and torch.cuda.is_available():
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + SEED)


@pytest.fixture(autouse=True)
def _warnings_may_be_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that allow no warning in a call make an error of it, which a call would only show."""

    def raise_it(warning: Warning, stacklevel: int) -> None:
        raise warning

    monkeypatch.setattr(announce, "_not_raised", raise_it)


#: Folders of tests of numbers, which are added up otherwise with more threads: these have them all.
_THREADED = ("kernels", "clib", "gpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """The models of the other tests are tiny: threads wait for each other longer than they work,
    most of all where processes share the processors. `make test-cpus` says how many there are."""
    before = torch.get_num_threads()
    one = "OMP_NUM_THREADS" not in os.environ and request.path.parent.name not in _THREADED
    if one:
        torch.set_num_threads(1)
    yield
    if one:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels_dir() -> Path:
    """The in-tree build, brought up to date with the sources first; HFPATCH_TEST_BUILD=0 takes it
    as it is, where it was brought along from another machine."""
    if PUBLISHED:
        return Path(str(_published().__file__)).parents[2]
    out = ROOT / "hfpatch" / "_kernels"
    if os.environ.get("HFPATCH_TEST_BUILD") == "0":
        return out
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
