"""Leaves that look like a formula and are none: every result is the original's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import battery, compare, same_state, state_of
from mutations import BEFORE, LEAVES, WIDTH, Leaf, mutated, randomized
from torch import nn

import hfpatch

#: Mutations that change nothing that a call can see (but where they raise).
HARMLESS = {"loop", "exception", "straight through", "batch mean"}


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.inner(*args)


def pair(leaf: Leaf, mutation: str, folder: Path) -> tuple[Root, Root]:
    """A model with the mutated leaf, and a twin that stays as it is."""
    modules = [mutated(leaf, mutation, folder, which) for which in ("", "_twin")]
    made = [leaf.make(getattr(m, leaf.cls.__name__)) for m in modules]
    model, twin = (Root(randomized(m)).eval() for m in made)
    return model, twin


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_the_class_as_it_is_is_swapped(leaf: Leaf, tmp_path: Path) -> None:
    model, twin = pair(leaf, "", tmp_path)
    report = hfpatch.apply(model)
    assert [s.path for s in report.swaps] == ["inner"], report
    assert not compare(model, twin, battery(WIDTH), leaf.inputs)


def _pairs() -> Iterator[Any]:
    """Every leaf with every mutation; `make test` takes each mutation with two of the leaves."""
    for i, mutation in enumerate(BEFORE):
        for j, leaf in enumerate(LEAVES):
            often = (i + j) % (len(LEAVES) // 2) == 0
            marks = () if often else (pytest.mark.exhaustive,)
            yield pytest.param(leaf, mutation, marks=marks, id=f"{leaf.name}-{mutation}")


@pytest.mark.parametrize(("leaf", "mutation"), _pairs())
def test_a_mutated_leaf_answers_as_the_original(leaf: Leaf, mutation: str, tmp_path: Path) -> None:
    model, twin = pair(leaf, mutation, tmp_path)
    before = state_of(model)
    hfpatch.plan(model)
    assert same_state(before, state_of(model))
    assert not model.inner.__class__.forward.__globals__["COUNT"]
    report = hfpatch.apply(model)
    wrong = compare(model, twin, battery(WIDTH), leaf.inputs)
    assert not wrong, report
    hfpatch.restore(model)
    assert not compare(model, twin, battery(WIDTH)[:3], leaf.inputs)


@pytest.mark.parametrize("mutation", [m for m in BEFORE if m not in HARMLESS])
def test_the_battery_sees_the_mutation(mutation: str, tmp_path: Path) -> None:
    """A mutated class differs from the real one for at least one of the calls."""
    if mutation in ("global dict", "clock"):
        pytest.skip("it waits for somebody to throw its switch")
    leaf = LEAVES[6]  # elementwise: nothing is lost in a norm
    model, _ = pair(leaf, mutation, tmp_path)
    real = Root(randomized(leaf.make(leaf.cls))).eval()
    assert compare(model, real, battery(WIDTH))
