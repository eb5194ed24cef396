"""Builds the kernels into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: `make build` compiles the kernels, in sight; the wheel that goes to an index has none.
LEFT_OUT = os.environ.get("HFPATCH_BUILD") == "0"


def load_kernel_build() -> ModuleType:
    """hfpatch/kernel_build by path: hfpatch itself needs torch, which may not be here."""
    name = "hfpatch_kernel_build"
    folder = ROOT / "hfpatch" / "kernel_build"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def long_description() -> str:
    """README.md with links that lead somewhere wherever it is shown: those of this release."""
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = dict(re.findall(r'^(version|Source) = "(.+)"$', config, re.MULTILINE))
    at = f"{found['Source']}/blob/v{found['version']}"

    def absolute(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        query = "?raw=true" if image else ""
        return f"{image}[{text}]({at}/{target}{query})"

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", absolute, readme)


def terminal(kernel_build: ModuleType) -> Callable[[str], None] | None:
    """Says how far a build is in spite of pip, which hides that; None without a terminal."""
    if "PIP_BUILD_TRACKER" not in os.environ or not os.path.exists("/dev/tty"):
        return None

    def say(line: str) -> None:
        if kernel_build.worth_showing(line):
            try:
                with open("/dev/tty", "w", encoding="utf-8") as tty:
                    tty.write(f"\r\x1b[K{line}\n")
            except OSError:  # it has none
                pass

    return say


class build_kernels(Command):
    """Compile what this machine can; record why the rest is missing."""

    description = "compile the kernels"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    stage = ROOT / ".cache" / "stage"

    def initialize_options(self) -> None:
        self.compiled = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        kernel_build = load_kernel_build()
        shutil.rmtree(self.stage, ignore_errors=True)
        self.stage.mkdir(parents=True)
        result = kernel_build.build_available(ROOT, self.stage, also=terminal(kernel_build))
        self.compiled = bool(result.variants)
        strict = os.environ.get("HFPATCH_BUILD_STRICT") == "1"
        if strict and (result.failed or not result.variants):
            reasons = {**result.missing, **result.failed}
            raise SystemExit("\n".join(f"error: {b} kernels: {why}" for b, why in reasons.items()))
        for backend, why in result.failed.items():
            warnings.warn(
                f"the {backend} kernels were not built; hfpatch will use torch instead:\n{why}",
                stacklevel=1,
            )


class build_py_with_kernels(build_py):
    """Copy the kernels into the package: the source tree's for `pip install -e`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_sources()
        if LEFT_OUT:
            return
        self.run_command("build_kernels")
        base = ROOT if self.editable_mode else Path(self.build_lib)
        target = base / "hfpatch" / "_kernels"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(build_kernels.stage, target)

    def copy_sources(self) -> None:
        """The header, and the sources that `hfpatch clib` and `hfpatch setup` compile."""
        package = Path(self.build_lib) / "hfpatch"
        for folder in (package / "include", package / "_clib"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "kernel_src" / "hfpatch.h", package / "include")
        shutil.copy(ROOT / "build.toml", package / "_clib")
        clean = shutil.ignore_patterns("__pycache__", "*.py[co]")
        for name in ("clib", "kernel_src", "torch-ext"):
            shutil.copytree(ROOT / name, package / "_clib" / name, ignore=clean)


class bdist_wheel_with_kernels(bdist_wheel):
    """A platform wheel if anything was compiled; no Python ABI either way."""

    def get_tag(self) -> tuple[str, str, str]:
        if LEFT_OUT:
            return ("py3", "none", "any")
        self.run_command("build_kernels")
        if not self.get_finalized_command("build_kernels").compiled:
            return ("py3", "none", "any")
        self.root_is_pure = False  # its libraries go where those of platforms do
        default = (self.plat_name or "").replace("-", "_").replace(".", "_")
        libraries = list(build_kernels.stage.rglob("*.so"))
        return ("py3", "none", load_kernel_build().platform_tag(libraries, default))


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={
        "bdist_wheel": bdist_wheel_with_kernels,
        "build_kernels": build_kernels,
        "build_py": build_py_with_kernels,
    },
)
