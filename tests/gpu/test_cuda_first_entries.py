"""The first entries of a cache's layer on a GPU, where fused blocks copy them by 16 bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from regions.test_first_entries import CONFIGS, entries, layers
from transformers import AutoModelForCausalLM, DynamicCache

import hfpatch
from hfpatch.regions import first_entries

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "skip"), [(16, 0), (16, 1), (5, 0), (8, 8)])
def test_the_bits_are_the_caches_own(
    dtype: torch.dtype, dim: int, skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_entries, "_MANY_BYTES", 0)
    for layer in layers():
        caches = [DynamicCache(), DynamicCache()]
        for cache in caches:
            cache.layers = [copy.deepcopy(layer)]
        keys, values = (entries(dtype, dim, skip).cuda() for _ in "kv")
        keys[0, 0, 0, :2] = torch.tensor([float("nan"), -0.0])
        wanted = caches[0].update(keys, values, 0)
        found = first_entries.taken(caches[1], keys, values, 0)
        assert found is not None
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts(name: str, graphs: bool, kernels_module: object) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval().cuda().bfloat16()
    plain = copy.deepcopy(model)
    first_entries._known.clear()
    hfpatch.apply(model, blocks=True, decoding=False, cuda_graphs=graphs)
    ids = torch.randint(64, (2, 700), device="cuda")
    with torch.no_grad():
        for _ in range(3):
            both = [DynamicCache(config=plain.config) for _ in range(2)]
            wanted, found = (
                m(ids, past_key_values=cache) for m, cache in zip((plain, model), both, strict=True)
            )
            scale = wanted.logits.abs().max()
            assert (found.logits - wanted.logits).abs().max() <= 0.05 * scale
            for a, b in zip(both[0].layers, both[1].layers, strict=True):
                assert a.keys.shape == b.keys.shape and a.get_seq_length() == b.get_seq_length()
                assert (a.keys - b.keys).abs().max() <= 0.05 * a.keys.abs().max()
                assert (a.values - b.values).abs().max() <= 0.05 * a.values.abs().max()
    assert first_entries._known and all(first_entries._known.values())
