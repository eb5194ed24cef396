"""Where a filter makes errors of warnings, a call ends as the original's does, and an `apply` that
has something to say leaves the model as it was."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch import announce
from hfpatch.announce import logger

_SHOWN = announce._not_raised
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


@pytest.fixture(autouse=True)
def _as_it_is(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "_not_raised", _SHOWN)


def model() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


def test_a_call_that_has_something_to_say() -> None:
    ours = model()
    twin = copy.deepcopy(ours)
    hfpatch.apply(ours)
    for one in (ours, twin):  # said behind the first layer, which has written to the cache by then
        one.model.layers[1].input_layernorm.variance_epsilon = 0.5
    caches = [DynamicCache(), DynamicCache()]
    ids = torch.arange(7)[None]
    records: list[Any] = []
    logger.addFilter(keep := lambda record: bool(records.append(record)) or True)
    try:
        with warnings.catch_warnings(record=True) as shown, torch.no_grad():
            warnings.simplefilter("error")
            a, b = (
                m(ids, past_key_values=c).logits for m, c in zip((ours, twin), caches, strict=True)
            )
    finally:
        logger.removeFilter(keep)
    torch.testing.assert_close(a, b)
    assert caches[0].get_seq_length(1) == caches[1].get_seq_length(1) == 7
    assert len(records) == 1
    (one,) = shown
    assert str(one.message).startswith("hfpatch: LlamaRMSNorm got other settings")
    assert one.category is RuntimeWarning
    assert one.filename.endswith("module.py")  # the place of the call


def test_an_apply_that_has_something_to_say() -> None:
    ours = model()
    before = {n: dict(m.__dict__) for n, m in ours.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="`blocks=True` captures nothing"):
            hfpatch.apply(ours, blocks=True, verify=False)
    assert {n: m.__dict__ for n, m in ours.named_modules()} == before
    assert not hfpatch.status(ours).swaps
