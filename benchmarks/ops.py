"""GPU and host time of each op against its peers: eager, torch's fused op, Liger, torch.compile.

    python benchmarks/ops.py --output benchmarks/results/ops-h100.json

GPU time is a CUDA-graph replay over buffers that rotate past twice the L2 cache; bandwidth counts
each input read once and each output written once, against a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfpatch
from hfpatch.bench.timing import gpu_microseconds, host_microseconds
from hfpatch.env import versions
from hfpatch.sources import local_package

SHAPES = [
    (1, 1024, 2048),
    (4, 1024, 2048),
    (2, 4096, 3072),
    (4, 4096, 3072),
    (1, 8064, 2048),
    (1, 4096, 8192),
    (1, 16384, 128),
    (8, 1, 4096),
    (1, 1, 2048),
    (1, 32768, 64),
    (1, 4096, 1000),
    (1, 4096, 5120),
    (1, 4096, 7168),
    (1, 2048, 16384),
    (1, 65536, 2048),
]
EXTRA_DTYPES = {
    torch.float32: [(4, 1024, 2048), (1, 4096, 8192)],
    torch.float16: [(4, 1024, 2048), (1, 4096, 8192)],
}


class LlamaNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def liger() -> dict[str, Callable[..., Tensor]]:
    """Liger's functions by op, empty when it is not installed."""
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "gated silu": lambda g, u: LigerSiLUMulFunction.apply(g, u),
        "gated gelu_tanh": lambda g, u: LigerGELUMulFunction.apply(g, u),
    }


def compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(fn, dynamic=False)


