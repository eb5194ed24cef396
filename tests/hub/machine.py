"""Which failures of `kernel check` are this machine's, and not the project's."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from kernel_abi_check import ObjectFile

from hfpatch.kernel_project.checks import Row, check_project
from hfpatch.kernel_project.checks.elf import read_library, symbol_file
from hfpatch.kernel_project.checks.library import MANYLINUX
from hfpatch.kernel_project.project import Project


def failures(project: Path, objects: Path | None = None) -> list[Row]:
    """The rows of `kernel check` that the project has to answer for.

    A compiler that links its own libstdc++.a makes the result ask for the libc which that was
    compiled with, whatever the project does: on Ubuntu 24.04 for `__isoc23_strtoul` of glibc 2.38.
    Releases are built elsewhere, so such a row is passed over where this machine's libc is newer
    than the floor and no symbol in question is one that the project's own objects take.

    Args:
        project: with its `build/`.
        objects: what the variants were linked of; default: the project's. With none there,
            nothing is passed over.
    """
    found = Project.open(project)
    ours = _taken(objects or project / ".cache" / "kernel_build")
    rows = [row for row in check_project(found) if not row.passed]
    if not ours or _libc() <= _numbers(MANYLINUX):
        return rows
    variants = {variant.name: variant for variant in found.variants()}
    return [
        row
        for row in rows
        if row.what != f"loads on {MANYLINUX}" or _above_the_floor(variants[row.where]) & ours
    ]


def _above_the_floor(variant: Path) -> set[str]:
    """The symbols for which a variant does not load there."""
    (library,) = variant.glob("*.so")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "symbols.o"
        file.write_bytes(symbol_file(read_library(library)))
        return {violation.name for violation in ObjectFile(file).check_manylinux(MANYLINUX)}


def _taken(objects: Path) -> set[str]:
    """The symbols that object files take from elsewhere."""
    names: set[str] = set()
    for path in objects.rglob("*.o"):
        with path.open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".symtab").iter_symbols()
            names |= {s.name.partition("@")[0] for s in symbols if s["st_shndx"] == "SHN_UNDEF"}
    return names - {""}


def _libc() -> list[int]:
    return _numbers(os.confstr("CS_GNU_LIBC_VERSION") or "")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
