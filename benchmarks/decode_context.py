"""Milliseconds a token of plain `generate` behind long contexts, beside the time that the bytes of
weights and cache take at the speed of a copy.

python benchmarks/decode_context.py --models 8B 0.6B --contexts 8192 32768 --output FILE

Random weights, bf16, one row. The prompt is computed once; then texts of 16 and of 80 tokens go on
from its cache, in turns, three of each: the difference of the least ones, eager's and patched.
Bytes: the layers' and the head's weights, and the keys and values of all tokens, once each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, gpu_ms, make
from transformers import DynamicCache

import hfpatch
from hfpatch.bench import results as figures
from hfpatch.bench.timing import copy_bytes_per_second


class Text:
    """A text that goes on: its tokens and their cache."""

    def __init__(self, model: Any, tokens: int, device: str) -> None:
        self._model, self._device = model, device
        self.ids = torch.randint(3, 1000, (1, tokens), device=device)
        self.cache: Any = DynamicCache(config=model.config)
        with torch.no_grad():
            model(self.ids[:, :-1], past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def seconds(self, count: int) -> float:
        """Of `count` tokens more."""
        start, before = self._now(), self.ids.shape[1]
        self.ids = self._model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        seconds = self._now() - start
        if (length := self.ids.shape[1] - before) != count:
            raise RuntimeError(f"expected {count} tokens more, the text ended after {length}")
        return seconds

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def per_token(text: Text, counts: tuple[int, int]) -> float:
    """Milliseconds: the least of three texts of each length, then the difference."""
    text.seconds(4)
    least = [float("inf")] * 2
    for _ in range(3):
        for i, count in enumerate(counts):
            least[i] = min(least[i], text.seconds(count))
    return 1e3 * (least[1] - least[0]) / (counts[1] - counts[0])


def bytes_of(model: Any, text: Text) -> int:
    """What a step reads: all weights without the rows of the embedding, and the cache."""
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        del weights[embedding.weight.data_ptr()]
    return sum(weights.values()) + sum(
        t.nbytes for layer in text.cache.layers for t in (layer.keys, layer.values)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8B", "0.6B"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copy = copy_bytes_per_second() if device == "cuda" else None
    rows: list[dict[str, Any]] = []
    for shape in args.models:
        model = make(shape, torch.bfloat16, device)
        for tokens in args.contexts:
            row: dict[str, Any] = {"model": shape, "context": tokens}
            row["eager_ms"] = per_token(Text(model, tokens, device), (4, 12))
            hfpatch.apply(model)
            text = Text(model, tokens, device)
            row["patched_ms"] = per_token(text, (16, 80))
            row["gpu_ms"] = gpu_ms(model, 1)
            row["bytes"] = bytes_of(model, text)
            if copy is not None:
                row["bytes_at_copy_ms"] = 1e3 * row["bytes"] / copy
                row["share_of_copy"] = row["bytes_at_copy_ms"] / row["patched_ms"]
            row["notes"] = list(hfpatch.status(model).notes)
            print(json.dumps(row), flush=True)
            rows.append(row)
            hfpatch.restore(model)
            del text
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.output:
        about = figures.head("decoding context", torch.device(device), args.commit)
        figures.write(about | {"copy_bytes_per_s": copy, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
