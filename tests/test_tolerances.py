"""The comparisons that other tests go by find what they should, and limits stand in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tolerances import F16, F32, ROUNDING, TOLERANCES, assert_close, assert_like, tolerance

TESTS = Path(__file__).resolve().parent


def test_every_kind_has_every_dtype_and_a_use() -> None:
    assert all(set(row) == set(ROUNDING) for row in TOLERANCES.values())
    files = [p for p in TESTS.rglob("*.py") if p.name != "test_tolerances.py"]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)
    assert set(re.findall(r'tolerance\(\s*"([^"]+)"', text)) == set(TOLERANCES)
    assert len(re.findall(r"^(?:ROUNDING|SUBNORMAL) = ", text, re.MULTILINE)) == 2


def test_assert_close() -> None:
    truth = torch.ones(4, dtype=torch.float64)
    assert_close(torch.ones(4) * 1.5, truth, 0.5)
    for wrong in (1.6, float("nan"), float("inf")):
        with pytest.raises(AssertionError, match=r"what: .* above the bound"):
            assert_close(torch.tensor([1.0, 1.0, wrong, 1.0]), truth, 0.5, "what")


def test_assert_like() -> None:
    exact = torch.ones(100, dtype=F16)
    few = exact.clone()
    few[:2] += 2**-10
    assert_like(few, exact, F16)
    assert_like([exact, few], (exact, few), F16)
    few[2] += 2**-10
    for besides in ({"spare": 1}, {"deviations": 1}):
        assert_like(few, exact, F16, **besides)
    far = exact.clone()
    far[0] += 10 * tolerance("cuda chain", F16)
    for wrong in (few, far, exact / 0, exact.float(), exact[:50]):
        with pytest.raises(AssertionError):
            assert_like(wrong, exact, F16)
    with pytest.raises(AssertionError):
        assert_like(exact.float() * (1 + 2e-5), exact.float(), F32)
