"""Sharded models on two processes, gloo on the CPU; the cases are in tests/sharded_cases.py.

On two GPUs: tests/gpu/test_cuda_distributed.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sharded
import sharded_cases

CASES = list(sharded.CASES)
assert sharded_cases.ORDERS  # the import filled CASES


@pytest.fixture(scope="module")
def ranks(kernels_dir: object) -> Iterator[sharded.Ranks]:
    pair = sharded.Ranks("cpu")
    yield pair
    pair.close()


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: sharded.Ranks) -> None:
    ranks.run(name)
