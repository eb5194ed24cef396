"""DeepSpeed's engine around a patched model, on two processes; the cases are in deepspeed_cases.py.

DeepSpeed is not among the packages of the tests, for it builds itself: where it is wanted,
`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8` (it needs no compiler then).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import sharded

CASES = [
    f"zero{stage}-{kind}-{order}"
    for stage in (1, 2, 3)
    for order in ("patch first", "shard first")
    for kind in ("plain", "LoRA", "checkpointed", "bf16")
]


@pytest.fixture(scope="module")
def ranks(kernels_dir: object) -> Iterator[sharded.Ranks]:
    pair = sharded.Ranks("cpu", "deepspeed_cases")
    yield pair
    pair.close()


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is missing")
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: sharded.Ranks) -> None:
    ranks.run(name)
    if name.startswith("zero3"):  # it has replaced `torch.nn.functional.linear` in its processes
        ranks.close()
