"""The options of tests/conftest.py for runs that may be cut off, and the scripts that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SCRIPT = TESTS / "gpu" / "all.sh"

FILE = """\
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent

def log(name):
    with (HERE / "order").open("a") as file:
        file.write(name + "\\n")

@pytest.mark.parametrize("i", range(3))
def test_good(i):
    log(f"good{i}")

def test_bad():
    log("bad")
    assert (HERE / "mended").exists(), "not mended"

def test_dies():
    log("dies")
    if "PYTEST_XDIST_WORKER" in os.environ and not (HERE / "mended").exists():
        os._exit(1)

def test_skipped():
    pytest.skip("here")
"""


def run(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """What ran, in its order, and what pytest said."""
    (folder / "order").unlink(missing_ok=True)
    (folder / "test_it.py").write_text(FILE)
    # this test may itself run in a worker of pytest-xdist
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # Of what is installed only pytest-xdist is asked for: hypothesis alone takes seconds to import.
    outside["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "conftest", "-p", "no:cacheprovider",
         "-c", "pytest.ini", "--rootdir", str(folder), str(folder), *arguments],
        cwd=folder, env={**outside, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert (folder / "order").exists(), said
    return (folder / "order").read_text().split(), said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def results(folder: Path) -> dict[str, dict[str, object]]:
    lines = (folder / "results").read_text().splitlines()
    rows = map(json.loads, (line for line in lines if line.endswith("}")))
    return {row["test"].partition("::")[2]: row for row in rows}


def test_a_run_goes_on_where_it_was_cut_off(folder: Path) -> None:
    options = ["--results", str(folder / "results"), "--failures", str(folder / "failures")]
    _, said = run(folder, *options)
    found = results(folder)
    assert len(found) == 6, said
    assert [k for k, row in found.items() if row["outcome"] == "failed"] == ["test_bad"]
    assert "not mended" in str(found["test_bad"]["message"])
    assert found["test_skipped"]["outcome"] == "skipped"
    assert "### test_it.py::test_bad (call)" in (folder / "failures").read_text()
    with (folder / "results").open("a") as file:
        file.write('{"test": "cut o')
    order, said = run(folder, *options)
    assert order == ["bad"] and "4 deselected" in said
    (folder / "mended").touch()
    assert run(folder, *options)[0] == ["bad"]
    assert results(folder)["test_bad"]["outcome"] == "passed"


def test_what_failed_and_what_is_named_goes_first(folder: Path) -> None:
    (folder / "results").write_text('{"test": "test_it.py::test_bad", "outcome": "failed"}\n')
    order, _ = run(folder, "--results", str(folder / "results"), "--first", "good[2],good")
    assert order == ["bad", "good2", "good0", "good1", "dies"]


def test_shards_share_the_tests(folder: Path) -> None:
    parts = [run(folder, "--shard", f"{i}/2")[0] for i in range(2)]
    assert sorted(parts[0] + parts[1]) == ["bad", "dies", "good0", "good1", "good2"]
    assert parts[0] and parts[1]


@pytest.mark.exhaustive
def test_a_worker_that_dies_does_not_end_the_run(folder: Path) -> None:
    """The one that takes its place finds the same tests, though the results have grown."""
    options = ["--results", str(folder / "results"), "-n", "1", "--maxschedchunk", "1"]
    _, said = run(folder, *options)
    found = {k: row["outcome"] for k, row in results(folder).items()}
    assert found["test_dies"] == "failed" and found["test_skipped"] == "skipped", said
    assert [found[f"test_good[{i}]"] for i in range(3)] == ["passed"] * 3
    (folder / "mended").touch()
    assert sorted(run(folder, *options)[0]) == ["bad", "dies"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that says how it was called; its pytest fails."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho "$OMP_NUM_THREADS $*" >>"$CALLS"\n'
        'case "$*" in *"-m pytest"*) exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\necho "tool $*" >>"$CALLS"\ncase "$*" in *racecheck*) exit 99;; esac\n'
    )
    tool.chmod(0o755)
    return program


def script(python: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    calls = python.with_name("calls")
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": str(python), "CALLS": str(calls),
             "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    called = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, done.stdout + done.stderr, called


def test_all_of_the_gpu_in_one_command(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said, calls = script(
        python, str(out), JOBS="3", MODELS_ARGS="--compile blocks --only 'ltx-video 49 frames'",
        OPS_ARGS="--op silu", PYTEST_ARGS="-k rope", SHARDS="2", LIMIT="50",
    )  # fmt: skip
    assert status == 1 and "failed: tests alone hub sanitize" in said, said
    build, tests, alone, hub, models, ops, *rest = calls
    assert build.endswith("-m hfpatch.kernel_build --out hfpatch/_kernels --archs native")
    for call in (tests, alone):
        assert call.startswith("1 -m pytest -q") and call.endswith("-k rope")
        assert f"--results {out}/tests.jsonl --failures {out}/failures.txt --first" in call
    assert "-n 3 --maxschedchunk 4" in tests and "-m not alone and not slow" in tests
    assert "-m alone or slow" in alone and "-n 3" not in alone
    assert "tests/hub/test_own_kernels.py" in hub and "-n 3" not in hub
    assert f"--resume --output {out}/models.json --compile blocks --only ltx-video 49" in models
    assert f"-m hfpatch bench --device cuda --output {out} --op silu" in ops
    tools = [call for call in rest if call.startswith("tool")]
    assert len(tools) == 8
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        for shard in ("0/2", "1/2"):
            assert sum(f"--tool {tool} " in c and f"--shard {shard}" in c for c in tools) == 1
    assert "racecheck-1: exit status 99" in said and "memcheck-0: nothing found" in said
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["status"] == 0] == ["build", "models", "ops"]


def test_steps_and_their_limit(python: Path, tmp_path: Path) -> None:
    status, said, calls = script(python, str(tmp_path / "out"), "two", "build")
    assert [c.partition("-k ")[2] for c in calls if "pytest" in c] == [
        "distributed or second_device or mixed_devices"
    ]
    assert status == 1 and len(calls) == 2
    status, said, calls = script(python, str(tmp_path / "out"), "build", "tets")
    assert status == 2 and "got `tets`" in said and not calls
    assert script(python)[0] == 2
    python.write_text("#!/bin/sh\nsleep 60\n")
    status, said, _ = script(python, str(tmp_path / "out"), "build", LIMIT="1")
    assert status == 1 and "build: exit status 124" in said
