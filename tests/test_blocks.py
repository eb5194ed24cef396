"""A fused block of LTX-Video: what it takes, when it steps aside, and lookalikes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import zoo
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor, nn

import hfpatch
from hfpatch.blocks import projections
from hfpatch.regions import offer
from hfpatch.regions.kind import runs_seen

NAME = "LTXVideoTransformerBlock"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""
    offer.forget()


class Root(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    @property
    def block(self) -> Any:
        return self.blocks[0]


def block(cls: type[nn.Module] = LTXVideoTransformerBlock) -> Root:
    made = cls(64, 4, 16, 48, activation_fn="gelu-approximate")
    return Root(zoo.randomize_(made).eval().requires_grad_(False))


def inputs(tokens: int = 10, modulations: int = 1) -> dict[str, Any]:
    angles = torch.randn(2, tokens, 32).repeat_interleave(2, -1)
    return {
        "hidden_states": torch.randn(2, tokens, 64),
        "encoder_hidden_states": torch.randn(2, 6, 48),
        "temb": torch.randn(2, modulations, 6 * 64),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def compare(model: Root, call: dict[str, Any], fused: bool = True) -> None:
    """The first call of a kind decides, and is the original's; the second runs fused, or not."""
    with torch.no_grad():
        expected = LTXVideoTransformerBlock.forward(model.block, **call)
        model.block(**call)
        with runs_seen(offer._kinds.values()) as seen:
            found = model.block(**call)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (id(model.block) in seen) is fused


def test_paths_of_the_forward() -> None:
    model = block()
    (candidate,) = hfpatch.apply(model).plan.candidates
    assert candidate.state == "at its first call"
    mask = torch.zeros(2, 1, 6)
    mask[0, :, 3:] = -10000.0
    compare(model, inputs())
    compare(model, inputs() | {"encoder_attention_mask": mask})
    compare(model, inputs() | {"image_rotary_emb": None})
    compare(model, inputs(modulations=10))  # a timestep per token
    other = inputs(tokens=7)  # other tables than the step before
    compare(model, other)
    compare(copy.deepcopy(model), other)


def test_steps_aside_for_hooks_processors_and_autograd() -> None:
    model = block()
    call = inputs()
    hfpatch.apply(model)
    compare(model, call)
    seen: list[str] = []
    handles = [
        m.register_forward_hook(lambda *a: seen.append("hook"))
        for m in (model.block.norm1, model.block.attn1, model.block.attn2.norm_k)
    ]
    compare(model, call, fused=False)
    assert len(seen) == 9  # three in each patched call, three in the original
    for handle in handles:
        handle.remove()

    class Doubled(type(model.block.attn1.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().__call__(*args, **kwargs) * 2

    model.block.attn1.set_processor(Doubled())
    compare(model, call, fused=False)
    hfpatch.restore(model)
    hfpatch.apply(model)
    model.block(**call)
    compare(model, call, fused=False)

    model = block().requires_grad_(True)
    hfpatch.apply(model)
    model.block(**call).sum().backward()
    assert all(p.grad is not None for p in model.block.attn1.parameters())


def test_a_lookalike_is_left_alone() -> None:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return LTXVideoTransformerBlock.forward(self, hidden_states * 1.01, *args, **kwargs)

    lookalike = type(NAME, (LTXVideoTransformerBlock,), {"forward": forward})
    report = hfpatch.apply(block(lookalike))
    assert not report.plan.candidates
    (note,) = (n for n in report.notes if "`blocks.0`" in n)
    assert "not captured" in note and "is a class of its own, not the library's" in note


def test_a_dropout_behind_the_projection_is_left_out_only_where_it_drops_nothing() -> None:
    attn, x, seen = nn.Module(), torch.ones(4, 64), []
    attn.to_out = nn.ModuleList([nn.Linear(64, 64), nn.Dropout(0.5)])
    plain = attn.to_out[0](x)
    assert torch.equal(projections.output_projection(attn.eval(), x), plain)
    torch.manual_seed(3)
    dropped = projections.output_projection(attn.train(), x)
    torch.manual_seed(3)
    assert torch.equal(dropped, attn.to_out[1](plain)) and (dropped == 0).any()
    attn.to_out[1].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(projections.output_projection(attn.eval(), x), plain) and seen == [1]


def test_a_copy_does_not_keep_the_first_alive() -> None:
    model = block()
    hfpatch.apply(model)
    twin, first = copy.deepcopy(model), weakref.ref(model.block)
    del model
    gc.collect()
    assert first() is None
    compare(twin, inputs())
