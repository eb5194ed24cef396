"""RoPE whose table does not hold each angle as the pairs lie: no kernel is used for it."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch

import hfpatch
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.inputs import sample_inputs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: captured blocks run on them."""


@torch.no_grad()
def test_a_gate_of_zero_hides_no_other_table() -> None:
    """As its constructor leaves it a block is the identity, with any RoPE; trained, it is not."""
    torch.manual_seed(0)
    model = diffusers_model(diffusers.ErnieImageTransformer2DModel).eval().requires_grad_(False)
    twin, inputs = copy.deepcopy(model), sample_inputs(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    model(**inputs)
    for m in (model, twin):
        generator = torch.Generator().manual_seed(5)
        for p in m.parameters():
            if not p.any():
                p.copy_(torch.randn(p.shape, generator=generator))
    found, wanted = (m(**inputs)[0] for m in (model, twin))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    reasons = {c.reason for c in hfpatch.status(model).plan.candidates if c.state == "left"}
    assert reasons == {"its RoPE has a table whose angles do not lie as its pairs do"}
    hfpatch.restore(model)


@torch.no_grad()
def test_nets_in_a_list_are_no_blocks() -> None:
    """Of several ControlNets in one the blocks are those of each."""
    model = diffusers_model(diffusers.HunyuanDiT2DMultiControlNetModel).eval()
    inputs = sample_inputs(model)
    hfpatch.apply(model, blocks=True, decoding=False)
    model(**inputs)
    candidates = hfpatch.status(model).plan.candidates
    assert {c.class_name for c in candidates} == {"HunyuanDiTBlock"}
    assert {c.state for c in candidates} == {"fused"}
    hfpatch.restore(model)
