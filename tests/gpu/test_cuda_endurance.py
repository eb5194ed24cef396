"""Many tokens and many cycles on a GPU: memory does not grow, there or on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# ruff: noqa: F401
from decoding.families import on_device
from decoding.test_endurance import test_cycles_of_apply_generate_and_restore, test_many_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def on_cuda(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield
