"""Milliseconds a token of an engine outside of PyTorch, CTranslate2, beside plain `generate` of the
patched model: the same weights, the same prompt, in turns.

    python benchmarks/decode_engine.py --output benchmarks/results/decode-engine-h200-1.json

Shapes and lengths of `decode.py`, bf16 on a GPU (fp32 on a CPU), random weights, greedy; of each
length the median of five turns, then the difference: what the prompt costs is in neither. The
engine is given the model through its own converter for transformers. CTranslate2 4.8 asks for
`libcublas.so.12`; where only cuBLAS 13 is there, a link of that name makes it start.
`same_tokens` is how far both texts agree, of how many; with random weights logits lie close.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.converters import transformers as converters
from decode import LENGTHS, PROMPT, SHAPES, make, run, twin

import hfpatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Words:
    """A tokenizer that the converter can ask: each token is its number, as a word."""

    bos_token, eos_token, unk_token, pad_token = "<1>", "<2>", "<0>", "<0>"
    bos_token_id, eos_token_id, unk_token_id, pad_token_id = 1, 2, 0, 0

    def __init__(self, count: int) -> None:
        self._count = count

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(self._count)}


def converted(model: Any, folder: str, dtype: str) -> Any:
    """The engine, with the model's weights."""
    loader = converters._MODEL_LOADERS[type(model.config).__name__]
    with torch.no_grad():
        spec = loader(model, Words(model.config.vocab_size))
    spec.validate()
    spec.optimize(quantization=dtype)
    spec.save(folder)
    return ctranslate2.Generator(folder, device=DEVICE, compute_type=dtype)


def turn(engine: Any, prompts: list[list[str]], tokens: int) -> tuple[float, list[int]]:
    """Seconds of one text of each row, and the first row's tokens."""
    start = time.perf_counter()
    out = engine.generate_batch(
        prompts, max_batch_size=len(prompts), max_length=tokens, min_length=tokens, beam_size=1,
        sampling_topk=1, include_prompt_in_result=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    found = out[0].sequences_ids[0]
    if len(found) != tokens:
        raise RuntimeError(f"expected a text of {tokens} tokens, it ended after {len(found)}")
    return seconds, found


def measured(shape: str, rows: int) -> dict[str, Any]:
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    model = make(shape, getattr(torch, dtype), DEVICE)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (rows, PROMPT), generator=generator)
    prompts = [[f"<{i}>" for i in row] for row in ids.tolist()]
    short, long = LENGTHS["patched"]
    with tempfile.TemporaryDirectory() as folder:
        engine = converted(twin(model), folder, dtype)  # which it takes apart
        hfpatch.apply(model)
        ways: dict[str, Callable[[int], tuple[float, Any]]] = {
            "ctranslate2": lambda count: turn(engine, prompts, count),
            "patched": lambda count: run(model, rows, count, DEVICE),
        }
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for call in ways.values():
            call(long), call(short)
        for _ in range(5):
            for way, call in ways.items():
                seconds[way].append((call(short)[0], call(long)[0]))
        theirs, ours = turn(engine, prompts, short)[1], run(model, rows, short, DEVICE)[1]
    row: dict[str, Any] = {"model": shape, "rows": rows, "dtype": dtype}
    for way, turns in seconds.items():
        a, b = (statistics.median(t[i] for t in turns) for i in range(2))
        row[f"{way}_ms"] = 1e3 * (b - a) / (long - short)
        row[f"{way}_short_s"] = a
    both = list(zip(theirs, ours[0, PROMPT:].tolist(), strict=True))
    row["same_tokens"] = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    row["of"] = len(both)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["1B", "0.6B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    from hfpatch.bench import results

    rows = []
    for shape in args.models:
        for count in args.rows:
            rows.append(measured(shape, count))
            print(json.dumps(rows[-1]), flush=True)
            if args.output is not None:
                about = results.head("decode-engine", torch.device(DEVICE), args.commit)
                about["versions"]["ctranslate2"] = importlib.metadata.version("ctranslate2")
                results.write(about | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
