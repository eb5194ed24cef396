"""Compile the kernels named by ``build.toml`` and write them in the Kernel Hub's layout.

Any kernel-builder project for CPU and CUDA on torch's stable ABI: hfpatch's own, and those that
`hfpatch kernel new` makes.

The result, ``<out>/build/<variant>/``, is what `kernels.get_local_kernel` and `kernels.get_kernel`
load: the Python files of ``torch-ext/``, a generated ``_ops.py``, one shared library on torch's
stable ABI, and ``metadata.json``. Hub releases come from kernel-builder, which reads the same
``build.toml``; this module is for ``pip install``, `hfpatch kernel build` and development.

It needs the standard library only (and ``tomli`` on Python 3.10), never torch or hfpatch, since
``setup.py`` loads this package by path in an isolated environment. Environment variables:

- ``CXX``: the C++ compiler (default: ``g++``, then ``clang++``).
- ``CUDA_HOME``: the CUDA toolkit (default: the one of ``nvcc`` on ``PATH``).
- ``HFPATCH_CUDA_ARCHS``: ``native`` (default where there is a GPU), ``all`` (else), ``none`` or a
  list: ``8.0;9.0+PTX``.
- ``HFPATCH_CUDA_QUICK=1``: CUDA code compiles in a seventh of the time and is slow to run, for a
  machine without a GPU that only looks whether it compiles (CUDA 13 and later).
- ``HFPATCH_TORCH_DIR``: the ``torch`` package directory to compile against.
- ``MAX_JOBS``: how many compilers run at once (default: the number of CPUs).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .builder import Builder
from .commands import write
from .errors import KernelBuildError, ToolchainMissing
from .estimate import worth_showing
from .objects import compile_all
from .project import read_project
from .ptxas import demangle
from .tag import platform_tag
from .toolchain import cuda_archs, find_cxx, find_torch
from .variant import digest, up_to_date, write_variant

__all__ = [
    "BuildResult",
    "BuiltVariant",
    "KernelBuildError",
    "ToolchainMissing",
    "build",
    "build_available",
    "cuda_archs",
    "digest",
    "find_cxx",
    "find_torch",
    "platform_tag",
    "read_project",
    "resources",
    "worth_showing",
]


@dataclass(frozen=True)
class BuiltVariant:
    """One directory ``build/<name>/`` that was written."""

    name: str
    path: Path
    backend: str
    id: str
    archs: tuple[str, ...] = ()
    seconds: float = 0.0  # until it was written; the backends of one call are compiled at once


@dataclass
class BuildResult:
    """What `build_available` built, and why it did not build the rest (by backend)."""

    variants: list[BuiltVariant] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def build(
    project_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    backends: Sequence[str] = ("cpu", "cuda"),
    archs: str | None = None,
    verbose: bool = True,
    also: Callable[[str], None] | None = None,
) -> list[BuiltVariant]:
    """Build every backend of ``backends`` into ``<out_dir>/build/<variant>/``.

    Objects are cached in ``<project_dir>/.cache/kernel_build`` and reused while their command,
    source and headers stay the same.

    Args:
        project_dir: where ``build.toml`` is.
        out_dir: where ``build/`` is written.
        backends: of ``cpu`` and ``cuda``.
        archs: CUDA architectures; default: ``HFPATCH_CUDA_ARCHS``, then as it says above.
        verbose: print a line for each file compiled.
        also: what gets these lines besides.

    Raises:
        ToolchainMissing: the machine lacks what a backend needs.
        KernelBuildError: a compiler or the linker failed.
    """
    built = _built(project_dir, out_dir, backends, archs, verbose, also)
    for found in built.values():
        if isinstance(found, KernelBuildError):
            raise found
    return [found for found in built.values() if isinstance(found, BuiltVariant)]


def _built(
    project_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    backends: Sequence[str],
    archs: str | None,
    verbose: bool,
    also: Callable[[str], None] | None,
) -> dict[str, BuiltVariant | KernelBuildError]:
    """What became of each backend; files of all of them are compiled at once."""
    start = time.perf_counter()
    result: dict[str, BuiltVariant | KernelBuildError] = {}
    begun: list[tuple[Builder, Path]] = []
    for backend in dict.fromkeys(backends):
        try:
            builder = Builder(Path(project_dir).resolve(), backend, archs, verbose, also)
        except KernelBuildError as error:
            result[backend] = error
            continue
        path = Path(out_dir).resolve() / "build" / builder.variant
        result[backend] = _variant(builder, path, start)
        if up_to_date(builder, path):
            builder.say(f"{path.name} is up to date")
        else:
            begun.append((builder, path))
    compiled = compile_all([builder.objects() for builder, _ in begun])
    for (builder, path), objects in zip(begun, compiled, strict=True):
        try:
            if isinstance(objects, KernelBuildError):
                raise objects
            write_variant(builder, path, objects)
        except KernelBuildError as error:
            result[builder.project.backend] = error
            continue
        builder.say(f"wrote {path} in {time.perf_counter() - start:.1f} s")
        result[builder.project.backend] = _variant(builder, path, start)
    return result


def _variant(builder: Builder, path: Path, start: float) -> BuiltVariant:
    seconds = time.perf_counter() - start
    backend = builder.project.backend
    return BuiltVariant(path.name, path, backend, builder.id, tuple(builder.archs), seconds)


def resources(
    project_dir: str | os.PathLike[str], archs: str | None = None, verbose: bool = True
) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of every CUDA kernel, as ptxas reports them.

    Compiles what is not up to date.

    Args:
        project_dir, archs, verbose: as in `build`.

    Returns:
        A dict for each kernel and architecture: `file`, `kernel` (its name, demangled where
        ``c++filt`` is installed), `arch` ("sm_90"), `registers` per thread, `stack`,
        `spill_stores` and `spill_loads` in bytes per thread, `shared` in bytes per block.

    Raises:
        ToolchainMissing: the machine lacks what the backend needs.
        KernelBuildError: a compiler failed.
    """
    builder = Builder(Path(project_dir).resolve(), "cuda", archs, verbose)
    objects = builder.objects()
    objects.compile()
    found = objects.resources()
    demangle(found)
    return found


def build_available(
    project_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    archs: str | None = None,
    verbose: bool = True,
    also: Callable[[str], None] | None = None,
) -> BuildResult:
    """Build what this machine can, and say why not the rest. Used by ``pip install``.

    Where a backend is missing that this machine's torch could use, ``<out_dir>/REASON.json`` says
    so: ``{"reason": text, "backends": {backend: text}}``. hfpatch's report shows it.
    """
    result = BuildResult()
    built = _built(project_dir, out_dir, ("cpu", "cuda"), archs, verbose, also)
    for backend, found in built.items():
        if isinstance(found, BuiltVariant):
            result.variants.append(found)
        elif isinstance(found, ToolchainMissing):
            result.missing[backend] = str(found)
        else:
            result.failed[backend] = str(found)
    reasons = {**result.missing, **result.failed}
    try:
        if "cuda" in result.missing and find_torch().cuda is None:
            del reasons["cuda"]  # a CPU build of torch has no use for it
    except ToolchainMissing:
        pass
    reason = Path(out_dir) / "REASON.json"
    reason.unlink(missing_ok=True)
    if reasons:
        text = "; ".join(f"{name} kernels were not built: {why}" for name, why in reasons.items())
        write(reason, json.dumps({"reason": text, "backends": reasons}, indent=2) + "\n")
    return result
