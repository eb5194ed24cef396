"""`hfpatch profile` on a GPU: kernels in place of operators, and the waits of the host."""

from __future__ import annotations

import json
from pathlib import Path

import check_cases
import pytest

from hfpatch import cli

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_kernels_of_each_module(tmp_path: Path, kernels_module: object) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    words = ["profile", folder, "--random-weights", "--dtype", "bfloat16", "--device", "cuda"]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert found["launched"] == "CUDA kernels"
    eager, patched = found["profiles"]["eager"], found["profiles"]["patched"]
    assert 0 < patched["launches"] < eager["launches"]
    norm = "model.layers.0.input_layernorm"
    assert eager["modules"][norm]["launches"] > 1
    assert patched["modules"][norm]["launches"] == 1
    assert 0 < patched["modules"][norm]["us"] < eager["modules"][norm]["us"]
