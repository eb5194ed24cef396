"""Calls whose cache has entries: captured where `blocks=True` asks for it, else the original's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel

from hfpatch.regions import offer, wanted


def model() -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaModel(config).eval().requires_grad_(False)


@pytest.mark.parametrize("past", [False, True])
def test_a_call_with_entries(
    past: bool, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `blocks="auto"` offers them, on the CPU."""
    import hfpatch

    real = offer.offer
    monkeypatch.setattr(wanted, "_GPU", frozenset({"cpu"}))
    monkeypatch.setattr(offer, "offer", lambda *given: real(*given[:3], auto=not past))
    offer.forget()
    plain, patched = model(), model()
    hfpatch.apply(patched, blocks=True)
    ids = torch.arange(24)[None] % 64
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    with torch.no_grad():
        for part in (ids[:, :16], ids[:, 16:], ids[:, :3]):
            expected, got = (
                m(part, past_key_values=cache)[0]
                for m, cache in zip((plain, patched), caches, strict=True)
            )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    (kind,) = offer._kinds.values()
    caches_of = [structure.cache for structure, *_ in kind.variants]
    states = {state.past for state in caches_of if state is not None}
    assert states == ({False, True} if past else {False})
    assert kind.decided and "candidate" not in str(hfpatch.status(patched))
    offer.forget()
