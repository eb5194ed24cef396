"""`hfpatch.bench.compare` on a GPU: graphs, what cannot be captured, host time."""

from __future__ import annotations

import pytest
import torch

import hfpatch

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_captured_or_by_events(kernels_module: object) -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        x.sum().item()  # which no graph can record
        return torch.nn.functional.silu(x)

    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    functions = {"hfpatch": hfpatch.functional.silu, "waits": waits}
    found = hfpatch.bench.compare(functions, (x,), iters=10)
    assert [row.captured for row in found.times] == [True, False]
    for row in found.times:
        assert row.host is not None and row.host.median > 0
        assert row.warm.median > 0 and row.cold.median > 0
        assert row.peak_bytes >= x.numel() * 2
