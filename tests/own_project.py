"""This repository as a kernel project: the files that build.toml names, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from hfpatch.kernel_build.project import tomllib

ROOT = Path(__file__).resolve().parent.parent


def named_files(*backends: str) -> list[str]:
    """What build.toml names for some backends, and the Python package."""
    toml = tomllib.loads((ROOT / "build.toml").read_text())
    files = {"build.toml", *toml["torch"]["src"]}
    for section in toml["kernel"].values():
        if section["backend"] in backends:
            files.update(section["src"])
    package = ROOT / "torch-ext" / "hfpatch_kernels"
    files.update(p.relative_to(ROOT).as_posix() for p in package.rglob("*.py"))
    return sorted(files)


def copy_project(target: Path, *backends: str) -> Path:
    """Copy them to an empty folder."""
    for name in named_files(*backends):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target
