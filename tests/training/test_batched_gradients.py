"""Gradients that are asked for in batches (`is_grads_batched=True`): a vectorized Jacobian does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import zoo

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "phi3", "bert"])
def test_gradients_in_batches(name: str) -> None:
    entry = zoo.ENTRIES[name]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    hfpatch.apply(model, mode="training")
    found = []
    for m in (model, twin):
        y = entry.output(m(**inputs))
        of = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(0))
        parameters = [p for p in m.parameters() if p.requires_grad]
        found.append(
            torch.autograd.grad(y, parameters, of, is_grads_batched=True, allow_unused=True)
        )
    whole = max(g.norm() for g in found[1] if g is not None)
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) is (theirs is None)
        if theirs is not None:
            assert (ours - theirs).norm() <= 2e-5 * (theirs.norm() + 1e-2 * whole)
