"""The programs in examples/c, examples/rust and examples/go, and what they must print."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILE = EXAMPLES / "row.safetensors"
TOKENS = (0, 7)
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def environment(prefix: Path) -> dict[str, str]:
    """In which a program is built and run with the libhfpatch in the folder `prefix`."""
    found = [str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(f for f in found if f),
        "HFPATCH_DIR": str(prefix),
        "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"),
    }


def said(command: list[object], **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(c) for c in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return str(done.stdout)


@functools.cache
def of_pytorch(token: int) -> str:
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(sys, "argv", ["row_pytorch.py", str(FILE), str(token)])
        runpy.run_path(str(EXAMPLES / "row_pytorch.py"), run_name="__main__")
    return text.getvalue()


def in_c(prefix: Path, folder: Path) -> Path:
    """The program in C, compiled into `folder`."""
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    env = environment(prefix)
    flags = said(["pkg-config", "--cflags", "--libs", "hfpatch"], env=env).split()
    source = EXAMPLES / "c" / "row.c"
    said(["gcc", *STRICT, source, *flags, "-ldl", "-o", folder / "row"], env=env)
    return folder / "row"


def in_rust(prefix: Path, folder: Path) -> Path:
    if not shutil.which("cargo"):
        pytest.skip("no cargo")
    ignore = shutil.ignore_patterns("target", "Cargo.lock")
    shutil.copytree(EXAMPLES / "rust", folder / "examples" / "rust", ignore=ignore)
    shutil.copytree(ROOT / "bindings" / "rust", folder / "bindings" / "rust", ignore=ignore)
    env = {**environment(prefix), "CARGO_TARGET_DIR": str(folder / "target")}
    command: list[object] = ["cargo", "build", "--quiet", "--offline"]
    said(command, cwd=folder / "examples" / "rust", env=env)
    return folder / "target" / "debug" / "row"


def in_go(prefix: Path, folder: Path) -> Path:
    if not shutil.which("go") or not shutil.which("pkg-config"):
        pytest.skip("no go, or no pkg-config")
    command: list[object] = ["go", "build", "-o", folder / "row", "."]
    said(command, cwd=EXAMPLES / "go", env=environment(prefix))
    assert said(["gofmt", "-l", "."], cwd=EXAMPLES / "go") == ""
    return folder / "row"


def check(program: Path, prefix: Path, devices: tuple[str, ...]) -> None:
    """It prints for each of these devices what PyTorch prints for it: tokens exactly, numbers to
    the last digit that is printed, give or take one."""
    for token in TOKENS:
        text = said([program, FILE, token], env=environment(prefix))
        lines, right = text.splitlines(), of_pytorch(token).splitlines()
        for device in devices:
            assert device in lines, text
            found, wanted = (part[part.index(device) + 1 :][:3] for part in (lines, right))
            assert [line.split()[0] for line in found] == ["y", "logits", "tokens"]
            for line, other in zip(found[:2], wanted[:2], strict=True):
                numbers = [[float(v) for v in of.split()[1:]] for of in (line, other)]
                assert len(numbers[0]) == 4
                assert numbers[0] == pytest.approx(numbers[1], abs=1.01e-4)
            assert found[2].split() == wanted[2].split()
        if "cuda:0" not in devices:
            assert lines[4] == "cuda:0  not run: this libhfpatch was built without CUDA"
            assert len(lines) == 5
    wrong = subprocess.run(
        [program, FILE, "40"], env=environment(prefix), capture_output=True, text=True
    )
    assert wrong.returncode == 1 and "no such token: 40" in wrong.stderr
