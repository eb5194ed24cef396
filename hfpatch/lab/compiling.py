"""A file with `solve` made a shared library: CUDA by nvcc, C and C++ by the C++ compiler."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hfpatch.kernel_build.errors import KernelBuildError, ToolchainMissing
from hfpatch.kernel_build.toolchain import find_cxx, find_nvcc, gpus
from hfpatch.lab.problems import ToolMissing

CUDA_SUFFIXES = (".cu",)
HOST_SUFFIXES = (".c", ".cc", ".cpp", ".cxx")
#: What nvcc must be at least.
MIN_CUDA = (11, 6)


class CompileError(Exception):
    """The compiler refused the source; its message."""


def library(source: Path, build: Path, flags: Sequence[str], include: Sequence[Path]) -> Path:
    """The shared library of a source file, compiled once for its content and flags.

    Args:
        source: a `.cu`, `.c` or `.cpp` file.
        build: the folder for what is compiled.
        flags: for the compiler, behind the lab's own.
        include: folders where its own headers are looked for.

    Raises:
        ToolMissing: no compiler for it; says what to install.
        CompileError: the compiler refused it.
    """
    command = _command(source, flags, include)
    key = hashlib.sha256()
    key.update(source.read_bytes() + shlex.join(command).encode())
    for folder in include:  # headers beside it
        for header in sorted(folder.glob("*.[ch]*")):
            if header.is_file() and header.suffix in (".h", ".hpp", ".cuh", ".hh"):
                key.update(header.read_bytes())
    target = build / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    build.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [*command, "-o", str(partial), str(source), *(f for f in flags if f.startswith("-l"))],
        text=True,
        errors="replace",
        capture_output=True,
    )
    said = (done.stdout + done.stderr).strip()
    (build / "compiler.txt").write_text(said + "\n", encoding="utf-8")
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise CompileError("\n".join(said.splitlines()[:40]) or f"status {done.returncode}")
    os.replace(partial, target)
    return target


def _command(source: Path, flags: Sequence[str], include: Sequence[Path]) -> list[str]:
    own = [f for f in flags if not f.startswith("-l")]
    folders = [f"-I{folder}" for folder in include]
    if source.suffix in CUDA_SUFFIXES:
        try:
            nvcc = find_nvcc()
        except (ToolchainMissing, KernelBuildError) as e:
            raise ToolMissing(
                f"`{source.name}` needs nvcc: {e}. Install the CUDA toolkit, {MIN_CUDA[0]}."
                f"{MIN_CUDA[1]} or newer, or set `CUDA_HOME`"
            ) from e
        if nvcc.version < MIN_CUDA:
            raise ToolMissing(
                f"nvcc is {nvcc.version[0]}.{nvcc.version[1]}; expected {MIN_CUDA[0]}."
                f"{MIN_CUDA[1]} or newer: upgrade the CUDA toolkit"
            )
        here = gpus()
        arch = f"sm_{here[0].replace('.', '')}" if here else "sm_75"
        chosen = any(f.startswith(("-arch", "--gpu-architecture", "-gencode")) for f in own)
        return [
            nvcc.path, "-O3", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler", "-fPIC",
            *([] if chosen else [f"-arch={arch}"]), "-Xptxas", "-v", *folders, *own,
        ]  # fmt: skip
    linked = 'extern "C"' in source.read_text(encoding="utf-8", errors="replace")
    if source.suffix == ".c" and not linked:
        compiler, language = shutil.which(os.environ.get("CC", "cc")), ["-x", "c", "-std=gnu11"]
        if compiler is None:
            raise ToolMissing(f"`{source.name}` needs a C compiler: install gcc or clang")
    else:
        try:
            compiler, language = find_cxx(), ["-x", "c++", "-std=c++17"]
        except (ToolchainMissing, KernelBuildError) as e:
            raise ToolMissing(f"`{source.name}` needs a C++ compiler: {e}; install g++") from e
    return [compiler, "-O3", "-march=native", "-shared", "-fPIC", *language, *folders, *own]
