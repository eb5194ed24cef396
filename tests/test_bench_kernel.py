"""`hfpatch.bench.benchmark_kernel` and `compare`: checked first, then timed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.bench import benchmark_kernel, compare
from hfpatch.errors import VerificationError

X, W = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64)


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def test_several_are_compared(kernels_module: object) -> None:
    functions = {"formula": norm, "hfpatch": hfpatch.functional.rms_norm}
    found = compare(functions, (X, W), warmup=2, iters=9)
    assert [row.name for row in found.times] == list(functions)
    for row in found.times:
        for spread in (row.cold, row.warm):
            assert 0 < spread.low <= spread.median <= spread.high and spread.count == 9
        assert row.host is None and row.error is not None and row.error < 1e-5
        assert row.peak_bytes >= X.numel() * 4
    assert found["formula"].peak_bytes > found["hfpatch"].peak_bytes
    assert found.gain("hfpatch", "warm").ratio > 0
    first, *rows = str(found).splitlines()
    assert "cold µs" in first and [row.split()[0] for row in rows] == list(functions)
    with pytest.raises(KeyError, match="expected one of formula, hfpatch"):
        _ = found["eager"]


def test_one_alone() -> None:
    found = benchmark_kernel(norm, X, W, warmup=1, iters=3)
    assert found.name == "norm" and found.error is None and found.warm.count == 3
    assert benchmark_kernel(norm, X, W, reference=norm, iters=1, warmup=0).error == 0
    assert str(found).startswith("norm: cold ")


def _over(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


WRONG: list[tuple[Any, str]] = [
    (lambda x, w: norm(x, w) * 1.001, r"`ours` is 1.00e-03 from the reference"),
    (lambda x, w: norm(x, w)[0], r"returns \[\[64\]\], expected the reference's \[\[8, 64\]\]"),
    (lambda x, w: norm(x, w) / 0, "NaN or infinity where the reference has none"),
    (_over, "`ours` writes over its tensor 0"),
]


@pytest.mark.parametrize(("ours", "said"), WRONG, ids=[w[1][:20] for w in WRONG])
def test_what_is_wrong_gets_no_time(ours: Any, said: str) -> None:
    with pytest.raises(VerificationError, match=said):
        compare({"formula": norm, "ours": ours}, (X, W), iters=1)


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: compare({}, (X,)), TypeError, "at least one entry"),
    (lambda: compare([norm], (X,)), TypeError, "`functions` must be a dict"),
    (lambda: compare({"a": norm}, X), TypeError, r"got Tensor; write `\(x,\)` for one"),
    (lambda: compare({"a": 3}, (X,)), TypeError, "`a` must be callable, got int"),
    (lambda: benchmark_kernel(norm, 3), ValueError, "tensors on one device, got none"),
    (lambda: benchmark_kernel(norm, X, W, iters=0), ValueError, "`iters` must be at least 1"),
    (lambda: benchmark_kernel(norm, X, W, warmup=1.5), TypeError, "`warmup` must be an int"),
]


@pytest.mark.parametrize(("call", "error", "said"), BAD, ids=[b[2][:20] for b in BAD])
def test_bad_arguments(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_the_import_stays_light() -> None:
    code = (
        "import sys, hfpatch\n"
        "names = ('bench.kernels', 'bench.ways', 'functional', 'layers')\n"
        "assert not [n for n in names if f'hfpatch.{n}' in sys.modules]\n"
        "hfpatch.bench.compare, hfpatch.layers.GatedMLP, hfpatch.functional.silu\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
