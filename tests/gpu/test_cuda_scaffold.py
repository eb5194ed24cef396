"""What `hfpatch kernel new` writes, on a GPU: built for it, tested on it, checked, measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfpatch import kernel_build
from hfpatch.kernel_project.checks import check_project
from hfpatch.kernel_project.checks.library import MANYLINUX
from hfpatch.kernel_project.new import new_project
from hfpatch.kernel_project.project import Project

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
#: What the compiler of a machine with a GPU need not meet, and `hfpatch[publish]` checks.
OF_THE_MACHINE = {f"loads on {MANYLINUX}", "the library keeps to the ABIs"}


@pytest.mark.skipif(not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")), reason="no nvcc")
@pytest.mark.parametrize(("template", "op"), [("elementwise", "relu_squared"), ("row", "rms_norm")])
def test_the_scaffold_runs_on_the_gpu(template: str, op: str, tmp_path: Path) -> None:
    root = new_project("my-kernel", tmp_path, template=template)
    (built,) = kernel_build.build(root, root, ("cuda",), archs="native", verbose=False)

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path}, cwd=root,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = run("-m", "pytest", "-v", "-p", "no:cacheprovider", "tests")
    assert "[cuda-" in out and "[cpu-" in out, "the CUDA build serves both"
    rows = check_project(Project.open(root))
    assert [row for row in rows if not row.passed and row.what not in OF_THE_MACHINE] == []
    (loaded,) = (row for row in rows if row.what == "`kernels` loads it")
    names = {"elementwise": 2, "row": 3}[template]
    assert loaded.where == built.name and loaded.note == f"{names} names, 1 layers"
    found = re.search(rf"{op} +([\d.]+) us", run("benchmarks/benchmark.py"))
    assert found is not None and float(found[1]) < 10_000
