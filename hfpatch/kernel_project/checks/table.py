"""Runs every check and shows the result."""

from __future__ import annotations

from collections.abc import Sequence

from hfpatch.kernel_project.checks import library, loading, project, python, variants
from hfpatch.kernel_project.checks.row import Row
from hfpatch.kernel_project.project import Project


def check_project(found: Project, load: bool = True) -> list[Row]:
    """Check a project and the variants that were built of it.

    Args:
        found: the project.
        load: import the variants that fit this system, each in a process of its own.

    Returns:
        A row for each demand: of the project first, then of each variant.
    """
    rows = [*project.rows(found), *python.rows(found)]
    folders = found.variants()
    if not folders:
        rows.append(
            Row("build", "a variant is built", "there is none", "build it: `hfpatch kernel build`")
        )
    for folder in folders:
        rows += variants.rows(found, folder)
        rows += library.rows(found, folder)
        if load:
            rows += loading.rows(folder)
    return rows


def as_table(rows: Sequence[Row]) -> str:
    """The rows as text, and a last line that counts them."""
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    buffer = StringIO()
    console = Console(file=buffer, width=120, color_system=None)
    for where in dict.fromkeys(row.where for row in rows):
        table = Table(box=box.SIMPLE_HEAD, title=where, title_justify="left", expand=True)
        table.add_column("", width=4)
        table.add_column("demand", ratio=4)
        table.add_column("found", ratio=5)
        table.add_column("what to do", ratio=4)
        for row in rows:
            if row.where == where:
                mark = "pass" if row.passed else "FAIL"
                cells = (mark, row.what, row.problem or row.note, row.todo)
                table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
    failed = sum(not row.passed for row in rows)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())
    summary = (
        f"{len(rows)} checks, {failed} failed" if failed else f"{len(rows)} checks, all passed"
    )
    return f"{text}\n{summary}"
