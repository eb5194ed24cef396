"""Our attention beside what `hfpatch.attention` takes else, at shapes with and without masks.

python benchmarks/attention_masks.py --output benchmarks/results/attention-masks-h100.json

In turns; GPU time in CUDA graphs, host time of a call.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hfpatch import attention as attend
from hfpatch.bench import results
from hfpatch.bench.timing import Replay, host_times, interleaved

Tensor = torch.Tensor
BF16 = torch.bfloat16


class Case(NamedTuple):
    """q [batch, heads, queries, dim], k and v [batch, groups, keys, dim]; the mask's kind."""

    model: str
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    dim: int
    mask: str = ""
    causal: bool = False


CASES = (
    Case("bert pad", 8, 12, 12, 512, 512, 64, "pad"),
    Case("bert pad row", 8, 12, 12, 512, 512, 64, "pad1"),
    Case("bert pad float", 8, 12, 12, 512, 512, 64, "fpad"),
    Case("bert 32x128 pad", 32, 12, 12, 128, 128, 64, "pad"),
    Case("bert-l 16x384 pad", 16, 16, 16, 384, 384, 64, "pad"),
    Case("t5 256", 1, 64, 64, 256, 256, 64, "bias"),
    Case("t5 8x512", 8, 64, 64, 512, 512, 64, "bias"),
    Case("llama causal mask", 1, 32, 8, 2048, 2048, 128, "causal"),
    Case("llama leftpad 4x1024", 4, 32, 8, 1024, 1024, 128, "leftpad"),
    Case("llama 8x256 leftpad", 8, 32, 8, 256, 256, 128, "leftpad"),
    Case("llama window mask", 1, 32, 8, 4096, 4096, 128, "window"),
    Case("gemma2 causal", 1, 8, 4, 2048, 2048, 256, "causal"),
    Case("gemma3 is_causal", 1, 4, 1, 2048, 2048, 256, "", True),
    Case("gemma3 window", 1, 4, 1, 2048, 2048, 256, "window"),
    Case("gemma 8 is_causal", 1, 16, 16, 2048, 2048, 256, "", True),
    Case("d256 free", 2, 8, 8, 2048, 2048, 256),
    Case("modernbert local", 8, 12, 12, 512, 512, 64, "local"),
    Case("modernbert 2x4096", 2, 12, 12, 4096, 4096, 64, "local"),
    Case("ltx text", 2, 32, 32, 2688, 128, 64, "pad1"),
    Case("ltx text wide", 1, 32, 32, 8000, 256, 64, "fpad"),
    Case("wan text 512", 1, 12, 12, 8190, 512, 128),
    Case("vit", 16, 16, 16, 197, 197, 64),
    Case("clip", 8, 8, 8, 77, 77, 64, "", True),
    Case("whisper", 1, 20, 20, 1500, 1500, 64),
    Case("siglip", 16, 16, 16, 729, 729, 72),
    Case("siglip", 4, 16, 16, 729, 729, 72, "pad"),
    Case("swin", 256, 4, 4, 49, 49, 32, "bias"),
    Case("sam", 1, 12, 12, 4096, 4096, 64, "bias"),
    Case("qwen0.6 causal", 1, 16, 8, 2048, 2048, 128, "", True),
    Case("llama is_causal", 1, 32, 8, 2048, 2048, 128, "", True),
    Case("small causal", 1, 32, 8, 512, 512, 128, "", True),
)


def mask_of(case: Case) -> Tensor | None:
    """None, a bias, or what is seen: padding, causal, a window of a quarter, 64 on either side."""
    size = case.batch, 1, case.queries, case.keys
    if not case.mask:
        return None
    if case.mask == "bias":
        return torch.randn(1, case.heads, *size[2:], device="cuda", dtype=BF16)
    at = torch.arange(case.queries, device="cuda")[:, None] + case.keys - case.queries
    key = torch.arange(case.keys, device="cuda")[None]
    lengths = torch.linspace(0.6 * case.keys, case.keys, case.batch, device="cuda").long()
    padding = (key[None] < lengths[:, None, None])[:, None]
    if case.mask == "pad1":
        return padding
    if case.mask == "fpad":
        zero = torch.zeros(size, device="cuda", dtype=BF16)
        return zero.masked_fill(~padding, torch.finfo(BF16).min)
    if case.mask == "leftpad":
        return ((key <= at)[None] & (key[None] >= (case.keys - lengths)[:, None, None]))[:, None]
    seen = {
        "pad": padding,
        "causal": key <= at,
        "window": (key <= at) & (key > at - case.keys // 4),
        "local": (key - at).abs() < 64,
    }[case.mask]
    return seen.expand(size)


def measured(case: Case) -> dict[str, Any]:
    q = torch.randn(case.batch, case.queries, case.heads, case.dim, device="cuda", dtype=BF16)
    k, v = (
        torch.randn(case.batch, case.keys, case.groups, case.dim, device="cuda", dtype=BF16)
        for _ in range(2)
    )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = mask_of(case)
    operator = attend._own_kernel(q, k, v, mask)
    ours = partial(attend._own, operator, causal=case.causal, window=None, softcap=0.0)
    chosen = attend._choose(q, k, v, mask, case.causal, None, None, False)
    found: dict[str, Any] = {"case": case.model, **case._asdict()}
    found["chosen"] = getattr(getattr(chosen, "func", chosen), "__name__", "")
    calls = {n: partial(way, q, k, v, mask, None) for n, way in (("own", ours), ("chosen", chosen))}
    stream = torch.cuda.Stream()
    replays = {name: Replay([call], stream, 2000.0) for name, call in calls.items()}
    gpu, host = interleaved(replays), host_times(calls, calls=20, rounds=3)
    for name in calls:
        found |= {f"{name}_us": gpu[name], f"{name}_host_us": host[name]}
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, metavar="JSON")
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    args = parser.parse_args()
    result = results.head("attention masks", torch.device("cuda"), args.commit)
    result["rows"] = []
    for case in CASES:
        result["rows"].append(measured(case))
        print(result["rows"][-1], flush=True)
        if args.output:
            results.write(result, args.output)


if __name__ == "__main__":
    main()
