"""TRL's function of a head's product beside ours, which stands in for it on a CPU: forward and
backward of the mean log-probability (and entropy).

    python benchmarks/fused_heads.py --tokens 8192 --width 2048 --classes 128256

Milliseconds, least of `--rounds` in turns, and MiB of memory at most beside what is given, the
gradients among them (a GPU's; of a CPU only the time).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from hfpatch.losses import fused_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS = {
    "log-probabilities": ("log_probs",),
    "and entropy": ("log_probs", "entropy"),
    "and hits": ("log_probs", "is_top1"),
}


def ours(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, *settings: Any) -> Any:
    """What a stand-in does, with all that it looks at."""
    int(targets.min()), int(targets.max())
    found = fused_heads._ours(hidden, weight, bias, targets, *settings)
    bool(found[0].detach().isfinite().all())  # type: ignore[union-attr]
    return found


WAYS: dict[str, Callable[..., Any]] = {"TRL": ChunkedLogProbFunction.apply, "hfpatch": ours}


def once(way: str, given: tuple[Tensor, Tensor, Tensor], outputs: tuple[str, ...]) -> float:
    """Seconds of a forward and a backward."""
    hidden, weight, targets = given
    hidden.grad = weight.grad = None
    settings = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0)  # a trainer's own
    _wait()
    start = time.perf_counter()
    found = WAYS[way](hidden, weight, None, targets, *settings, outputs)
    loss = -found[0].float().mean()
    if "entropy" in outputs:
        loss = loss - 0.01 * found[1].float().mean()
    loss.backward()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    for dtype in args.dtypes:
        as_: dict[str, Any] = {"device": DEVICE, "dtype": getattr(torch, dtype)}
        hidden = torch.randn(args.tokens, args.width, **as_).requires_grad_()
        weight = (torch.randn(args.classes, args.width, **as_) / args.width**0.5).requires_grad_()
        given = hidden, weight, torch.randint(args.classes, (args.tokens,), device=DEVICE)
        for name, outputs in OUTPUTS.items():
            row: dict[str, Any] = {"dtype": dtype, "outputs": name}
            for way in WAYS:
                once(way, given, outputs)
                if DEVICE == "cuda":
                    hidden.grad = weight.grad = None
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    once(way, given, outputs)
                    row[f"{way}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            for _ in range(args.rounds):
                for way in WAYS:
                    ms = 1e3 * once(way, given, outputs)
                    row[f"{way}_ms"] = min(ms, row.get(f"{way}_ms", ms))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
