"""`hfpatch bench` on a GPU: graphs of every mode are captured, and times are believable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfpatch import cli
from hfpatch.bench import ops, timing
from hfpatch.bench.cases import CASES, Case

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SMALL = 16


def test_a_copy_is_timed_by_its_bytes() -> None:
    a = torch.randn(2**26, device="cuda")
    small, b = a[: 2**25], torch.empty_like(a)
    whole = timing.gpu_microseconds([lambda: b.copy_(a)])
    half = timing.gpu_microseconds([lambda: b[: 2**25].copy_(small)])
    assert 1.6 < whole / half < 2.4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_measured(case: Case, kernels_module: object) -> None:
    if not hasattr(kernels_module.ops, case.op):  # type: ignore[attr-defined]
        pytest.skip(f"{case.op} is not in this build")
    shape = {name: min(size, SMALL) for name, size in ops.shapes_of(case.shapes, "cuda")[0].items()}
    task = ops.Task(case, shape, torch.bfloat16)
    row = ops.measure(task, kernels_module, torch.device("cuda"), ("eager", "torch"), 1e12)
    assert "failed" not in row
    for times in (row["cold_us"], row["warm_us"]):
        assert {"eager", "hfpatch"} <= set(times)
        assert all(0.2 < us < 1000 for us in times.values())
    assert 0.2 < row["copy_us"] < 1000 and not any("copy" in name for name in row["cold_us"])


def test_the_command(tmp_path: Path, kernels_module: object) -> None:
    output = tmp_path / "ops.json"
    few = ["--op", "silu", "--shape", "64x1024", "--peer", "eager"]
    assert cli.main(["bench", "ops", "--output", str(output), *few]) == 0
    result = json.loads(output.read_text())
    assert result["copy_bytes_per_s"] > 1e11 and result["l2_bytes"] > 0
    (row,) = result["rows"]
    assert set(row["cold_us"]) == {"eager", "hfpatch"}
