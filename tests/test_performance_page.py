"""docs/performance.md says what the committed measurements say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfpatch.bench.cases import CASES
from hfpatch.bench.inputs import takes_a_dtype
from hfpatch.bench.page import slug

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_is_generated_from_the_results() -> None:
    command = [sys.executable, "-m", "hfpatch", "bench", "--page", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == 0, "run `hfpatch bench --page` and commit docs"


#: On an H100 alone: the last run on an H200 was before they came.
ELSEWHERE = {
    "add", "mul", "scale", "cross_entropy_log_probs", "load_balancing_loss",
    "load_balancing_loss_backward", "gated_clamped silu",
}  # fmt: skip


def test_every_op_is_on_a_page() -> None:
    """With a table of times and a picture of its bandwidth."""
    h200, h100 = (
        (ROOT / "docs" / name).read_text(encoding="utf-8").partition("## Ops: GPU time")[2]
        .partition("\n## ")[0]
        for name in ("performance.md", "performance-h100.md")
    )  # fmt: skip
    left = [
        set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^Not measured.*: (.*)\.$", page, re.M))))
        for page in (h200, h100)
    ]
    assert left[0] == ELSEWHERE and not left[1] & ELSEWHERE
    for case in CASES:
        of_gpu = h100 if case.name in ELSEWHERE else h200
        name, rest = case.op, case.name[len(case.op) :]
        assert re.search(rf"^(### )?`{name}`{rest}:?$", of_gpu, re.MULTILINE), case.name
        if case.name not in ELSEWHERE:
            assert f"](images/{slug(case.name)}.svg)" in of_gpu, case.name


def test_rows_say_what_they_measured() -> None:
    """Each once in a run, and in fp32 what takes nothing else."""
    fp32 = {case.name for case in CASES if not takes_a_dtype(case.inputs)}
    assert "adamw_step" in fp32
    for file in RESULTS.glob("ops-*.json"):
        rows = json.loads(file.read_text())["rows"]
        names = [(row["op"], row["shape"], row["dtype"]) for row in rows]
        assert len(set(names)) == len(names), file.name
        assert {dtype for op, _, dtype in names if op in fp32} <= {"float32"}, file.name


def test_results_say_where_they_come_from() -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert result["device"], file.name
        assert len(result["commit"]) == 40
        assert result["versions"]["torch"]
        assert result["rows"]


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_the_tables_of_models_hold_measured_figures(page: str) -> None:
    """All ways of running a model, on the newest GPU."""
    names = ("eager_ms", "compiled_blocks_ms", "patched_ms", "graphs_ms")
    found = models_measured()
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    seen = 0
    for line in lines:
        case, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        measured = found.get(case.strip("`"))
        if measured is not None:
            seen += 1
            assert 0.5 <= measured["apply_s"] <= 2, "the sentence below the table"
            assert [float(c) for c in cells] == [round(measured[n], 1) for n in names], case
    assert seen == len(found)


def test_the_sentences_about_speed_hold_measured_figures() -> None:
    words = " ".join((ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    ltx = models_measured()["ltx-video 49 frames"]
    names = ("eager", "compiled", "patched", "graphs", "apply_and_compiled")
    eager, compiled, patched, graphs, both = (f"{ltx[f'{n}_queued_ms']:.1f}" for n in names)
    assert (
        f"{eager} ms, {compiled} compiled, {patched} patched, {both} with both and {graphs} with "
        "graphs" in words
    )
    pipeline = json.loads((RESULTS / "pipeline-h200.json").read_text())["rows"]
    total = {row["variant"]: f"{row['seconds']:.2f}" for row in pipeline}
    assert f"takes {total['kernels']} s of {total['eager']}, {total['compile']} compiled." in words
    usage = " ".join((ROOT / "docs" / "usage.md").read_text(encoding="utf-8").split())
    assert f"first call takes {ltx['apply_and_compile_s']:.0f} s instead of" in usage
    assert f"instead of {ltx['compile_s']:.0f} ([performance.md](performance.md))" in usage


def models_measured() -> dict[str, Any]:
    """The rows of benchmarks/models.py on an H200, by case."""
    files = sorted(RESULTS.glob("models-h200-*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return {row["case"]: row for row in rows}
