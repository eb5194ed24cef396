"""A cache that grows needs memory for one layer more, as the original's does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "growth_cases.py"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited there")
@pytest.mark.parametrize(
    "case", ["its first step", "it grows", "a step that fails", "its first turn", "a turn"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_long_cache_grows_in_little_memory(
    family: str, case: str, kernels_module: object
) -> None:
    """With room for two layers beside the cache: the original's text, without an error."""
    # what is freed goes back to the system
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(CASES), family, case],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = re.search(r"decoding: (\d+) steps", ran.stdout)
    assert found is not None and int(found[1]) >= 70, ran.stdout
    assert ("1 turns behind a cache" in ran.stdout) == (case == "a turn"), ran.stdout
