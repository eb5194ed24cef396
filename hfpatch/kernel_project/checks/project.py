"""The project: `build.toml`, the files that it names, the flake, the card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hfpatch.kernel_project.card import fill_card
from hfpatch.kernel_project.checks.row import Row, verdict
from hfpatch.kernel_project.project import Project, ProjectError

_WHERE = "project"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
#: Written by the builder.
_GENERATED = {"registration.h"}


def rows(project: Project) -> Iterator[Row]:
    """The project's rows."""
    yield _build_toml(project)
    yield verdict(
        _WHERE,
        "every source is there",
        (
            f"`{section}` names `{src}`"
            for section, sources in project.sources().items()
            for src in sources
            if not (project.root / src).is_file()
        ),
        "correct `src` in `build.toml`",
        note=f"{len(set().union(*project.sources().values()))} files",
    )
    yield verdict(
        _WHERE,
        "headers are named too",
        _unnamed_headers(project),
        "add them to `src` of that section: a build sees only the files named there",
    )
    yield _layout(project)
    yield _flake(project)
    yield _card(project)


def _build_toml(project: Project) -> Row:
    from kernels._rust import Build

    what = "`build.toml` is valid"
    try:
        build = Build.open(project.root)
    except ValueError as e:
        said = " ".join(str(e).split())
        return Row(_WHERE, what, said, "correct it; kernels' own parser said this")
    if project.toml["general"].get("edition") != 5:
        edition = project.toml["general"].get("edition")
        return Row(_WHERE, what, f"edition {edition}, expected 5", "`kernel-builder update-build`")
    backends = ", ".join(sorted(str(b).lower() for b in build.general.backends))
    return Row(_WHERE, what, note=f"{project.name} v{project.version}; {backends}")


def _unnamed_headers(project: Project) -> Iterator[str]:
    """Headers that a section's sources include, directly or not, and that it does not name."""
    sections = {"torch": project.toml["torch"]}
    sections |= {f"kernel.{k}": v for k, v in project.toml.get("kernel", {}).items()}
    for name, section in sections.items():
        named = {(project.root / src).resolve() for src in section.get("src", [])}
        folders = [project.root / d for d in section.get("include", [])]
        found: set[Path] = set()
        todo = [p for p in sorted(named) if p.is_file()]
        while todo:
            path = todo.pop()
            for include in _INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
                header = _resolve(include, [path.parent, *folders])
                if header is not None and header not in found:
                    found.add(header)
                    todo.append(header)
        for header in sorted(found - named):
            if header.is_relative_to(project.root):
                yield f"`{name}` includes `{header.relative_to(project.root)}`"
            else:
                yield f"`{name}` includes `{header}`, which is outside of the project"


def _resolve(include: str, folders: list[Path]) -> Path | None:
    if include in _GENERATED:
        return None
    return next(((f / include).resolve() for f in folders if (f / include).is_file()), None)


def _layout(project: Project) -> Row:
    what = "the Python package is in its place"
    package = project.package.relative_to(project.root).as_posix()
    if not (project.package / "__init__.py").is_file():
        return Row(
            _WHERE,
            what,
            f"no `{package}/__init__.py`",
            "the folder has the kernel's name, `_` for `-`",
        )
    if (project.package / project.package.name).exists():
        return Row(
            _WHERE,
            what,
            f"`{package}/{project.package.name}` is there",
            "rename it: builds put a folder of that name there, for old versions of `kernels`",
        )
    return Row(_WHERE, what, note=package)


def _flake(project: Project) -> Row:
    what = "`flake.nix` is there"
    path = project.root / "flake.nix"
    if not path.is_file():
        return Row(
            _WHERE, what, "it is not", "copy that of `hfpatch kernel new`; kernel-builder needs it"
        )
    if "genKernelFlakeOutputs" not in path.read_text(encoding="utf-8"):
        return Row(
            _WHERE,
            what,
            "it does not call `genKernelFlakeOutputs`",
            "copy that of `hfpatch kernel new`",
        )
    return Row(_WHERE, what)


def _card(project: Project) -> Row:
    what = "`CARD.md` can be filled"
    try:
        text = fill_card(project, project.repo_id or "org/name")
    except ProjectError as e:
        return Row(_WHERE, what, str(e), "see the card that `hfpatch kernel new` writes")
    start = text.split("---", 2)
    if len(start) < 3 or "library_name: kernels" not in start[1] or "license:" not in start[1]:
        return Row(
            _WHERE,
            what,
            "its head lacks `library_name: kernels` or `license:`",
            "see the card that `hfpatch kernel new` writes",
        )
    return Row(_WHERE, what)
