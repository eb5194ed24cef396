"""Attention kernels at the models' shapes, in turns: GPU time, sustained, and host time of a call.

python benchmarks/attention.py --output benchmarks/results/attention-h100.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from hfpatch.bench import results
from hfpatch.bench.timing import Replay, host_times, interleaved
from hfpatch.blocks import flash3

Tensor = torch.Tensor
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """Attention of one kind of block: q of `length` tokens, k and v of `keys`."""

    model: str
    batch: int
    length: int
    heads: int
    dim: int
    keys: int


CASES = (
    Case("LTX-Video 49 frames", 2, 2688, 32, 64, 2688),
    Case("LTX-Video 161 frames", 2, 8064, 32, 64, 8064),
    Case("FLUX.1 1024px", 1, 4608, 24, 128, 4608),
    Case("Qwen-Image 1024px, 154 text tokens", 1, 4250, 24, 128, 4250),
    Case("SD3.5 medium 1024px", 2, 4429, 24, 64, 4429),
    Case("HunyuanVideo 33 frames", 1, 18416, 24, 128, 18416),
    Case("Wan 2.1 1.3B 49 frames", 1, 20280, 12, 128, 20280),
    Case("Wan 2.1 1.3B, text", 1, 20280, 12, 128, 512),
    Case("SDXL, 4096 tokens", 2, 4096, 10, 64, 4096),
    Case("SDXL, 1024 tokens", 2, 1024, 20, 64, 1024),
    Case("LTX-Video 49 frames, text", 2, 2688, 32, 64, 128),
    Case("LTX-Video 161 frames, text", 2, 8064, 32, 64, 128),
)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    run = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return run(q, k, v, None, False, 0.0, False, False)[0].transpose(1, 2)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v)[0].transpose(1, 2)


def ways() -> dict[str, Way]:
    """The kernels that are there; says of the others why they are not."""
    found: dict[str, Way] = {"cuDNN": cudnn, "PyTorch flash": flash}
    package = flash3.find()
    if package is not None and package.problem is None:
        found["FlashAttention-3"] = flash3.attention
    else:
        print("FlashAttention-3:", "not installed" if package is None else package.problem)
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as e:  # its compiler has many ways not to fit
        print("FlashAttention-4:", type(e).__name__, e)
    else:

        def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result: Any = flash_attn_func(q, k, v)
            return result[0] if isinstance(result, tuple) else result

        found["FlashAttention-4"] = flash4
    return found


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q and k as norms leave them, v a view of the packed product; all apart, with few keys."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q = draw(case.batch, case.length, case.heads, case.dim)
    k = draw(case.batch, case.keys, case.heads, case.dim)
    if case.keys != case.length:
        return q, k, torch.randn_like(k)
    return q, k, draw(case.batch, case.keys, 3, case.heads, case.dim)[:, :, 2]


def off(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """How far the first head of the first sample is from fp64, in the norm."""
    q, k, v = (t[0, :, 0].double() for t in (q, k, v))
    truth = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v
    return ((out[0, :, 0].double() - truth).norm() / truth.norm()).item()


def measure(case: Case, kernels: dict[str, Way], target_us: float) -> dict[str, Any]:
    """A row; a kernel that cannot do this is left out of it, with the reason."""
    row: dict[str, Any] = case._asdict() | {"error": {}, "failed": {}}
    tensors = inputs(case)
    stream = torch.cuda.Stream()
    replays: dict[str, Replay] = {}
    for name, way in kernels.items():
        try:
            row["error"][name] = off(way(*tensors), *tensors)
            replays[name] = Replay([lambda way=way: way(*tensors)], stream, target_us)
        except Exception as e:
            row["failed"][name] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    row["gpu_us"] = interleaved(replays)
    calls = {name: lambda way=kernels[name]: way(*tensors) for name in replays}
    row["host_us"] = host_times(calls, calls=20, rounds=3)
    return row


def table(rows: list[dict[str, Any]], kernels: dict[str, Way]) -> Table:
    shown = Table(title="attention, bf16, µs (host µs)", title_justify="left", box=None)
    shown.add_column("model")
    shown.add_column("B, S, H, D, keys")
    for name in kernels:
        shown.add_column(name, justify="right")
    for row in rows:
        shape = ", ".join(str(row[name]) for name in Case._fields[1:])
        cells = [
            f"{row['gpu_us'][name]:.1f} ({row['host_us'][name]:.0f})"
            if name in row["gpu_us"]
            else "failed"
            for name in kernels
        ]
        shown.add_row(row["model"], shape, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="JSON")
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument(
        "--sustain", type=float, default=20.0, metavar="MS", help="length of a turn; default 20"
    )
    args = parser.parse_args()
    kernels = ways()
    result = results.head("attention", torch.device("cuda"), args.commit)
    result |= {"dtype": "bfloat16", "rows": []}
    with torch.no_grad():
        for case in CASES:
            result["rows"].append(measure(case, kernels, args.sustain * 1e3))
            if args.output:  # after each, so that a run that is cut off keeps what it measured
                results.write(result, args.output)
    console = Console(width=140)
    console.print(table(result["rows"], kernels))
    for row in result["rows"]:
        for name, why in row["failed"].items():
            console.print(f"{name} failed on {row['model']}: {why}", markup=False)


if __name__ == "__main__":
    main()