def eager_rms(x: Tensor, w: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * x.to(dtype)


def peers(k: Any) -> Iterator[tuple[str, int, dict[str, Callable[..., Tensor]], str]]:
    """(op, tensors moved in units of x, {peer: call(x, y, w, b)}, kind of shapes)."""
    lib = liger()

    def add(
        calls: dict[str, Callable[..., Tensor]], op: str, pick: Callable[..., Any]
    ) -> dict[str, Callable[..., Tensor]]:
        if op in lib:
            calls["liger"] = lambda x, y, w, b: lib[op](*pick(x, y, w, b))
        return calls

    yield (
        "rms_norm",
        2,
        add(
            {
                "hfpatch": lambda x, y, w, b: k.rms_norm(x, w, None, 1e-6, 0.0, "input"),
                "eager": lambda x, y, w, b: eager_rms(x, w),
                "torch": lambda x, y, w, b: F.rms_norm(x, w.shape, w, 1e-6),
                "compile": compiled(lambda x, y, w, b: eager_rms(x, w)),
            },
            "rms_norm",
            lambda x, y, w, b: (x, w),
        ),
        "norm",
    )
    yield (
        "layer_norm",
        2,
        add(
            {
                "hfpatch": lambda x, y, w, b: k.layer_norm(x, w, b, 1e-5),
                "torch": lambda x, y, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
                "compile": compiled(lambda x, y, w, b: F.layer_norm(x, w.shape, w, b, 1e-5)),
            },
            "layer_norm",
            lambda x, y, w, b: (x, w, b),
        ),
        "norm",
    )
    yield (
        "gelu",
        2,
        {
            "hfpatch": lambda x, y, w, b: k.gelu(x, "tanh"),
            "torch": lambda x, y, w, b: F.gelu(x, approximate="tanh"),
        },
        "few",
    )
    yield (
        "gelu erf",
        2,
        {
            "hfpatch": lambda x, y, w, b: k.gelu(x),
            "torch": lambda x, y, w, b: F.gelu(x),
        },
        "few",
    )
    yield (
        "silu",
        2,
        {
            "hfpatch": lambda x, y, w, b: k.silu(x),
            "torch": lambda x, y, w, b: F.silu(x),
        },
        "few",
    )
    yield (
        "gated silu",
        3,
        add(
            {
                "hfpatch": lambda x, y, w, b: k.gated(x, y, "silu"),
                "eager": lambda x, y, w, b: F.silu(x) * y,
                "compile": compiled(lambda x, y, w, b: F.silu(x) * y),
            },
            "gated silu",
            lambda x, y, w, b: (x, y),
        ),
        "few",
    )
    yield (
        "gated gelu_tanh",
        3,
        add(
            {
                "hfpatch": lambda x, y, w, b: k.gated(x, y, "gelu_tanh"),
                "eager": lambda x, y, w, b: F.gelu(x, approximate="tanh") * y,
                "compile": compiled(lambda x, y, w, b: F.gelu(x, approximate="tanh") * y),
            },
            "gated gelu_tanh",
            lambda x, y, w, b: (x, y),
        ),
        "few",
    )

    def packed(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return first * F.gelu(second)

    yield (
        "gated_packed gelu",
        3,
        {
            "hfpatch": lambda x, y, w, b: k.gated_packed(x, "gelu", False),
            "eager": lambda x, y, w, b: packed(x),
            "compile": compiled(lambda x, y, w, b: packed(x)),
        },
        "few",
    )


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read and written."""
    a = torch.randn(2**28, device="cuda")
    b = torch.empty_like(a)
    ways = (lambda: b.copy_(a), lambda: torch.neg(a, out=b))
    best = min(gpu_microseconds([way], target_us=10000) for way in ways)
    return 2 * a.numel() * a.element_size() / (best * 1e-6)


def buffers(shape: tuple[int, ...], dtype: torch.dtype, packed: bool) -> list[tuple[Tensor, ...]]:
    """Input sets that together exceed twice the L2 cache."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    size = math.prod(shape) * dtype.itemsize
    n = max(2, min(64, math.ceil(2 * l2 / max(size, 1))))
    last = shape[-1] * (2 if packed else 1)
    sets = []
    for _ in range(n):
        x = torch.randn(*shape[:-1], last, device="cuda").to(dtype)
        w, b = (torch.randn(shape[-1], device="cuda").to(dtype) for _ in range(2))
        sets.append((x, torch.randn(*shape, device="cuda").to(dtype), w, b))
    return sets


def measure(only: list[str] | None, quick: bool) -> Iterator[dict[str, Any]]:
    from tqdm import tqdm

    # past the default of 8 shapes torch.compile gives up and runs eager: no peer at all
    torch._dynamo.config.recompile_limit = 1000
    copy = copy_bandwidth()
    module = local_package().module
    for op, moved, calls, kind in peers(module):
        if only and op not in only:
            continue
        shapes = SHAPES if kind == "norm" else [SHAPES[i] for i in (0, 1, 3, 4, 6, 7, 11)]
        if quick:
            shapes = shapes[:4]
        cases = [(s, torch.bfloat16) for s in shapes]
        if kind == "norm" and not quick:
            cases += [(s, t) for t, extra in EXTRA_DTYPES.items() for s in extra]
        for shape, dtype in tqdm(cases, desc=op):
            sets = buffers(shape, dtype, "packed" in op)
            row: dict[str, Any] = {"op": op, "shape": list(shape), "dtype": str(dtype)[6:]}
            bytes_moved = moved * math.prod(shape) * dtype.itemsize
            row["floor_us"] = bytes_moved / copy * 1e6
            for name, call in calls.items():
                with torch.no_grad():
                    row[name] = gpu_microseconds([lambda s=s, c=call: c(*s) for s in sets])
            row["bandwidth"] = row["floor_us"] / row["hfpatch"]
            yield row
            del sets


def host_times() -> dict[str, float]:
    """Host microseconds of one call of a small norm: module, patched module, op."""
    x = torch.randn(8, 1, 2048, device="cuda", dtype=torch.bfloat16)
    fused = nn.RMSNorm(2048, device="cuda", dtype=torch.bfloat16)
    model = nn.Sequential(LlamaNorm(2048).to("cuda", torch.bfloat16))
    plain = LlamaNorm(2048).to("cuda", torch.bfloat16)
    hfpatch.register("LlamaNorm", family="norm")
    assert len(hfpatch.apply(model).swaps) == 1
    k = local_package().module
    raw, out = k.ops.rms_norm.default, torch.empty_like(x)
    w = fused.weight.detach()
    with torch.no_grad():
        return {
            "eager LlamaRMSNorm module": host_microseconds(lambda: plain(x)),
            "torch.nn.RMSNorm module": host_microseconds(lambda: fused(x)),
            "patched LlamaRMSNorm module": host_microseconds(lambda: model[0](x)),
            "F.rms_norm": host_microseconds(lambda: F.rms_norm(x, (2048,), w, 1e-6)),
            "hfpatch op": host_microseconds(lambda: raw(x, w, None, 1e-6, 0.0, 1)),
            "hfpatch op, out variant": host_microseconds(
                lambda: k.ops.rms_norm_out.default(out, x, w, None, 1e-6, 0.0, 1)
            ),
            "x * x": host_microseconds(lambda: x * x),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit")
    args = parser.parse_args()
    rows = list(measure(args.only, args.quick))
    for row in rows:
        numbers = "  ".join(f"{k}={v:.2f}" for k, v in row.items() if isinstance(v, float))
        print(f"{row['op']:18} {'x'.join(map(str, row['shape'])):14} {row['dtype']:9} {numbers}")
    host = host_times()
    for name, us in host.items():
        print(f"host {name:30} {us:6.2f} us")
    head = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    result = {
        "suite": "ops",
        "device": torch.cuda.get_device_name(),
        "commit": head,
        "versions": versions() | {"cuda": torch.version.cuda or ""},
        "copy_bytes_per_s": copy_bandwidth(),
        "host_us": host,
        "rows": rows,
    }
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
