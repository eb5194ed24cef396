"""A mutation run: plants faults in hfpatch and its kernels, and counts those that the tests find.

    python tests/mutation/run.py --coverage FILE --times FILE --output FILE [--count 400]

coverage: of coverage.py, with the tests as contexts, and times: the lines of pytest's `--results`:

    pytest -n 2 -m 'not exhaustive' --cov=hfpatch --cov-context=test --results times.jsonl

A fault in Python runs the tests that reach its line, quick ones first, in a fork of a process that
has PyTorch and the libraries loaded; the file on disk is not touched. A fault in the CPU kernels is
compiled in a copy of the project, and the kernels' tests run on it. A fault that makes a test fail,
hang or crash is found. Faults that nothing finds are run again with the tests that `make test`
leaves out, so that the table says what it costs to leave them out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType

from plant import Fault, planted

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds after which a fault's tests hang.
HANGS = 180.0
#: What every fault in Python costs before its tests run is paid once.
PRELOADED = ("torch", "transformers", "diffusers", "accelerate", "numpy", "pytest", "hypothesis")


@dataclass
class Outcome:
    """What became of a fault: "found", "not found", "not reached", "does not compile", or, with
    the tests that `make test` leaves out, "found by make test-all"."""

    fault: str
    outcome: str
    by: str = ""
    seconds: float = 0.0


class Coverage:
    """Which tests reach a line, and how long each takes."""

    def __init__(self, data: Path, times: Path, budget: float) -> None:
        self._budget = budget
        self._db = sqlite3.connect(data)
        self._files = {
            os.path.relpath(path, ROOT): number
            for number, path in self._db.execute("select id, path from file")
        }
        # The data may come from another checkout of the same commit.
        self._files |= {
            "hfpatch/" + path.rpartition("/hfpatch/")[2]: number
            for path, number in self._files.items()
            if "/hfpatch/" in f"/{path}"
        }
        self._contexts = dict(self._db.execute("select id, context from context"))
        rows = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
        self.seconds = {r["test"]: r["seconds"] for r in rows if r["outcome"] == "passed"}

    def _lines(self, path: str) -> Iterator[tuple[str, set[int]]]:
        from coverage.numbits import numbits_to_nums

        query = "select context_id, numbits from line_bits where file_id = ?"
        for context, bits in self._db.execute(query, (self._files.get(path, -1),)):
            test = self._contexts[context].rpartition("|")[0]
            if test in self.seconds:
                yield test, set(numbits_to_nums(bits))

    def tests(self, path: str, line: int) -> list[str]:
        """Tests that run the line; of a line that runs when its module is imported, those that run
        anything in the file."""
        rows = list(self._lines(path))
        here = {test for test, lines in rows if line in lines}
        return self._quick(here or ({t for t, _ in rows} if self._at_import(path, line) else set()))

    def _at_import(self, path: str, line: int) -> bool:
        from coverage.numbits import numbits_to_nums

        query = (
            "select numbits from line_bits join context on context_id = context.id "
            "where file_id = ? and context = ''"
        )
        rows = self._db.execute(query, (self._files.get(path, -1),))
        return any(line in numbits_to_nums(bits) for (bits,) in rows)

    def _quick(self, tests: set[str]) -> list[str]:
        """One of each test function first, the quickest first, within the budget."""
        by_function: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda t: (self.seconds[t], t)):
            by_function[test.partition("[")[0]].append(test)
        rounds = [t for row in _in_turns(list(by_function.values())) for t in row]
        chosen, spent = [], 0.0
        for test in rounds:
            if spent + self.seconds[test] > self._budget and chosen:
                continue
            spent += self.seconds[test]
            chosen.append(test)
            if len(chosen) == 150:
                break
        return chosen


def _in_turns(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    for i in range(max(map(len, rows), default=0)):
        yield [row[i] for row in rows if i < len(row)]


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a text instead of from its file."""

    def __init__(self, module: str, path: Path, text: str) -> None:
        super().__init__(module, str(path))
        self._text = text

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != self.name:
            return None
        file = self.path
        packages = [os.path.dirname(file)] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=packages
        )

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


