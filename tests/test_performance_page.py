"""docs/performance.md says what the committed measurements say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_is_generated_from_the_results() -> None:
    command = [sys.executable, "-m", "hfpatch", "bench", "--page", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == 0, "run `hfpatch bench --page` and commit docs"


def test_results_say_where_they_come_from() -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert result["device"]
        assert len(result["commit"]) == 40
        assert result["versions"]["torch"]
        assert result["rows"]
