"""What was done, for people (text, notebook HTML) and programs (JSON)."""

from __future__ import annotations

import html
import io
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hfpatch.text import printable, shown

if TYPE_CHECKING:
    from hfpatch.planning.plan import Candidate, Plan, Skip, Swap


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

    @property
    def headline(self) -> str:
        """The report in one line: the model, how many were swapped and left alone, the time."""
        return headline_of(self.plan, self.applied)

    def plot(self, axes: Any = None) -> Any:
        """A bar chart: of each class how many modules were swapped, and left alone by kind.

        Args:
            axes: matplotlib's, to draw on; None: those of a new figure.

        Returns:
            the axes; `report.plot().figure.savefig("report.png")` writes a file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from hfpatch.report_chart import draw

        return draw(self.plan, self.applied, axes)

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
            "planned_for": self.plan.planned_for,
            "proven": not self.plan.planned_for,
            "swaps": [asdict(s) for s in self.swaps],
            "candidates": [asdict(c) for c in self.plan.candidates],
            "skips": [asdict(s) for s in self.skips],
            "notes": list(self.notes),
            "times": [asdict(t) for t in self.plan.times],
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
    later = set()
    for s in plan.swaps:
        key = (s.class_name, s.formula, s.source)
        groups[key] += 1
        errors[key] = max(errors.get(key, 0.0), s.max_rel_error)
        if s.op == "decoding":
            later.add(key)
    return [
        (*key, str(n), "at first use" if key in later else f"{errors[key]:.1e}")
        for key, n in groups.items()
    ]


def _skip_rows(plan: Plan) -> list[tuple[str, ...]]:
    groups = Counter((s.class_name, s.kind, s.reason) for s in plan.skips)
    return [(name, kind, reason, str(n)) for (name, kind, reason), n in groups.items()]


def _candidate_rows(plan: Plan) -> list[tuple[str, ...]]:
    """class → what its fused calls run, or why there are none → count → error against a wider dtype
    beside the original's own."""
    groups = Counter(replace(c, path="") for c in plan.candidates)
    return [
        (
            c.class_name,
            _outcome(c),
            str(n),
            f"{c.error:.1e} ({c.original:.1e})" if c.state == "fused" else "",
        )
        for c, n in groups.items()
    ]


def _outcome(c: Candidate) -> str:
    if c.state == "left":
        return f"left to its parts: {c.reason}"
    if c.state != "fused":
        return c.state
    counted = Counter(c.found)
    found = ", ".join(f"{n} × {what}" if n > 1 else what for what, n in counted.items())
    return f"{c.before} operators → {c.after}: {found}"


def _time_rows(plan: Plan) -> list[tuple[str, ...]]:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    return [
        (t.class_name, t.op, t.call, str(t.modules), ms(t.original_ms), ms(t.patched_ms), t.kept)
        for t in plan.times
    ]


_CANDIDATE_COLUMNS = ("class", "block", "count", "error (original)")
_TIME_COLUMNS = ("class", "timed", "call", "count", "original ms", "patched ms", "kept")
_SWAP_COLUMNS = ("class", "kernel", "source", "count", "probe error")
_SKIP_COLUMNS = ("class", "left alone", "reason", "count")


def headline_of(plan: Plan, applied: bool) -> str:
    verb = "swapped" if applied else "to swap"
    seconds = f" in {plan.seconds:.2f} s" if plan.seconds else ""
    elsewhere = f", planned for {plan.planned_for}, not proven there" if plan.planned_for else ""
    return (
        f"{plan.model}: {len(plan.swaps)} {verb}, {len(plan.skips)} left alone "
        f"(mode={plan.mode}){seconds}{elsewhere}"
    )


def as_text(plan: Plan, applied: bool) -> str:
    """The report as plain text, at most 110 columns wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hfpatch.env import version_line

    # Not standard output's: on a terminal, or where FORCE_COLOR is set, titles would be bold, which
    # is escape sequences.
    console = Console(
        file=io.StringIO(),
        width=110,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(Text(headline_of(plan, applied)))
        for columns, rows in (
            (_SWAP_COLUMNS, _swap_rows(plan)),
            (_CANDIDATE_COLUMNS, _candidate_rows(plan)),
            (_TIME_COLUMNS, _time_rows(plan)),
            (_SKIP_COLUMNS, _skip_rows(plan)),
        ):
            if not rows:
                continue
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in columns:
                right = column in _NUMBERS
                table.add_column(column, justify="right" if right else "left", no_wrap=right)
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        for note in plan.notes:
            console.print(Text(f"note: {note}"))
        console.print(Text(version_line()))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    return shown(printable(text, len(text)))  # reasons may hold what somebody else's code said


# Written into each cell, since a notebook's own styles win over a sheet's; the colours suit light
# and dark pages.
_TABLE = "border-collapse:collapse;margin:0.4em 0 1em"
_HEAD = "padding:0.3em 0.9em 0.3em 0;border-bottom:2px solid rgba(128,128,128,0.55)"
_CELL = "padding:0.25em 0.9em 0.25em 0;border-bottom:1px solid rgba(128,128,128,0.25)"
_NUMBERS = ("count", "probe error", "error (original)", "original ms", "patched ms")
_GREEN, _SAND, _BLUE = "#2a7f62", "#b59b63", "#4f7cac"


def as_html(plan: Plan, applied: bool) -> str:
    """The report for a notebook."""
    from hfpatch.env import version_line

    def table(title: str, color: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        if not rows:
            return ""
        sides = ["right" if c in _NUMBERS else "left" for c in columns]
        head = "".join(
            f'<th style="text-align:{side};{_HEAD}">{html.escape(c)}</th>'
            for side, c in zip(sides, columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{side};vertical-align:top;{_CELL}">{_coded(c)}</td>'
                for side, c in zip(sides, row, strict=True)
            )
            + "</tr>"
            for row in rows
        )
        mark = f"border-left:4px solid {color};padding-left:0.5em"
        return (
            f'<p style="margin:0.9em 0 0.2em;{mark}"><b>{title}</b></p>'
            f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        )

    notes = "".join(f"<p><b>note:</b> {_coded(n)}</p>" for n in plan.notes)
    return (
        f"<div><p><b>{html.escape(headline_of(plan, applied))}</b></p>"
        f"{table('swapped' if applied else 'to swap', _GREEN, _SWAP_COLUMNS, _swap_rows(plan))}"
        f"{table('blocks', _GREEN, _CANDIDATE_COLUMNS, _candidate_rows(plan))}"
        f"{table('timed', _BLUE, _TIME_COLUMNS, _time_rows(plan))}"
        f"{table('left alone', _SAND, _SKIP_COLUMNS, _skip_rows(plan))}{notes}"
        f'<p style="opacity:0.7"><small>{html.escape(version_line())}</small></p></div>'
    )


def _coded(text: str) -> str:
    """Escaped, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
