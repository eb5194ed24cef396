"""The scaffold of `hfpatch kernel new`, built for the CPU once for all tests."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from hfpatch import kernel_build
from hfpatch.kernel_project.new import new_project

ROOT = Path(__file__).resolve().parents[2]
NAME = "my-kernel"


def built_scaffold(target: Path) -> Path:
    """A fresh copy of the built scaffold in `target/my-kernel`; its objects are kept in .cache."""
    shelf = ROOT / ".cache" / "scaffold"
    shelf.mkdir(parents=True, exist_ok=True)
    with (shelf / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest-xdist runs this in several processes
        fresh = shelf / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        new_project(NAME, fresh)
        for stale in ("torch-ext", "kernel_src", "tests", "benchmarks"):
            shutil.rmtree(shelf / NAME / stale, ignore_errors=True)
        shutil.copytree(fresh / NAME, shelf / NAME, dirs_exist_ok=True)
        kernel_build.build(shelf / NAME, shelf / NAME, ("cpu",), verbose=False)
        ignored = shutil.ignore_patterns(".cache", "__pycache__", "*-cu[0-9]*")
        shutil.copytree(shelf / NAME, target / NAME, ignore=ignored)
    return target / NAME
