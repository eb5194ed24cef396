"""Short prompts by the description give what the unpatched model gives.

On the CPU, where they are no graphs and are not used unless a test asks for it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding.families import FAMILIES, make, prompts
from transformers import DynamicCache

import hfpatch
from hfpatch.decoding import kept, prompt, step
from hfpatch.decoding.prompt import BUCKETS, MOST_TOKENS, bucket_for
from hfpatch.regions import offer


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PROMPT_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(prompt, "_MANY_TOKENS", 64)  # two rows of 32: both ways are gone


def served(model: Any) -> int:
    return int(kept.decoders[model].prompts_served)


#: One family of two, and all in `make test-all`; the steps of each are asked in test_layer.py.
_FAMILIES = [
    pytest.param(name, marks=pytest.mark.exhaustive if i % 2 else ())
    for i, name in enumerate(FAMILIES)
]


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_familys_prompts(name: str) -> None:
    """Of several lengths, padded and not: texts, logits and cache."""
    plain = make(name)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, include=type(patched).__name__)
    more: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    more |= {"return_dict_in_generate": True, "output_logits": True}
    # the first of a length and number of rows is the original's
    for rows, length, padding in (
        (1, 20, 0),
        (1, 30, 0),
        (2, 17, 3),
        (2, 31, 5),
        (1, 5, 0),
        (1, 9, 0),
    ):
        inputs = prompts(rows, length, padding)
        before = served(patched)
        wanted, got = (m.generate(**inputs, **more) for m in (plain, patched))
        assert torch.equal(got.sequences, wanted.sequences), (rows, length)
        for a, b in zip(wanted.logits, got.logits, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
        layers = zip(wanted.past_key_values.layers, got.past_key_values.layers, strict=True)
        shown = inputs["attention_mask"].bool()
        for theirs, ours in layers:
            assert theirs.get_seq_length() == ours.get_seq_length()
            there = theirs.keys.shape[2]
            seen = torch.cat([shown, shown.new_ones(rows, 7)], 1)[:, -there:, None]
            for name_of in ("keys", "values"):
                a, b = (getattr(o, name_of).transpose(1, 2).flatten(2) for o in (theirs, ours))
                torch.testing.assert_close(b * seen, a * seen, rtol=1e-3, atol=1e-3)
        if (rows, length) in ((1, 30), (2, 31), (1, 9)):
            assert served(patched) == before + 1, kept.notes(patched)
    assert "prompts as graphs" in kept.notes(patched)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "cohere"])
def test_half_types_are_no_farther_from_fp32(name: str, dtype: torch.dtype) -> None:
    plain = make(name, dtype)
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    hfpatch.apply(patched, include=type(patched).__name__)
    errors = [0.0, 0.0]
    for seed in range(6):
        torch.manual_seed(seed)
        ids = torch.randint(3, 300, (2, 25))
        results = []
        for model in (exact, plain, patched):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            results.append(out.logits.double())
        for i in range(2):
            errors[i] += float((results[1 + i] - results[0]).square().sum())
    assert served(patched) == 5
    assert errors[1] <= 1.2 * errors[0]


def test_what_is_no_short_prompt_is_the_originals() -> None:
    plain = make("llama")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    ids = prompts(1, 20, 0)["input_ids"]
    calls: list[dict[str, Any]] = [
        {"logits_to_keep": 0},
        {"logits_to_keep": 2},
        {"output_hidden_states": True, "logits_to_keep": 1},
    ]
    with torch.no_grad():
        for arguments in calls * 2:
            results = [
                m(ids, past_key_values=DynamicCache(config=m.config), **arguments).logits
                for m in (plain, patched)
            ]
            torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
        lazy = [m(ids, past_key_values=DynamicCache(), logits_to_keep=1) for m in (plain, patched)]
        torch.testing.assert_close(lazy[1].logits, lazy[0].logits, rtol=1e-3, atol=1e-3)
    assert served(patched) == 0
    assert bucket_for(1, 512) == 512 and bucket_for(1, 513) is None
    assert bucket_for(16, 512) is None and bucket_for(1, 1) == BUCKETS[0]
    assert all(b * 16 <= MOST_TOKENS for b in BUCKETS if b <= 256)


def test_a_changed_weight_counts_at_once() -> None:
    model = make("llama")
    hfpatch.apply(model)
    inputs = prompts(1, 20, 0)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    for _ in range(2):
        model.generate(**inputs, **more)
    assert served(model) == 1
    up = model.model.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(torch.randn_like(up.weight))
    other = copy.deepcopy(model)
    hfpatch.restore(other)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **more), other.generate(**inputs, **more))
    assert served(model) == 2


def test_a_prompt_that_fails_is_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    inputs = prompts(1, 20, 0)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(**inputs, **more)
    hfpatch.apply(model)
    model.generate(**inputs, **more)

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(step.prompts.PromptEngine, "run", failing)
    with pytest.warns(RuntimeWarning, match="its prompts: OutOfMemoryError: no room"):
        assert torch.equal(model.generate(**inputs, **more), wanted)
    assert torch.equal(model.generate(**inputs, **more), wanted)
    assert served(model) == 0 and kept.decoders[model].steps > 10


def test_a_prompt_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    inputs = prompts(1, 20, 0)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(**inputs, **more)
    hfpatch.apply(model)
    mlp = step.prompts.PromptEngine._mlp
    monkeypatch.setattr(
        step.prompts.PromptEngine, "_mlp", lambda self, x, m: 1.01 * mlp(self, x, m)
    )
    with pytest.warns(RuntimeWarning, match="20 tokens of 1 rows: .* differ"):
        assert torch.equal(model.generate(**inputs, **more), wanted)
    assert torch.equal(model.generate(**inputs, **more), wanted)
    assert served(model) == 0


def test_settings_are_looked_at_before_a_prompt_counts() -> None:
    """They are while it is computed: what was computed by other ones is forgotten, and what the
    original then says of its call is its own."""
    plain = make("llama")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, include=type(patched).__name__)
    held = kept.decoders[patched]
    arguments: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    for served in (1, 2):
        for model in (plain, patched):
            model.model.layers[0].input_layernorm.variance_epsilon += 0.5
        for _ in range(2):  # proven, then served
            wanted, got = (m.generate(**prompts(1, 20), **arguments) for m in (plain, patched))
            torch.testing.assert_close(got.logits[0], wanted.logits[0], rtol=1e-3, atol=1e-4)
        assert held.prompts_served == served, kept.notes(patched)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    patched.model.layers[0].mlp.forward = fails
    with pytest.raises(RuntimeError, match="mine"):
        patched.generate(**prompts(1, 20), **arguments)
    del patched.model.layers[0].mlp.forward
    assert held.prompts_refused is None
    patched.generate(**prompts(1, 20), **arguments)
    assert held.prompts_served == 3 and held.prompts_refused is None, kept.notes(patched)


def test_settings_that_go_to_and_fro() -> None:
    """What was proven under those before is known, and what the others give is of no use."""
    plain = make("llama")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, include=type(patched).__name__)
    ids = prompts(1, 20)["input_ids"]
    for number in range(6):
        results = []
        for model in (plain, patched):
            model.model.layers[0].input_layernorm.variance_epsilon = (1e-6, 2.0)[number % 2]
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            results.append((logits, *(layer.keys for layer in cache.layers)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
    assert served(patched) == 4, kept.notes(patched)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_padding_on_either_side_and_holes(name: str) -> None:
    """What follows a prompt that is padded on the right is read off a token that is padding."""
    plain = make(name)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    ids = prompts(2, 13)["input_ids"]
    masks = torch.ones(4, 2, 13, dtype=torch.int64)
    masks[1, 0, :3] = masks[2, 0, 10:] = masks[3, 0, 4:6] = 0
    for mask in masks[[0, 1, 1, 2, 3, 3, 2, 1, 0]]:
        wanted, got = (
            m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
            for m in (plain, patched)
        )
        assert torch.equal(got, wanted), mask
    assert kept.decoders[patched].prompts_served >= 2


def test_no_block_is_captured_for_prompts_and_steps_that_are_proven() -> None:
    """A capture takes seconds and moves weights; a call that stays the original's needs it."""
    offer.forget()
    plain = make("qwen3")
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, blocks=True)
    more: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    for inputs in (prompts(1, 20, 0), prompts(2, 20, 3), prompts(1, 20, 0)):
        assert torch.equal(patched.generate(**inputs, **more), plain.generate(**inputs, **more))
    assert served(patched) == 1 and kept.decoders[patched].steps
    blocks = [
        c for c in hfpatch.status(patched).plan.candidates if c.class_name == "Qwen3DecoderLayer"
    ]
    assert blocks and all(c.state == "at its first call" for c in blocks), blocks
    with torch.no_grad():
        wanted, got = (m(prompts(1, 20, 0)["input_ids"]).logits for m in (plain, patched))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    blocks = [
        c for c in hfpatch.status(patched).plan.candidates if c.class_name == "Qwen3DecoderLayer"
    ]
    assert blocks and all(c.state == "fused" for c in blocks), blocks
