"""What was done, for people (text, notebook HTML) and programs (JSON)."""

from __future__ import annotations

import html
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hfpatch.text import printable

if TYPE_CHECKING:
    from hfpatch.plan import Plan, Skip, Swap


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of `apply` or `status`. Printed, or bare in a REPL, it is a table; in a notebook
    HTML."""

    plan: Plan
    applied: bool = True

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """What was swapped, in the model's order."""
        return self.plan.swaps

    @property
    def skips(self) -> tuple[Skip, ...]:
        """What was nominated and left as it is, with the reason."""
        return self.plan.skips

    @property
    def notes(self) -> tuple[str, ...]:
        """What else the user should know, e.g. that no compiled kernel could be loaded."""
        return self.plan.notes

    def __str__(self) -> str:
        return as_text(self.plan, self.applied)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data: settings, versions, every swap and skip."""
        from hfpatch.env import versions

        return {
            "model": self.plan.model,
            "mode": self.plan.mode,
            "applied": self.applied,
            "seconds": self.plan.seconds,
            "swaps": [asdict(s) for s in self.swaps],
            "skips": [asdict(s) for s in self.skips],
            "notes": list(self.notes),
            "versions": versions(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _repr_html_(self) -> str:
        return as_html(self.plan, self.applied)


def _swap_rows(plan: Plan) -> list[tuple[str, ...]]:
    """class → formula → source → count → largest error of the probe."""
    groups: Counter[tuple[str, str, str]] = Counter()
    errors: dict[tuple[str, str, str], float] = {}
    for s in plan.swaps:
        key = (s.class_name, s.formula, s.source)
        groups[key] += 1
        errors[key] = max(errors.get(key, 0.0), s.max_rel_error)
    return [(*key, str(n), f"{errors[key]:.1e}") for key, n in groups.items()]


def _skip_rows(plan: Plan) -> list[tuple[str, ...]]:
    groups = Counter((s.class_name, s.kind, s.reason) for s in plan.skips)
    return [(name, kind, reason, str(n)) for (name, kind, reason), n in groups.items()]


_SWAP_COLUMNS = ("class", "kernel", "source", "count", "probe error")
_SKIP_COLUMNS = ("class", "left alone", "reason", "count")


def _headline(plan: Plan, applied: bool) -> str:
    verb = "swapped" if applied else "to swap"
    seconds = f" in {plan.seconds:.2f} s" if plan.seconds else ""
    return (
        f"{plan.model}: {len(plan.swaps)} {verb}, {len(plan.skips)} left alone "
        f"(mode={plan.mode}){seconds}"
    )


def as_text(plan: Plan, applied: bool) -> str:
    """The report as plain text, at most 110 columns wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hfpatch.env import version_line

    console = Console(width=110, no_color=True, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(Text(_headline(plan, applied)))
        for columns, rows in ((_SWAP_COLUMNS, _swap_rows(plan)), (_SKIP_COLUMNS, _skip_rows(plan))):
            if not rows:
                continue
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in columns:
                right = column in ("count", "probe error")
                table.add_column(column, justify="right" if right else "left", no_wrap=right)
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        for note in plan.notes:
            console.print(Text(f"note: {note}"))
        console.print(Text(version_line()))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    return printable(text, len(text))  # reasons may hold what somebody else's code said


def as_html(plan: Plan, applied: bool) -> str:
    """The report for a notebook."""
    from hfpatch.env import version_line

    def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        if not rows:
            return ""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    notes = "".join(f"<p><b>note:</b> {html.escape(n)}</p>" for n in plan.notes)
    return (
        f"<div><p><b>{html.escape(_headline(plan, applied))}</b></p>"
        f"{table(_SWAP_COLUMNS, _swap_rows(plan))}{table(_SKIP_COLUMNS, _skip_rows(plan))}{notes}"
        f"<p><small>{html.escape(version_line())}</small></p></div>"
    )
