"""Microseconds of the decoding engine's step, for models' shapes with random weights.

python benchmarks/decoding/engine.py --output benchmarks/decoding/results/engine-h200.json
python benchmarks/decoding/engine.py --device cpu --threads 2 --models SmolLM2-135M

Beside each figure: the bytes that the step must read (weights and cache) at the speed at which the
device copies (CUDA) or adds up (CPU) memory.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from hfpatch.decoding import spec
from hfpatch.decoding.engine import Engine

#: layers, width, inner, heads, key heads, head_dim, vocabulary, tied, q/k norm
SHAPES = {
    "8B": (32, 4096, 14336, 32, 8, 128, 128256, False, False),
    "1B": (16, 2048, 8192, 32, 8, 64, 128256, True, False),
    "0.6B": (28, 1024, 3072, 16, 8, 128, 151936, True, True),
    "SmolLM2-135M": (30, 576, 1536, 9, 3, 64, 49152, True, False),
}


def model_of(name: str, dtype: torch.dtype, device: str) -> spec.Model:
    layers, width, inner, heads, key_heads, dim, vocab, tied, normed = SHAPES[name]

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[-1] ** -0.5)

    def norm(size: int) -> spec.Norm:
        return spec.Norm("rms", torch.ones(size, dtype=dtype, device=device))

    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    made = []
    for _ in range(layers):
        attention = spec.Attention(
            spec.Product(weight(heads * dim, width)),
            spec.Product(weight(key_heads * dim, width)),
            spec.Product(weight(key_heads * dim, width)),
            spec.Product(weight(width, heads * dim)),
            heads,
            key_heads,
            dim,
            dim**-0.5,
            q_norm=norm(dim) if normed else None,
            k_norm=norm(dim) if normed else None,
        )
        mlp = spec.Mlp(
            spec.Product(weight(inner, width)),
            spec.Product(weight(width, inner)),
            "silu",
            spec.Product(weight(inner, width)),
        )
        made.append(
            spec.Layer(attention, mlp, before_attention=norm(width), before_mlp=norm(width))
        )
    embedding = weight(vocab, width)
    head = spec.Product(embedding if tied else weight(vocab, width))
    return spec.Model(embedding, tuple(made), (spec.Rope(inv_freq, dim),), norm(width), head)


def bytes_of(model: spec.Model, rows: int, length: int) -> int:
    """What a step reads of weights and cache."""
    size = model.head.weight.numel()
    for layer in model.layers:
        a, mlp = layer.attention, layer.mlp
        assert mlp is not None and mlp.gate is not None
        products = (a.q, a.k, a.v, a.o, mlp.gate, mlp.up, mlp.down)
        size += sum(p.weight.numel() for p in products)
        size += 2 * rows * a.key_heads * length * a.head_dim
    return size * model.embedding.element_size()


def speed(device: str) -> float:
    """Bytes a second."""
    size = 1 << (32 if device == "cuda" else 28)
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x) if device == "cuda" else None
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        if y is not None:
            y.copy_(x)
            torch.cuda.synchronize()
        else:
            x.sum()
        best = min(best, time.perf_counter() - start)
    return size * (2 if y is not None else 1) / best


def measure(model: spec.Model, rows: int, length: int, package: Any, times: int) -> dict[str, Any]:
    """Median and least of a step; on CUDA also of its graph alone, and the host's time."""
    cuda = model.device.type == "cuda"
    engine = Engine(model, rows, package=package)
    cache = spec.CacheTable(length=length)
    for layer in model.layers:
        shape = (rows, layer.attention.key_heads, length + 8, layer.attention.head_dim)
        for kept in (cache.keys, cache.values):
            kept.append(torch.empty(shape, dtype=model.dtype, device=model.device).normal_())
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
    positions = torch.full_like(ids, length)
    vocab = model.head.weight.shape[0]
    logits = torch.empty(rows, 1, vocab, dtype=model.dtype, device=model.device)
    start = time.perf_counter()
    engine.step(ids, positions, cache, logits)
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    found, host = [], []
    for _ in range(times):
        start = time.perf_counter()
        if not cuda:
            engine.step(ids, positions, cache, logits)
            found.append((time.perf_counter() - start) * 1e6)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        engine.step(ids, positions, cache, logits)
        end.record()
        host.append((time.perf_counter() - start) * 1e6)
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    row: dict[str, Any] = {"us": sorted(found)[times // 2], "least_us": min(found)}
    if cuda:
        row["host_us"] = sorted(host)[times // 2]
        (graph,) = engine.graphs.made
        alone = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            alone.append(begin.elapsed_time(end) * 1e3)
        row["graph_us"] = sorted(alone)[times // 2]
    return row | {"first_call_ms": first * 1e3, "bytes": bytes_of(model, rows, length)}


def main(package: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--models", nargs="+", default=["0.6B", "1B", "8B"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 16])
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 1000, 8000, 32000])
    parser.add_argument("--row-lengths", nargs="+", type=int, default=[1000], help="of rows > 1")
    parser.add_argument("--times", type=int, default=15)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rate = speed(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} CPU threads"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "bytes_per_s": rate}
    result["steps"] = []
    print(f"{name}: {rate / 1e9:.0f} GB/s")
    for shape in args.models:
        for dtype in args.dtypes:
            model = model_of(shape, getattr(torch, dtype), args.device)
            cases = [(1, length) for length in args.lengths]
            several = [rows for rows in args.rows if rows > 1]
            cases += [(rows, length) for rows in several for length in args.row_lengths]
            for rows, length in cases:
                row = measure(model, rows, length, package, args.times)
                row |= {"model": shape, "dtype": dtype, "rows": rows, "length": length}
                row["floor_us"] = row["bytes"] / rate * 1e6
                result["steps"].append(row)
                times = f"{row['us']:.0f} us (least {row['least_us']:.0f}"
                times += f", graph {row.get('graph_us', 0):.0f}), host {row.get('host_us', 0):.0f}"
                print(f"{shape} {dtype} x{rows} length {length}: {times}", end=", ")
                print(f"floor {row['floor_us']:.0f}, first {row['first_call_ms']:.1f} ms")
            del model
    if args.output:
        args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
