"""What compute-sanitizer does not see it cannot find fault with: its tests launch every kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
ROOT = Path(__file__).resolve().parents[2]
#: For GPUs without clusters.
ELSEWHERE = {"argmax_merge_kernel"}


def declared() -> set[str]:
    found = set()
    for file in (ROOT / "kernel_src" / "cuda").glob("*.cu*"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\s*\(", text))
    return found


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="which kernels are chosen is known for compute capability 9.0",
)
def test_every_kernel_is_launched(tmp_path: Path, kernels_dir: Path) -> None:
    """By name: of a template, one set of arguments is enough."""
    launched = tmp_path / "launched.json"
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_cuda_sanitize.py", "-m", "sanitize"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"HFPATCH_TEST_LAUNCHED": str(launched), "HFPATCH_TEST_BUILD": "0"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    names = " ".join(json.loads(launched.read_text(encoding="utf-8")))
    every = declared()
    assert len(every) > 50 and every >= ELSEWHERE
    missing = {name for name in every if not re.search(rf"\b{name}\b", names)}
    assert missing <= ELSEWHERE, sorted(missing - ELSEWHERE)
