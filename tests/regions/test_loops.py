"""Blocks whose code loops over parts of the text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.coverage.small_transformers import transformers_model
from hfpatch.regions import capture as capturing
from hfpatch.regions import kind
from hfpatch.regions.offer import forget


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.mark.parametrize(
    ("name", "cls", "child"),
    [
        ("qwen3_next", "Qwen3NextModel", "linear_attn"),
        ("kimi_linear", "KimiLinearModel", "self_attn"),
    ],
)
def test_a_child_that_loops_over_chunks_is_called_as_it_is(
    name: str, cls: str, child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block around it is fused, and no other number of chunks is captured anew."""
    forget()  # kinds are shared with other models of equal code
    torch.manual_seed(0)
    plain = transformers_model(name, cls).eval().requires_grad_(False)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, blocks=True)
    captures: list[Any] = []
    capture = kind.capture

    def noted(*args: Any) -> Any:
        captures.append(capture(*args))
        return captures[-1]

    monkeypatch.setattr(kind, "capture", noted)

    def both(tokens: int) -> None:
        ids = torch.randint(0, 60, (2, tokens))
        with torch.no_grad():
            expected = plain(ids, use_cache=False)[0]
            for _ in range(2):  # the call that is captured, and the fused one
                result = patched(ids, use_cache=False)[0]
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)

    both(100)
    walls = [c.walls[child] for c in captures if child in c.walls]
    assert walls and all("as loops over chunks do" in why for why in walls)
    assert {c.state for c in hfpatch.status(patched).plan.candidates} == {"fused"}
    before = len(captures)
    both(170)
    both(40)
    assert len(captures) == before


def test_a_class_that_loops_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kind of call, and no other block with such a child, runs into the loop again."""
    forget()
    plain = transformers_model("zamba2", "Zamba2Model").eval().requires_grad_(False)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, blocks=True)
    attempts: list[int] = []
    captures: list[int] = []
    run, capture = capturing._Attempt.run, kind.capture

    def attempted(*args: Any) -> Any:
        attempts.append(1)
        return run(*args)

    def captured(*args: Any) -> Any:
        captures.append(1)
        return capture(*args)

    monkeypatch.setattr(capturing._Attempt, "run", attempted)
    monkeypatch.setattr(kind, "capture", captured)
    ids = torch.randint(0, 60, (2, 40))
    for more in ({}, {"output_attentions": True}):
        with torch.no_grad():
            expected = plain(ids, use_cache=False, **more)[0]
            for _ in range(2):
                result = patched(ids, use_cache=False, **more)[0]
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert len(captures) > 4 and len(attempts) == len(captures) + 1
