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


def test_the_readmes_figures_are_measured_ones() -> None:
    """Of the first table that has the model with all ways of running it."""
    names = ("eager_ms", "compiled_blocks_ms", "patched_ms", "graphs_ms")
    found: dict[str, dict[str, float]] = {}
    for file in sorted(RESULTS.glob("models-*.json")):
        for row in json.loads(file.read_text())["rows"]:
            if all(name in row for name in names):
                found.setdefault(row["case"], row)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `") and "ms" not in line]
    seen = 0
    for line in lines:
        case, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        measured = found.get(case.strip("`"))
        if measured is not None:
            seen += 1
            assert 0.5 <= measured["apply_s"] <= 2, "the sentence above the table"
            assert [float(c) for c in cells] == [round(measured[n], 1) for n in names], case
    assert seen >= 5
    words = " ".join(text.split())
    assert (
        f"half a second to two (SDXL {found['sdxl-unet channels-last']['apply_s']:.1f} s)" in words
    )
    ltx = found["ltx-video 49 frames"]
    eager, compiled, patched, graphs = (f"{ltx[n.replace('_ms', '_queued_ms')]:.1f}" for n in names)
    assert f"{eager} ms, {compiled} compiled, {patched} patched and {graphs} with graphs" in words
    with_flash3 = json.loads((RESULTS / "models-h100-03-flash3.json").read_text())["rows"]
    _, wan = ([f"{row['eager_ms']:.1f}", f"{row['patched_ms']:.1f}"] for row in with_flash3)
    assert f"Wan's step goes from {wan[0]} to {wan[1]}." in words
    pipeline = json.loads((RESULTS / "pipeline-h100.json").read_text())["rows"]
    total = {row["variant"]: f"{row['seconds']:.2f}" for row in pipeline}
    assert f"takes {total['kernels']} s of {total['eager']}." in words
