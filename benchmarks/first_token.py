"""Milliseconds to the first token of plain `generate`, eager and patched in turns, at the shapes of
real models; and of the patched prompt's CUDA graph alone.

python benchmarks/first_token.py --models 8B 0.6B --output benchmarks/results/first-token.json
python benchmarks/first_token.py --behind 1000 --tokens 16 64 256 --output turns.json

Random weights, bf16, prompts of 128 and 500 tokens, which with `--behind` are turns behind a cache
of so many. Medians of five, the first three calls left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, make
from transformers import DynamicCache

import hfpatch
from hfpatch.bench import results as figures
from hfpatch.decoding import kept


def seconds(model: Any, ids: torch.Tensor, behind: int = 0) -> float:
    """Of one `generate` of one token; the first `behind` ids are in the cache that it is given."""
    cache = DynamicCache(config=model.config)
    if behind:
        with torch.no_grad():
            model(ids[:, :behind], past_key_values=cache, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=0,
    )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def graph_ms(model: Any) -> float | None:
    """Of the last prompt's graph, replayed twenty times."""
    engines = list(kept.decoders[model].prompts.values())
    if not engines or engines[-1]._graph is None:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        engines[-1]._graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8B", "0.6B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 500])
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--behind", type=int, default=0, help="tokens in the cache before these")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for shape in args.models:
        model = make(shape, torch.bfloat16, device)
        for count in args.rows:
            for tokens in args.tokens:
                ids = torch.randint(3, 1000, (count, args.behind + tokens), device=device)
                times: dict[str, list[float]] = {"eager": [], "patched": []}
                first = 0.0
                for turn in range(2):
                    for name, taken in times.items():
                        hfpatch.restore(model)
                        if name == "patched":
                            hfpatch.apply(model)
                        warm = [seconds(model, ids, args.behind) for _ in range(3)]
                        if name == "patched" and turn == 0:
                            first = warm[0]
                        taken += [seconds(model, ids, args.behind) for _ in range(5)]
                row = {"model": shape, "rows": count, "tokens": tokens, "behind": args.behind}
                row |= {f"{k}_ms": 1e3 * statistics.median(v) for k, v in times.items()}
                alone = None if args.behind else graph_ms(model)
                row |= {"graph_ms": alone, "first_call_ms": 1e3 * first}
                row["notes"] = kept.notes(model)
                rows.append(row)
                print(json.dumps(row), flush=True)
        del model
    if args.output:
        about = figures.head("first_token", torch.device(device), args.commit)
        figures.write(about | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
