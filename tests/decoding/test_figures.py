"""The table of docs/decoding.md is what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_the_short_tables_are_the_file(page: str) -> None:
    measured = json.loads((ROOT / "benchmarks/results/decode-h100-3.json").read_text("utf-8"))
    rows = {r["model"]: r for r in measured["rows"] if r["rows"] == 1}
    text = (ROOT / page).read_text("utf-8")
    found = re.findall(
        r"^\| \w+ ([\w.]+) \| ([\d.]+) \| ([\d.]+) \| \**([\d.]+)\** \|$", text, re.MULTILINE
    )
    assert len(found) == len(rows) == 3
    for model, *figures in found:
        exact = [rows[model][f"{name}_ms"] for name in ("eager", "compiled", "patched")]
        digits = [len(figure.partition(".")[2]) for figure in figures]
        assert [f"{x:.{n}f}" for x, n in zip(exact, digits, strict=True)] == figures, model
    seconds = sorted(row["compiled_first_s"] for row in rows.values())
    assert f"after {seconds[0]:.0f} to {seconds[-1]:.0f} s of compiling" in " ".join(text.split())


def test_the_table_is_the_file() -> None:
    measured = json.loads((ROOT / "benchmarks/results/decode-h100-3.json").read_text("utf-8"))
    page = (ROOT / "docs/decoding.md").read_text("utf-8")
    found = re.findall(
        r"^\| \w+ ([\w.]+), (\d+) \| (\S+) \| (\S*) ?\| (\S+) \| (\S+) \|$", page, re.MULTILINE
    )
    rows = {(r["model"], str(r["rows"])): r for r in measured["rows"]}
    assert len(found) == len(rows) == 6
    for model, count, *figures in found:
        row = rows[model, count]
        exact = [row.get(f"{name}_ms") for name in ("eager", "compiled", "patched", "gpu")]
        for figure, value in zip(figures, exact, strict=True):
            digits = len(figure.partition(".")[2])
            assert ("" if value is None else f"{value:.{digits}f}") == figure, (model, count)
