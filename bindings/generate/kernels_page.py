"""The ops in `docs/kernels.md` and `docs/usage.md`. The rest of both pages is written by hand."""

from __future__ import annotations

import re
import textwrap

from header import ROOT, Header
from section import between

PAGE = ROOT / "docs" / "kernels.md"
USAGE = ROOT / "docs" / "usage.md"
_START = "<!-- The table is written by `python bindings/generate`. -->\n"
_END = "<!-- End of the table. -->\n"
_LIST = "<!-- The list is written by `python bindings/generate`. -->\n"
_END_OF_LIST = "<!-- End of the list. -->\n"


def kernels(header: Header) -> str:
    """`docs/kernels.md` with the ops, their C functions and their schemas."""
    by_name = {f.op: f for f in header.ops}
    lines = ["", "| op | C function | schema |", "|---|---|---|"]
    lines += [f"| `{op}` | `{by_name[op].name}` | `{by_name[op].schema}` |" for op in header.rows]
    text = PAGE.read_text(encoding="utf-8")
    return between(PAGE.name, text, _START, _END, "\n".join([*lines, "", ""]))


def usage(header: Header) -> str:
    """`docs/usage.md` with the ops that `kernels=` takes: those with a formula."""
    files = sorted((ROOT / "hfpatch" / "ops").glob("*.py"))
    found = {n for f in files for n in re.findall(r'= Op\(\s*"(\w+)"', f.read_text("utf-8"))}
    named = ", ".join(f"`{op}`" for op in header.rows if op in found)
    lines = textwrap.fill(f"`kernels=` takes these ops by name: {named}.", 100) + "\n"
    return between(USAGE.name, USAGE.read_text(encoding="utf-8"), _LIST, _END_OF_LIST, lines)
