"""Fused joint-attention blocks on a GPU: numbers on each path, launches, graphs, real sizes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from support.captured import paths
from support.nearness import Draw, assert_as_near, draw
from support.samples import SEEDS, Sample, moved
from test_joint_blocks import MASKED, ROWS, Row, assert_fused, build, of_batch, pack

import hfpatch

pytestmark = pytest.mark.gpu
#: Inputs that decide about one family, dtype and batch.
DRAWS = 12
families = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.zoo)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels must be there; convolutions in true fp32, or TF32 hides everything."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def launches(run: Any) -> int:
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type.name == "CUDA")


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_numbers(row: Row, dtype: torch.dtype, batch: int, packed: bool) -> None:
    draws = []
    for seed in range(SEEDS):
        entry, change = zoo.ENTRIES[row.zoo], functools.partial(of_batch, batch=batch)
        sample = Sample(entry, dtype, seed, DRAWS // SEEDS, change, device="cuda")
        if packed:
            pack(sample.model)
        hfpatch.apply(sample.model)
        with torch.no_grad():
            assert_fused(row, sample.model, sample.inputs[0])
        draws += sample.draws()
        again, patched = (entry.run(sample.model, sample.inputs[0]) for _ in range(2))
        assert torch.equal(again, patched)  # the same kernels on the same tensors
    assert_as_near(draws, dtype, row.zoo)


@pytest.mark.parametrize("row", MASKED, ids=lambda row: row.zoo)
@pytest.mark.parametrize("kept", ["1111111", "1111000", "1010101"])
@pytest.mark.parametrize("inference", [False, True])
def test_masks(row: Row, kept: str, inference: bool) -> None:
    assert row.mask is not None
    entry = zoo.ENTRIES[row.zoo]
    model, inputs = build(row)
    inputs = of_batch(inputs, 1)
    inputs[row.mask] = torch.tensor([[int(c) for c in kept]])
    truth = entry.reference(model, inputs)
    model, inputs = model.cuda(), moved(inputs, "cuda")
    hfpatch.apply(model)
    with torch.inference_mode(inference):
        for _ in range(3):  # a captured block decides, packs, runs
            assert relative_error(entry.run(model, inputs).cpu(), truth) < 1e-4


@families
def test_launches_less_than_half(row: Row) -> None:
    entry = zoo.ENTRIES[row.zoo]
    model, inputs = build(row, torch.bfloat16)
    model, inputs = model.cuda(), moved(of_batch(inputs, 1), "cuda")
    block: Any = model.get_submodule(row.blocks[0])
    calls: list[tuple[Any, Any]] = []
    handle = block.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    entry.run(model, inputs)
    handle.remove()
    args, kwargs = calls[0]
    with torch.no_grad():
        before = launches(lambda: block(*args, **kwargs))
        pack(model)
        hfpatch.apply(model)
        assert_fused(row, model, inputs)
        after = launches(lambda: block(*args, **kwargs))
    assert after * 2 < before, (after, before)


@families
def test_in_a_graph(row: Row) -> None:
    """Nothing that a fused block keeps between calls is of a graph's own memory, and no block waits
    for the GPU while a graph is captured."""
    if row.mask is not None:
        pytest.skip("the models themselves look at the mask, which a capture forbids")
    entry = zoo.ENTRIES[row.zoo]
    model, inputs = build(row, torch.bfloat16)
    model, inputs = model.cuda(), moved(of_batch(inputs, 1), "cuda")
    hfpatch.apply(model)
    assert_fused(row, model, inputs)
    blocks: Any = [model.get_submodule(path) for path in row.blocks]
    calls: dict[Any, Any] = {}
    for block in blocks:
        block.register_forward_pre_hook(
            lambda m, args, kwargs: calls.update({m: (args, kwargs)}), with_kwargs=True
        )
    entry.run(model, inputs)
    for block in blocks:
        block._forward_pre_hooks.clear()
        args, kwargs = calls[block]
        with torch.no_grad():
            expected = block(*args, **kwargs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = block(*args, **kwargs)
            entry.run(model, inputs)
            graph.replay()
        for a, b in zip(_flat(result), _flat(expected), strict=True):
            torch.testing.assert_close(a, b)


def _flat(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, tuple) else (result,)
    return [v for v in values if v is not None]


@pytest.mark.parametrize("name", ["FluxTransformerBlock", "FluxSingleTransformerBlock"])
def test_flux_at_its_real_size(name: str) -> None:
    import diffusers.models.transformers.transformer_flux as flux

    torch.manual_seed(0)
    with torch.device("cuda"):
        block = getattr(flux, name)(3072, 24, 128).bfloat16().eval().requires_grad_(False)
        angles = torch.randn(4608, 64).repeat_interleave(2, -1)
        calls = [
            {
                "hidden_states": torch.randn(1, 4096, 3072, dtype=torch.bfloat16),
                "encoder_hidden_states": torch.randn(1, 512, 3072, dtype=torch.bfloat16),
                "temb": torch.randn(1, 3072, dtype=torch.bfloat16),
                "image_rotary_emb": (angles.cos(), angles.sin()),
            }
            for _ in range(4)
        ]
    before = [block(**call) for call in calls]
    in_fp32 = copy.deepcopy(block).float()  # 2^16 times finer than bf16
    pack(block)
    blocks = torch.nn.ModuleList([block])
    hfpatch.apply(blocks)
    block(**calls[0])  # decides
    assert paths(blocks) == {"0"}
    draws: list[list[Draw]] = [[], []]  # of each of the block's two results
    for call, eager in zip(calls, before, strict=True):
        exact = in_fp32(**{k: v if isinstance(v, tuple) else v.float() for k, v in call.items()})
        for one, row in zip(draws, zip(block(**call), eager, exact, strict=True), strict=True):
            one.append(draw(*row))
    for one in draws:
        assert_as_near(one, torch.bfloat16, name)
