"""The zoo itself: what other tests rely on when they compare models."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn

ALL = {**zoo.ENTRIES, **zoo.PIPELINES}


@pytest.mark.parametrize("dtype", zoo.DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_runs_and_repeats(name: str, dtype: torch.dtype) -> None:
    entry = ALL[name]
    model = entry.build(dtype)
    inputs = entry.inputs(model, dtype)
    y = entry.run(model, inputs)
    assert y.isfinite().all()
    assert torch.equal(entry.run(model, inputs), y)  # a run consumes nothing
    again = entry.build(dtype)
    assert torch.equal(entry.run(again, entry.inputs(again, dtype)), y)
    # a dead model would hide any error behind a constant output
    assert y.float().std() > 0.05
    # an fp64 twin agrees as far as the dtype goes: depth multiplies one rounding
    truth = entry.reference(model, inputs)
    assert truth.dtype == torch.float64
    error = (y.double() - truth).norm() / truth.norm()
    # another model's is 1; a recurrence carries fp32's roundings far, by how far depends on the CPU
    assert error < (100 if dtype == torch.float32 else 20) * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ALL)
def test_no_parameter_is_trivial(name: str) -> None:
    for module in zoo.modules_of(ALL[name].build()):
        for path, p in module.named_parameters():
            if p.numel() > 1:
                assert p.std() > 0, f"`{path}` is constant"


def test_seed_decides() -> None:
    entry = zoo.ENTRIES["llama"]
    a, b, c = entry.build(seed=1), entry.build(seed=1), entry.build(seed=2)
    weights = [m.model.norm.weight for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    zoo.ENTRIES["bert"].build()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_keeps_in_fp32_what_the_library_keeps() -> None:
    wan = zoo.ENTRIES["wan"].build(torch.bfloat16)
    assert wan.blocks[0].norm2.weight.dtype == torch.float32
    assert wan.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    t5 = zoo.ENTRIES["t5-v1.1-encoder"]
    kept = {torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}
    for dtype, expected in kept.items():
        wo = [m for n, m in t5.build(dtype).named_modules() if n.endswith(".wo")]
        assert wo
        assert all(isinstance(m, nn.Linear) and m.weight.dtype == expected for m in wo)
