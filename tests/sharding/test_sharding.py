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


def _cases() -> Iterator[object]:
    """`make test` asks each way to shard, model and mode in one of the two orders, in turns."""
    numbers: dict[str, int] = {}
    for name in CASES:
        way = name.replace("-patch first", "").replace("-shard first", "")
        number = numbers.setdefault(way, len(numbers))
        there = [n for n in CASES if n in (f"{way}-patch first", f"{way}-shard first")]
        often = len(there) < 2 or name == there[number % 2]
        yield pytest.param(name, marks=() if often else pytest.mark.exhaustive)


@pytest.mark.parametrize("name", list(_cases()))
def test_case(name: str, ranks: sharded.Ranks) -> None:
    ranks.run(name)
