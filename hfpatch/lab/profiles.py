"""A version's profile: counters of Nsight Compute, or a roofline; what limits it; the pages."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hfpatch.lab import bottleneck, ncu, worker
from hfpatch.lab.alone import counting
from hfpatch.lab.workspace import Lab, write_json


def profile(lab: Lab, n: int, seconds: float, roofline: bool) -> dict[str, Any]:
    """Profile version n and write its pages.

    Args:
        seconds: it is given up after so long.
        roofline: leave the counters alone.

    Raises:
        ToolMissing: Nsight Compute is missing, and no roofline was asked for.
        worker.Failed: the version did not run.
    """
    why = "there are no counters on a CPU" if lab.data["device"] == "cpu" else ""
    if roofline and not why:
        why = "--roofline asks for timings"
    found: dict[str, Any] = {}
    if not why:
        tool, version = ncu.find()
        try:
            found = _counted(lab, n, tool, seconds)
            found["tool"] = f"Nsight Compute {'.'.join(map(str, version))}, --clock-control none"
        except ncu.Unreadable as e:
            why = f"Nsight Compute could not read the counters: {e}"
    timed = worker.job(lab, "roofline", seconds, version=n)
    if why:
        limit = bottleneck.of_roofline(timed)
        found = {"source": "roofline", "why": why, "bottleneck": limit.as_data()}
    found = {"version": n, "sha256": lab.digest(n), **found, "roofline": timed}
    write_json(lab.folder(n) / "profile.json", found)
    for name, text in (("ncu_summary.md", summary(found)), ("ncu_details.md", details(found))):
        (lab.folder(n) / name).write_text(text, encoding="utf-8")
    return found


def _counted(lab: Lab, n: int, tool: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, result = Path(folder, "job.json"), Path(folder, "result.json")
        write_json(wanted, {"root": str(lab.root), "step": "call", "version": n})
        problem: ncu.Unreadable | None = None
        page = ""
        try:
            with counting():
                page = ncu.collect(
                    tool,
                    worker.command(wanted, result),
                    worker.environment(),
                    lab.folder(n) / "kernels",
                    seconds,
                )
        except ncu.Unreadable as e:
            problem = e
        if result.is_file():  # a version that fails says so itself
            worker.outcome_of(result, 0, "")
        if problem is not None:
            raise problem
    (lab.folder(n) / "ncu_raw.csv").write_text(page, encoding="utf-8")
    return of_page(page)


def of_page(page: str) -> dict[str, Any]:
    """What a CSV page comes to. Raises ncu.Unreadable where it has no kernel."""
    try:
        kernels = ncu.parse(page)
        kernel = ncu.longest(kernels)
    except ValueError as e:
        raise ncu.Unreadable(str(e)) from e
    return {
        "source": "counters",
        "why": "",
        "bottleneck": bottleneck.of_counters(kernel).as_data(),
        "kernel": kernel.name,
        "kernels": ncu.as_data(kernels),
    }


def summary(found: dict[str, Any]) -> str:
    """`ncu_summary.md`: what limits the version, and the numbers that say so."""
    limit, timed = found["bottleneck"], found["roofline"]
    lines = [
        f"# v{found['version']}: {limit['kind']}-bound"
        if limit["kind"] != "unknown"
        else f"# v{found['version']}: what limits it is not known",
        "",
        f"{limit['reason'][:1].upper()}{limit['reason'][1:]}.",
        "",
    ]
    if found["source"] == "counters":
        lines.append(f"From the hardware's counters ({found.get('tool', 'Nsight Compute')}).")
    else:
        lines.append(f"**A roofline from timings, no counters:** {found['why']}.")
    us = timed["us"]
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| time of a call, µs | {us['median']:.2f} ({us['low']:.2f} to {us['high']:.2f}) |",
        f"| moved, GB/s | {timed['GB/s']:.1f}, {timed['of copy']:.0%} of a copy's "
        f"{timed['copy GB/s']:.1f} |",
    ]
    if timed["of arithmetic"] is not None:
        lines.append(
            f"| computed, GFLOP/s | {timed['GFLOP/s']:.1f}, {timed['of arithmetic']:.0%} of a "
            f"product's {timed['product GFLOP/s']:.1f} |"
        )
    lines += [f"| {name} | {value:.4g} |" for name, value in limit["numbers"].items()]
    if found["source"] == "counters" and len(found["kernels"]) > 1:
        whole = sum(k["values"].get("time us", 0.0) for k in found["kernels"]) or 1.0
        lines += ["", "| kernel | µs | share |", "|---|---|---|"]
        for k in found["kernels"]:
            us_of = k["values"].get("time us", 0.0)
            lines.append(f"| `{_short(k['name'])}` | {us_of:.2f} | {us_of / whole:.0%} |")
    return "\n".join([*lines, ""])


def details(found: dict[str, Any]) -> str:
    """`ncu_details.md`: every value, by group, of each kernel."""
    lines = [f"# v{found['version']}: details", ""]
    if found["source"] != "counters":
        lines += [f"No counters: {found['why']}. What was timed:", "", "| | |", "|---|---|"]
        for name, value in found["roofline"].items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v:.4g}" for k, v in value.items())
            lines.append(f"| {name} | {value if value is not None else 'not known'} |")
        return "\n".join([*lines, ""])
    for kernel in found["kernels"]:
        lines += [f"## `{_short(kernel['name'])}`", ""]
        groups: dict[str, list[str]] = {}
        for name, value in kernel["values"].items():
            group = ncu.METRICS[name][0]
            groups.setdefault(group, []).append(f"| {name} | {value:.4g} |")
        for group, rows in groups.items():
            lines += [f"### {group}", "", "| | |", "|---|---|", *rows, ""]
        if kernel["stalls"]:
            lines += ["### warp stalls", "", "| reason | cycles an instruction |", "|---|---|"]
            stalls = sorted(kernel["stalls"].items(), key=lambda item: -item[1])
            lines += [*(f"| {name} | {value:.2f} |" for name, value in stalls), ""]
    return "\n".join(lines)


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."
