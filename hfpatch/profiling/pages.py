"""A profile as a text and as a page."""

from __future__ import annotations

import html
from typing import Any

_MOST = 20
_NOTE = "One call each; the profiler's own time is in it, so take speed-ups from `bench model`."
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:.5em 0 2em}td,th{padding:.2em .8em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid #ddd}"
)
Table = tuple[str, list[list[str]]]


def tables(data: dict[str, Any]) -> list[Table]:
    """Titles with rows, the first of which are headings: what both forms show."""
    sides: dict[str, Any] = data["profiles"]
    names = list(sides)
    found: list[Table] = []
    head = ["", *names]
    rows = [head]
    rows.append(
        ["ms of the profiled call", *(f"{s['total_us'] / 1e3:.2f}" for s in sides.values())]
    )
    rows.append([data["launched"], *(str(s["launches"]) for s in sides.values())])
    rows.append(["gaps", *(str(int(s["gaps"]["count"])) for s in sides.values())])
    rows.append(["ms in gaps", *(f"{s['gaps']['us'] / 1e3:.2f}" for s in sides.values())])
    rows.append(
        [
            "host synchronizations",
            *(str(sum(r["count"] for r in s["syncs"])) for s in sides.values()),
        ]
    )
    found.append(("The call", rows))
    for name, side in sides.items():
        rows = [["", "calls", "ms", "share"]]
        rows += [
            [r["name"], str(r["calls"]), f"{r['us'] / 1e3:.3f}", f"{r['share']:.1%}"]
            for r in side["operators"][:_MOST]
        ]
        found.append((f"{data['launched']} by time, {name}", rows))
    for name, side in sides.items():
        rows = [["", "calls", "ms", "GB/s", "of a copy", "TFLOP/s", "of a product"]]
        for r in side["work"][:_MOST]:
            seconds = r["us"] * 1e-6
            rows.append([r["name"], str(r["calls"]), f"{r['us'] / 1e3:.3f}"])
            rows[-1] += [f"{r['bytes'] / seconds / 1e9:.1f}", f"{r['of copy']:.0%}"]
            rows[-1] += (
                [f"{r['flops'] / seconds / 1e12:.3g}", f"{r['of arithmetic']:.0%}"]
                if r["flops"]
                else ["-", "-"]
            )
        if len(rows) > 1:
            found.append((f"Share of memory and compute speed, {name}", rows))
    rows = [["", *(f"{n} {what}" for n in names for what in ("ms", "launches"))]]
    first = sides[names[-1]]["modules"]
    for path in sorted(first, key=lambda p: -sides[names[0]]["modules"].get(p, {"us": 0})["us"]):
        row = [path or "(the whole model)"]
        for side in sides.values():
            m = side["modules"].get(path)
            row += ["-", "-"] if m is None else [f"{m['us'] / 1e3:.3f}", str(int(m["launches"]))]
        rows.append(row)
    where = "of their kernels" if "CUDA" in data["launched"] else "in their forwards"
    if len(rows) > 1:
        found.append((f"Swapped modules, time {where}", rows[: 2 * _MOST]))
    for name, side in sides.items():
        rows = [["at", "operator", "count"]]
        for r in side["syncs"]:
            rows.append([r["at"], r["operator"], str(r["count"])])
            rows += [[f"  called at {line}", "", ""] for line in r["stack"][1:4]]
        if side["syncs"]:
            found.append((f"Host synchronizations, {name}", rows))
    return found


def as_text(data: dict[str, Any]) -> str:
    lines = [data["title"], _NOTE, *([data["note"]] if data["note"] else []), ""]
    for title, rows in tables(data):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [title, "-" * len(title)]
        lines += [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        lines.append("")
    return "\n".join([*lines, "To go on:", *(f"  {line}" for line in data["go on with"]), ""])


def as_html(data: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><meta charset='utf-8'>",
        f"<title>{html.escape(data['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(data['title'])}</h1><p>{_NOTE} {html.escape(data['note'])}</p>",
    ]
    for title, rows in tables(data):
        parts.append(f"<h2>{html.escape(title)}</h2><table>")
        for i, row in enumerate(rows):
            cell = "th" if i == 0 else "td"
            cells = "".join(f"<{cell}>{html.escape(c)}</{cell}>" for c in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table>")
    lines = html.escape("\n".join(data["go on with"]))
    return "\n".join([*parts, f"<h2>To go on</h2><pre>{lines}</pre>", ""])
