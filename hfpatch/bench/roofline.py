"""The pictures of docs/performance.md: bytes per second by size, and of a copy of as many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfpatch.bench.page import cold, picture_title
from hfpatch.bench.peers import OURS, PEERS
from hfpatch.bench.show import copy_of

_COLORS = {
    "eager": "#9aa0a6",
    "torch": "#5f6368",
    "compile": "#f29900",
    "max-autotune": "#c26401",
    "liger": "#1a73e8",
    OURS: "#d93025",
}


def draw(path: Path, rows: Sequence[dict[str, Any]], mark: str) -> None:
    """Write one op's picture as SVG.

    Args:
        path: the file.
        rows: of one op and dtype.
        mark: written at the end of the file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError(
            "the pictures need matplotlib, which is not installed: pip install 'hfpatch[bench]'"
        ) from e
    # text as text, and the same file for the same numbers
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hfpatch", "font.size": 9})
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    points = sorted((row["bytes"], copy_of(row), cold(row)) for row in _distinct(rows))
    axes.plot(
        [size / 1e6 for size, _, _ in points],
        [size / copy / 1e6 for size, copy, _ in points],
        color="black",
        linestyle="--",
        linewidth=0.8,
        label="copy",
    )
    for name in (*PEERS, OURS):
        line = [
            (size / 1e6, size / (times[name] * 1e-6) / 1e12)
            for size, _, times in points
            if name in times
        ]
        if line:
            axes.plot(
                *zip(*line, strict=True),
                marker="o",
                markersize=3,
                linewidth=1.6 if name == OURS else 0.9,
                color=_COLORS[name],
                label=name,
            )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MB read and written")
    axes.set_ylabel("TB/s")
    axes.minorticks_off()
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_title(picture_title(rows), fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    path.write_text(f"{text}\n{mark}\n", encoding="utf-8")


def _distinct(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each size: the last, of those with as many bytes."""
    return list({row["bytes"]: row for row in rows}.values())
