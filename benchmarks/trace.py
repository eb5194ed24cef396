"""Where a step's GPU time goes: kernels by total time, gaps, launches; eager, patched,
patched in a CUDA graph, or compiled.

python benchmarks/trace.py "ltx-video 49 frames" --mode patched
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from models import CASES

import hfpatch
from hfpatch.bench.timing import step_milliseconds


def table(call: Any, rows: int) -> str:
    """Kernels of one call by total GPU time, with the time between its first and last kernel."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type.name == "CUDA"]
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for e in kernels:
        name = re.sub(r"<.*", "", re.sub(r"^void ", "", e.name))[:70]
        if "nvjet" in name or "gemm" in name or "cutlass" in name:
            name = e.name[:70]
        total[name] += e.time_range.elapsed_us()
        count[name] += 1
    busy = sum(total.values())
    span = max(e.time_range.end for e in kernels) - min(e.time_range.start for e in kernels)
    lines = [f"{len(kernels)} launches, busy {busy / 1e3:.2f} ms, span {span / 1e3:.2f} ms"]
    lines += [
        f"{us / 1e3:9.3f} ms {us / busy:6.1%} {count[name]:5d}x {us / count[name]:8.1f} us  {name}"
        for name, us in total.most_common(rows)
    ]
    return "\n".join([*lines, "", *gaps(kernels)])


def gaps(kernels: list[Any], rows: int = 12) -> list[str]:
    """Where the GPU waits: idle time by the kernel that ends it, and over the step's tenths."""
    kernels = sorted(kernels, key=lambda e: e.time_range.start)
    start, end = kernels[0].time_range.start, kernels[-1].time_range.end
    idle: Counter[str] = Counter()
    count: Counter[str] = Counter()
    tenth = [0.0] * 10
    for before, after in pairwise(kernels):
        gap = max(0.0, after.time_range.start - before.time_range.end)
        name = re.sub(r"<.*", "", after.name)[:60]
        idle[name] += gap
        count[name] += 1
        at = (after.time_range.start - start) / (end - start)
        tenth[min(9, int(at * 10))] += gap
    return [
        "idle ms over the step's tenths: " + " ".join(f"{us / 1e3:.2f}" for us in tenth),
        *(
            f"{us / 1e3:9.3f} ms idle before {count[name]:5d}x {us / count[name]:6.1f} us  {name}"
            for name, us in idle.most_common(rows)
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument(
        "--mode", choices=["eager", "patched", "graphs", "compiled"], default="patched"
    )
    parser.add_argument("--rows", type=int, default=30)
    args = parser.parse_args()
    model, step = CASES[args.case]()
    fast: Any = model
    with torch.no_grad():
        if args.mode in ("patched", "graphs"):
            hfpatch.apply(model, cuda_graphs=args.mode == "graphs")
        elif args.mode == "compiled":
            fast = torch.compile(model, dynamic=False)
        ms = step_milliseconds(lambda: step(fast))
        print(f"{args.case}, {args.mode}: {ms:.2f} ms")
        print(table(lambda: step(fast), args.rows))


if __name__ == "__main__":
    main()
