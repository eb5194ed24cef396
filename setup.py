"""Builds the kernels into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: `make build` compiles the kernels, in sight.
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
        result = kernel_build.build_available(ROOT, self.stage)
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
        if LEFT_OUT:
            return
        self.run_command("build_kernels")
        base = ROOT if self.editable_mode else Path(self.build_lib)
        target = base / "hfpatch" / "_kernels"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(build_kernels.stage, target)
        if not self.editable_mode:
            self.copy_c_library()

    def copy_c_library(self) -> None:
        """The header, and the sources that `hfpatch clib` compiles."""
        package = Path(self.build_lib) / "hfpatch"
        for folder in (package / "include", package / "_clib"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "kernel_src" / "hfpatch.h", package / "include")
        shutil.copy(ROOT / "build.toml", package / "_clib")
        for name in ("clib", "kernel_src"):
            shutil.copytree(ROOT / name, package / "_clib" / name)


class bdist_wheel_with_kernels(bdist_wheel):
    """A platform wheel if anything was compiled; no Python ABI either way."""

    def get_tag(self) -> tuple[str, str, str]:
        if LEFT_OUT:
            return ("py3", "none", "any")
        self.run_command("build_kernels")
        if not self.get_finalized_command("build_kernels").compiled:
            return ("py3", "none", "any")
        platform = (self.plat_name or "").replace("-", "_").replace(".", "_")
        return ("py3", "none", platform)


setup(
    cmdclass={
        "bdist_wheel": bdist_wheel_with_kernels,
        "build_kernels": build_kernels,
        "build_py": build_py_with_kernels,
    }
)
