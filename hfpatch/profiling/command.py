"""`hfpatch profile`: the arguments, and what they run."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hfpatch.bench.model_command import add_model_arguments, check_sizes, settle_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For `hfpatch.cli`; imports nothing heavy."""
    add_model_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if need be")
    parser.add_argument("--max-syncs", type=int, metavar="N", help="exit status 1 above it")


def run_command(args: argparse.Namespace) -> int:
    """The command; returns the exit status: 1 if the patched model synchronizes too often.

    Raises:
        ValueError: an argument that cannot be; says what can.
    """
    check_sizes(args)
    if args.max_syncs is not None and args.max_syncs < 0:
        raise ValueError(f"--max-syncs {args.max_syncs}: expected at least 0")
    from hfpatch.bench.output import require_writable

    try:
        require_writable(args.out / "profile.json")
    except OSError as e:
        raise ValueError(f"--out {args.out}: {e}") from e
    words = _words(args)
    settle_device(args)
    data = _profiled(args, words)
    from hfpatch.profiling.pages import as_html, as_text

    (args.out / "profile.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = as_text(data)
    (args.out / "profile_report.txt").write_text(text, encoding="utf-8")
    (args.out / "profile.html").write_text(as_html(data), encoding="utf-8")
    print(json.dumps(data, indent=1) if args.json else f"{text}\nwrote {args.out}")
    count = sum(row["count"] for row in data["profiles"]["patched"]["syncs"])
    if args.max_syncs is not None and count > args.max_syncs:
        if not args.json:
            print(f"gate missed: --max-syncs {args.max_syncs}: got {count}")
            for row in data["profiles"]["patched"]["syncs"]:
                print(f"  {row['count']} x {row['operator']} at {row['at']}")
        return 1
    return 0


def _words(args: argparse.Namespace) -> str:
    """The model as the command named it, before it is located."""
    found = [str(args.model)] + (["--random-weights"] if args.random_weights else [])
    for name in ("dtype", "device", "subfolder", "batch_size", "seq_len", "new_tokens", "height",
                 "width", "num_frames", "steps"):  # fmt: skip
        value = getattr(args, name)
        if value is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*found, "--out", str(args.out)])


def _profiled(args: argparse.Namespace, words: str) -> dict[str, Any]:
    from torch import nn

    import hfpatch
    from hfpatch.bench.peaks import peaks
    from hfpatch.bench.subjects import load
    from hfpatch.profiling.record import record

    subject = load(args)
    cuda = subject.device.type == "cuda"
    plan = hfpatch.plan(subject.model)
    paths = [s.path for s in plan.swaps]
    parts = getattr(subject.model, "components", {})
    roots = [("", subject.model)] if isinstance(subject.model, nn.Module) else parts.items()
    every = {
        f"{root}.{path}".strip("."): module
        for root, model in roots
        if isinstance(model, nn.Module)
        for path, module in model.named_modules()
    }
    modules = [(path, every[path]) for path in paths if path in every]
    note = ""
    if args.new_tokens is not None and any(s.op == "decoding" for s in plan.swaps):
        modules = []  # a hook on a module would turn its decoding steps off
        note = (
            "Decoding steps in one call: modules are not timed apart, as a hook would turn them "
            "off; host synchronizations are those without them."
        )
    speed = peaks(subject.device, subject.dtype)
    before = record(subject.call, modules, cuda, args.out / "profile_trace_eager.json", speed)
    report = hfpatch.apply(subject.model)
    try:
        after = record(subject.call, modules, cuda, args.out / "profile_trace.json", speed)
    finally:
        hfpatch.restore(subject.model)
    return {
        "title": f"{subject.title} on {subject.device}: as it is and patched",
        "inputs": subject.shapes,
        "swapped": len(report.swaps),
        "note": note,
        "copy GB/s": speed[0] / 1e9,
        "product TFLOP/s": speed[1] / 1e12,
        "launched": "CUDA kernels" if cuda else "ATen operators",
        "profiles": {"eager": asdict(before), "patched": asdict(after)},
        "go on with": [
            f"nsys profile --trace=cuda,nvtx -o {args.out}/timeline hfpatch profile {words}",
            f"ncu --set full --nvtx --launch-count 50 -o {args.out}/kernels "
            f"hfpatch profile {words}",
        ],
    }
