"""docs/compatibility.md from the cells, and the cells back from the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from columns import COLUMNS
from harness import ABSENT, ORIGINAL, PARTLY, PATCHED, Cell
from row import Row

PATH = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
COMMAND = "python -m pytest tests/compat --write-matrix"

#: What stands in a page that is being made for a cell whose test failed or did not run.
UNTESTED = "untested"
#: (row's title, column's name) -> cell
Cells = Mapping[tuple[str, str], Cell]

HEAD = f"""\
# What users do to a model

Every row is something that is done to a model, every column a model family. Each cell but those
marked n/a was run, on small models of the real classes with random weights, on the CPU: done before
`hfpatch.apply`, done after it, and each of these once more after `hfpatch.restore`. The result was
compared with the unpatched model to which the same was done (within the rounding noise of the
dtype; bit for bit where no kernel ran and after `restore`, unless inductor writes the code anew),
and the calls of kernels were counted.

| cell | meaning |
|---|---|
| {PATCHED} | the kernels run |
| {PARTLY} | some of them run; the other modules hand their calls to the original |
| {ORIGINAL} | no kernel runs: the calls are handed back to the original, which is correct and not \
faster |
| {ABSENT} | not run: there is no such thing for this family, or it is tested elsewhere |

Two words with a slash: done before `apply` / done after it. A number leads to the reason at the
end of the page.

This page is written by `{COMMAND}` from what the tests of
`tests/compat` see, and they fail where it says something else.
"""


def render(rows: Sequence[Row], cells: Cells) -> str:
    """The page; raises KeyError where a cell is missing."""
    reasons: dict[str, int] = {}
    out = [HEAD]
    for group in dict.fromkeys(r.group for r in rows):
        out += [f"\n## {group}\n", "| | " + " | ".join(c.title for c in COLUMNS.values()) + " |"]
        out.append("|---" * (len(COLUMNS) + 1) + "|")
        for row in rows:
            if row.group == group:
                shown = [_show(cells[row.title, name], reasons) for name in COLUMNS]
                out.append(f"| {row.title} | " + " | ".join(shown) + " |")
    out.append("\n## Reasons\n")
    out += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(out) + "\n"


def _show(cell: Cell, reasons: dict[str, int]) -> str:
    words = cell.before if cell.before == cell.after else f"{cell.before} / {cell.after}"
    if not cell.reason:
        return words
    number = reasons.setdefault(cell.reason, len(reasons) + 1)
    return f"{words} [{number}](#reasons)"


def parse(text: str) -> dict[tuple[str, str], Cell]:
    """The cells of a page."""
    tables, _, end = text.partition("\n## Reasons\n")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", end, re.MULTILINE))
    cells = {}
    for line in tables.partition("\n## ")[2].splitlines():
        parts = [p.strip() for p in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(parts) != len(COLUMNS) + 1 or not parts[0]:
            continue
        for name, shown in zip(COLUMNS, parts[1:], strict=True):
            words, _, link = shown.partition(" [")
            before, _, after = words.partition(" / ")
            reason = reasons[link.partition("]")[0]] if link else ""
            cells[parts[0], name] = Cell(before, after or before, reason)
    return cells
