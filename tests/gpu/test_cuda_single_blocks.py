"""Fused single-stream blocks on a GPU: numbers, attention backends, a fused block in a graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.captured import captured
from support.samples import moved
from test_blocks_single import ROWS, assert_equal_numbers, build, call_of, flat, is_fused

import hfpatch

pytestmark = pytest.mark.gpu
CALLS = [(name, call) for name, row in ROWS.items() for call in row.calls]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; convolutions in true fp32, or TF32 hides everything."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _captured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of rows that say so no class has a file."""
    row = ROWS[request.node.callspec.params["name"]]
    with captured() if row.captured else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_numbers(name: str, call: str, dtype: torch.dtype) -> None:
    row, shapes = ROWS[name], ((2, 10), (1, 67), (4, 128))
    root = build(row, dtype).cuda()
    report = hfpatch.apply(root)
    assert is_fused(root, moved(call_of(row, call, dtype), "cuda"), row), report
    for shape in shapes:
        make = functools.partial(call_of, row, call, dtype, shape)
        assert_equal_numbers(root, make, dtype)


@pytest.mark.parametrize("name", list(ROWS))
def test_launches_less(name: str) -> None:
    def launches(run: Any) -> int:
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return sum(e.count for e in profile.key_averages() if e.device_type.name == "CUDA")

    row = ROWS[name]
    root = build(row, torch.bfloat16).cuda()
    given = moved(call_of(row, dtype=torch.bfloat16, shape=(2, 64)), "cuda")
    before = launches(lambda: root.block(**given))
    hfpatch.apply(root)
    root.block(**given)  # a captured block decides, and packs at its next call
    assert launches(lambda: root.block(**given)) < before


@pytest.mark.parametrize("name", list(ROWS))
def test_in_a_graph(name: str) -> None:
    """Nothing that a fused block keeps between calls is of a graph's own memory."""
    row = ROWS[name]
    if row.waits:
        pytest.skip("it looks at its mask, as the original does, which a capture forbids")
    root = build(row, torch.bfloat16).cuda()
    hfpatch.apply(root)
    given, other = (
        moved(call_of(row, dtype=torch.bfloat16, shape=(2, n)), "cuda") for n in (64, 96)
    )
    with torch.no_grad():
        for each in (given, other):
            root.block(**each)  # a captured block decides
        expected = flat(root.block(**given))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = root.block(**given)
        flat(root.block(**other))
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(flat(result), expected)
