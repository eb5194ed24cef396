"""A wheel of one compiled variant: `hfpatch-kernels-cpu`, `hfpatch-kernels-cu130`.

It holds the Hub's layout and nothing else: `hfpatch_kernel_builds/build/<variant>/`, which
`hfpatch.kernels.builds` finds. So a variant is the same files in a wheel, on the Hub and in a
source tree.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hfpatch.kernel_build import platform_tag  # noqa: E402

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of hfpatch: {variant}"
readme = "README.md"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["LICENSE"]
authors = [{{ name = "The hfpatch maintainers" }}]
dependencies = ["torch>=2.11"]

[project.urls]
Source = "{source}"

[tool.setuptools]
packages = ["hfpatch_kernel_builds"]
include-package-data = false

[tool.setuptools.package-data]
hfpatch_kernel_builds = ["build/**/*"]
"""

_SETUP = """\
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class platform_wheel(bdist_wheel):
    def get_tag(self):
        self.root_is_pure = False
        return ("py3", "none", {tag!r})


setup(cmdclass={{"bdist_wheel": platform_wheel}})
"""

_README = """\
# {name}

The compiled kernels of [hfpatch]({source}) for `{devices}`: build `{id}`{archs}, on
torch's stable ABI, for every torch from 2.11 up. Nothing is compiled when it is installed.

```sh
pip install hfpatch {name}
hfpatch env    # says which kernels are used
```
"""


def backend(variant: str) -> str:
    """ "cpu" or "cu130" of `torch-stable-abi211-cu130-x86_64-linux`."""
    return variant.split("-")[3]


def make_wheel(variant: Path, out: Path, version: str, source: str) -> Path:
    """The wheel of `variant` (a folder `build/<variant>`), written to `out`."""
    name = f"hfpatch-kernels-{backend(variant.name)}"
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    archs = metadata["backend"].get("archs", [])
    tag = platform_tag(variant.glob("*.so"), f"linux_{variant.name.split('-')[4]}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary)
        inside = project / "hfpatch_kernel_builds" / "build" / variant.name
        clean = shutil.ignore_patterns("__pycache__", "*.py[co]")
        shutil.copytree(variant, inside, ignore=clean)
        shutil.copy(ROOT / "LICENSE", project)
        (project / "pyproject.toml").write_text(
            _PROJECT.format(name=name, version=version, variant=variant.name, source=source)
        )
        (project / "setup.py").write_text(_SETUP.format(tag=tag))
        (project / "README.md").write_text(
            _README.format(
                name=name,
                source=source,
                id=metadata["id"],
                devices="CUDA and the CPU" if metadata["backend"]["type"] == "cuda" else "the CPU",
                archs=f" (compute capabilities {', '.join(archs)})" if archs else "",
            )
        )
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "dist"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the wheel of `{variant}` failed:\n{done.stderr}")
        (wheel,) = (project / "dist").glob("*.whl")
        return Path(shutil.move(wheel, out / wheel.name))
