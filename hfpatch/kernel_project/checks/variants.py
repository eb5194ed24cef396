"""A built variant: its name, metadata, digest, files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfpatch.kernel_project.checks.row import Row, verdict
from hfpatch.kernel_project.project import Project

_AGAIN = "build it again: `hfpatch kernel build`"


def rows(project: Project, variant: Path) -> Iterator[Row]:
    """The variant's rows."""
    from kernels import Metadata

    where = variant.name
    yield _name(variant)
    try:
        metadata = Metadata.read_from_file(variant / "metadata.json")
    except ValueError as e:
        yield Row(where, "its metadata are valid", " ".join(str(e).split()), _AGAIN)
        return
    backend, archs = str(metadata.backend.backend_type).lower(), metadata.backend.archs or []
    note = backend + (f" for {', '.join(archs)}" if archs else "")
    problems = _wrong(project, variant, metadata)
    yield verdict(where, "its metadata are valid", problems, _AGAIN, note)
    yield verdict(where, "the digest is its files'", _digest(variant, metadata), _AGAIN)
    module = project.name.replace("-", "_")
    needed = ["__init__.py", f"{module}/__init__.py"]
    yield verdict(
        where,
        "its files are in their places",
        (f"no `{name}`" for name in needed if not (variant / name).is_file()),
        _AGAIN,
    )
    yield verdict(where, "its Python is the sources'", _stale(project, variant), _AGAIN)


def _name(variant: Path) -> Row:
    from kernels.variants import parse_variant

    what = "the variant's name is one"
    try:
        parsed = parse_variant(variant.name)
    except ValueError as e:
        todo = "`torch-stable-abi211-cpu-x86_64-linux` is an example"
        return Row(variant.name, what, str(e), todo)
    return Row(variant.name, what, note="" if hasattr(parsed.arch, "backend") else "Python only")


def _wrong(project: Project, variant: Path, metadata: Any) -> Iterator[str]:
    expected = {
        "name": (str(metadata.name), project.name),
        "version": (metadata.version, project.version),
        "license": (metadata.license, project.toml["general"]["license"]),
    }
    for key, (got, wanted) in expected.items():
        if got != wanted:
            yield f"`{key}` is {got!r}, `build.toml` says {wanted!r}"
    if not metadata.id.isidentifier():
        yield f"`id` is {metadata.id!r}, expected the name of a Python module"
    backend = str(metadata.backend.backend_type).lower()
    in_name = {"cuda": "-cu", "rocm": "-rocm", "cpu": "-cpu", "xpu": "-xpu", "metal": "-metal"}
    if in_name.get(backend, f"-{backend}") not in variant.name:
        yield f"`backend` is {backend}, the variant's name says otherwise"
    if backend in ("cuda", "rocm") and not metadata.backend.archs and "-stable" in variant.name:
        yield "`backend.archs` does not say which GPUs it was built for"


def _digest(variant: Path, metadata: Any) -> Iterator[str]:
    from kernels._rust import Digest, DigestValidationError

    if metadata.digest is None:
        yield "there is none"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as e:
        yield from (str(v) for v in e.violations)


def _stale(project: Project, variant: Path) -> Iterator[str]:
    """Python files that were edited after the build, or that it lacks."""
    for path in sorted(project.package.rglob("*.py")):
        relative = path.relative_to(project.package)
        built = variant / relative
        if not built.is_file():
            yield f"no `{relative}`"
        elif built.read_bytes() != path.read_bytes():
            yield f"`{relative}` was edited since"
