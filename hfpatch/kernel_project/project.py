"""A kernel project on disk: `build.toml`, and the variants that were built from it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch import kernel_build
from hfpatch.errors import HfpatchError


class ProjectError(HfpatchError):
    """A kernel project is not what the command needs, or could not be published."""


@dataclass(frozen=True)
class Project:
    """A kernel project.

    Attributes:
        root: where `build.toml` is.
        toml: its content.
        build: the folder that holds `build/`; None: the project's.
    """

    root: Path
    toml: dict[str, Any]
    build: Path | None = None

    @classmethod
    def open(cls, root: Path) -> Project:
        """The project in a folder.

        Raises:
            ProjectError: it is not a kernel project.
        """
        if not root.is_dir():
            raise ProjectError(f"`{root}` is not a folder; name that of a kernel's `build.toml`")
        try:
            return cls(root.resolve(), kernel_build.read_project(root.resolve()))
        except kernel_build.KernelBuildError as e:
            raise ProjectError(str(e)) from e

    @property
    def name(self) -> str:
        """The kernel's name, e.g. "my-kernel"."""
        return str(self.toml["general"]["name"])

    @property
    def version(self) -> int:
        """The kernel's version; it is published to the branch `v<version>`."""
        return int(self.toml["general"]["version"])

    @property
    def repo_id(self) -> str | None:
        """Where it is published: `general.hub.repo-id`."""
        found = self.toml["general"].get("hub", {}).get("repo-id")
        return None if found is None else str(found)

    @property
    def package(self) -> Path:
        """The folder of its Python package."""
        return self.root / "torch-ext" / self.name.replace("-", "_")

    def sources(self) -> dict[str, list[str]]:
        """The files that `build.toml` names, by section ("torch", "kernel.<name>")."""
        sections = {"torch": self.toml["torch"]}
        sections |= {f"kernel.{k}": v for k, v in self.toml.get("kernel", {}).items()}
        return {
            name: [str(s) for s in section.get("src", [])] for name, section in sections.items()
        }

    def variants(self) -> list[Path]:
        """Folders of the built variants: of kernel-builder's `result`, else of `build`."""
        for folder in ("result", "build"):
            root = (self.build or self.root) / folder
            found = sorted(p.parent for p in root.glob("*/metadata.json"))
            if found:
                return found
        return []


def assigned_names(tree: ast.Module) -> list[str]:
    """The strings of a module's `__all__`; empty if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else []
            constants = [v.value for v in values if isinstance(v, ast.Constant)]
            return [c for c in constants if isinstance(c, str)]
    return []
