"""Arguments of a block whose memory holds another sign than they have, as PyTorch lays out the
imaginary part of a conjugate: the result is the unpatched twin's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import hfpatch

BLOCKS = {
    "bert": "encoder.layer.0",
    "vit": "layers.0",
    "llama": "model.layers.0",
    "ltx": "transformer_blocks.0",
    "wan": "blocks.0",
    "flux": "transformer_blocks.0",
    "sd3": "transformer_blocks.0",
}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _otherwise(value: Any) -> Any:
    """The same values, of negated memory."""
    if isinstance(value, tuple):
        return tuple(map(_otherwise, value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    found = torch._neg_view(-value)  # dense; a conjugate's own `.imag` has every other element
    assert found.is_neg() and torch.equal(found, value)
    return found


def _call_of(model: nn.Module, block: nn.Module, inputs: Any) -> tuple[Any, Any]:
    seen: list[Any] = []
    handle = block.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    model(**inputs)
    handle.remove()
    args, kwargs = seen[0]
    return args, {k: v for k, v in kwargs.items() if "Cache" not in type(v).__name__}


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_negated_memory(name: str) -> None:
    entry = zoo.ENTRIES[name]
    twin = entry.build()
    model, inputs = copy.deepcopy(twin), entry.inputs(twin)
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(2):
        model(**inputs)
    theirs, ours = (m.get_submodule(BLOCKS[name]) for m in (twin, model))
    args, kwargs = _call_of(twin, theirs, inputs)
    args, kwargs = list(args), dict(kwargs)
    for place in (*range(len(args)), *kwargs):
        changed, named = list(args), dict(kwargs)
        into: Any = changed if isinstance(place, int) else named
        into[place] = _otherwise(into[place])
        for _ in range(2):  # the first of a kind is captured
            got, expected = (b(*changed, **named) for b in (ours, theirs))
            if isinstance(expected, Tensor):
                got, expected = (got,), (expected,)
            for mine, its in zip(got, expected, strict=True):
                if isinstance(its, Tensor):
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4 * its.abs().max())
