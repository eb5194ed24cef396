"""The table of docs/blocks.md is what was measured, and nothing in it is slower than eager."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def measured(*names: str) -> dict[str, dict[str, float]]:
    """A case that was measured again stands with its later figures."""
    rows = {}
    for name in names:
        found = json.loads((ROOT / "benchmarks/results" / name).read_text("utf-8"))
        rows |= {r["case"]: r["ms"] for r in found["rows"]}
    return rows


@pytest.mark.parametrize(
    ("names", "ways"),
    [
        (
            ("captured-h200-3.json", "captured-h200-4.json"),
            ("eager", "leaves", "blocks", "graphs"),
        ),
        (
            ("captured-h100.json", "captured-h100-2.json"),
            ("eager", "leaves", "blocks", "graphs", "liger"),
        ),
    ],
    ids=["H200", "H100"],
)
def test_the_table_is_the_files(names: tuple[str, ...], ways: tuple[str, ...]) -> None:
    rows = measured(*names)
    page = (ROOT / "docs/blocks.md").read_text("utf-8")
    cells = r" ([\d.]+|–) \|" * len(ways)
    found = re.findall(rf"^\| ([^|]+) \|{cells}$", page, re.MULTILINE)
    assert {f[0] for f in found} == set(rows) and len(rows) == 18
    for case, *figures in found:
        ms = rows[case]
        assert figures == [f"{ms[w]:.2f}" if w in ms else "–" for w in ways], case
        assert max(ms["blocks"], ms["graphs"]) <= 1.03 * ms["eager"], case
