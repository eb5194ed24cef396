"""The vectors through C, Python, Rust and Go, with the library and with its stub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import c_api
import pytest
import vectors

from hfpatch import capi

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = ROOT / "bindings"
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@dataclass(frozen=True)
class Files:
    """The file of vectors, and where the library and its stub are."""

    vectors: Path
    count: int
    prefix: Path
    stub: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("vectors")
    library = c_api.built_library()
    assert library is not None
    count = vectors.write(folder / "vectors.txt", capi.Library(library))
    c_api.build(folder / "stub", kind="stub")
    return Files(folder / "vectors.txt", count, library.parent.parent, folder / "stub")


def finished(command: list[object], **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(c) for c in command], capture_output=True, text=True, **options
    )
    said = str(done.stdout) + str(done.stderr)
    assert done.returncode == 0, said[-6000:]
    return said


def all_passed(said: str, files: Files) -> None:
    found = re.findall(r"(\d+) cases, (\d+) failed", said)
    assert found == [(str(files.count), "0")], said[-2000:]


def environment(prefix: Path, files: Files, stub: bool) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(prefix / "lib"),
        "HFPATCH_DIR": str(prefix),
        "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"),
        "HFPATCH_VECTORS": str(files.vectors),
        "HFPATCH_VECTORS_STUB": str(int(stub)),
    }


def test_the_file_has_every_function_and_refusals(files: Files) -> None:
    text = files.vectors.read_text()
    called = set(re.findall(r"^function (\w+)$", text, re.MULTILINE))
    assert called == {op.function for op in c_api.CALLS.values()}
    good = re.findall(r"^function (\w+)$(?:(?!^end$).*\n)*?status 0$", text, re.MULTILINE)
    assert set(good) == called
    assert files.count > 300


@pytest.mark.parametrize("stub", [False, True], ids=["library", "stub"])
def test_c(files: Files, stub: bool, tmp_path: Path) -> None:
    prefix = files.stub if stub else files.prefix
    program = tmp_path / "vectors"
    command: list[object] = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += [f"-I{prefix}/include", BINDINGS / "c" / "vectors.c", "-o", program]
    finished([*command, f"-L{prefix}/lib", "-lhfpatch", "-lm"])
    arguments: list[object] = [program, files.vectors, *(["stub"] * stub)]
    all_passed(finished(arguments, env=environment(prefix, files, stub)), files)


@pytest.mark.parametrize("stub", [False, True], ids=["library", "stub"])
def test_python(files: Files, stub: bool, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hfpatch" / "capi", tmp_path / "capi")
    prefix = files.stub if stub else files.prefix
    script = Path(__file__).with_name("run_vectors.py")
    command: list[object] = [sys.executable, script, files.vectors]
    command += [prefix / "lib" / "libhfpatch.so", tmp_path, *(["stub"] * stub)]
    all_passed(finished(command), files)


@pytest.mark.parametrize("stub", [False, True], ids=["library", "stub"])
def test_rust(files: Files, stub: bool, tmp_path: Path) -> None:
    if not shutil.which("cargo"):
        pytest.skip("no cargo")
    shutil.copytree(
        BINDINGS / "rust", tmp_path / "rust", ignore=shutil.ignore_patterns("target", "Cargo.lock")
    )
    env = environment(files.stub if stub else files.prefix, files, stub)
    env["CARGO_TARGET_DIR"] = str(tmp_path / "target")
    env["HFPATCH_SOURCE"] = str(ROOT)
    features = ["--features", "stub"] if stub else []
    command: list[object] = ["cargo", "test", "--offline", "--quiet", *features]
    said = finished([*command, "--", "--nocapture"], cwd=tmp_path / "rust", env=env)
    all_passed(said, files)


@pytest.mark.parametrize("stub", [False, True], ids=["library", "stub"])
def test_go(files: Files, stub: bool) -> None:
    if not shutil.which("go") or not shutil.which("pkg-config"):
        pytest.skip("no go, or no pkg-config")
    env = environment(files.stub if stub else files.prefix, files, stub)
    tags = ["-tags", "hfpatch_stub"] if stub else []
    command: list[object] = ["go", "test", *tags, "-count=1", "-v", "."]
    all_passed(finished(command, cwd=BINDINGS / "go", env=env), files)
    assert finished(["gofmt", "-l", "."], cwd=BINDINGS / "go") == ""
    finished(["go", "vet", *tags, "."], cwd=BINDINGS / "go", env=env)


def test_a_library_that_computes_nothing_fails(files: Files, tmp_path: Path) -> None:
    """What the vectors are worth: the stub that is taken for the library."""
    shutil.copytree(ROOT / "hfpatch" / "capi", tmp_path / "capi")
    script = Path(__file__).with_name("run_vectors.py")
    library = files.stub / "lib" / "libhfpatch.so"
    command = [sys.executable, script, files.vectors, library, tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert f"{files.count} cases, {files.count} failed" in done.stdout
    assert done.returncode == 1
