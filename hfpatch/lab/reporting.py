"""`lab report`: the best version, the way to it, and how it stands to the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpatch.lab import worker
from hfpatch.lab.problems import Refused
from hfpatch.lab.workspace import Lab, write_json

Found = dict[str, Any]


def report(lab: Lab, seconds: float) -> Found:
    """Time the best version and v0 beside the reference, and write the report's pages.

    Raises:
        Refused: v0 or the best version did not pass its check as it is.
    """
    best = lab.best()
    for n in {0, best}:
        lab.require_checked(n)
    try:
        measured = worker.job(lab, "report", seconds, versions=sorted({0, best}))
    except worker.Failed as e:
        raise Refused(f"the versions could not be timed: {e}") from e
    path = [_row(lab, n) for n in range(lab.last + 1)]
    found = {
        "best": best,
        "gain": measured["of v0"][f"v{best}"],
        "path": path,
        "iterations": lab.data["iterations"],
        "subject": lab.data["subject"]["name"],
        **measured,
    }
    picture = lab.root / "path.svg"
    found["picture"] = picture.name if _draw(picture, found) else None
    write_json(lab.root / "report.json", found)
    (lab.root / "final_report.md").write_text(_final(lab, found), encoding="utf-8")
    (lab.root / "benchmark.md").write_text(_benchmark(lab, found), encoding="utf-8")
    return found


def _row(lab: Lab, n: int) -> Found:
    """One version of the path."""
    hypothesis, record = lab.result(n, "hypothesis") or {}, lab.result(n, "record") or {}
    profile = lab.result(n, "profile") or {}
    checked = lab.result(n, "correctness") or {}
    return {
        "version": n,
        "from": hypothesis.get("from"),
        "change": hypothesis.get("change", "as it came"),
        "hypothesis": hypothesis.get("hypothesis", ""),
        "rationale": hypothesis.get("rationale", ""),
        "expected": hypothesis.get("expected", ""),
        "passed": checked.get("passed"),
        "outcome": record.get("outcome", "" if n == 0 else "not recorded"),
        "note": record.get("note", ""),
        "gain": record.get("gain"),
        "gain of v0": lab.gain(n),
        "bottleneck": profile.get("bottleneck", {}).get("kind"),
        "source": profile.get("source"),
        "us": profile.get("roofline", {}).get("us", {}).get("median"),
    }


def _final(lab: Lab, found: Found) -> str:
    best, gain = found["best"], found["gain"]
    subject = lab.data["subject"]
    head = (
        f"v{best} is {gain:.2f} times as fast as v0."
        if best
        else "No version was faster than v0 beyond noise."
    )
    recorded = [r for r in found["path"] if r["version"] and r["outcome"] != "not recorded"]
    counts = {
        o: sum(r["outcome"] == o for r in recorded) for o in ("success", "failure", "neutral")
    }
    lines = [
        f"# {subject['name']}: v{best}",
        "",
        head,
        f"{len(recorded)} of {found['iterations']} iterations: {counts['success']} won, "
        f"{counts['failure']} lost, {counts['neutral']} made no difference beyond noise.",
        "",
        f"The best version: `v{best}/{subject['file']}`. Times beside the reference: "
        "[benchmark.md](benchmark.md).",
        "",
        "## The way",
        "",
    ]
    if found["picture"]:
        lines += [f"![gain of each version over v0]({found['picture']})", ""]
    lines += [
        "| version | from | change | outcome | gain | over v0 | limited by |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["path"]:
        limit = r["bottleneck"] or "-"
        limit += " (timings)" if r["source"] == "roofline" else ""
        lines.append(
            f"| v{r['version']} | {'-' if r['from'] is None else 'v' + str(r['from'])} | "
            f"{r['change']} | {r['outcome'] or '-'} | {_times(r['gain'])} | "
            f"{_times(r['gain of v0'])} | {limit} |"
        )
    for r in found["path"][1:]:
        lines += [
            "",
            f"### v{r['version']}: {r['change']}",
            "",
            f"- Hypothesis: {r['hypothesis']}",
            f"- Rationale: {r['rationale']}",
            f"- Expected: {r['expected']}",
            f"- Outcome: {r['outcome']}{'' if r['gain'] is None else ', ' + _times(r['gain'])}",
        ]
        if r["note"]:
            lines.append(f"- {r['note']}")
    return "\n".join([*lines, ""])


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.3f}x"


def _benchmark(lab: Lab, found: Found) -> str:
    sizes = (lab.data["sizes"] or [{}])[0]
    said = ", ".join(f"{k}={v:g}" for k, v in sizes.items()) or "those of `setup`"
    lines = [
        f"# {lab.data['subject']['name']}, {lab.data['device']}: times in turns",
        "",
        f"Sizes: {said}. Microseconds of one call, median and quartiles; inputs come from memory. "
        + (
            "GPU time: by CUDA graphs where the kernel launches on the stream it is given, else by "
            "events around many calls."
            if lab.data["device"] == "cuda"
            else "By the clock."
        ),
        "",
        "| | µs | | of v0 |",
        "|---|---|---|---|",
    ]
    for name, t in found["times"].items():
        lines.append(
            f"| {name} | {t['median']:.2f} | {t['low']:.2f} to {t['high']:.2f} | "
            f"{found['of v0'][name]:.3f}x |"
        )
    lines += [f"| {name} | not measured: {why} | | |" for name, why in found["absent"].items()]
    return "\n".join([*lines, ""])


def _draw(path: Path, found: Found) -> bool:
    """The path as a picture; False where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hfpatch", "font.size": 9})
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    colors = {"success": "#188038", "failure": "#d93025", "neutral": "#9aa0a6", "": "#1a73e8"}
    gains = {r["version"]: r["gain of v0"] for r in found["path"]}
    for r in found["path"]:
        n, gain = r["version"], r["gain of v0"]
        color = colors.get(r["outcome"], "#9aa0a6")
        if gain is None:
            axes.plot([n], [1.0], marker="x", color=colors["failure"])
            continue
        if r["from"] is not None and gains.get(r["from"]) is not None:
            axes.plot([r["from"], n], [gains[r["from"]], gain], color=color, linewidth=0.9)
        axes.plot([n], [gain], marker="o", color=color, markersize=8 if n == found["best"] else 4)
    for name, gain in found["of v0"].items():
        if not name.startswith("v"):
            axes.axhline(gain, color="#5f6368", linewidth=0.7, linestyle="--")
            axes.text(len(gains) - 0.6, gain, name, fontsize=7, va="bottom", ha="right")
    axes.set_xticks(list(gains), [f"v{n}" for n in gains])
    axes.set_ylabel("speed, of v0")
    axes.set_ylim(bottom=0)
    axes.grid(True, axis="y", linewidth=0.3)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(f"{text}\n", encoding="utf-8")
    return True
