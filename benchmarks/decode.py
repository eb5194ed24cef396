"""Milliseconds a token of plain `generate`, eager and patched, at the shapes of real models; and of
the patched step's CUDA graph alone.

python benchmarks/decode.py --models 8B 1B 0.6B --rows 1 8 --output benchmarks/results/decode.json

Random weights, bf16 on a GPU. Of each of two lengths the least of three runs, then the difference:
what the prompt costs is in neither. The texts are compared up to where they part, and there the
original's two best logits: weights that are random lie close together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import hfpatch
from hfpatch.bench import results as figures
from hfpatch.decoding import kept

PROMPT = 128
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "8B": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "1B": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "0.6B": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "135M": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
}


def make(name: str, dtype: torch.dtype, device: str) -> Any:
    """A model of that shape with random weights."""
    cls, config, sizes = SHAPES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(config(**sizes, max_position_embeddings=65536)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(model: Any, rows: int, tokens: int, device: str, logits: bool = False) -> tuple[float, Any]:
    """Seconds and result of one `generate`; with `logits`, a dictionary that has them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (rows, PROMPT), generator=generator).to(device)
    start = _now(device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=logits,
        output_logits=logits,
    )
    return _now(device) - start, out


def per_token(model: Any, rows: int, lengths: tuple[int, int], device: str) -> float:
    """Milliseconds a token: the least of three runs of each length, then the difference."""
    least = [min(run(model, rows, n, device)[0] for _ in range(3)) for n in lengths]
    return (least[1] - least[0]) / (lengths[1] - lengths[0]) * 1e3


def gpu_ms(model: Any, rows: int) -> float | None:
    """Milliseconds of a step's graph alone, one replay after the other; None on a CPU. Call it
    while the cache of the last text is alive, whose end the step writes to."""
    engine = kept.decoders[model].engines[rows, 1]
    if engine.graphs is None:
        return None
    graph = engine.graphs.made[-1]
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(50):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 50)
    return min(times)


def parted(eager: Any, patched: Any) -> dict[str, Any]:
    """How many tokens are the same in each row, and at the places where texts part by how much the
    original prefers its token, relative to the spread of its logits."""
    a, b = (t.sequences[:, PROMPT:] for t in (eager, patched))
    same = (a == b).long().cumprod(1).sum(1).tolist()
    gaps = []
    for row, count in enumerate(same):
        if count < a.shape[1]:
            logits = eager.logits[count][row].float()
            gap = logits[a[row, count]] - logits[b[row, count]]
            gaps.append(float(gap / logits.std()))
    return {"same_tokens": same, "of": a.shape[1], "gap_where_parted": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8B", "1B", "0.6B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: list[dict[str, Any]] = []
    for shape in args.models:
        model = make(shape, getattr(torch, args.dtype), device)
        eager: dict[int, tuple[float, Any]] = {}
        for rows in args.rows:
            run(model, rows, 3, device)
            eager[rows] = (
                per_token(model, rows, (4, 20), device),
                run(model, rows, 32, device, True)[1],
            )
        start = time.perf_counter()
        report = hfpatch.apply(model)
        seconds = time.perf_counter() - start
        assert report.swaps and report.swaps[0].op == "decoding", report
        for rows in args.rows:
            first = run(model, rows, 2, device)[0]
            ms = per_token(model, rows, (16, 80), device)
            last = run(model, rows, 32, device, True)[1]
            texts = parted(eager[rows][1], last)
            row = {"model": shape, "rows": rows, "dtype": args.dtype, "eager_ms": eager[rows][0]}
            row |= {"patched_ms": ms, "gpu_ms": gpu_ms(model, rows)}
            row |= {"apply_s": seconds, "first_generate_s": first, **texts}
            row["notes"] = list(hfpatch.status(model).notes)
            print(json.dumps(row), flush=True)
            results.append(row)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.output:
        about = figures.head("decoding", torch.device(device), args.commit)
        figures.write(about | {"prompt": PROMPT, "rows": results}, args.output)


if __name__ == "__main__":
    main()
