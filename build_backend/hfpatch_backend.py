"""The setuptools build backend, which asks for torch only where the kernels need its headers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)


def _torch_requirement() -> list[str]:
    if os.environ.get("HFPATCH_BUILD") == "0":
        return []
    folder = Path(__file__).resolve().parent.parent / "hfpatch" / "kernel_build"
    spec = importlib.util.spec_from_file_location(
        "hfpatch_kernel_build", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    try:
        module.find_cxx()
    except module.ToolchainMissing:
        return []  # nothing will be compiled
    try:
        module.find_torch()
    except module.ToolchainMissing:
        return ["torch>=2.11"]
    return []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
