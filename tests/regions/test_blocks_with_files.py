"""Blocks that have files of their own, captured in their place: what their captures fuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from torch import Tensor

import hfpatch
from hfpatch.planning import families
from hfpatch.regions import emit, offer


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: what is fused depends on them."""


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    """Nothing is known of these blocks, and nothing stays known."""
    offer.forget()
    yield
    offer.forget()


#: By class: what its captures find, among other things.
FOUND = {
    "ltx": {
        "LTXVideoTransformerBlock": {
            "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate", "3 products as one",
        },
    },
    "wan": {"WanTransformerBlock": {"qk_norm_rope", "gate_residual_norm_modulate"}},
    "flux": {
        "FluxTransformerBlock": {"text and image side by side", "gate_residual_norm_modulate"},
        "FluxSingleTransformerBlock": {"qk_norm_rope", "product of two parts", "gate_residual"},
    },
    "sd3": {"JointTransformerBlock": {"text and image side by side", "norm_modulate"}},
    "lumina2": {"Lumina2TransformerBlock": {"qk_norm_rope", "norm_modulate", "gated silu"}},
    "z-image": {"ZImageTransformerBlock": {"qk_norm_rope", "norm_modulate", "gated silu"}},
    "ltx2": {"LTX2VideoTransformerBlock": {"rope_qk", "norm_modulate"}},
    "cogvideox": {"CogVideoXBlock": {"attention", "norm_modulate"}},
    "sana": {"SanaTransformerBlock": {"norm_modulate", "gate_residual_norm_modulate"}},
    "sd15-unet": {"BasicTransformerBlock": {"add_layer_norm", "gated gelu"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_capture_has_the_ops_of_the_file(name: str, dtype: torch.dtype) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build(dtype)
    inputs = entry.inputs(model, dtype)
    truth, eager = entry.reference(model, inputs), entry.run(model, inputs)
    with families.without_files():
        hfpatch.apply(model, blocks=True)
    first, second = entry.run(model, inputs), entry.run(model, inputs)
    candidates = hfpatch.status(model).plan.candidates
    for cls, wanted in FOUND[name].items():
        of_class = [c for c in candidates if c.class_name == cls]
        assert of_class
        assert {c.state for c in of_class} == {"fused"}, of_class
        assert any(wanted <= set(c.found) for c in of_class), of_class
    limit = 1.25 * relative_error(eager, truth) + 4 * torch.finfo(dtype).eps
    for found in (first, second):
        assert relative_error(found, truth) <= limit
    hfpatch.restore(model)
    assert torch.equal(entry.run(model, inputs), eager)


@pytest.mark.parametrize("name", ["ltx", "wan", "lumina2"])
def test_tables_that_a_step_shares_go_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    own = emit.made_table

    def noted(*args: Any) -> Tensor:
        table = own(*args)
        made.append(weakref.ref(table))
        return table

    monkeypatch.setattr(emit, "made_table", noted)
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.bfloat16)
    inputs = entry.inputs(model, torch.bfloat16)
    with families.without_files():
        hfpatch.apply(model, blocks=True)
    entry.run(model, inputs)
    entry.run(model, inputs)
    made.clear()
    entry.run(model, inputs)
    blocks = len(hfpatch.status(model).plan.candidates)
    assert 0 < len(made) < 2 * blocks or blocks == 1  # once for all blocks of a kind
    del model, inputs
    gc.collect()
    assert not [ref for ref in made if ref() is not None]


@pytest.mark.parametrize("apart", [False, True])
def test_two_halves_of_one_memory_are_not_copied_and_not_written_to(apart: bool) -> None:
    """What the block before a single-stream one returns: text and image of one buffer."""
    entry = zoo.ENTRIES["flux"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    blocks = model.single_transformer_blocks
    calls: list[dict[str, Any]] = []

    def noted(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(kwargs)

    hook = blocks[0].register_forward_pre_hook(noted, with_kwargs=True)
    entry.run(model, inputs)
    hook.remove()
    (call,) = calls
    text, image = call["encoder_hidden_states"], call["hidden_states"]
    both = torch.cat((text, image), 1)
    if not apart:
        text, image = both.split([text.shape[1], image.shape[1]], 1)
    call |= {"encoder_hidden_states": text, "hidden_states": image}
    with torch.no_grad():
        expected = blocks[0](**call)
        with families.without_files():
            hfpatch.apply(model, blocks=True)
        for _ in range(3):
            found = blocks[0](**call)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                assert a.untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    assert torch.equal(torch.cat((text, image), 1), both)
    assert hfpatch.status(model).plan.candidates[-1].state == "fused"
