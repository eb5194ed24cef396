"""A GPU's random state is the user's: `apply` and proofs of first calls leave it as it was."""

from __future__ import annotations

import pytest
import torch
import zoo

import hfpatch
from hfpatch.decoding import layer as decoding_layer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "ltx", "flux"])
def test_a_seed_stays(name: str, mode: str) -> None:
    decoding_layer.forget()
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.bfloat16).cuda()
    inputs = {
        k: v.cuda() if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(model, torch.bfloat16).items()
    }
    torch.cuda.manual_seed(42)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    if mode == "training":
        hfpatch.apply(model, mode="training")
    else:
        hfpatch.apply(model)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for _ in range(2):
        entry.run(model, inputs)
        assert torch.equal(torch.cuda.get_rng_state(), before)
