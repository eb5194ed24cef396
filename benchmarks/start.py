"""Seconds that `apply` takes in a process that has not called it before, and again.

    python benchmarks/start.py --output benchmarks/results/start-h200.json
    python benchmarks/start.py --only ltx-video qwen3-0.6b

Full sizes, random weights in bf16, each model in processes of its own, one after the other; torch
and the model's library are imported and the model has run once before, as in a program that
loads a model. Of the processes the least counts, and the first one of a model stands beside it: it
may find files that are not in the machine's memory yet. `import_s` is `import hfpatch`; `again_s`
an `apply` behind `restore` in the same process; `first_call_s` the first call behind the first
`apply`, with all that is made or captured in it, and `call_s` a later one.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]


def _diffusion(name: str) -> Case:
    import models

    return models.CASES[name]()


def _captured(name: str) -> Case:
    import captured

    model, inputs = captured.CASES[name]()
    return model, lambda m: m(**inputs)


def _text(shape: str) -> Case:
    import decode

    model = decode.make(shape, torch.bfloat16, DEVICE)
    return model, lambda m: decode.run(m, 1, 16, DEVICE)


CASES: dict[str, Callable[[], Case]] = {
    "ltx-video": functools.partial(_diffusion, "ltx-video 49 frames"),
    "wan-2.1-1.3b": functools.partial(_diffusion, "wan-2.1-1.3b 49 frames"),
    "flux.1-dev": functools.partial(_diffusion, "flux.1-dev 1024px"),
    "sdxl-unet": functools.partial(_diffusion, "sdxl-unet"),
    "llama-8b": functools.partial(_text, "8B"),
    "qwen3-0.6b": functools.partial(_text, "0.6B"),
    "bert-base": functools.partial(_captured, "bert-base 8x512"),
    "vit-l": functools.partial(_captured, "vit-l 16x224"),
}


def measured(name: str) -> dict[str, Any]:
    """One model in this process."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    imported, _ = _seconds(lambda: __import__("hfpatch"))
    import hfpatch

    model, call = CASES[name]()
    with torch.no_grad():
        call(model)
        applied, report = _seconds(lambda: hfpatch.apply(model))
        first, _ = _seconds(lambda: call(model))
        later = min(_seconds(lambda: call(model))[0] for _ in range(3))
        hfpatch.restore(model)
        again, _ = _seconds(lambda: hfpatch.apply(model))
    return {
        "import_s": imported, "apply_s": applied, "again_s": again, "first_call_s": first,
        "call_s": later, "swaps": len(report.swaps), "candidates": len(report.plan.candidates),
    }  # fmt: skip


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    start = time.perf_counter()
    result = call()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def in_processes(name: str, count: int) -> dict[str, Any]:
    """The least of several processes, and the first one's `apply`."""
    found = []
    for _ in range(count):
        ran = subprocess.run(
            [sys.executable, __file__, "--here", name], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            raise RuntimeError(f"`{name}` failed:\n{ran.stderr[-2000:]}")
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    least = {key: min(run[key] for run in found) for key in found[0]}
    return {"model": name, **least, "first_process_s": found[0]["apply_s"], "processes": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--here", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measured(args.here)))
        return
    from hfpatch.bench import results

    rows = []
    for name in args.only:
        rows.append(in_processes(name, args.processes))
        print(json.dumps(rows[-1]), flush=True)
        if args.output is not None:
            about = results.head("start", torch.device(DEVICE), args.commit)
            results.write(about | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
