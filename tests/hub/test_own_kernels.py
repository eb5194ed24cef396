"""Our own kernels as a kernel project: built from what build.toml names, in an empty folder,
published, and tested as everybody gets them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from machine import failures
from own_project import ROOT, copy_project
from server import HubServer

from hfpatch import kernel_build
from hfpatch.kernel_project.project import Project, ProjectError
from hfpatch.kernel_project.publish import check_client, plan_publication, publish

REPO = "me/hfpatch-kernels"
LOAD = """
import torch, kernels
k = kernels.get_kernel("me/hfpatch-kernels", version=1)
x = torch.randn(3, 5, 16)
y = k.rms_norm(x, torch.ones(16), eps=1e-6)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), eps=1e-6))
print(k.ops.silu.default._schema.name)
"""


has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ
brought = os.environ.get("HFPATCH_TEST_BUILD") == "0"  # see tests/conftest.py


def lend_objects(project: Path) -> None:
    """Give a copy of the project the C++ objects of the build here, which it may take."""
    here = ROOT / ".cache" / "kernel_build" / "cpu"
    there = project / ".cache" / "kernel_build" / "lent"
    if here.is_dir():
        shutil.copytree(here, there)
        for record in there.glob("*.json"):
            record.write_text(record.read_text().replace(str(here), str(there)))


def build(project: Path, backends: Sequence[str]) -> tuple[list[str], Path]:
    """Make the project's `build/`: compiled here, or hfpatch/_kernels as it is.

    Returns:
        The ids of the variants, those of the last backend last; where their objects are.
    """
    if not brought:
        lend_objects(project)
        built = kernel_build.build(project, project, backends, archs="native", verbose=False)
        return [variant.id for variant in built], project / ".cache" / "kernel_build"
    ids = []
    for backend in backends:
        name = {"cpu": "*-cpu-*", "cuda": "*-cu[0-9]*"}[backend]
        found = list((ROOT / "hfpatch" / "_kernels" / "build").glob(name))
        assert len(found) == 1, f"hfpatch/_kernels: expected one {backend} build, got {found}"
        target = project / "build" / found[0].name
        shutil.copytree(found[0], target, ignore=shutil.ignore_patterns("__pycache__"))
        ids.append(json.loads((target / "metadata.json").read_text())["id"])
    return ids, ROOT / ".cache" / "kernel_build"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    torch.cuda.is_available() and not (has_nvcc or brought), reason="a GPU, and no nvcc"
)
@pytest.mark.exhaustive  # test_load.py publishes this build too, and loads it
def test_the_published_kernels_pass_the_same_tests(hub: HubServer, tmp_path: Path) -> None:
    """The tests of the operators, with the package that `get_kernel` downloads: those of the GPU
    where there is one, else those of the CPU. Compiles everything, which takes minutes, unless a
    build was brought along."""
    backends = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    project = copy_project(tmp_path / "project", "cpu", "cuda")
    for name in ("CARD.md", "flake.nix"):
        shutil.copy2(ROOT / name, project / name)
    ids, objects = build(project, backends)
    assert failures(project, objects) == []
    plan = plan_publication(Project.open(project), REPO)
    try:
        check_client()
    except ProjectError:  # this huggingface_hub only reads kernels, which is what counts here
        hub.put(REPO, {file.path: file.read() for file in plan.files}, plan.branch)
    else:
        publish(plan)
    shutil.rmtree(project)
    hub.trust("me")

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = hub.env(tmp_path / "home", PYTHONPATH=path, HFPATCH_CONFIG="")
    run = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", LOAD], **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ids[-1]}::silu"
    env |= {"HFPATCH_TEST_KERNELS": f"{REPO}@1", "HFPATCH_KERNELS": f"{REPO}@v1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if len(backends) > 1:  # as tests/gpu/all.sh runs them
        env["OMP_NUM_THREADS"] = "1"
        jobs = str(max(1, min(14, (os.cpu_count() or 1) - 2)))
        command += ["tests/gpu", "-m", "not alone and not slow", "-n", jobs, "--maxschedchunk=4"]
    else:  # those of the package, not of the C functions
        of_c = ("fuzz", "aarch64", "c_api", "c_api_*")
        command += [f"--ignore-glob=tests/kernels/test_{name}.py" for name in of_c]
        command += ["tests/kernels", "-m", "not exhaustive"]
    done = subprocess.run(command, **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-20000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 500
