"""A container of keys and values that layers share is handed to every block: those that leave it
alone are fused, those that read it or write to it are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import hfpatch


def _model(layers: int, shared: int) -> Any:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=99,
        vocab_size_per_layer_input=99,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=shared,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )
    model = Gemma4ForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize(("layers", "shared", "fused"), [(2, 0, 2), (6, 2, 2)])
def test_blocks_that_leave_it_alone(
    layers: int, shared: int, fused: int, kernels_module: object
) -> None:
    """Of six layers with two that reuse, the last of each type before them stores."""
    model = _model(layers, shared)
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))

    def outputs() -> tuple[Any, Any]:
        with torch.no_grad():
            return model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)

    logits, said = outputs()
    hfpatch.apply(model, blocks=True)
    try:
        for _ in range(2):
            again, repeated = outputs()
            torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
            assert torch.equal(repeated, said)
        candidates = hfpatch.status(model).plan.candidates
    finally:
        hfpatch.restore(model)
    assert sum(c.state == "fused" for c in candidates) == fused
    left = {c.reason for c in candidates if c.state != "fused"}
    # those that store hand it on to their attention; those that reuse have no cache of their own
    assert all("KVSharingDict" in why or "DummyLayer" in why for why in left)
    assert torch.equal(outputs()[0], logits)
