"""Weights whose memory was taken from them, as FSDP1 does between calls; to read them is fatal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from torch import Tensor, nn

import hfpatch

_TENSORS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "a norm's": lambda m: [m.get_submodule("model.norm").weight],  # type: ignore[list-item]
    "the head's": lambda m: [m.get_submodule("lm_head").weight],  # type: ignore[list-item]
    "a projection's": lambda m: [m.get_submodule("model.layers.0.mlp.up_proj").weight],  # type: ignore[list-item]
    "buffers": lambda m: list(m.buffers()),
    "all": lambda m: [*m.parameters(), *m.buffers()],
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("which", list(_TENSORS))
def test_apply_does_not_read_memory_that_is_given_back(
    which: str, mode: str, kernels_dir: object
) -> None:
    model = zoo.ENTRIES["llama"].build().train(mode == "training")
    inputs = zoo.ENTRIES["llama"].inputs(model, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(**inputs).logits
    tensors = _TENSORS[which](model)
    assert tensors
    kept = [(t, t.untyped_storage().nbytes(), t.detach().clone()) for t in tensors]
    for t in tensors:
        t.untyped_storage().resize_(0)
    report = hfpatch.apply(model, mode=mode)
    reasons = [skip.reason for skip in report.skips]
    if which in ("a norm's", "all") or (which, mode) == ("the head's", "training"):
        assert any("`weight` has no memory now" in reason for reason in reasons), reasons
    if which == "all":
        assert not any(swap.op in ("rms_norm", "linear_cross_entropy") for swap in report.swaps)
    for t, size, values in kept:
        t.untyped_storage().resize_(size)
        with torch.no_grad():
            t.copy_(values)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected)
    assert hfpatch.restore(model)


def test_such_a_module_is_planned_again_once_its_memory_is_back(kernels_dir: object) -> None:
    model = zoo.ENTRIES["llama"].build().eval()
    weight = model.get_submodule("model.norm").weight
    assert isinstance(weight, Tensor)
    size, values = weight.untyped_storage().nbytes(), weight.detach().clone()
    weight.untyped_storage().resize_(0)
    before = hfpatch.plan(model)
    weight.untyped_storage().resize_(size)
    with torch.no_grad():
        weight.copy_(values)
    paths = [{s.path for s in plan.swaps} for plan in (before, hfpatch.plan(model))]
    assert "model.norm" not in paths[0]
    assert "model.norm" in paths[1]
