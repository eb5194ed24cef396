"""Each family: explained, and its texts those of the unpatched model; others refused by name."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoding.families import FAMILIES, HALVES, REFUSED, make, prompts
from support.nearness import assert_as_near
from support.steps import WIDE, drawn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch.decoding import kept
from hfpatch.decoding.layer import describe
from hfpatch.decoding.rules import Unexplained
from hfpatch.decoding.spec import Opaque

_GREEDY = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}


def steps_of(model: torch.nn.Module) -> int:
    return kept.decoders[model].steps


@pytest.mark.parametrize("name", [*FAMILIES, *HALVES])
def test_texts_of_a_family_are_the_unpatched_models(name: str) -> None:
    model, inputs = make(name), prompts()
    more = {"return_dict_in_generate": True, "output_logits": True}
    before = model.generate(**inputs, **_GREEDY, **more)
    report = hfpatch.apply(model, include=type(model).__name__)
    assert [s.op for s in report.swaps] == ["decoding"], report
    after = model.generate(**inputs, **_GREEDY, **more)
    assert steps_of(model) >= 14, kept.notes(model)
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
    for held, other in zip(
        before.past_key_values.layers, after.past_key_values.layers, strict=True
    ):
        torch.testing.assert_close(other.keys, held.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.values, held.values, rtol=1e-3, atol=1e-4)
        assert held.get_seq_length() == other.get_seq_length()
    hfpatch.restore(model)
    assert torch.equal(model.generate(**inputs, **_GREEDY), before.sequences)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_explained_is_left_alone_with_the_stage_named(name: str) -> None:
    model, inputs = make(name), prompts()
    stage = REFUSED[name][2]
    with pytest.raises(Unexplained, match=stage):
        describe(model)
    before = model.generate(**inputs, **_GREEDY)
    report = hfpatch.apply(model)
    assert not any(s.op == "decoding" for s in report.swaps)
    skip = next(s for s in report.skips if s.path == "")
    assert skip.kind == "unexplained" and re.search(stage, skip.reason)
    assert torch.equal(model.generate(**inputs, **_GREEDY), before)


@pytest.mark.parametrize("name", HALVES)
def test_what_a_module_of_its_own_computes_is_called(name: str) -> None:
    """Mixtures of experts: the attention halves are the engine's; dense layers among them whole."""
    layers = describe(make(name)).model.layers
    dense = [i for i, layer in enumerate(layers) if not isinstance(layer.mlp, Opaque)]
    assert dense == ([1] if name == "qwen3-moe" else [])


@pytest.mark.parametrize(
    "name", ["gemma", "gemma3", "granite", "glm", "ernie", "olmo2", "mixtral", "gpt-oss"]
)
def test_a_family_in_bf16_is_no_farther_from_fp32(name: str) -> None:
    """Teacher forced: factors and rotations are rounded where the original rounds them."""
    assert_as_near(drawn(name, torch.bfloat16, chosen=WIDE), torch.bfloat16, name)


def test_a_model_from_a_file_is_explained(tmp_path: Path) -> None:
    make("qwen2").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert describe(model).model.dtype == torch.bfloat16
    assert hfpatch.apply(model).swaps[0].op == "decoding"


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi3-longrope", "ministral3"])
def test_steps_end_where_rope_becomes_another(name: str) -> None:
    """Texts that go over the limit, and short ones after long ones, also in turns."""
    plain, inputs = make(name), prompts(2, 40, 5)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched, include=type(patched).__name__)
    more = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    short = prompts(1, 9)
    for given, new in ((inputs, 40), (short, 10), (prompts(1, 80), 5), (short, 10)):
        arguments = {**more, "max_new_tokens": new}
        assert torch.equal(
            patched.generate(**given, **arguments), plain.generate(**given, **arguments)
        )
    assert 20 < steps_of(patched) < 45, kept.notes(patched)

    def logits(of: Any) -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            ids = short["input_ids"]
            cache = of(ids, use_cache=True).past_key_values
            for i in range(3):  # between two steps of a short text another's long prompt
                of(prompts(1, 80 + i)["input_ids"])
                found.append(of(ids[:, i : i + 1], past_key_values=cache).logits)
        return found

    for a, b in zip(logits(plain), logits(patched), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("which", ["full_attention", "sliding_attention"])
def test_two_ropes_that_are_alike_in_small_alone(which: str) -> None:
    """A replica cannot tell which one a layer reads where both hold the same."""
    alike = {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    }
    model = make("gemma3", rope_parameters=alike)
    assert describe(model).model.layers
    held = model.model.rotary_emb._buffers
    held[f"{which}_inv_freq"] = held[f"{which}_inv_freq"] * 0.6
    with pytest.raises(Unexplained, match=r"RoPE: `.*` and `.*` differ, and only one is read"):
        describe(model)


@pytest.mark.parametrize("name", ["FalconH1", "Qwen3Next", "RecurrentGemma"])
def test_linear_attention_is_refused_without_a_replica(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica has the sizes of its linear attention: at full size one takes minutes in fp64."""
    cls = getattr(transformers, f"{name}ForCausalLM")
    with torch.device("meta"):
        model = cls(getattr(transformers, f"{name}Config")())
    made, init = [], cls.__init__
    monkeypatch.setattr(
        cls, "__init__", lambda self, *a, **k: made.append(1) or init(self, *a, **k)
    )
    plan = hfpatch.plan(model, include=cls.__name__)
    (reason,) = (s.reason for s in plan.skips if s.class_name == cls.__name__)
    assert re.search(r"layer 0 of its cache is a `LinearAttention\w*`", reason), reason
    assert not made


def test_an_attention_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa(*args, **kwargs)
        return out * 0.5, weights

    monkeypatch.setattr(
        AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping}
    )
    AttentionInterface.register("halved", halved)
    model = make("llama")
    model.set_attn_implementation("halved")
    with pytest.raises(Unexplained, match="attention"):
        describe(model)
    ids = prompts()["input_ids"]
    before = model.generate(ids, **_GREEDY)
    report = hfpatch.apply(model)
    assert not any(s.op == "decoding" for s in report.swaps)
    assert torch.equal(model.generate(ids, **_GREEDY), before) and model not in kept.decoders
