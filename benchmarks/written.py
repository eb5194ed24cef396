"""Blocks that have a file of their own beside what a capture of the same blocks gives.

    python benchmarks/written.py --output benchmarks/results/written-h200-2.json
    python benchmarks/written.py --only wan sana
    python benchmarks/written.py --only ltx flux --compile

Models of `models.py` at full width, random weights in bf16, the large ones with few layers (`FEW`),
since all blocks of a class take as long: a step in eager mode, with
`hfpatch.apply` as it is, and with the files of transformer blocks out of reach, so that these
blocks are captured as those of any other model; with `--compile` each of the three once more in a
model that `torch.compile` has compiled, where fused blocks are operators. In turns, least of
`--rounds`, ms of a step that is waited for and of one among queued steps; `first_s`: seconds of
`apply`, compilation and three steps. `off` is how far a way's result is from eager's, the root
of the mean square beside eager's own; `why` says what kept blocks from being captured. A file whose
blocks are captured as fast (98 %) is one that can go.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import joint
import models
import torch

import hfpatch
from hfpatch.bench import results
from hfpatch.bench.timing import queued_milliseconds, step_milliseconds
from hfpatch.planning.families import BLOCKS, without_files
from hfpatch.regions import offer

#: A few layers of models whose weights would take long to draw. Mochi's last one is another kind.
FEW: dict[str, Callable[[], joint.Case]] = {
    "flux.2-dev 1024px": lambda: joint.flux2(layers=(2, 4)),
    "qwen-image 1024px": lambda: joint.qwen_image(layers=4),
    "hunyuan-video 33 frames": lambda: joint.hunyuan_video(layers=(2, 3)),
    "cogvideox-5b 49 frames": lambda: families.cogvideox(layers=3),
    "mochi-1 31 frames": lambda: families.mochi(layers=4),
    "ltx-2 121 frames": lambda: families.ltx2(layers=3),
    "sana-1.6b 1024px": lambda: families.sana(layers=4),
    "hunyuan-video-1.5 25 frames": lambda: families.hunyuan_video15(layers=3),
    "hunyuan-image-2.1 2048px": lambda: families.hunyuan_image(layers=(2, 3)),
}
CASES = {n: c for n, c in models.CASES.items() if "llama" not in n} | FEW


WAYS = ("eager", "written", "captured")
COMPILED = tuple(f"{way}_compiled" for way in WAYS)


@contextlib.contextmanager
def way(model: torch.nn.Module, name: str) -> Iterator[None]:
    captured = name.startswith("captured")
    if not name.startswith("eager"):
        with without_files() if captured else contextlib.nullcontext():
            hfpatch.apply(model, blocks=captured or "auto")
    if name in COMPILED:
        torch._dynamo.reset()
        model.compile(dynamic=False)
    try:
        yield
    finally:
        model._compiled_call_impl = None
        hfpatch.restore(model)


def measured(name: str, rounds: int, ways: tuple[str, ...] = WAYS) -> dict[str, Any]:
    model, step = CASES[name]()
    row: dict[str, Any] = {"case": name, "few_layers": name in FEW}
    out: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for turn in range(rounds):
            for each in ways:
                began = time.perf_counter()
                with way(model, each):
                    for _ in range(3):  # captures, packing, choices
                        found = step(model)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    if not turn:
                        row[f"{each}_first_s"] = time.perf_counter() - began
                        out[each] = _first(found).float().cpu()
                        row[f"{each}_blocks"] = _blocks(model)
                        if each.startswith("captured"):
                            row["why"] = _why(model)
                    for key, ms in (
                        (f"{each}_ms", step_milliseconds(lambda: step(model), warmup=1, steps=5)),
                        (
                            f"{each}_queued_ms",
                            queued_milliseconds(lambda: step(model), warmup=0, steps=5),
                        ),
                    ):
                        row[key] = min(ms, row.get(key, ms))
    scale = out["eager"].square().mean().sqrt()
    for each in ways[1:]:
        row[f"{each}_off"] = float((out[each] - out["eager"]).square().mean().sqrt() / scale)
    offer.forget()
    return row


def _first(found: Any) -> torch.Tensor:
    value = found[0] if isinstance(found, (tuple, list)) else found
    return value if isinstance(value, torch.Tensor) else value.sample


def _blocks(model: torch.nn.Module) -> int:
    """Swapped or captured blocks."""
    status = hfpatch.status(model)
    captured = sum(c.state == "fused" for c in status.plan.candidates)
    return captured + sum(s.class_name in BLOCKS for s in status.swaps)


def _why(model: torch.nn.Module) -> list[str]:
    """The states and reasons of what was to be captured, each once."""
    found = hfpatch.status(model).plan.candidates
    return sorted({f"{c.class_name}: {c.state} {c.reason}"[:240] for c in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="+", help="cases whose name holds one of these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="and each way compiled")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in CASES:
        if args.only and not any(o in name for o in args.only):
            continue
        try:
            rows.append(measured(name, args.rounds, WAYS + COMPILED if args.compile else WAYS))
        except Exception as e:  # a way that fails is a figure too
            rows.append({"case": name, "error": f"{type(e).__name__}: {e}"[:500]})
        print(json.dumps(rows[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if args.output is not None:
            about = results.head("written", torch.device("cuda"), args.commit)
            results.write(about | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
