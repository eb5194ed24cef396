"""examples/c, examples/rust and examples/go print what examples/row_pytorch.py prints."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import c_api
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILE = EXAMPLES / "row.safetensors"
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    library = c_api.built_library()
    assert library is not None
    prefix = library.parent.parent
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(prefix / "lib"),
        "HFPATCH_DIR": str(prefix),
        "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"),
    }


def run(command: list[object], **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(c) for c in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def of_pytorch() -> dict[int, str]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for token in (0, 7):
            patch.setattr(sys, "argv", ["row_pytorch.py", str(FILE), str(token)])
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                runpy.run_path(str(EXAMPLES / "row_pytorch.py"), run_name="__main__")
            found[token] = said.getvalue()
    return found


def same(said: str, expected: str) -> None:
    """Tokens exactly; numbers to the last digit that is printed, give or take one."""
    lines, right = said.splitlines(), expected.splitlines()
    assert [line.split()[0] for line in lines] == ["y", "logits", "tokens"]
    for line, wanted in zip(lines[:2], right[:2], strict=True):
        numbers = [[float(v) for v in text.split()[1:]] for text in (line, wanted)]
        assert len(numbers[0]) == 4
        assert numbers[0] == pytest.approx(numbers[1], abs=1.01e-4)
    assert lines[2].split() == right[2].split()


def test_the_two_tokens_differ(of_pytorch: dict[int, str]) -> None:
    assert of_pytorch[0] != of_pytorch[7]


def test_c(environment: dict[str, str], of_pytorch: dict[int, str], tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    flags = run(["pkg-config", "--cflags", "--libs", "hfpatch"], env=environment).split()
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    run(["gcc", *strict, EXAMPLES / "c" / "row.c", *flags, "-o", tmp_path / "row"])
    for token, expected in of_pytorch.items():
        same(run([tmp_path / "row", FILE, token], env=environment), expected)
    wrong = subprocess.run(
        [tmp_path / "row", FILE, "40"], env=environment, capture_output=True, text=True
    )
    assert (wrong.returncode, wrong.stderr) == (1, "row: no such token: 40\n")


def test_rust(environment: dict[str, str], of_pytorch: dict[int, str], tmp_path: Path) -> None:
    if not shutil.which("cargo"):
        pytest.skip("no cargo")
    ignore = shutil.ignore_patterns("target", "Cargo.lock")
    shutil.copytree(EXAMPLES / "rust", tmp_path / "examples" / "rust", ignore=ignore)
    shutil.copytree(ROOT / "bindings" / "rust", tmp_path / "bindings" / "rust", ignore=ignore)
    env = {**environment, "CARGO_TARGET_DIR": str(tmp_path / "target")}
    for token, expected in of_pytorch.items():
        command: list[object] = ["cargo", "run", "--quiet", "--offline", "--", FILE, token]
        same(run(command, cwd=tmp_path / "examples" / "rust", env=env), expected)


def test_go(environment: dict[str, str], of_pytorch: dict[int, str]) -> None:
    if not shutil.which("go") or not shutil.which("pkg-config"):
        pytest.skip("no go, or no pkg-config")
    for token, expected in of_pytorch.items():
        said = run(["go", "run", ".", FILE, token], cwd=EXAMPLES / "go", env=environment)
        same(said, expected)
    assert run(["gofmt", "-l", "."], cwd=EXAMPLES / "go") == ""
