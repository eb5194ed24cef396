"""docs/training.md shows the loss curves that were measured, and these are what it claims."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.curves import draws_of
from support.nearness import assert_as_near

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Any:
    """benchmarks/training_curves.py"""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("training_curves")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def rows(script: Any) -> Any:
    return json.loads(script.RESULT.read_text())["rows"]


def test_the_page_is_generated_from_the_result(script: Any) -> None:
    assert script.write_page(check=True) == 0, "run `python benchmarks/training_curves.py --page`"


def test_a_page_or_picture_of_other_numbers_is_found(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("RESULT", "PAGE", "PICTURE"):
        copied = shutil.copy(getattr(script, name), tmp_path)
        monkeypatch.setattr(script, name, Path(copied))
    assert script.write_page(check=True) == 0
    text = script.RESULT.read_text()
    result = json.loads(text)
    result["rows"][0]["losses"][0] += 1.0
    script.RESULT.write_text(json.dumps(result))
    before = script.PAGE.read_text(), script.PICTURE.read_text()
    assert script.write_page(check=True) == 1
    assert (script.PAGE.read_text(), script.PICTURE.read_text()) == before
    assert script.write_page(check=False) == 0 == script.write_page(check=True)
    after = script.PAGE.read_text(), script.PICTURE.read_text()
    assert all(a != b for a, b in zip(after, before, strict=True))
    script.RESULT.write_text(text)
    assert script.write_page(check=False) == 0
    assert script.PAGE.read_text() == before[0]
    script.PAGE.write_text("no place")
    with pytest.raises(ValueError, match="expected the lines"):
        script.write_page(check=True)


def test_all_was_measured_and_trained(script: Any, rows: Any) -> None:
    found = [
        (r["steps"], r["tokens"], (r["dtype"], r["way"] == "hfpatch"), len(r["losses"]))
        for r in rows
    ]
    assert found == [
        (steps, tokens, way, steps) for steps, tokens, ways in script.RUNS for way in ways
    ]
    assert all(r["losses"][0] != r["losses"][-1] for r in rows)


def test_fp32_is_the_originals(script: Any, rows: Any) -> None:
    for steps in (50, 6):
        curves = [script.losses_of(rows, steps, "float32", way) for way in ("hfpatch", "eager")]
        assert max(map(abs, script.apart(*curves))) <= 1e-4


def test_bf16_is_no_farther_from_fp32(script: Any, rows: Any) -> None:
    exact = script.losses_of(rows, 200, "float32", "eager")
    ours, theirs = (script.losses_of(rows, 200, "bfloat16", w) for w in ("hfpatch", "eager"))
    assert_as_near(draws_of(ours, theirs, exact, 10), torch.bfloat16, "SmolLM2's loss")
