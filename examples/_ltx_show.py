"""The comparison of LTX-Video's variants: one table, one JSON document, one bar chart."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _ltx_variants import Measurement
from _pictures import pixel_difference

from hfpatch.bench.spread import Gain

NO_CHART = "no bar chart: matplotlib is not installed; run `pip install 'hfpatch[examples]'`"
LEAST_BAR = 0.004  # of the longest: what is shorter cannot be seen
PARTS = {  # of a generation, in its order
    "prepare_seconds": ("before", "#b8b8b8"),
    "denoise_seconds": ("denoising", "#4477aa"),
    "decode_seconds": ("decoding", "#ddaa33"),
}


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def as_run(measured: Measurement, base: Measurement | None) -> dict[str, Any]:
    """One variant for the JSON; with `base`, what it is compared with, the differences from it."""
    generation = measured.generation
    run: dict[str, Any] = {
        "seconds": generation.seconds,
        "all_seconds": [run.seconds for run in measured.runs],
        "prepare_seconds": generation.prepare_seconds,
        "denoise_seconds": generation.denoise_seconds,
        "decode_seconds": generation.decode_seconds,
        "iterations_per_second": measured.iterations_per_second,
        "step_ms": measured.step_ms,
        "step_seconds": list(generation.steps),
        "apply_seconds": measured.apply_seconds,
        "first_step_seconds": measured.first_step_seconds,
        "peak_memory_gib": measured.peak_gib,
    }
    if measured.counts is not None:
        run |= {f"{name}_per_step": n for name, n in asdict(measured.counts).items()}
    if base is not None:
        reference = base.generation
        distance = (generation.latents - reference.latents).norm() / reference.latents.norm()
        run |= {
            "speed_up": reference.seconds / generation.seconds,
            "within_noise": gain_of(base, measured).within_noise,
            "step_speed_up": base.step_ms / measured.step_ms,
            "latents_relative_difference": distance.item(),
            **asdict(pixel_difference(reference.frames, generation.frames)),
        }
    if measured.report is not None:
        run["report"] = measured.report
    return run


def gain_of(base: Measurement, measured: Measurement) -> Gain:
    """How many times faster whole generations are."""
    times = [[run.seconds for run in m.runs] for m in (base, measured)]
    return Gain.of(*times)


def _cells(run: dict[str, Any]) -> dict[str, str | None]:
    """Column title → text; None where there is nothing to say."""

    def text(key: str, form: str) -> str | None:
        return None if run.get(key) is None else format(run[key], form)

    launches = text("launches_per_step", "d")
    return {
        "total s": text("seconds", ".2f"),
        "×": (text("speed_up", ".2f") or "") + ("~" if run.get("within_noise") else "") or None,
        "step ms": text("step_ms", ".1f"),
        "× step": text("step_speed_up", ".2f"),
        "decode s": text("decode_seconds", ".2f"),
        "first step s": text("first_step_seconds", ".2f"),
        "launches per step": launches,
        "operators per step": None if launches else text("operators_per_step", "d"),
        "peak GiB": text("peak_memory_gib", ".2f"),
        "latents differ": text("latents_relative_difference", ".1e"),
        "pixels differ": text("max_pixel_difference", "d"),
    }


def as_table(runs: dict[str, dict[str, Any]]) -> str:
    """All variants as text at most 118 columns wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = {name: _cells(run) for name, run in runs.items()}
    titles = [t for t in next(iter(cells.values())) if any(c[t] for c in cells.values())]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", min_width=max(map(len, title.split())))
    for name, row in cells.items():
        table.add_row(name, *(row[title] or "" for title in titles))
    console = Console(width=118, no_color=True, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def save_chart(runs: dict[str, dict[str, Any]], title: str, output: Path) -> Path:
    """A PNG: seconds end to end by their parts, and milliseconds of a step, a bar per variant."""
    from matplotlib.figure import Figure

    names = list(runs)
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(names)), dpi=120, layout="constrained")
    whole, step = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left = [0.0] * len(names)
    longest = max(run["seconds"] for run in runs.values())
    for key, (label, color) in PARTS.items():
        values = [runs[name][key] for name in names]
        if max(values) < LEAST_BAR * longest:
            label = None  # no legend without a bar
        bars = whole.barh(names, values, left=left, label=label, color=color, height=0.62)
        left = [a + b for a, b in zip(left, values, strict=True)]
    whole.bar_label(bars, labels=_labels(runs, "seconds", ".2f", "speed_up"), padding=4)
    whole.set_xlabel("seconds, end to end")
    bars = step.barh(names, [runs[n]["step_ms"] for n in names], color="#4477aa", height=0.62)
    step.bar_label(bars, labels=_labels(runs, "step_ms", ".1f", "step_speed_up"), padding=4)
    step.set_xlabel("milliseconds per denoising step (median)")
    step.tick_params(axis="y", length=0)
    whole.invert_yaxis()  # shared: the first variant on top
    for axes in (whole, step):
        axes.set_xlim(right=axes.get_xlim()[1] * 1.3)  # room for the labels
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="x", linewidth=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    figure.legend(
        *whole.get_legend_handles_labels(),
        loc="outside lower left", ncols=len(PARTS), frameon=False, fontsize=9,
    )  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def _labels(runs: dict[str, dict[str, Any]], key: str, form: str, factor: str) -> list[str]:
    return [
        f"{run[key]:{form}}" + (f" ({run[factor]:.2f}×)" if factor in run else "")
        for run in runs.values()
    ]
