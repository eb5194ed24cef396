"""Captured blocks of families that no file names: fused, as near to fp64 as eager, undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from regions.families import FAMILIES, build
from support.nearness import assert_as_near, draw

import hfpatch

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs)[0]
    return out


def states(model: Any) -> set[tuple[str, str]]:
    return {(c.state, c.reason) for c in hfpatch.status(model).plan.candidates}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_block_is_fused_and_undone(name: str) -> None:
    model, inputs = build(name)
    calls = [inputs(1, 9), inputs(3, 7), inputs(2, 16)]
    before = [run(model, c) for c in calls]
    held = {n: dict(m.__dict__) for n, m in model.named_modules()}
    report = hfpatch.apply(model, decoding=False, blocks=True)
    assert {c.state for c in report.plan.candidates} <= {"at its first call", "fused"}
    for _ in range(2):
        for call, expected in zip(calls, before, strict=True):
            found = run(model, call)
            scale = expected.abs().max()
            assert (found - expected).abs().max() <= 1e-5 * scale
    assert states(model) == {("fused", "")}
    assert hfpatch.restore(model) == len(report.swaps)
    assert all(torch.equal(run(model, c), b) for c, b in zip(calls, before, strict=True))
    for n, m in model.named_modules():
        assert m.__dict__.keys() == held[n].keys(), n


# a mixture of experts chooses other experts in fp64 where two are as good
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "mixtral"])
def test_as_near_to_fp64_as_the_original(name: str, dtype: torch.dtype) -> None:
    draws = []
    for seed in range(4):
        model, inputs = build(name, dtype, seed)
        calls = [inputs(2, 8 + i) for i in range(3)]
        exact = copy.deepcopy(model).double()
        theirs = [run(model, c) for c in calls]
        hfpatch.apply(model, decoding=False, blocks=True)
        for call in calls:
            run(model, call)
        for call, eager in zip(calls, theirs, strict=True):
            wide = {k: v.double() if v.is_floating_point() else v for k, v in call.items()}
            draws.append(draw(run(model, call), eager, run(exact, wide)))
        assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    assert_as_near(draws, dtype, name)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "gemma3", "olmo2", "mixtral", "bert", "bert, eager", "t5", "t5, eager"],
)
def test_padding_on_either_side(name: str) -> None:
    model, inputs = build(name)
    call = inputs(3, 9)
    for left in (True, False):
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, :4] = 0 if left else 1
        mask[1, 5:] = 1 if left else 0
        padded = call | {"attention_mask": mask}
        expected = run(model, padded)
        hfpatch.apply(model, decoding=False, blocks=True)
        for _ in range(2):
            found = run(model, padded)
            kept = mask.bool()
            assert (found - expected)[kept].abs().max() <= 1e-5 * expected[kept].abs().max()
        hfpatch.restore(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_a_cache_is_filled_as_by_the_original_and_goes_on(name: str) -> None:
    from transformers import DynamicCache

    model, inputs = build(name)
    prompt, more = inputs(2, 9), inputs(2, 3)

    def both() -> tuple[list[torch.Tensor], Any]:
        cache = DynamicCache(config=model.config)
        first = run(model, prompt | {"past_key_values": cache, "use_cache": True})
        second = run(model, more | {"past_key_values": cache, "use_cache": True})
        return [first, second], cache

    expected, theirs = both()
    hfpatch.apply(model, decoding=False, blocks=True)
    both()
    found, ours = both()
    assert states(model) == {("fused", "")} or name.startswith("gemma")
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert ours.get_seq_length() == theirs.get_seq_length() == 12
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.keys.shape == b.keys.shape and a.keys.is_contiguous() == b.keys.is_contiguous()
        assert (a.keys - b.keys).abs().max() <= 1e-5 * b.keys.abs().max()
        assert (a.values - b.values).abs().max() <= 1e-5 * b.values.abs().max()
