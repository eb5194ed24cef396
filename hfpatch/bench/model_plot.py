"""The times of `hfpatch bench model` as a bar chart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.bench.output import require_writable

if TYPE_CHECKING:
    from hfpatch.bench.ways import Measured

_OURS, _OTHERS = "#2a7f62", "#aeb9c4"


def require_plot(path: Path) -> None:
    """See that the picture can be drawn and written, before what takes minutes.

    Raises:
        ValueError: matplotlib is missing, the suffix is of no picture, or nothing can be written.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: expected a name that ends in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ValueError("--plot needs matplotlib: pip install 'hfpatch[bench]'") from e
    try:
        require_writable(path)
    except OSError as e:
        raise ValueError(f"--plot {path}: {e}") from e


def draw(path: Path, title: str, found: dict[str, Measured]) -> None:
    """Wall time of each way, with the range of its rounds."""
    from matplotlib.figure import Figure

    timed = [m for m in found.values() if m.wall_ms]
    medians = [statistics.median(m.wall_ms) for m in timed]
    low = [median - min(m.wall_ms) for m, median in zip(timed, medians, strict=True)]
    high = [max(m.wall_ms) - median for m, median in zip(timed, medians, strict=True)]
    figure = Figure(figsize=(7, 1.4 + 0.45 * len(timed)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    names = [m.name for m in timed]
    colors = [_OURS if name in ("patched", "graphs") else _OTHERS for name in names]
    axes.barh(names, medians, xerr=[low, high], color=colors, height=0.6, capsize=3)
    for i, median in enumerate(medians):
        text = f" {median:.3g} ms" + ("" if not i else f" ({medians[0] / median:.2f}x)")
        axes.text(median + high[i], i, text, va="center")
    axes.set_xlim(0, 1.35 * max(m + h for m, h in zip(medians, high, strict=True)))
    axes.set_xlabel("ms of a call: median, and the range of the rounds")
    axes.set_title(title, fontsize=10, loc="left")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path)
