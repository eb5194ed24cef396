"""Every cell of docs/compatibility.md, and that the page says what is seen."""

from __future__ import annotations

import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import page
import pytest
from columns import COLUMNS
from harness import run_cell
from row import Row
from rows import ROWS

PAGE = page.PATH.read_text(encoding="utf-8") if page.PATH.exists() else ""
COMMITTED = page.parse(PAGE)


def _parameter(row: Row) -> Any:
    name = re.sub(r"\W+", "-", f"{row.group}: {row.title}").strip("-")
    return pytest.param(row, id=name, marks=[pytest.mark.slow] if row.thin or row.slow else [])


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", [_parameter(row) for row in ROWS])
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
