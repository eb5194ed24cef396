"""Milliseconds a token of plain `generate` at the shapes of real models: eager, compiled as
transformers does it for a static cache, and patched; and of the patched step's CUDA graph alone.

python benchmarks/decode.py --models 8B 1B 0.6B --rows 1 8 --output benchmarks/results/decode.json

Random weights, bf16 on a GPU. The ways run in turns, five times, as models of their own over the
same weights. Each turn is a short text and a long one; of each the median, then the difference:
what the prompt costs is in neither. The texts are compared up to where they part, and there the
original's two best logits: weights that are random lie close together. `…_first_s` is what a way's
first text took beyond the same text later: compiling, recording, judging. `engine_s` is what a text
takes longer whose step's engine is not there any more, its graph included. `beside_cache` is the
memory that a patched text holds beside its cache and the weights, as a share of the weights, and
`…_bytes` in all; what graphs take outside of PyTorch's allocator is `graphs_bytes`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import hfpatch
from hfpatch.bench import results as figures
from hfpatch.decoding import kept

PROMPT = 128
#: New tokens of the short text and of the long one: a slow way has few, a fast one enough that a
#: host's noise of some milliseconds is little to them.
LENGTHS = {"eager": (4, 20), "compiled": (16, 144), "patched": (16, 272)}
#: What `generate` is told beside that. transformers compiles the step where the cache is static.
SETTINGS: dict[str, dict[str, Any]] = {"compiled": {"cache_implementation": "static"}}
#: So many tokens of each way are compared.
COMPARED = 32
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


def twin(model: Any) -> Any:
    """Another model over the same weights."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def run(model: Any, rows: int, tokens: int, device: str, **settings: Any) -> tuple[float, Any]:
    """Seconds and result of one `generate` with these settings beside the plain ones."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (rows, PROMPT), generator=generator).to(device)
    start = _now(device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        **settings,
    )
    seconds = _now(device) - start
    length = (out.sequences if isinstance(out, dict) else out).shape[1] - PROMPT
    if length != tokens:
        raise RuntimeError(f"expected a text of {tokens} tokens, it ended after {length}")
    return seconds, out


def per_token(ways: dict[str, Any], rows: int, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds a token of each way: the median, and how far the turns spread around it.

    Args:
        ways: a model by the way's name.
    """
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(5):
        for way, model in ways.items():
            short, long = (
                run(model, rows, count, device, **SETTINGS.get(way, {}))[0]
                for count in LENGTHS[way]
            )
            seconds[way].append((short, long))
    taken: dict[str, dict[str, float]] = {}
    for way, turns in seconds.items():
        count = LENGTHS[way][1] - LENGTHS[way][0]
        short, long = (statistics.median(turn[i] for turn in turns) for i in range(2))
        each = [1e3 * (turn[1] - turn[0]) / count for turn in turns]
        taken[way] = {"ms": 1e3 * (long - short) / count, "spread_ms": max(each) - min(each)}
    return taken


def gpu_ms(model: Any, rows: int) -> float | None:
    """Milliseconds of a step's graph alone, one replay after the other; None on a CPU. Call it
    while the cache of the last text is alive, whose end the step writes to."""
    engine = kept.decoders[model].engines[rows, 1]
    if engine.graphs is None:
        return None
    graph = engine.graphs.made[0]  # which chooses no token and leaves the length as it is
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


def engine_seconds(model: Any, rows: int, device: str) -> float:
    """What a text takes longer that has to make its step's engine first."""
    engines = kept.decoders[model].engines
    found = []
    for _ in range(3):
        engines.pop((rows, 1))
        anew, again = (run(model, rows, 4, device)[0] for _ in range(2))
        found.append(anew - again)
    return min(found)


def beside_cache(model: Any, rows: int, base: tuple[int, int], device: str) -> dict[str, Any]:
    """Memory that a text of 128 tokens and 272 more holds, its prompt's graph included.

    Args:
        base: `in_use` before `apply`, when the weights were there.
    """
    if device != "cuda":
        return {}
    out = run(model, rows, 272, device, return_dict_in_generate=True)[1]
    allocated, outside = in_use()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    described = kept.decoders[model].described.model
    tokens = out.past_key_values.get_seq_length()
    cache = rows * tokens * described.cached_bytes
    held = allocated - base[0] - cache
    return {
        "weights_bytes": weights, "cache_bytes": cache, "beside_bytes": held,
        "beside_cache": held / weights, "graphs_bytes": outside - base[1],
    }  # fmt: skip


def in_use() -> tuple[int, int]:
    """Bytes: what PyTorch's allocator has given out, and what is in use beside its memory."""
    gc.collect()
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), whole - free - torch.cuda.memory_reserved()


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
    parser.add_argument(
        "--compiled-rows", nargs="*", type=int, default=[1], help="rows that are compiled as well"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with_logits = {"return_dict_in_generate": True, "output_logits": True}
    results: list[dict[str, Any]] = []
    for shape in args.models:
        gc.collect()  # the model before
        model = make(shape, getattr(torch, args.dtype), device)
        eager = twin(model)
        run(eager, 1, 4, device)  # what PyTorch allocates once
        base = in_use() if device == "cuda" else (0, 0)
        start = time.perf_counter()
        report = hfpatch.apply(model)
        seconds = time.perf_counter() - start
        assert report.swaps and report.swaps[0].op == "decoding", report
        for rows in args.rows:
            ways = {"eager": eager, "patched": model}
            first: dict[str, float] = {}
            if rows in args.compiled_rows:
                ways["compiled"] = twin(eager)
            for way, each in ways.items():
                # the long text first: a static cache is made for it, and compiled for its size
                warm = [
                    run(each, rows, count, device, **SETTINGS.get(way, {}))[0]
                    for count in (*LENGTHS[way][::-1], *LENGTHS[way])
                ]
                first[way] = warm[0] - warm[-1]
            taken = per_token(ways, rows, device)
            original = run(eager, rows, COMPARED, device, **with_logits)[1]
            last = run(model, rows, COMPARED, device, **with_logits)[1]
            row = {"model": shape, "rows": rows, "dtype": args.dtype}
            row |= {f"{way}_ms": figure["ms"] for way, figure in taken.items()}
            row |= {f"{way}_spread_ms": figure["spread_ms"] for way, figure in taken.items()}
            row |= {"gpu_ms": gpu_ms(model, rows), "apply_s": seconds}
            row |= {f"{way}_first_s": first[way] for way in ways if way != "eager"}
            row |= {"engine_s": engine_seconds(model, rows, device)}
            row |= parted(original, last)
            del original, last
            row |= beside_cache(model, rows, base, device)
            row["notes"] = list(hfpatch.status(model).notes)
            print(json.dumps(row), flush=True)
            results.append(row)
            if args.output:  # after each, for a run that is cut short
                about = figures.head("decoding", torch.device(device), args.commit)
                figures.write(about | {"prompt": PROMPT, "rows": results}, args.output)
            del ways
            torch.compiler.reset()
        del eager
        del model
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
