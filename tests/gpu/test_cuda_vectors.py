"""The C library on a GPU: every vector through C and Python, eight threads with a stream each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfpatch.kernel_build import toolchain

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
#: Seconds that the threads run.
SECONDS = os.environ.get("HFPATCH_TEST_SECONDS", "60")


@pytest.fixture(scope="module")
def library() -> Path:
    path = os.environ.get("HFPATCH_LIBRARY")
    if not path:
        pytest.skip("HFPATCH_LIBRARY names no libhfpatch with CUDA kernels (make clib)")
    return Path(path).resolve()


@pytest.fixture(scope="module")
def cuda() -> Path:
    """CUDA's folder, of whose runtime library the programs are users."""
    found = Path(toolchain.find_nvcc().root)
    if not (found / "include" / "cuda_runtime_api.h").is_file() or not shutil.which("gcc"):
        pytest.skip("no CUDA toolkit, or no gcc")
    return found


@pytest.fixture(scope="module")
def cases(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    sys.path.insert(0, str(ROOT / "tests" / "clib"))
    import vectors

    from hfpatch import capi

    file = tmp_path_factory.mktemp("vectors") / "vectors.txt"
    return file, vectors.write(file, capi.Library(library), cuda=True)


def program(name: str, library: Path, cuda: Path, folder: Path) -> Path:
    prefix, target = library.parent.parent, folder / name
    folders = [p for p in (cuda / "lib64", cuda / "lib") if p.is_dir()]
    subprocess.run(
        [
            *("gcc", "-std=c11", "-O2", "-Wall", "-DHFP_CUDA", f"-I{prefix}/include"),
            *(f"-I{cuda}/include", str(ROOT / "bindings" / "c" / f"{name}.c"), "-o", str(target)),
            *(f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"),
            *(option for f in folders for option in (f"-L{f}", f"-Wl,-rpath,{f}")),
            *("-lhfpatch", "-lcudart", "-lm", "-pthread"),
        ],
        check=True,
    )
    return target


def said(command: list[object]) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_in_c(library: Path, cuda: Path, cases: tuple[Path, int], tmp_path: Path) -> None:
    made = program("vectors", library, cuda, tmp_path)
    assert f"{cases[1]} cases, 0 failed" in said([made, cases[0]])


def test_in_c_under_the_sanitizer(
    library: Path, cuda: Path, cases: tuple[Path, int], tmp_path: Path
) -> None:
    """Its memcheck: no kernel reads or writes where it must not."""
    tool = shutil.which("compute-sanitizer") or str(cuda / "bin" / "compute-sanitizer")
    if not Path(tool).is_file():
        pytest.skip("no compute-sanitizer")
    made = program("vectors", library, cuda, tmp_path)
    found = said([tool, "--error-exitcode", "9", made, cases[0]])
    assert f"{cases[1]} cases, 0 failed" in found and "ERROR SUMMARY: 0 errors" in found


def test_in_python(library: Path, cuda: Path, cases: tuple[Path, int], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hfpatch" / "capi", tmp_path / "capi")  # all that a program needs
    runtime = next(
        f
        for d in ("lib64", "lib")
        for f in sorted((cuda / d).glob("libcudart.so.*"))
        if f.is_file()
    )
    script = ROOT / "tests" / "clib" / "run_vectors.py"
    found = said([sys.executable, script, cases[0], library, tmp_path, runtime])
    assert f"{cases[1]} cases, 0 failed" in found


def test_threads_with_a_stream_each(library: Path, cuda: Path, tmp_path: Path) -> None:
    found = said([program("threads", library, cuda, tmp_path), SECONDS])
    calls = re.fullmatch(r"(\d+) calls, 0 differences\n", found)
    assert calls and int(calls[1]) > 10_000, found
