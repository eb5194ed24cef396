"""The rules of docs/c-rules.md, on the CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import c_api
import numpy as np
import pytest
import vectors

from hfpatch import capi

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "bindings" / "c"
STRICT = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g")
F32 = (2, 32)
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(scope="module")
def path() -> Path:
    found = c_api.built_library()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def library(path: Path) -> capi.Library:
    return capi.Library(path)


@pytest.fixture(scope="module")
def cases(library: capi.Library, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    file = tmp_path_factory.mktemp("rules") / "vectors.txt"
    return file, vectors.write(file, library)


def program(name: str, library: Path, folder: Path, flags: Sequence[str] = ()) -> Path:
    prefix = library.parent.parent
    target = folder / name
    command = ["gcc", *STRICT, *flags, f"-I{prefix}/include", str(PROGRAMS / f"{name}.c")]
    command += ["-o", str(target), f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"]
    subprocess.run([*command, "-lhfpatch", "-lm", "-pthread"], check=True)
    return target


def said(command: list[object], **environment: str) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_a_call_does_not_allocate(path: Path, cases: tuple[Path, int], tmp_path: Path) -> None:
    counting = program("vectors", path, tmp_path, ("-DHFP_COUNT_ALLOCATIONS", "-fno-builtin"))
    assert f"{cases[1]} cases, 0 failed" in said([counting, cases[0]])


def test_the_program_counts_allocations(tmp_path: Path, cases: tuple[Path, int]) -> None:
    """What the test above is worth: a library that allocates one byte in every call."""
    source = tmp_path / "allocating.c"
    text = (ROOT / "clib" / "stub.c").read_text()
    text = text.replace("static int32_t missing(const char *why) {", (
        "#include <stdlib.h>\nvolatile char *volatile kept;\n"
        "static int32_t missing(const char *why) {\n  kept = (char *)malloc(1);\n"
        "  free((void *)kept);"
    ))  # fmt: skip
    source.write_text(text)
    for folder in ("lib", "include"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "kernel_src" / "hfpatch.h", tmp_path / "include")
    made = tmp_path / "lib" / "libhfpatch.so"
    flags = ["-shared", "-fPIC", "-O0", f"-I{tmp_path}/include", "-Wl,-soname,libhfpatch.so"]
    subprocess.run(["gcc", *flags, source, "-o", made], check=True)
    counting = program("vectors", made, tmp_path, ("-DHFP_COUNT_ALLOCATIONS", "-fno-builtin"))
    done = subprocess.run([counting, cases[0], "stub"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.count("1 allocations, 1 bytes") > cases[1] // 2


def test_threads_get_the_same_bits_and_their_own_messages(path: Path, tmp_path: Path) -> None:
    threads = program("threads", path, tmp_path)
    assert ", 0 differences" in said([threads, 2], OMP_NUM_THREADS="2")


def test_the_message_is_this_threads(library: capi.Library) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(capi.HfpatchError, match="`x` must be a tensor"):
        library.silu(x, None)
    mine = library.last_error()
    others = []
    thread = threading.Thread(target=lambda: others.append(library.last_error()))
    thread.start()
    thread.join()
    assert others == [""]
    assert library.last_error() == mine != ""


def test_the_stream_is_not_looked_at(library: capi.Library) -> None:
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    out, other = np.empty_like(x), np.empty_like(x)
    library.silu(out, x)
    library.silu(other, x, stream=0xDEAD)
    assert (out == other).all()


def test_views_and_lists_may_go_when_a_call_returns(library: capi.Library) -> None:
    """Two calls on the memory of one view, which is written over between them."""
    x, out = np.float32([1, 2, 3, 4]), np.zeros(4, np.float32)
    shape = (ctypes.c_int64 * 1)(4)
    view = capi.DLTensor(
        data=x.ctypes.data, device=capi.DLDevice(1, 0), ndim=1,
        dtype=capi.DLDataType(2, 32, 1), shape=shape, strides=None, byte_offset=0,
    )  # fmt: skip
    library.silu(out, view)
    first = out.copy()
    shape[0] = 2
    view.data = x[2:].ctypes.data
    library.silu(out[:2], view)
    assert (out[:2] == first[2:]).all()


@pytest.mark.parametrize("offset", range(4))
def test_any_alignment_to_the_element(library: capi.Library, offset: int) -> None:
    memory = np.zeros(64, np.float32)
    x = np.linspace(-3, 3, 37, dtype=np.float32)
    memory[offset : offset + 37] = x
    out, right = np.zeros(64, np.float32), np.empty_like(x)
    library.softmax(right[None], np.empty(library.row_workspace(1, 37), np.int64), x[None], None, 1)
    workspace = np.empty(library.row_workspace(1, 37), np.int64)
    shifted = out[offset + 1 : offset + 38]
    library.softmax(shifted[None], workspace, memory[None, offset : offset + 37], None, 1)
    assert (shifted == right).all()
    assert (out[: offset + 1] == 0).all() and (out[offset + 38 :] == 0).all()


def test_half_an_element_is_refused(library: capi.Library) -> None:
    out, memory = np.zeros(4, np.float32), np.zeros(40, np.uint8)
    view = capi.dltensor(memory.ctypes.data + 2, [4], F32)
    with pytest.raises(capi.HfpatchError, match="`x` must be aligned to its element size of 4"):
        library.silu(out, view)


@pytest.mark.parametrize("stride", [0, -6])
def test_rows_may_repeat_or_go_backwards(library: capi.Library, stride: int) -> None:
    x = np.linspace(-3, 3, 18, dtype=np.float32).reshape(3, 6)
    first = x[0] if stride == 0 else x[-1]
    view = capi.dltensor(first.ctypes.data, [3, 6], F32, [stride, 1])
    out, right = np.empty((3, 6), np.float32), np.empty((3, 6), np.float32)
    library.silu(out, view)
    library.silu(right, np.broadcast_to(x[0], (3, 6)).copy() if stride == 0 else x[::-1].copy())
    assert (out == right).all()


def test_nothing_is_read_where_there_is_no_element(library: capi.Library) -> None:
    nothing = capi.dltensor(0, [3, 0], F32)
    library.silu(nothing, nothing)
    wrong = capi.dltensor(0, [2, 0], F32)
    with pytest.raises(capi.HfpatchError, match=r"`out` must have shape \[3, 0\]"):
        library.silu(wrong, nothing)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [([2**31, 2**32], None), ([2, 8], [2**62, 1]), ([2**62, 2, 0, 4], None)],
)
def test_sizes_of_63_bits_are_refused(
    library: capi.Library, shape: list[int], strides: list[int] | None
) -> None:
    x = np.zeros(8, np.float32)
    view = capi.dltensor(x.ctypes.data, shape, F32, strides)
    with pytest.raises(capi.HfpatchError, match=r"fewer than 2\^63 bytes"):
        library.silu(x, view)


def test_sizes_of_buffers_are_of_64_bits(library: capi.Library) -> None:
    """More rows than 32 bits count; what is asked for fits a process."""
    for rows in (2**20, 2**40):
        assert 0 <= library.row_workspace(rows, 2**15) < 2**63
        assert 0 <= library.partial_rows(rows, 4096) < 2**31
        assert 0 <= library.sum_partial_rows(rows, 4096, 1) < 2**31


SANITIZERS = {
    "address": ("address,undefined", "vectors"),
    "thread": ("thread", "threads"),
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers(name: str, cases: tuple[Path, int], tmp_path: Path) -> None:
    """Without OpenMP, whose runtime the thread sanitizer cannot look into; without optimization,
    with which the sanitizers' passes take an hour."""
    sanitizer, which = SANITIZERS[name]
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O0")
    library = c_api.build(tmp_path / "built", flags=flags, openmp=False)
    made = program(which, library, tmp_path, flags)
    if which == "vectors":
        assert f"{cases[1]} cases, 0 failed" in said([made, cases[0]])
    else:
        assert ", 0 differences" in said([made, 60])
