"""Products of 1 to 16 rows in CUDA graphs with programmatic dependent launch: errors and times.

python benchmarks/decoding/products.py --output benchmarks/decoding/results/products-h200.json

It compiles products.cu with nvcc (or takes --library), compares each kernel with fp64 on fresh
random data and a poisoned output, and times it in a chain over weights larger together than L2.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
STORE, RESIDUAL, GATED, NORM = 0, 1, 2, 3
SILU, GELU_TANH = 0, 1
STAGES = (4, 8, 12)  # of a warp's ring, as in products.cu
SHARED_BYTES = 227 << 10
STAGED_BYTES = 12 << 10  # x in shared memory up to this size, where it need not be for a norm

# name: (hidden, queries, keys (= values), intermediate, vocabulary, layers)
MODELS = {
    "8B": (4096, 4096, 1024, 14336, 128256, 32),
    "1B": (2048, 2048, 512, 8192, 128256, 16),
    "0.6B": (1024, 2048, 1024, 3072, 151936, 28),
}


class Product(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p * 3),
        ("bias", ctypes.c_void_p * 3),
        ("end", ctypes.c_int * 3),
        ("columns", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        ("round_normed", ctypes.c_int),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_columns", ctypes.c_int),
        ("activation", ctypes.c_int),
    ]


def build() -> Path:
    """Compile products.cu for this machine's GPU; the path of the library."""
    major, minor = torch.cuda.get_device_capability()
    target = f"{major}{minor}{'a' if major == 9 else ''}"
    library = Path(tempfile.mkdtemp()) / "products.so"
    arch = f"-gencode=arch=compute_{target},code=sm_{target}"
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        arch,
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "--threads",
        "8",
    ]
    subprocess.run([*command, str(HERE / "products.cu"), "-o", str(library)], check=True)
    return library


