"""RoPE whose table does not hold each angle as the pairs lie: no kernel is used for it."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.inputs import sample_inputs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: captured blocks run on them."""


@torch.no_grad()
def test_a_gate_of_zero_hides_no_other_table() -> None:
    """ErnieImage's angles lie in pairs, its code turns halves. As it is made its gates are 0, so
    that any RoPE gives the same numbers; of a trained one they are not."""
    torch.manual_seed(0)
    made = diffusers_model(diffusers.ErnieImageTransformer2DModel).eval()
    trained = copy.deepcopy(made)
    for p in trained.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.5)
    inputs = sample_inputs(made)
    wanted = trained(**inputs).sample
    for model in (made, trained):
        hfpatch.apply(model, blocks=True, decoding=False)
        found = model(**inputs).sample
        states = {(c.state, c.reason) for c in hfpatch.status(model).plan.candidates}
        assert states == {("left", "its RoPE has a table whose angles do not lie as its pairs do")}
        hfpatch.restore(model)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


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
