"""libhfpatch's gemm and attention, checked against fp64, and timed beside PyTorch's.

    python benchmarks/clib_products.py LIBRARY [--device cuda] [--output FILE] [--no-check]

On a GPU the peers are torch.matmul (cuBLAS) and scaled_dot_product_attention with cuDNN and with
FlashAttention; times are CUDA events' over several calls, in turns, the median of 7. On the CPU
they are torch.matmul and scaled_dot_product_attention; the least of many calls in turns,
since other work only adds to them. HFPATCH_BLAS=none times our own blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from products import Products, cases  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from hfpatch.bench import results  # noqa: E402
from hfpatch.capi.library import Caller  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def timed_cuda(calls: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Microseconds of a call, the median of `repeats` turns of enough calls for a few ms each."""
    counts = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        counts[name] = max(3, min(200, int(4e-3 / ((time.perf_counter() - start) / 5 + 1e-9))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(counts[name]):
                call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / counts[name])
    return {name: statistics.median(times) for name, times in found.items()}


def timed_cpu(calls: dict[str, Callable[[], Any]], seconds: float = 2.0) -> dict[str, float]:
    """Microseconds of a call, the least of those that fit into `seconds`, in turns."""
    # With one thread its own time, which other programs do not add to.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], (clock() - start) * 1e6)
    return best


def gemm_calls(p: Products, m: int, n: int, k: int, dtype: torch.dtype, tb: int) -> dict[str, Any]:
    a, b = p.random(m, k, dtype=dtype), p.random(*((n, k) if tb else (k, n)), dtype=dtype)
    out, other = p.empty(m, n, dtype=dtype), p.empty(m, n, dtype=dtype)
    size = p.library.size("hfp_gemm_workspace", 1, m, n, k, 2 if p.device == "cuda" else 1)
    scratch = torch.empty(size, device=p.device)
    right = b.T if tb else b
    return {
        "hfpatch": prepared(p, "hfp_gemm", out, scratch, a, b, None, 1.0, 0.0, 0, tb),
        "torch": lambda: torch.matmul(a, right, out=other),
    }


def prepared(p: Products, name: str, *arguments: Any) -> Callable[[], None]:
    """The C call with its arguments converted once: what a C program does."""
    from hfpatch.capi.library import SIGNATURES, _passed

    function = p.library.function(name)
    keep: list[Any] = []
    parameters = SIGNATURES[name][1]
    given = [
        _passed(kind, parameter, value, keep)
        for (kind, parameter), value in zip(parameters, (*arguments, p.stream), strict=True)
    ]

    def call() -> None:
        if function(*given):
            raise RuntimeError(p.library.last_error())

    call.keep = keep  # type: ignore[attr-defined]  # what the pointers lead to
    return call


def attention_calls(
    p: Products, batch: int, queries: int, heads: int, dim: int, dtype: torch.dtype, causal: bool,
    kv_heads: int = 0,
) -> dict[str, Any]:  # fmt: skip
    kv_heads = kv_heads or heads
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # As models have them: views of [B, S, H, D].
    q = p.random(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
    k, v = (p.random(batch, queries, kv_heads, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    out = p.empty(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
    lse = p.empty(batch, heads, queries)
    calls: dict[str, Any] = {
        "hfpatch": prepared(
            p,
            "hfp_attention",
            out,
            lse,
            q,
            k,
            v,
            None,
            None,
            None,
            None,
            dim**-0.5,
            int(causal),
            0,
            0,
            0.0,
        )
    }
    options = {"is_causal": causal, "enable_gqa": kv_heads != heads}
    backends = {"torch": None}
    if p.device == "cuda":
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                    "efficient": SDPBackend.EFFICIENT_ATTENTION}  # type: ignore[dict-item]  # fmt: skip
    for name, backend in backends.items():

        def call(backend: Any = backend) -> None:
            if backend is None:
                sdpa(q, k, v, **options)
                return
            with sdpa_kernel(backend):
                sdpa(q, k, v, **options)

        try:
            call()
        except RuntimeError:
            continue  # not for this dtype
        calls[name] = call
    return calls


GPU_GEMMS = [
    (4096, 4096, 4096, BF16, 1), (8192, 8192, 8192, BF16, 1), (4096, 14336, 4096, BF16, 1),
    (2048, 2048, 2048, F16, 0), (16, 4096, 4096, BF16, 1), (1024, 1024, 1024, BF16, 0),
    (2048, 2048, 2048, F32, 0),
]  # fmt: skip
GPU_ATTENTIONS = [
    (2, 2688, 32, 64, BF16, False, 0), (2, 2688, 32, 64, BF16, True, 0),
    (2, 4096, 32, 128, BF16, False, 0), (2, 4096, 32, 128, BF16, True, 8),
    (2, 2048, 8, 256, F16, False, 0), (4, 1024, 16, 64, F16, True, 0),
    (1, 1024, 16, 64, F32, False, 0),
]  # fmt: skip
CPU_GEMMS = [(1024, 1024, 1024, F32, 0), (512, 512, 512, F32, 1), (1, 4096, 4096, F32, 1),
             (512, 512, 512, BF16, 1), (512, 512, 512, F16, 1)]  # fmt: skip
CPU_ATTENTIONS = [(1, 512, 8, 64, F32, False, 0), (1, 512, 8, 64, F32, True, 0),
                  (1, 512, 8, 64, BF16, False, 0), (1, 512, 8, 128, F32, False, 2)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings(
        "ignore", message=".*(kernel not used|disabled|fused kernels|Expected query)"
    )
    library = Caller(args.library)
    p = Products(library, args.device)
    backend = library.size("hfp_gemm_backend", 2 if args.device == "cuda" else 1)
    found = results.head("clib products", torch.device(args.device), args.commit)
    found |= {"gemm_backend": backend, "threads": torch.get_num_threads(), "failures": []}
    found["rows"] = []
    print(found)
    if not args.no_check:
        count = 0
        for title, case in cases(p):
            count += 1
            try:
                case()
            except Exception as error:  # all of them are wanted in one run
                last = traceback.format_exc(limit=-2).splitlines()[-3:]
                found["failures"].append({"case": title, "error": str(error)[:300]})
                if len(found["failures"]) < 15:
                    print("FAILED", title, str(error)[:300], last)
        print(f"{count} cases, {len(found['failures'])} failures")
    on_gpu = args.device == "cuda"
    timed = timed_cuda if on_gpu else timed_cpu
    for gemm in [] if args.no_time else GPU_GEMMS if on_gpu else CPU_GEMMS:
        times = timed(gemm_calls(p, *gemm))
        m, n, k, dtype, tb = gemm
        rate = {name: 2e-6 * m * n * k / t for name, t in times.items()}
        row = {"op": "gemm", "case": f"{m}x{n}x{k} {dtype} transpose_b={tb}", "us": times}
        found["rows"].append(row)
        print(row["case"], {k: f"{t:.1f} us {rate[k]:.1f} TFLOP/s" for k, t in times.items()},
              f"hfpatch/torch {times['hfpatch'] / times['torch']:.3f}")  # fmt: skip
    for case in [] if args.no_time else GPU_ATTENTIONS if on_gpu else CPU_ATTENTIONS:
        batch, queries, heads, dim, dtype, causal, kv_heads = case
        times = timed(attention_calls(p, *case))
        flops = 4e-6 * batch * heads * queries * queries * dim / (2 if causal else 1)
        title = f"{batch}x{queries}x{heads}({kv_heads or heads})x{dim} {dtype} causal={causal}"
        found["rows"].append({"op": "attention", "case": title, "us": times})
        best = min(t for name, t in times.items() if name != "hfpatch")
        print(title, {k: f"{t:.1f} us {flops / t:.1f} TFLOP/s" for k, t in times.items()},
              f"hfpatch/best {times['hfpatch'] / best:.3f}")  # fmt: skip
    if args.output:
        results.write(found, args.output)
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