class Kernels:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.error_text.restype = ctypes.c_char_p
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.normed: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.overlap = True
        self.most_stages = 8

    def __call__(
        self,
        kind: int,
        x: torch.Tensor,
        weights: list[torch.Tensor],
        out: torch.Tensor,
        *,
        biases: list[torch.Tensor | None] | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        round_normed: bool = True,
        residual: torch.Tensor | None = None,
        activation: int = SILU,
    ) -> None:
        p = Product(columns=x.shape[1], rows=x.shape[0], x=x.data_ptr(), out=out.data_ptr())
        end = 0
        for i in range(3):
            if i < len(weights):
                p.weight[i] = weights[i].data_ptr()
                end += weights[i].shape[0]
                if biases is not None and biases[i] is not None:
                    p.bias[i] = biases[i].data_ptr()  # type: ignore[union-attr]
            p.end[i] = end
        p.norm_weight = norm.data_ptr() if norm is not None else None
        p.eps, p.norm_offset, p.round_normed = eps, offset, int(round_normed)
        p.residual = residual.data_ptr() if residual is not None else None
        p.out_columns, p.activation = out.shape[1], activation
        # As deep a ring as fits beside x; without x where that leaves less than four stages.
        rows, columns = x.shape
        staged_bytes = rows * (-(-columns // 64) * 128 + 64)
        staged = norm is not None or staged_bytes <= STAGED_BYTES
        free = SHARED_BYTES - 16 * (rows * 128 + 64)
        depths = [n for n in reversed(STAGES) if n <= self.most_stages]
        fits = [n for n in depths if n << 14 <= free - (staged_bytes if staged else 0)]
        staged, fits = (staged, fits) if fits else (False, depths)
        stages = next(n for n in fits if n << 14 <= free)
        if norm is not None and not staged:  # the norm in a kernel of its own
            normed = self.normed.setdefault((rows, columns, x.dtype), torch.empty_like(x))
            p.out = normed.data_ptr()
            self.launch(NORM, p, stages, rows, False, x.dtype)
            p.x, p.norm_weight, p.out = normed.data_ptr(), None, out.data_ptr()
        units = -(-(p.end[0] if kind == GATED else p.end[2]) // 8)
        self.launch(kind, p, stages, min(units, self.processors), staged, x.dtype)

    def launch(
        self, kind: int, p: Product, stages: int, grid: int, staged: bool, dtype: torch.dtype
    ) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        half, at = int(dtype == torch.float16), ctypes.byref(p)
        setting = (half, stages, kind, int(staged), grid, int(self.overlap))
        if status := self.library.product(at, *setting, stream):
            raise RuntimeError(f"{self.library.error_text(status).decode()}: {setting}")


# --- against fp64 --------------------------------------------------------------------------------


def reference(
    kind: int, x: torch.Tensor, weights: list[torch.Tensor], kw: dict[str, Any], dtype: Any
) -> Any:
    """The same in `dtype`: fp64, or x's own for PyTorch's error."""
    x = x.to(dtype)
    if kw.get("norm") is not None:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + kw["eps"])
        if dtype == torch.float64:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + kw["eps"])
            x = x * scale * (kw["norm"].double() + kw["offset"])
        else:
            x = (x.float() * scale).to(dtype) * (kw["norm"] + kw["offset"])
    biases = kw.get("biases") or [None] * 3
    parts = [
        F.linear(x, w.to(dtype), b.to(dtype) if b is not None else None)
        for w, b in zip(weights, biases, strict=False)
    ]
    if kind == GATED:
        act = F.silu if kw["activation"] == SILU else (lambda v: F.gelu(v, approximate="tanh"))
        return act(parts[0]) * parts[1]
    y = torch.cat(parts, 1)
    return y + kw["residual"].to(dtype) if kind == RESIDUAL else y


def check(kernels: Kernels) -> list[dict[str, Any]]:
    """‖out − fp64‖ / ‖fp64‖ of kernels and PyTorch; prints where a kernel's is a fifth larger."""
    found = []
    shapes = [
        (4096, (4096, 1024, 1024)),
        (1024, (2048, 1024, 1024)),
        (576, (576, 192, 192)),
        (200, (367, 91, 220)),
    ]
    shapes += [(14336, (264, 8, 8)), (3072, (1024,)), (72, (1000,)), (2048, (2048, 512, 512))]
    for dtype in (torch.bfloat16, torch.float16):
        for columns, sizes in shapes:
            for rows in (1, 2, 3, 8, 9, 16):
                for kind in (STORE, RESIDUAL, GATED):
                    for normed in (False, True):
                        if normed and (kind == RESIDUAL or columns > 4096):
                            continue
                        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
                        n = [sizes[0]] * 2 if kind == GATED else list(sizes)
                        weights = [
                            torch.randn(m, columns, device="cuda", dtype=dtype) / columns**0.5
                            for m in n
                        ]
                        biases: list[Any] = [
                            torch.randn(m, device="cuda", dtype=dtype) for m in n
                        ] + [None] * 3
                        kw: dict[str, Any] = {"biases": biases if rows % 2 else None}
                        if kind == GATED:
                            kw["activation"] = rows % 2
                        if kind == RESIDUAL:
                            kw["residual"] = torch.randn(rows, sum(n), device="cuda", dtype=dtype)
                        if normed:
                            kw |= {
                                "norm": torch.randn(columns, device="cuda", dtype=dtype) * 0.3,
                                "eps": 1e-5,
                            }
                            kw |= {"offset": float(rows % 2), "round_normed": rows != 1}
                        out = torch.full(
                            (rows, sum(n) if kind != GATED else n[0]),
                            torch.nan,
                            device="cuda",
                            dtype=dtype,
                        )
                        kernels(kind, x, weights, out, **kw)
                        true = reference(kind, x, weights, kw, torch.float64)
                        own = reference(kind, x, weights, kw, dtype).double()
                        error = float((out.double() - true).norm() / true.norm())
                        theirs = float((own - true).norm() / true.norm())
                        alone = torch.full_like(out, torch.nan)[:1]
                        kw1 = dict(kw)
                        if kind == RESIDUAL:
                            kw1["residual"] = kw["residual"][-1:].contiguous()
                        kernels(kind, x[-1:].contiguous(), weights, alone, **kw1)
                        same = bool(torch.equal(alone[0], out[-1]))
                        row = {
                            "dtype": str(dtype)[6:],
                            "columns": columns,
                            "out": n,
                            "rows": rows,
                            "kind": kind,
                        }
                        row |= {
                            "norm": normed,
                            "error": error,
                            "torch": theirs,
                            "same_bits_alone": same,
                        }
                        found.append(row)
                        if not error <= theirs * 1.2 + 1e-5 or not same:
                            print("WRONG", row)
    return found


# --- times ---------------------------------------------------------------------------------------


def graph_microseconds(calls: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a replayed graph of `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        for _ in range(2):
            graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def copy_speed() -> float:
    """Bytes a microsecond, read and written."""
    a = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)

    def copy() -> None:
        b.copy_(a)

    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 4 * a.numel() / sorted(times)[len(times) // 2]


class Pool:
    """Weights cut from one buffer of 4 GB, each call's others than the last's."""

    def __init__(self) -> None:
        self.data = torch.empty(1 << 31, device="cuda", dtype=torch.bfloat16)
        for part in self.data.split(1 << 28):
            part.normal_(0, 0.02)
        self.at = 0

    def take(self, rows: int, columns: int) -> torch.Tensor:
        if self.at + rows * columns > self.data.numel():
            self.at = 0
        piece = self.data[self.at : self.at + rows * columns].view(rows, columns)
        self.at += rows * columns
        return piece


def products_of(model: str) -> dict[str, tuple[int, int, list[int]]]:
    hidden, queries, keys, inner, vocabulary, _ = MODELS[model]
    return {
        "qkv": (STORE, hidden, [queries, keys, keys]),
        "o": (RESIDUAL, queries, [hidden]),
        "gate_up": (GATED, hidden, [inner, inner]),
        "down": (RESIDUAL, inner, [hidden]),
        "logits": (STORE, hidden, [vocabulary]),
    }


def one_product(
    kernels: Kernels | None, pool: Pool, spec: tuple[int, int, list[int]], rows: int
) -> float:
    """Microseconds of one product in a chain of many; `kernels` None: cuBLAS, all parts at once."""
    kind, columns, sizes = spec
    count = max(4, min(96, 1_500_000_000 // (sum(sizes) * columns * 2)))
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(columns, device="cuda", dtype=torch.bfloat16) if kind != RESIDUAL else None
    n = sizes[0] if kind == GATED else sum(sizes)
    out = torch.empty(rows, n if kernels else sum(sizes), device="cuda", dtype=torch.bfloat16)
    residual = (
        torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) if kind == RESIDUAL else None
    )
    sets = [pool.take(sum(sizes), columns) for _ in range(count)]

    def calls() -> None:
        for w in sets:
            if kernels is None:
                torch.mm(x, w.t(), out=out)
            else:
                kernels(kind, x, list(w.split(sizes)), out, norm=norm, residual=residual)

    return graph_microseconds(calls) / count


def whole_model(kernels: Kernels, pool: Pool, model: str, rows: int) -> tuple[float, int]:
    """Microseconds and bytes of a step's products, each depending on the last; no attention."""
    layers = MODELS[model][-1]
    specs = products_of(model)
    buffers = {}
    for name, (kind, _, sizes) in specs.items():
        buffers[name] = torch.zeros(
            rows, sizes[0] if kind == GATED else sum(sizes), device="cuda", dtype=torch.bfloat16
        )
    hidden = torch.randn(rows, specs["qkv"][1], device="cuda", dtype=torch.bfloat16)
    heads = torch.randn(rows, specs["o"][1], device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(specs["qkv"][1], device="cuda", dtype=torch.bfloat16)
    pool.at = 0
    weights = [
        {
            name: list(pool.take(sum(s), c).split(s))
            for name, (_, c, s) in specs.items()
            if name != "logits"
        }
        for _ in range(layers)
    ]
    head = [pool.take(specs["logits"][2][0], specs["logits"][1])]

    def calls() -> None:
        for w in weights:
            kernels(STORE, hidden, w["qkv"], buffers["qkv"], norm=norm)
            kernels(RESIDUAL, heads, w["o"], buffers["o"], residual=hidden)
            kernels(GATED, buffers["o"], w["gate_up"], buffers["gate_up"], norm=norm)
            kernels(RESIDUAL, buffers["gate_up"], w["down"], hidden, residual=buffers["o"])
        kernels(STORE, hidden, head, buffers["logits"], norm=norm)

    size = sum(
        sum(s) * c * 2 * (1 if name == "logits" else layers) for name, (_, c, s) in specs.items()
    )
    return graph_microseconds(calls), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--library", type=Path, help="products.cu compiled; else it is compiled now"
    )
    args = parser.parse_args()
    kernels = Kernels(args.library or build())
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    result["errors"] = check(kernels)
    wrong = [
        r
        for r in result["errors"]
        if not r["error"] <= r["torch"] * 1.2 + 1e-5 or not r["same_bits_alone"]
    ]
    worst = max(r["error"] / r["torch"] for r in result["errors"])
    print(
        f"{len(result['errors'])} cases against fp64, {len(wrong)} wrong; "
        f"worst error {worst:.3f} of PyTorch's"
    )

    speed = result["copy_bytes_per_us"] = copy_speed()
    print(f"copy {speed / 1e6:.3f} TB/s")
    pool = Pool()
    result["products"], result["steps"] = [], []
    for most_stages, overlap in ((8, True), (12, True), (4, True), (8, False)):
        kernels.most_stages, kernels.overlap = most_stages, overlap
        tag = {"stages": most_stages, "overlap": overlap}
        for model in MODELS:
            for rows in (1, 2, 8, 16):
                us, size = whole_model(kernels, pool, model, rows)
                result["steps"].append(
                    tag | {"model": model, "rows": rows, "us": us, "bytes": size}
                )
        line = "  ".join(
            f"{r['model']}x{r['rows']} {r['us']:.0f} ({r['bytes'] / r['us'] / speed:.3f})"
            for r in result["steps"][-12:]
        )
        print(f"step, {most_stages} stages {'pdl' if overlap else '   '}: {line}")
        if not overlap:
            continue
        for model in MODELS:
            for name, spec in products_of(model).items():
                for rows in (1, 8, 16):
                    us = one_product(kernels, pool, spec, rows)
                    size = sum(spec[2]) * spec[1] * 2
                    row = tag | {"model": model, "product": name, "rows": rows, "us": us}
                    row |= {"of_copy": size / us / speed, "beside_bytes_us": us - size / speed}
                    result["products"].append(row)
        for model in MODELS:
            rows_of = [
                r
                for r in result["products"]
                if r["model"] == model and all(r[k] == v for k, v in tag.items())
            ]
            print(
                "   ",
                model,
                "  ".join(
                    f"{r['product']}x{r['rows']} {r['us']:.1f} {r['of_copy']:.2f} "
                    f"+{r['beside_bytes_us']:.1f}"
                    for r in rows_of
                ),
            )
    for model in MODELS:
        line = []
        for name, spec in products_of(model).items():
            for rows in (1, 8):
                us = one_product(None, pool, spec, rows)
                size = sum(spec[2]) * spec[1] * 2
                result["products"].append(
                    {
                        "cublas": True,
                        "model": model,
                        "product": name,
                        "rows": rows,
                        "us": us,
                        "of_copy": size / us / speed,
                    }
                )
                line.append(f"{name}x{rows} {us:.1f} {size / us / speed:.2f}")
        print("cuBLAS", model, "  ".join(line))
    if args.output:
        args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
