"""Memory of a GPU that plain `generate` takes beside a model's weights: eager and patched.

    python benchmarks/decode_memory.py --output benchmarks/results/decode-memory-h200-1.json

Shapes of `decode.py`, random weights in bf16, each way in a process of its own: a text of 128
tokens and 272 more, twice. Of the second one, in bytes:

held: what the process has of the GPU while the text's cache is there, less the weights, the cache
    and what it had before the first text (PyTorch's context): buffers, graphs, their pools with
    all that lies unused in them, workspaces of libraries. `held_share` is its share of the weights.
peak: what PyTorch's allocator had given out at most, less the weights and the cache; what a
    graph works in is `held`, whether it runs or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, make, run

import hfpatch

TOKENS = 272


def measured(shape: str, rows: int, way: str) -> dict[str, Any]:
    """One way in this process."""
    model = make(shape, torch.bfloat16, "cuda")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.zeros(8, 8, device="cuda").matmul(torch.zeros(8, 8, device="cuda"))  # a handle of cuBLAS
    before, given = _taken(), torch.cuda.memory_allocated()
    if way == "patched":
        hfpatch.apply(model)
    for _ in range(2):
        out = None
        torch.cuda.reset_peak_memory_stats()
        _, out = run(model, rows, TOKENS, "cuda", return_dict_in_generate=True)
    peak = torch.cuda.max_memory_allocated() - given
    layers = out.past_key_values.layers
    tokens = out.past_key_values.get_seq_length()
    cache = sum(t[:, :, :tokens].numel() * t.element_size() for x in layers for t in _kept(x))
    # a look at keys and values makes layers plain: what is held is the next text's
    del layers, out
    _, out = run(model, rows, TOKENS, "cuda", return_dict_in_generate=True)
    held = _taken() - before - cache
    del out
    return {
        "model": shape, "rows": rows, "way": way, "weights_bytes": weights, "cache_bytes": cache,
        "held_bytes": held, "held_share": held / weights, "peak_bytes": peak - cache,
    }  # fmt: skip


def _kept(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _taken() -> int:
    """Bytes of the GPU that are not free, once PyTorch has given back what nobody uses."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8B", "1B", "0.6B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        shape, rows, way = args.here
        print(json.dumps(measured(shape, int(rows), way)))
        return
    from hfpatch.bench import results

    found = []
    for shape in args.models:
        for rows in args.rows:
            for way in ("eager", "patched"):
                found.append(_in_a_process(shape, rows, way))
                print(json.dumps(found[-1]), flush=True)
                if args.output is not None:
                    about = results.head("decode-memory", torch.device("cuda"), args.commit)
                    results.write(about | {"rows": found}, args.output)


def _in_a_process(shape: str, rows: int, way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--here", shape, str(rows), way]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"`{shape}` failed:\n{ran.stderr[-2000:]}")
    line: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return line


if __name__ == "__main__":
    main()
