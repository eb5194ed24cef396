"""Results as tables that a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hfpatch.bench.peers import OURS, PEERS

Row = dict[str, Any]

#: Times this close are the same; see issue and docs/performance.md.
NOISE = 0.03


def best_peer(times: dict[str, float]) -> float | None:
    """The shortest time that is not ours, or None without a peer."""
    return min((us for name, us in times.items() if name != OURS), default=None)


def speedup(times: dict[str, float]) -> float | None:
    """How many times faster ours is than the best peer."""
    best = best_peer(times)
    return None if best is None or OURS not in times else best / times[OURS]


def copy_of(row: Row) -> float:
    """Microseconds that a copy of as many bytes took in the same run; in results that have none,
    what it would take at the speed of a large copy."""
    us: float = row["copy_us"] if "copy_us" in row else row["floor_us"]
    return us


def show_ops(console: Console, rows: Sequence[Row], cache: str) -> None:
    """The rows of one op; `cache`: "cold" or "warm"."""
    key = f"{cache}_us"
    rows = [row for row in rows if row.get(key)]
    if not rows:
        return
    columns = [p for p in (*PEERS, OURS) if any(p in row[key] for row in rows)]
    floor = any("floor_us" in row for row in rows) and cache == "cold"
    title = f"{rows[0]['op']}, µs" + (f", {cache} cache" if floor or cache == "warm" else "")
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("shape")
    table.add_column("dtype")
    for name in (["copy"] if floor else []) + columns + (["of copy"] if floor else []):
        table.add_column(name, justify="right")
    table.add_column("× best peer", justify="right")
    for row in rows:
        times = row[key]
        cells = [f"{copy_of(row):.2f}"] if floor else []
        cells += [_cell(times, name, row) for name in columns]
        if floor:
            cells.append(f"{100 * copy_of(row) / times[OURS]:.0f} %")
        table.add_row(row["shape"], row["dtype"], *cells, _ratio(speedup(times)))
    console.print(table)
    for row in rows:
        for peer, why in row.get("failed", {}).items():
            console.print(f"[red]{peer}[/] failed on {row['shape']} {row['dtype']}: {why}")
    console.print()


def _cell(times: dict[str, float], name: str, row: Row) -> str:
    if name not in times:
        return "failed" if name in row.get("failed", {}) else ""
    text = f"{times[name]:.2f}"
    return f"[bold]{text}[/]" if times[name] == min(times.values()) else text


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    color = "green" if value >= 1 else "yellow" if value >= 1 - NOISE else "red"
    return f"[{color}]{value:.2f}×[/]"


def show_host(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="host µs of one call", title_justify="left", title_style="bold", box=None)
    table.add_column("call")
    table.add_column("µs", justify="right")
    table.add_column("of nn.RMSNorm", justify="right")
    of = {row["call"]: row["us"] for row in rows if "call" in row}
    reference = of["torch.nn.RMSNorm module"]
    for call, us in of.items():
        table.add_row(call, f"{us:.2f}", f"{us / reference:.2f}")
    console.print(table)
    ops = [row for row in rows if "op" in row]
    table = Table(title="\nhost µs by op", title_justify="left", title_style="bold", box=None)
    table.add_column("op")
    for name in ("eager formula", OURS, "eager / ours"):
        table.add_column(name, justify="right")
    for row in ops:
        eager, ours = row["eager_us"], row[f"{OURS}_us"]
        table.add_row(row["op"], f"{eager:.2f}", f"{ours:.2f}", _ratio(eager / ours))
    console.print(table)


def summary(console: Console, rows: Sequence[Row]) -> None:
    """How many rows win, and those that do not."""
    lost = []
    count = 0
    for row in rows:
        for cache in ("cold", "warm"):
            ratio = speedup(row.get(f"{cache}_us") or {})
            if ratio is None:
                continue
            count += 1
            if ratio < 1 - NOISE:
                lost.append((ratio, f"{row['op']} {row['shape']} {row['dtype']} {cache}"))
    won = count - len(lost)
    console.print(f"{won} of {count} at least as fast as the best peer (within {NOISE:.0%})")
    for ratio, name in sorted(lost):
        console.print(f"  [red]{ratio:.2f}×[/] {name}")
