"""Single norms of every family: as near to fp64 as the original, and wrong kernels are found."""

from __future__ import annotations

import pytest
import torch
import zoo
from support import mutations
from support.leaves import leaves

import hfpatch

#: One of each formula: `cast=` input, none with an offset, weight, and LayerNorm.
MUTATED = ("llama", "gemma2", "t5-v1.1", "bert")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "olmo2", "phi3", "t5-v1.1", "bert", "clip-text", "vit"]
)
def test_leaves_are_as_near(name: str) -> None:
    for dtype in zoo.DTYPES:
        found = {leaf.name: leaf.verdict(dtype) for leaf in leaves(name, dtype)}
        assert found
        assert all(v.is_near for v in found.values()), (dtype, found)


@pytest.mark.parametrize("dtype", zoo.DTYPES, ids=str)
@pytest.mark.parametrize("mutation", ["none", *mutations.MUTATIONS])
def test_mutations_are_found(mutation: str, dtype: torch.dtype) -> None:
    """In every dtype, whatever the formula; the formula itself passes."""
    make = mutations.MUTATIONS.get(mutation, mutations.exact)
    for name in MUTATED:
        with mutations.registered(make) as settings:
            found = [(leaf.name, leaf.verdict(dtype)) for leaf in leaves(name, dtype, **settings)]
        assert found
        assert all(v.is_near == (mutation == "none") for _, v in found), (name, found)


def test_a_mutated_kernel_is_not_used_when_it_is_verified() -> None:
    """What the tests above look at is behind a proof that would not let it pass."""
    model = zoo.ENTRIES["llama"].build()
    with mutations.registered(mutations.wrong_eps) as settings:
        report = hfpatch.apply(model, **{**settings, "verify": True})
    assert not report.swaps
    assert any(s.kind == "rejected" for s in report.skips)
