"""The shared library of a variant: ABI, libraries it needs, symbols it gives, paths in it."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hfpatch.hub.elf import examine
from hfpatch.kernel_project.checks.elf import Library, read_library, symbol_file
from hfpatch.kernel_project.checks.row import Row, verdict
from hfpatch.kernel_project.project import Project

MANYLINUX = "manylinux_2_28"
PYTHON_ABI = "3.9"

#: Libraries that every system with this torch has.
_SYSTEM = re.compile(
    r"^(lib(torch|torch_cpu|torch_cuda|torch_python|c10|c10_cuda)\.so"  # torch
    r"|lib(cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nvrtc|nvJitLink|cuda)\.so.*"
    r"|lib(stdc\+\+\.so\.6|gcc_s\.so\.1|c\.so\.6|m\.so\.6|dl\.so\.2|rt\.so\.1|pthread\.so\.0)"
    r"|ld-linux-[\w-]+\.so\.\d)$"
)
#: torch's C++ symbols that are not of the stable ABI.
_UNSTABLE = re.compile(r"^_Z(T[A-Z])?NK?(3c10|2at(?=\d)|5torch(?!6stable|10headeronly))")
#: Symbols that every linker makes.
_LINKER = {"__bss_start", "_edata", "_end", "_init", "_fini"}
#: An absolute path of a source, and the places that every Linux has.
_SOURCE = re.compile(
    rb"(?<![\w.~/+-])/(?!usr/|proc/|sys/|dev/|etc/|lib)(?:[\w.+@-]+/)+[\w.+@-]+"
    rb"\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|inl|py|o|so)\b"
)


def rows(project: Project, variant: Path) -> Iterator[Row]:
    """The rows of a variant's libraries, and of the paths in all of its files."""
    yield _paths(project, variant)
    libraries = sorted(variant.glob("*.so"))
    if not libraries:
        if not variant.name.startswith("torch-c"):  # noarch: Python only
            yield Row(variant.name, "there is a library", "there is no `.so`", "build it again")
        return
    for path in libraries:
        try:
            yield from _library(project, variant.name, read_library(path))
        except ImportError as e:
            yield Row(
                variant.name,
                "the library keeps to the ABIs",
                f"not checked: {e}",
                "`pip install 'hfpatch[publish]'`",
            )
        except ValueError as e:
            yield Row(
                variant.name, "the library can be read", f"`{path.name}`: {e}", "build it again"
            )


def _library(project: Project, where: str, library: Library) -> Iterator[Row]:
    yield from _abi(where, library)
    if "stable-abi" in where:
        yield verdict(
            where,
            "only torch's stable ABI is used",
            (f"`{name}`" for name, _ in library.undefined if _UNSTABLE.match(name)),
            "include `torch/csrc/stable/*` and `torch/headeronly/*` only",
        )
    yield verdict(
        where,
        "needs torch and the system only",
        (f"`{name}`" for name in library.needed if not _SYSTEM.match(name)),
        "link it statically, or take what torch has (its OpenMP, its CUDA libraries)",
        note=f"{len(library.needed)} libraries",
    )
    yield verdict(
        where,
        "no search path",
        (f"`{path}`" for path in library.paths),
        "link without `-rpath`",
    )
    yield _loading(where, library.path)
    declared = _declared(project)
    yield verdict(
        where,
        "exports its C interface only",
        (
            f"`{name}`" + (" (unique in the process)" if binding == "STB_LOOS" else "")
            for name, binding in library.exported
            if binding == "STB_LOOS"
            or not (name in declared or name in _LINKER or name.startswith("PyInit_"))
        ),
        "compile with `-fvisibility=hidden -fno-gnu-unique`; declare what is for others in a "
        "header",
        note=f"{sum(n in declared for n, _ in library.exported)} functions",
    )


def _loading(where: str, path: Path) -> Row:
    """What `hfpatch.apply` looks at before it loads a library; search paths have a row."""
    with path.open("rb") as file:
        found = examine(file)
    problems = (p for p in found.problems if not p.endswith(("(RPATH)", "(RUNPATH)")))
    return verdict(
        where,
        "asks nothing odd of the loader",
        (f"`{path.name}` {problem}" for problem in problems),
        "link with `-z noexecstack -z text`, and without paths, filters or audits",
        note=f"{found.constructors} functions run as it is loaded",
    )


def _abi(where: str, library: Library) -> Iterator[Row]:
    from kernel_abi_check import ObjectFile

    with tempfile.TemporaryDirectory(prefix="hfpatch-") as folder:
        path = Path(folder) / "symbols.o"
        path.write_bytes(symbol_file(library))
        found = ObjectFile(path)
        floor = found.check_manylinux(MANYLINUX)
        python = found.check_python_abi(PYTHON_ABI)
    newest = sorted({v for _, v in library.undefined if v.startswith("GLIBC_")}, key=_numbers)
    yield verdict(
        where,
        f"loads on {MANYLINUX}",
        (f"`{v.name}` of {v.dep} {v.version}" for v in floor),
        "build it by kernel-builder, or in a manylinux_2_28 container",
        note=f"newest: {newest[-1]}" if newest else "",
    )
    yield verdict(
        where,
        f"loads in Python {PYTHON_ABI} and later",
        (f"`{v.name}`" for v in python),
        "use Python's limited API, or none of it",
    )


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def _declared(project: Project) -> set[str]:
    """Words of the headers that `build.toml` names."""
    headers = {
        project.root / src
        for sources in project.sources().values()
        for src in sources
        if src.endswith((".h", ".hpp"))
    }
    words: set[str] = set()
    for path in headers:
        if path.is_file():
            words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return words


def _paths(project: Project, variant: Path) -> Row:
    here = {str(project.root), str(Path.home()), sys.prefix, tempfile.gettempdir()} - {"/"}
    machine = [p.encode() + b"/" for p in sorted(here)]

    def found() -> Iterator[str]:
        for path in sorted(p for p in variant.rglob("*") if p.is_file()):
            if path.suffix == ".pyc":  # of an import here; it is not published
                continue
            data = path.read_bytes()
            hits = [p.decode() for p in machine if p in data]
            if path.suffix == ".so":
                hits += [m.group().decode() for m in _SOURCE.finditer(data)]
            if hits:
                yield f"`{path.relative_to(variant)}` names `{hits[0]}`"

    return verdict(
        variant.name,
        "no path of this machine",
        found(),
        "compile with `-ffile-prefix-map`, link with `-s`",
    )
