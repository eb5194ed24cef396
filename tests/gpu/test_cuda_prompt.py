"""Short prompts as CUDA graphs, mixtures of experts, and models of images, on a GPU: each gives
what the unpatched model gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding.families import FAMILIES, HALVES, make, prompts
from decoding.test_image_models import MODELS, asked
from decoding.test_image_models import make as make_image_model

import hfpatch
from hfpatch.decoding import kept, prompt
from hfpatch.graphs.captures import Pool, recorded

pytestmark = [pytest.mark.gpu]


def on(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.cuda() for k, v in inputs.items()}


def pair(model: Any) -> tuple[Any, Any]:
    plain = model.cuda()
    patched = copy.deepcopy(plain)
    report = hfpatch.apply(patched, include=type(patched).__name__)
    assert report.swaps[0].op == "decoding", report
    return plain, patched


def compare(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], **more: Any) -> None:
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_logits": True, **more}
    wanted, got = (m.generate(**inputs, **arguments) for m in models)
    assert torch.equal(got.sequences, wanted.sequences)
    for a, b in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3 * float(a.abs().max()))
    lengths = [o.past_key_values.get_seq_length() for o in (wanted, got)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_MANY_TOKENS", 64)  # two rows of 32: both ways are gone
    models = pair(make(name))
    held = kept.decoders[models[1]]
    for rows, length, padding in ((1, 20, 0), (1, 30, 0), (2, 17, 3), (2, 31, 5), (1, 9, 0)):
        compare(models, on(prompts(rows, length, padding)))
    assert held.prompts_refused is None and held.prompts_served >= 2, kept.notes(models[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "cohere"])
def test_half_types_are_no_farther_from_fp32(name: str, dtype: torch.dtype) -> None:
    plain, patched = pair(make(name, dtype))
    exact = copy.deepcopy(plain).float()
    errors = [0.0, 0.0]
    for seed in range(8):
        torch.manual_seed(seed)
        ids = torch.randint(3, 300, (2, 100)).cuda()
        results = []
        for model in (exact, plain, patched):
            with torch.no_grad():
                cache = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True,
                                       output_logits=True, do_sample=False)  # fmt: skip
            results.append(cache.logits[0].double())
        for i in range(2):
            errors[i] += float((results[1 + i] - results[0]).square().sum())
    assert kept.decoders[patched].prompts_served == 7
    assert errors[1] <= 1.2 * errors[0], errors


@pytest.mark.parametrize("name", HALVES)
def test_a_mixture_of_experts(name: str) -> None:
    models = pair(make(name))
    for rows in (1, 2, 1, 2):
        compare(models, on(prompts(rows)))
    assert kept.decoders[models[1]].steps >= 24, kept.notes(models[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_texts_about_an_image(name: str) -> None:
    models = pair(make_image_model(name))
    for image, rows in ((True, 1), (False, 2), (True, 2)):
        compare(models, on(asked(name, rows, image)))
    assert kept.decoders[models[1]].steps >= 18, kept.notes(models[1])


def test_prompts_beside_blocks_that_move_weights() -> None:
    """All of a model is patched: its blocks pack weights at a later call, the graphs that read
    where they were go, and new ones are made."""
    plain = make("llama").cuda()
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    for length in (100, 20, 100, 30, 100, 20, 500, 100):
        compare((plain, patched), on(prompts(1, length)), max_new_tokens=3)
    held = kept.decoders[patched]
    assert held.prompts_refused is None and held.prompts_served >= 2, kept.notes(patched)


def test_graphs_after_others_that_are_gone() -> None:
    """Settings that change drop all graphs; those that follow have memory of their own."""
    plain, patched = pair(make("llama"))
    held = kept.decoders[patched]
    for _ in range(3):
        for _ in range(2):
            compare((plain, patched), on(prompts(1, 20)))
        for model in (plain, patched):
            model.model.layers[0].input_layernorm.variance_epsilon *= 2
    assert held.prompts_refused is None and held.prompts_served >= 3, kept.notes(patched)


def test_a_capture_that_fails_leaves_nothing() -> None:
    """Numbers at random, the allocator and the next capture are as before."""
    x = torch.zeros(4, device="cuda")

    def fails() -> None:
        x.add_(1)
        x.sum().item()

    for _ in range(2):
        with pytest.raises(RuntimeError):
            recorded(fails, Pool())

    def divides() -> None:
        _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        recorded(divides)
    torch.randn(3, device="cuda")
    before = torch.cuda.memory_reserved()
    del_me = torch.empty(2**26, device="cuda")
    del del_me
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before

    def adds() -> None:
        x.add_(1)

    graph = recorded(adds, Pool())
    x.zero_()
    graph.replay()
    assert x.tolist() == [1.0] * 4
