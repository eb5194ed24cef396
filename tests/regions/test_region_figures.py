"""The table of docs/blocks.md is what was measured, and nothing in it is slower than eager."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_the_file() -> None:
    measured = json.loads((ROOT / "benchmarks/results/captured-h100.json").read_text("utf-8"))
    page = (ROOT / "docs/blocks.md").read_text("utf-8")
    found = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M
    )
    rows = {r["case"]: r["ms"] for r in measured["rows"]}
    assert {f[0] for f in found} == set(rows) and len(rows) == 18
    for case, *figures in found:
        ways = ("eager", "leaves", "blocks", "graphs")
        assert figures == [f"{rows[case][w]:.2f}" for w in ways], case
        assert min(rows[case]["blocks"], rows[case]["graphs"]) <= 1.03 * rows[case]["eager"], case
