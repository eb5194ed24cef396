"""`hfpatch bench model`: what a model of the user's gains, and by which way to run it."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.bench.subjects import Subject
    from hfpatch.bench.ways import Measured

_DTYPES = ("float32", "float16", "bfloat16")
_WAYS = ("eager", "patched", "graphs", "compile", "blocks")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and inputs of which sizes; shared with `hfpatch profile`."""
    parser.add_argument(
        "model", help="a Hub id, a folder, a config.json, or FILE.py:function that returns one"
    )
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--subfolder", help="a part of a pipeline, e.g. transformer")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seq-len", type=int, help="tokens of a text")
    parser.add_argument("--new-tokens", type=int, help="time `generate`, with so many new tokens")
    parser.add_argument("--height", type=int, help="pixels; of a denoiser alone, rows of latents")
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--steps", type=int, help="of a pipeline; default 2")
    parser.add_argument("--threads", type=int, help="on the CPU; default: as torch has it")
    parser.add_argument("--json", action="store_true")


def model_parser() -> argparse.ArgumentParser:
    """The arguments behind `bench model`; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="hfpatch bench model",
        description="Time a model or a pipeline as it is, patched, as CUDA graphs, and under "
        "torch.compile, in turns, after outputs were compared.",
    )
    parser.set_defaults(suites=["model"])
    add_model_arguments(parser)
    parser.add_argument(
        "--ways", default="eager,patched", metavar="LIST", help=f"of {', '.join(_WAYS)}"
    )
    parser.add_argument("--iterations", type=int, default=3, help="rounds of turns; default 3")
    parser.add_argument("--warmup", type=int, default=2, help="calls before a turn; default 2")
    parser.add_argument("--min-speedup", type=float, metavar="X", help="exit status 1 below it")
    parser.add_argument("--max-launches", type=int, metavar="N", help="exit status 1 above it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture: .png, .svg or .pdf")
    return parser


def run_model(args: argparse.Namespace) -> int:
    """The command; returns the exit status: 1 if a way failed or a gate was missed.

    Raises:
        ValueError: an argument that cannot be; says what can.
    """
    ways = _checked(args)
    settle_device(args)
    if args.max_launches is not None and args.new_tokens is not None and args.device == "cpu":
        raise ValueError(
            f"--max-launches {args.max_launches}: decoding steps on a CPU are no operators to "
            "count; leave out --new-tokens to count those of a forward"
        )
    if args.plot:
        from hfpatch.bench.model_plot import require_plot

        require_plot(args.plot)
    from hfpatch.bench.subjects import load
    from hfpatch.bench.ways import measure

    subject = load(args)
    found, exact = measure(subject, ways, args.iterations, args.warmup)
    missed = _missed(args, found)
    failed = [m for m in found.values() if m.failed]
    if args.json:
        print(json.dumps(_as_data(args, subject, found, exact, missed), indent=2))
    else:
        print("\n".join(_table(args, subject, found, exact)))
        for line in missed:
            print(f"gate missed: {line}")
    if args.plot:
        from hfpatch.bench.model_plot import draw

        draw(args.plot, subject.title, found)
        if not args.json:
            print(f"wrote {args.plot}")
    return int(bool(missed or failed))


def settle_device(args: argparse.Namespace) -> None:
    """`args.device`, and torch's threads on a CPU.

    Raises:
        ValueError: it is not here.
    """
    import torch

    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device; measure on cpu instead")
    if args.device == "cpu" and args.threads is not None:
        torch.set_num_threads(args.threads)


def check_sizes(args: argparse.Namespace) -> None:
    """Raises ValueError: a size below 1."""
    at_least_one = ("iterations", "batch_size", "seq_len", "new_tokens", "height", "width",
                    "num_frames", "steps", "threads")  # fmt: skip
    for name in at_least_one:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")


def _checked(args: argparse.Namespace) -> list[str]:
    ways = [word.strip() for word in args.ways.split(",")]
    for way in ways:
        if way not in _WAYS:
            raise ValueError(f"--ways {args.ways}: `{way}` is none; expected {', '.join(_WAYS)}")
    check_sizes(args)
    if args.warmup < 0:
        raise ValueError(f"--warmup {args.warmup}: expected at least 0")
    if args.min_speedup is not None and not args.min_speedup > 0:
        raise ValueError(f"--min-speedup {args.min_speedup}: expected a ratio above 0")
    if args.max_launches is not None and args.max_launches < 0:
        raise ValueError(f"--max-launches {args.max_launches}: expected at least 0")
    for flag in ("min_speedup", "max_launches"):
        if getattr(args, flag) is not None and "patched" not in ways:
            raise ValueError(
                f"--{flag.replace('_', '-')} is a gate of `patched`, which --ways {args.ways} "
                "leaves out; add it"
            )
    return ways


def _missed(args: argparse.Namespace, found: dict[str, Measured]) -> list[str]:
    """The gates that `patched` does not pass, each as a line."""
    lines: list[str] = []
    patched = found.get("patched")
    if patched is None:
        return lines
    gain = patched.as_data(found["eager"]).get("speed-up")
    if args.min_speedup is not None and (gain is None or gain < args.min_speedup):
        got = "none, for it has no time" if gain is None else f"{gain:.3f}"
        lines.append(f"--min-speedup {args.min_speedup}: got {got}")
    count = patched.launches
    if args.max_launches is not None and (count is None or count > args.max_launches):
        got = "no count" if count is None else str(count)
        lines.append(f"--max-launches {args.max_launches}: got {got}")
    return lines


def _as_data(
    args: argparse.Namespace,
    subject: Subject,
    found: dict[str, Measured],
    exact: str,
    missed: list[str],
) -> dict[str, Any]:
    from hfpatch.env import versions

    rows = []
    for m in found.values():
        row = m.as_data(found["eager"])
        if m.wall_ms:
            seconds = statistics.median(m.wall_ms) / 1e3
            row["per second"] = subject.count / seconds
        rows.append(row)
    return {
        "model": subject.title,
        "class": type(subject.model).__name__,
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "inputs": subject.shapes,
        "unit": subject.unit,
        "launches": _counted(subject),
        "exact": exact or None,
        "rounds": args.iterations,
        "warmup": args.warmup,
        "ways": rows,
        "gates missed": missed,
        "versions": versions(),
    }


def _counted(subject: Subject) -> str:
    return "CUDA kernels" if subject.device.type == "cuda" else "ATen operators"


def _table(
    args: argparse.Namespace, subject: Subject, found: dict[str, Measured], exact: str
) -> list[str]:
    """A row per figure, a column per way: five ways fit on 100 columns."""
    dtype = str(subject.dtype).removeprefix("torch.")
    shapes = ", ".join(f"{k} {v}" for k, v in subject.shapes.items())
    lines = [
        f"{subject.title} ({type(subject.model).__name__}) in {dtype} on {subject.device}",
        f"inputs: {shapes}",
        f"{args.iterations} rounds in turns; medians, below them the least to the most",
        "",
    ]
    timed = [m for m in found.values() if not m.problem]
    rows: list[tuple[str, list[str]]] = [("", [m.name for m in timed])]

    def times(label: str, key: str) -> None:
        values = [getattr(m, key) for m in timed]
        if any(values):
            rows.append((label, [_number(statistics.median(v)) for v in values]))
            rows.append(("", [f"{_number(min(v))} to {_number(max(v))}" for v in values]))

    def one(label: str, cells: list[str]) -> None:
        if any(cells):
            rows.append((label, [cell or "-" for cell in cells]))

    data = [m.as_data(found["eager"]) for m in timed]
    times("wall ms", "wall_ms")
    gains = [f"{d['speed-up']:.2f}x" if "speed-up" in d else "" for d in data]
    one("of eager", gains)
    if any(gains):
        one("", ["within noise" if d.get("within noise") else "" for d in data])
    times("queued ms", "queued_ms")
    times("host ms", "host_ms")
    rate = [subject.count / (statistics.median(m.wall_ms) / 1e3) for m in timed]
    one(f"{subject.unit} per s", [_number(r) for r in rate])
    one("first call s", [f"{m.first_call_s:.2f}" for m in timed])
    one("apply s", ["" if m.apply_s is None else f"{m.apply_s:.2f}" for m in timed])
    one("modules swapped", ["" if m.swapped is None else str(m.swapped) for m in timed])
    one(_counted(subject), ["" if m.launches is None else str(m.launches) for m in timed])
    one("peak GiB", ["" if m.peak_bytes is None else f"{m.peak_bytes / 2**30:.3f}" for m in timed])
    one("from eager", ["" if m.from_eager is None else f"{m.from_eager:.1e}" for m in timed])
    if exact:
        one(f"from {exact}", ["" if m.from_exact is None else f"{m.from_exact:.1e}" for m in timed])
    width = max(len(label) for label, _ in rows)
    columns = [max(len(cells[i]) for _, cells in rows) for i in range(len(timed))]
    for label, cells in rows:
        shown = "  ".join(c.rjust(w) for c, w in zip(cells, columns, strict=True))
        lines.append(f"{label:{width}}  {shown}".rstrip())
    for m in found.values():
        if m.problem:
            lines.append(f"{m.name}: {'failed' if m.failed else 'unavailable'}: {m.problem}")
    return lines


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
