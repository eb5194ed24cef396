"""The sources of a version built: a kernel project's, or hfpatch's own kernels."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hfpatch.kernel_build.errors import KernelBuildError, ToolchainMissing
from hfpatch.lab.compiling import CompileError
from hfpatch.lab.problems import ToolMissing
from hfpatch.lab.workspace import Lab, source_files


def built(lab: Lab, n: int, device: str) -> Any:
    """The package of a kernel project's version, as users of the project get it.

    Raises:
        ToolMissing, CompileError: it cannot be built.
    """
    from kernels import get_local_kernel

    return get_local_kernel(_build(lab, n, device), backend=None if device == "cuda" else "cpu")


def built_kernels(lab: Lab, n: int, device: str) -> Any:
    """hfpatch's own kernels, built from a version's sources. Raises ToolMissing, CompileError."""
    from hfpatch.kernels.sources import local_package

    return local_package(_build(lab, n, device))


def _build(lab: Lab, n: int, device: str) -> Path:
    """The folder with `build/<variant>/` of version n.

    All versions are built in one tree, whose objects are kept: a version compiles what it changed.
    """
    from hfpatch import kernel_build

    source, tree, out = lab.kernel(n), lab.root / "tree", lab.folder(n) / "built"
    if (out / lab.digest(n)).is_file():
        return out
    _mirror(source, tree)
    try:
        kernel_build.build(tree, out, [device], None, verbose=False)
    except ToolchainMissing as e:
        raise ToolMissing(f"{e}; the project's version v{n} cannot be built without it") from e
    except KernelBuildError as e:
        raise CompileError(str(e)) from e
    (out / lab.digest(n)).touch()
    return out


def _mirror(source: Path, tree: Path) -> None:
    """Make `tree` what `source` is; files that are the same keep their time."""
    wanted = {p.relative_to(source) for p in source_files(source)}
    if tree.is_dir():
        for path in [p for p in source_files(tree) if p.relative_to(tree) not in wanted]:
            path.unlink()
    for name in sorted(wanted):
        to = tree / name
        if to.is_file() and to.read_bytes() == (source / name).read_bytes():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, to)
