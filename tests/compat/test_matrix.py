"""Every cell of docs/compatibility.md, and that the page says what is seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import cpus
import page
import pytest
from columns import COLUMNS
from harness import run_cell
from row import Row
from rows import ROWS

PAGE = page.PATH.read_text(encoding="utf-8") if page.PATH.exists() else ""
COMMITTED = page.parse(PAGE)


#: Compiling them (a scan, the many layers of a UNet) takes several times as long as another model:
#: for `make test-all`.
_SLOW_TO_COMPILE = ("bamba", "sd15-unet")


def _often(number: int, row: Row) -> set[str]:
    """The columns that `make test` asks about a row: a denoiser, a causal model or another, in
    turns, of those for which there is such a thing; and what tests/cpus.py names. `make test-all`
    has every cell."""
    kinds: dict[str, list[str]] = {"denoiser": [], "causal": [], "other": []}
    for name, column in COLUMNS.items():
        if row.unless(column) is None and not (row.thin and name in _SLOW_TO_COMPILE):
            kinds[column.kind if column.kind in kinds else "other"].append(name)
    asked = [names for names in kinds.values() if names] or [list(COLUMNS)]
    names = asked[number % len(asked)]
    return {names[number // len(asked) % len(names)]}


def _id(row: Row, column: str) -> str:
    title = re.sub(r"\W+", "-", f"{row.group}: {row.title}").strip("-")
    return f"{title}-{column}"


def _cells() -> Iterator[Any]:
    for number, row in enumerate(ROWS):
        often = _often(number, row)
        for name in COLUMNS:
            marks = [pytest.mark.slow] if row.thin or row.slow else []
            if name not in often and not any(f"[{_id(row, name)}]" in t for t in cpus.SENSITIVE):
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(row, name, id=_id(row, name), marks=marks)


@pytest.mark.parametrize(("row", "column"), list(_cells()))
def test_cell(
    row: Row,
    column: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Any,
) -> None:
    cell = run_cell(row, COLUMNS[column], tmp_path)
    record_property("cell", (row.title, column, *astuple(cell)))
    if not request.config.getoption("--write-matrix", False):
        assert cell == COMMITTED.get((row.title, column)), (
            f"docs/compatibility.md says something else; write it with `{page.COMMAND}`"
        )


def test_titles_are_unique() -> None:
    titles = [row.title for row in ROWS]
    assert len(set(titles)) == len(titles)


def test_the_page_has_these_rows_and_nothing_else(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-matrix", False):
        pytest.skip("the page is being written")
    assert set(COMMITTED) == {(row.title, column) for row in ROWS for column in COLUMNS}
    assert page.render(ROWS, COMMITTED) == PAGE
