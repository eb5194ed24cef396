"""What `build.toml` of a kernel project says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from .commands import search
from .errors import KernelBuildError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_project(project: Path) -> dict[str, Any]:
    """``build.toml`` of a kernel project, as plain data.

    Raises:
        KernelBuildError: there is none, it is not TOML, or it lacks what a build needs.
    """
    path = project / "build.toml"
    try:
        toml: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise KernelBuildError(
            f"`{project}` is not a kernel project: it has no `build.toml`; "
            "`hfpatch kernel new NAME` makes one"
        ) from error
    except (OSError, ValueError) as error:
        raise KernelBuildError(f"`{path}` cannot be read: {error}") from error
    general = toml.get("general")
    missing = [
        f"general.{key}"
        for key in ("name", "version", "license", "backends")
        if not isinstance(general, dict) or key not in general
    ]
    if not isinstance(toml.get("torch"), dict) or "src" not in toml["torch"]:
        missing.append("torch.src")
    if missing:
        raise KernelBuildError(f"`{path}` lacks {', '.join(f'`{name}`' for name in missing)}")
    if wrong := _wrong_types(toml):
        raise KernelBuildError(f"`{path}`: {wrong}")
    return toml


def _wrong_types(toml: dict[str, Any]) -> str | None:
    """What is not of the type that everything here reads; kernels' parser judges the rest."""
    general, kernel = toml["general"], toml.get("kernel", {})
    version = general["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        return f"`general.version` must be a whole number from 0 up, got {version!r}"
    if not isinstance(general["name"], str):
        return f"`general.name` must be a string, got {general['name']!r}"
    if not _strings(general["backends"]):
        return f"`general.backends` must be a list of strings, got {general['backends']!r}"
    sections = ("hub", "cpu", "cuda", *general["backends"])
    tables = {f"general.{key}": general.get(key, {}) for key in sections}
    tables["kernel"] = kernel
    if isinstance(kernel, dict):
        tables |= {f"kernel.{name}": section for name, section in kernel.items()}
    for name, table in tables.items():
        if not isinstance(table, dict):
            return f"`{name}` must be a table, got {table!r}"
    keys = ("src", "include", "depends", "cxx-flags", "cuda-flags", "pyext", "python-depends")
    for name, table in {"general": general, "torch": toml["torch"], **tables}.items():
        for key in keys:
            if not _strings(table.get(key, [])):
                return f"`{name}.{key}` must be a list of strings, got {table[key]!r}"
    for name, section in kernel.items():
        for key in ("backend", "src"):
            if key not in section:
                return f"`kernel.{name}` lacks `{key}`"
    return None


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


class Project:
    """A kernel project for one of its backends.

    Raises:
        KernelBuildError: it cannot be built for this backend, and why.
    """

    def __init__(self, root: Path, backend: str) -> None:
        self.root = root
        self.backend = backend
        toml: dict[str, Any] = read_project(root)
        self.torch: dict[str, Any] = toml["torch"]
        self.general: dict[str, Any] = toml["general"]
        #: Name of its Python package.
        self.package: str = self.general["name"].replace("-", "_")
        if backend not in self.general["backends"]:
            raise KernelBuildError(
                f"`{backend}`: expected a backend of build.toml "
                f"({', '.join(self.general['backends'])})"
            )
        abi = self.torch.get("stable-abi", {})
        #: The stable ABI that it is built for, e.g. "2.11": one for all backends, or one for each.
        self.abi = str(abi.get(backend, "") if isinstance(abi, dict) else abi)
        if not re.fullmatch(r"\d\.\d+", self.abi):
            raise KernelBuildError(
                f'`{root / "build.toml"}`: expected `{backend} = "2.11"` under '
                "`[torch.stable-abi]`: builds on torch's stable ABI only are made here, others by "
                "kernel-builder"
            )
        name = self.general["name"]
        if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
            raise KernelBuildError(
                f"`general.name` must be of lower-case letters, digits and dashes, got {name!r}"
            )
        init = root / "torch-ext" / self.package / "__init__.py"
        if not init.is_file():
            raise KernelBuildError(
                f"`{init}` is not there: the Python package of a kernel called "
                f"`{name}` is expected in that folder"
            )
        #: Tables that name sources: the binding's first, then this backend's.
        self.sections = [self.torch]
        self.sections += [s for s in toml.get("kernel", {}).values() if s["backend"] == backend]

    def python_files(self) -> list[Path]:
        """Files of the Python package."""
        root = self.root / "torch-ext" / self.package
        suffixes = {"." + ext for ext in self.torch.get("pyext", ["py", "pyi"])}
        return [p for p in sorted(root.rglob("*")) if p.suffix in suffixes and p.is_file()]

    def sources(self) -> list[Path]:
        """Every file that a build is made of.

        Raises:
            KernelBuildError: `build.toml` names one that does not exist.
        """
        files = {self.root / "build.toml", *self.python_files()}
        for section in self.sections:
            files.update(self.root / src for src in section["src"])
        for path in files:
            if not path.is_file():
                raise KernelBuildError(f"build.toml names `{path}`, which does not exist")
        return sorted(files)

    def depends(self, key: str) -> list[Any]:
        """What the package needs on every backend, and on this one (`general.cuda`)."""
        return [*self.general.get(key, []), *self.general.get(self.backend, {}).get(key, [])]

    def first_op(self) -> str:
        """Any operator of the library: `_ops.py` asks whether it is registered."""
        for section in self.sections:
            for src in section["src"]:
                text = (self.root / src).read_text(encoding="utf-8")
                name = search(r"#define \w+_OP_TABLE\(X\)[\s\\]*X\((\w+)", text)
                name = name or search(r"\bdef\(\s*\"(\w+)\(", text)
                if name:
                    return name
        raise KernelBuildError(
            'build.toml: no source defines an operator (`ops.def("name(...)")` or an op table '
            "`#define NAME_OP_TABLE(X)`)"
        )
