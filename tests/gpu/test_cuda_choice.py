"""Greedy tokens as the GPU's kernels choose them, and what they report to the host."""

from __future__ import annotations

import gc

import pytest
import torch

# ruff: noqa: F401
from decoding.choice_cases import (
    test_a_step_of_no_use_leaves_the_text_as_it_was,
    test_bad_arguments,
    test_each_token_and_what_the_next_step_reads,
    test_results_lie_apart,
)

from hfpatch.decoding import greedy
from hfpatch.decoding.greedy import Chain

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(kernels_module: object) -> str:
    return "cuda"


def test_a_reports_memory_waits_for_the_step_that_writes_to_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is gone, whose last step still runs, leaves its memory to nobody."""
    monkeypatch.setattr(greedy, "_free", {})  # those of other tests' texts

    def begun() -> Chain:
        return Chain(torch.zeros(1, 1, dtype=torch.int64, device=device),
                     torch.ones(1, dtype=torch.bool, device=device), None)  # fmt: skip

    first = begun()
    held = first.entries()[1:]
    gc.collect()  # not while the step sleeps, some two seconds
    torch.cuda._sleep(4_000_000_000)
    first.launched()
    del first
    second = begun()
    assert second.entries()[1:] != held
    torch.cuda.synchronize()
    assert begun().entries()[1:] == held
