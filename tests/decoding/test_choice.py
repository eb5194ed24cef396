"""Greedy tokens as the CPU's kernel chooses them."""

from __future__ import annotations

import pytest

# ruff: noqa: F401
from decoding.choice_cases import (
    test_a_step_of_no_use_leaves_the_text_as_it_was,
    test_bad_arguments,
    test_each_token_and_what_the_next_step_reads,
    test_results_lie_apart,
)


@pytest.fixture
def device(kernels_module: object) -> str:
    return "cpu"
