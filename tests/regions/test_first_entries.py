"""The first entries of a cache's layer, as fused blocks put them there on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

import hfpatch
from hfpatch.regions import first_entries, offer, wanted

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "window": lambda: MistralConfig(**SIZES, sliding_window=7),
    "wide window": lambda: MistralConfig(**SIZES, sliding_window=40),
    "gemma": lambda: GemmaConfig(**SIZES),
}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_entries, "_DEVICES", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(first_entries, "_MANY_BYTES", 0)
    monkeypatch.setattr(first_entries, "_known", {})
    monkeypatch.setattr(wanted, "_GPU", frozenset({"cpu", "cuda"}))
    offer.forget()


def layers() -> list[Any]:
    return [DynamicLayer(), *(DynamicSlidingWindowLayer(sliding_window=n) for n in (1, 4, 50))]


def entries(dtype: torch.dtype = torch.bfloat16, dim: int = 16, skip: int = 0) -> torch.Tensor:
    """As products leave them, a part of packed rows."""
    whole = torch.randn(2, 9, 4 * dim + skip).to(dtype)
    return whole[..., skip : skip + 3 * dim].view(2, 9, 3, dim).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "skip"), [(16, 0), (16, 1), (5, 0), (8, 8)])
def test_a_layer_is_left_as_its_own_update_leaves_it(
    dtype: torch.dtype, dim: int, skip: int
) -> None:
    for layer in layers():
        caches = [DynamicCache(), DynamicCache()]
        for cache in caches:
            cache.layers = [copy.deepcopy(layer)]
        keys, values = entries(dtype, dim, skip), entries(dtype, dim, skip)
        for turn in range(2):  # the second is theirs
            wanted = caches[0].update(keys, values, 0)
            found = first_entries.taken(caches[1], keys, values, 0)
            assert (found is None) == (turn == 1)
            found = caches[1].update(keys, values, 0) if found is None else found
            assert all(map(torch.equal, wanted, found))
            a, b = (vars(cache.layers[0]) for cache in caches)
            assert a.keys() == b.keys()
            for name, value in a.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, b[name]), name
                else:
                    assert value == b[name], name
        keys.zero_()  # nothing of it is held
        assert caches[1].layers[0].keys.abs().sum() > 0


def test_what_is_changed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = entries(), entries()

    def tried(change: Any, layer: Any = None) -> bool:
        cache = DynamicCache()
        cache.layers = [DynamicLayer() if layer is None else layer]
        change(cache)
        before = dict(vars(cache.layers[0]))
        found = first_entries.taken(cache, keys, values, 0)
        assert found is not None or vars(cache.layers[0]) == before
        return found is not None

    class Rounded(DynamicLayer):
        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys.round(), values, *args, **kwargs)

    class Noting(DynamicLayer):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            self.noted = True
            return super().update(*args, **kwargs)

    assert tried(lambda cache: None)
    assert not tried(lambda cache: None, Rounded())
    assert not tried(lambda cache: None, Noting())
    assert not tried(lambda cache: setattr(cache, "update", print))
    assert not tried(lambda cache: setattr(cache.layers[0], "update", print))
    assert not tried(lambda cache: setattr(cache, "offloading", True))
    assert not tried(lambda cache: cache.layers.clear() or cache.layers.append(layers()[1])
                     or cache.layers[0].activate_past_recording())  # fmt: skip
    real = DynamicLayer.update

    def other(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self, -keys, values, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", other)
    assert not tried(lambda cache: None)
    monkeypatch.undo()


def test_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    cache = DynamicCache()
    cache.layers = [DynamicLayer()]
    assert first_entries._fits(cache, cache.layers[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_and_what_follows_them(name: str, rows: int, kernels_module: object) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, blocks=True, decoding=False)
    ids = torch.randint(64, (rows, 21))
    with torch.no_grad():
        for _ in range(3):
            both = [DynamicCache(config=plain.config) for _ in range(2)]
            for part in (ids[:, :18], ids[:, 18:19], ids[:, 19:]):
                wanted, found = (
                    model(part, past_key_values=cache)
                    for model, cache in zip((plain, patched), both, strict=True)
                )
                torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
            for a, b in zip(both[0].layers, both[1].layers, strict=True):
                torch.testing.assert_close(b.keys, a.keys, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(b.values, a.values, rtol=1e-4, atol=1e-5)
                assert b.get_seq_length() == a.get_seq_length()
    assert first_entries._known and all(first_entries._known.values())


def test_a_decoder_behind_an_encoder(kernels_module: object) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=64, d_ff=96, d_kv=16, num_heads=4, num_layers=2,
        decoder_start_token_id=0, is_gated_act=True, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    plain = T5ForConditionalGeneration(config).eval()
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, blocks=True, decoding=False)
    ids, start = torch.randint(64, (2, 19)), torch.randint(64, (2, 5))
    with torch.no_grad():
        for _ in range(2):
            caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
            for part in (start, start[:, :1]):
                wanted, found = (
                    model(input_ids=ids, decoder_input_ids=part, past_key_values=cache).logits
                    for model, cache in zip((plain, patched), caches, strict=True)
                )
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
