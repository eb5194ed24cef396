"""`hfpatch bench model` on a GPU: the figures that a CPU has not."""

from __future__ import annotations

import json
from pathlib import Path

import check_cases
import pytest

from hfpatch import cli

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("name", ["zoo-llama", "zoo-ltx-pipeline"])
def test_figures_of_a_gpu(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels_module: object
) -> None:
    folder = str(check_cases.write(name, tmp_path))
    words = ["bench", "model", folder, "--random-weights", "--dtype", "bfloat16", "--json"]
    assert cli.main([*words, "--ways", "eager,patched,graphs", "--device", "cuda"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["launches"] == "CUDA kernels"
    rows = {row["way"]: row for row in found["ways"]}
    for row in rows.values():
        assert "failed" not in row and "unavailable" not in row
        for key in ("wall_ms", "queued_ms", "host_ms"):
            assert 0 < row[key]["least"] <= row[key]["median"] <= row[key]["most"]
        assert row["launches"] > 0 and row["peak_bytes"] > 0
        assert row["host_ms"]["least"] <= row["wall_ms"]["most"]
    assert rows["patched"]["launches"] < rows["eager"]["launches"]
