"""The criterion of whole models: what it promises, and that it finds what the old one found."""

from __future__ import annotations

import math

import pytest
import torch
import zoo
from support import mutations
from support.nearness import (
    LIKE,
    Draw,
    allowance,
    assert_as_near,
    draw,
    limit,
    verdict,
    worst_limit,
)
from support.samples import SEEDS, Sample

import hfpatch

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")


def test_the_limit_is_derived_from_the_draws() -> None:
    assert limit(4) == 2 * limit(16) == limit(1, 4 * LIKE)
    mean = limit(24)
    assert math.sqrt((1 + mean) / (1 - mean)) == pytest.approx(1.17, abs=0.01)


def test_chance_alone_does_not_pass_the_limit() -> None:
    """Both errors of `LIKE - 1` independent parts, as the derivation has it; and their spread."""
    torch.manual_seed(0)
    parts = torch.randn(2, 20_000, 12, LIKE - 1).square().mean(-1)
    d = (parts[0] - parts[1]) / (parts[0] + parts[1])
    assert d.var().item() == pytest.approx(1 / LIKE, rel=0.05)
    assert d.mean(-1).max().item() < limit(12)
    assert d.max().item() < worst_limit()


def test_an_error_that_is_larger_is_found() -> None:
    """In the mean of the draws, or in one draw."""
    same = [Draw(1e-6, 1e-6)] * 24
    assert_as_near(same, F32)
    assert_as_near([Draw(1.15e-6, 1e-6)] * 24, F32)
    for wrong in (
        [Draw(1.25e-6, 1e-6)] * 24,
        [*same[:-1], Draw(4e-6, 1e-6)],
        [*same[:-1], Draw(NAN, 1e-6)],
        [*same[:-1], Draw(INF, 1e-6)],
        [*same[:-1], Draw(1e-6, NAN)],
    ):
        with pytest.raises(AssertionError, match="what: the mean excess over 24 draws"):
            assert_as_near(wrong, F32, "what")
    assert_as_near([Draw(0.0, 0.0)], BF16)


def test_roundings_are_allowed_by_their_mean_square() -> None:
    """An original without an error of its own: a kernel may round."""
    x = torch.rand(10_000, dtype=torch.float64) + 1
    for dtype in (F32, BF16):
        exact = draw(x.to(dtype), x.to(dtype), x)
        assert exact.ours**2 <= allowance(dtype, inside=1)
        assert_as_near([Draw(exact.ours, 0.0)] * 12, dtype)
    with pytest.raises(AssertionError):
        assert_as_near([draw(x.bfloat16().float(), x.float(), x)] * 12, F32)
    with pytest.raises(AssertionError):
        draw(x.bfloat16(), x.float(), x)


def found_by_old(one: Draw, dtype: torch.dtype) -> bool:
    """The criterion as it was, on one draw."""
    return not one.ours <= one.theirs + torch.finfo(dtype).eps


def judged(name: str, dtype: torch.dtype, mutation: str) -> tuple[float, bool]:
    """In what share of the draws the old criterion finds a mutation, and whether this one does."""
    draws = []
    with mutations.registered(mutations.MUTATIONS[mutation]) as settings:
        for seed in range(SEEDS):
            sample = Sample(zoo.ENTRIES[name], dtype, seed, 6)
            assert hfpatch.apply(sample.model, **settings).swaps
            draws += sample.draws()
    old = sum(found_by_old(d, dtype) for d in draws) / len(draws)
    return old, not verdict(draws, allowance(dtype)).is_near


NAMES = ["llama", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("t5-v1.1", "bert"))]


@pytest.mark.usefixtures("kernels_module")
@pytest.mark.parametrize("dtype", zoo.DTYPES, ids=str)
@pytest.mark.parametrize("mutation", list(mutations.MUTATIONS))
@pytest.mark.parametrize("name", NAMES)
def test_not_weaker_than_on_one_draw(name: str, mutation: str, dtype: torch.dtype) -> None:
    """What the old criterion finds more often than not, this one finds; all of it in fp32. What
    drowns in a whole model's roundings to a half type is found in its leaves (test_leaves.py)."""
    old, new = judged(name, dtype, mutation)
    assert new or (old < 0.5 and dtype != F32), (old, new)
