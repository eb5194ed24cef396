"""The lab on a GPU: four kernels of known limits, kernels and a missing tool that must stop it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "lab" / "run.py"

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.slow]


def test_limits_and_stops(tmp_path: Path) -> None:
    for tool in ("ncu", "nvcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` is not installed")
    done = subprocess.run(
        [sys.executable, str(RUN), str(tmp_path), "--seconds", "240",
         "--only", "copy", "fma", "chase", "hog", "stops"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "summary.json").read_text())["found"]
    limits = {name: found[name]["limit"] for name in ("copy", "fma", "chase", "hog")}
    assert limits == {"copy": "memory", "fma": "compute", "chase": "latency", "hog": "occupancy"}