def _module_of(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _run_python(fault: Fault, tests: Sequence[str], log: Path, marks: str) -> int:
    """A child process: never returns to its caller's code. Its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(ROOT)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        text = fault.applied((ROOT / fault.path).read_text(encoding="utf-8"))
        sys.meta_path.insert(0, _Changed(_module_of(fault.path), ROOT / fault.path, text))
        import pytest

        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"]
        code = int(pytest.main([*arguments, "-m", marks, "--tb=line", *tests]))
    except BaseException as e:
        os.write(2, repr(e).encode())
    finally:
        os._exit(code)


def _waited(pid: int, limit: float) -> int | None:
    """The child's exit status; None: it hangs and was ended."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _verdict(status: int | None, log: Path) -> tuple[str, str]:
    """(outcome, by which test) of pytest's exit status."""
    if status in (0, 5):
        return "not found", ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "found", named[0][:200] if named else (
        "hangs" if status is None else f"ends in {status}"
    )


def python_outcome(fault: Fault, coverage: Coverage, log: Path) -> Outcome:
    """Runs the tests that reach the fault, then those of them that `make test` leaves out."""
    start = time.monotonic()
    tests = coverage.tests(fault.path, fault.line)
    if not tests:
        return Outcome(str(fault), "not reached")
    pid = _run_python(fault, tests, log, "not exhaustive")
    outcome, by = _verdict(_waited(pid, HANGS), log)
    if outcome == "not found":
        # Every case of the functions that reach it, also those that `make test` leaves out.
        functions = list(dict.fromkeys(t.partition("[")[0] for t in tests))[:12]
        pid = _run_python(fault, functions, log, "exhaustive")
        left, by = _verdict(_waited(pid, HANGS), log)
        outcome = "found by make test-all" if left == "found" and by != "hangs" else "not found"
    return Outcome(str(fault), outcome, by, round(time.monotonic() - start, 1))


class Kernels:
    """A copy of the project in which the CPU kernels are compiled with a fault."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        if not folder.exists():
            ignored = shutil.ignore_patterns(".git", ".venv", "*.pyc", "outputs", "bindings")
            shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
        self._run(["-m", "hfpatch.kernel_build", "--out", "hfpatch/_kernels", "--archs", "none"])

    def _run(self, arguments: Sequence[str], limit: float = 900.0) -> tuple[int | None, str]:
        environment = os.environ | {"PYTHONPATH": str(self.root), "HFPATCH_TEST_BUILD": "0"}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, text

    def outcome(self, fault: Fault, tests: Sequence[str]) -> Outcome:
        """Compiles the fault and runs `make test`'s kernel tests, then those that it leaves out."""
        start, file = time.monotonic(), self.root / fault.path
        before = file.read_text(encoding="utf-8")
        file.write_text(fault.applied(before), encoding="utf-8")
        try:
            build = ["-m", "hfpatch.kernel_build", "--out", "hfpatch/_kernels", "--archs", "none"]
            status, _ = self._run(build)
            if status != 0:
                return Outcome(str(fault), "does not compile")
            pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
            outcome, by = "not found", ""
            for marks, name in (
                ("not exhaustive", "found"),
                ("exhaustive", "found by make test-all"),
            ):
                status, text = self._run([*pytest, "-m", marks, *tests])
                if status not in (0, 5):
                    named = [
                        row for row in text.splitlines() if row.startswith(("FAILED", "ERROR"))
                    ]
                    outcome, by = name, named[0][:200] if named else f"ends in {status}"
                    break
            return Outcome(str(fault), outcome, by, round(time.monotonic() - start, 1))
        finally:
            file.write_text(before, encoding="utf-8")


def _table(rows: Sequence[Outcome]) -> Mapping[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.outcome] += 1
    return dict(counts)


def _sources() -> dict[str, list[str]]:
    def under(folder: str, *patterns: str) -> list[str]:
        found = [p for pattern in patterns for p in sorted((ROOT / folder).glob(pattern))]
        return [str(p.relative_to(ROOT)) for p in found if "_kernels" not in p.parts]

    hub = under("hfpatch/hub", "*.py")
    return {
        "hfpatch": [p for p in under("hfpatch", "**/*.py") if p not in hub],
        "hub": hub,
        "kernels": under("kernel_src", "cpu/*.cpp", "cpu/*.h", "*.cpp", "check.h"),
    }


def main() -> int:
    """The program; its exit status is 0 whatever was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--counts", default="hfpatch=260,hub=60,kernels=80")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of tests for a fault, as they took without it"
    )
    parser.add_argument("--part", default="0/1", help="every N-th fault from the I-th")
    parser.add_argument("--copy", type=Path, default=ROOT / ".cache" / "mutation")
    arguments = parser.parse_args()
    index, parts = map(int, arguments.part.split("/"))
    coverage = Coverage(arguments.coverage, arguments.times, arguments.seconds)
    for name in PRELOADED:
        importlib.import_module(name)
    kernel_tests = ["tests/kernels"]
    results: dict[str, list[Outcome]] = {}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    log = arguments.output.with_suffix(".log")
    for area, files in _sources().items():
        counts = dict(pair.split("=") for pair in arguments.counts.split(","))
        count = int(counts.get(area, 0))
        rows = results[area] = []
        kernels = Kernels(arguments.copy) if area == "kernels" and count else None
        faults = planted(ROOT, files, 10 * count, arguments.seed)
        # A line that no test reaches in its own process (a subprocess may) decides nothing.
        for number, fault in enumerate(faults):
            counted = sum(r.outcome not in ("not reached", "does not compile") for r in rows)
            if counted >= -(-count // parts):
                break
            if number % parts != index:
                continue
            row = (
                kernels.outcome(fault, kernel_tests)
                if kernels
                else python_outcome(fault, coverage, log)
            )
            rows.append(row)
            print(f"{area} {counted + 1}: {row.outcome}: {row.fault} {row.by}", flush=True)
            table = {name: _table(found) for name, found in results.items()}
            written = {
                "counts": table,
                "faults": {name: [asdict(r) for r in found] for name, found in results.items()},
            }
            arguments.output.write_text(json.dumps(written, indent=1), encoding="utf-8")
    for area, found in results.items():
        print(area, dict(_table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
