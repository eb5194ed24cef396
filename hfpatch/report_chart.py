"""A report as a bar chart, for notebooks and slides."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hfpatch.planning.plan import SKIP_KINDS, Plan

_SWAPPED = "#2a7f62"
#: By kind of skip, in the order of `SKIP_KINDS`: greys for what is wanted or no loss.
_COLORS = {
    "excluded": "#d9d9d9",
    "off": "#c4c4c4",
    "unavailable": "#e0a030",
    "no gain": "#aeb9c4",
    "unsupported": "#c9793a",
    "mismatch": "#8a6bb1",
    "unexplained": "#5b7fb8",
    "rejected": "#b33a3a",
    "foreign": "#6d6d6d",
}
_MOST_CLASSES = 24


def draw(plan: Plan, applied: bool, axes: Any = None) -> Any:
    """See `Report.plot`."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator
    except ImportError as e:
        raise ImportError("`report.plot()` needs matplotlib: `pip install matplotlib`") from e

    from hfpatch.report import headline_of

    swapped = Counter(s.class_name for s in plan.swaps)
    left = {
        kind: Counter(s.class_name for s in plan.skips if s.kind == kind) for kind in SKIP_KINDS
    }
    total = sum(left.values(), swapped.copy())
    names = [name for name, _ in total.most_common(_MOST_CLASSES)]
    if axes is None:
        size = (8, 1.6 + 0.32 * max(len(names), 1))
        _, axes = plt.subplots(figsize=size, dpi=120, layout="constrained")
    parts = [("swapped" if applied else "to swap", swapped, _SWAPPED)]
    parts += [(kind, counts, _COLORS[kind]) for kind, counts in left.items()]
    start = [0] * len(names)
    for label, counts, color in parts:
        widths = [counts[name] for name in names]
        if any(widths):  # no legend without a bar
            axes.barh(names, widths, left=start, label=label, color=color, height=0.7)
            start = [a + b for a, b in zip(start, widths, strict=True)]
    hidden = len(total) - len(names)
    axes.set_xlabel("modules" + (f" ({hidden} more classes are not shown)" if hidden else ""))
    axes.set_title(headline_of(plan, applied), fontsize=10, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if names:
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=9, loc="best")
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no module is of a class that hfpatch knows",
                  transform=axes.transAxes, ha="center", va="center")  # fmt: skip
    return axes
