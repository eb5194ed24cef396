"""SmolLM2-135M's real weights on a GPU: the tests of tests/decoding there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# ruff: noqa: F401
from decoding.families import on_device
from decoding.test_real_weights import (
    halves,
    patched,
    plain,
    test_a_step_in_bf16_is_no_farther_from_fp32s,
    test_perplexity_in_bf16_is_no_farther_from_fp32s,
    test_texts_in_bf16_part_within_its_noise,
    test_texts_in_fp32_are_identical,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def on_the_gpu(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield
