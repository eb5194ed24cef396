"""Captured blocks of families that no file names: fused, as near to fp64 as eager, undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from regions.families import FAMILIES, build
from support.nearness import assert_as_near, draw

import hfpatch
from hfpatch import swap
from hfpatch.regions.offer import forget

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs)[0]
    return out


def states(model: Any) -> set[tuple[str, str]]:
    return {(c.state, c.reason) for c in hfpatch.status(model).plan.candidates}


def _thinned() -> Iterator[Any]:
    """`make test` asks one family of six: that each is fused, near fp64 and undone, bit for bit,
    test_as_near_to_fp64_as_the_original says of all of them. Halves and mixtures it leaves out."""
    for i, name in enumerate(FAMILIES):
        often = i % 6 == 0 or "both halves" in name or name == "mixtral"
        yield pytest.param(name, marks=() if often else pytest.mark.exhaustive)


@pytest.mark.parametrize("name", list(_thinned()))
def test_every_block_is_fused_and_undone(name: str) -> None:
    model, inputs = build(name)
    calls = [inputs(1, 9), inputs(3, 7), inputs(2, 16)]
    before = [run(model, c) for c in calls]
    held = {n: dict(m.__dict__) for n, m in model.named_modules()}
    report = hfpatch.apply(model, decoding=False, blocks=True)
    assert {c.state for c in report.plan.candidates} <= {"at its first call", "fused"}
    for _ in range(2):
        for call, expected in zip(calls, before, strict=True):
            found = run(model, call)
            scale = expected.abs().max()
            assert (found - expected).abs().max() <= 1e-5 * scale
    assert states(model) == {("fused", "")}
    assert hfpatch.restore(model) == len(report.swaps)
    assert all(torch.equal(run(model, c), b) for c, b in zip(calls, before, strict=True))
    for n, m in model.named_modules():
        assert m.__dict__.keys() == held[n].keys(), n


#: How heads are rotated: in halves or pairs, a part of them, out of packed products, behind norms,
#: in fp32, by tables that hold each angle once.
ROTATED = {
    **dict.fromkeys(
        ("llama", "cohere", "ernie", "falcon", "glm4", "gpt-neox", "helium"), "rope_qk"
    ),
    **dict.fromkeys(("modernbert", "phi3", "stablelm"), "rope_qk"),
    **dict.fromkeys(("qwen3", "gemma3", "olmo2"), "qk_norm_rope"),
}


@pytest.mark.parametrize("name", list(ROTATED))
def test_rotations_are_found(name: str) -> None:
    """With one row of positions for all of a batch, as models make them."""
    model, inputs = build(name, torch.bfloat16)
    hfpatch.apply(model, decoding=False, blocks=True)
    run(model, inputs(3, 9))
    candidates = hfpatch.status(model).plan.candidates
    assert all(ROTATED[name] in c.found for c in candidates), candidates
    assert all(c.after <= 14 for c in candidates)


def _near() -> Iterator[Any]:
    """`make test` asks every family in one of the dtypes, in turns."""
    # a mixture of experts chooses other experts in fp64 where two are as good
    for i, name in enumerate(n for n in FAMILIES if n != "mixtral"):
        for j, dtype in enumerate(DTYPES):
            marks = () if (i + j) % 2 == 0 else (pytest.mark.exhaustive,)
            yield pytest.param(name, dtype, id=f"{name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("name", "dtype"), list(_near()))
def test_as_near_to_fp64_as_the_original(name: str, dtype: torch.dtype) -> None:
    draws = []
    for seed in range(4):
        model, inputs = build(name, dtype, seed)
        calls = [inputs(2, 8 + i) for i in range(3)]
        exact = copy.deepcopy(model).double()
        theirs = [run(model, c) for c in calls]
        report = hfpatch.apply(model, decoding=False, blocks=True)
        for call in calls:
            run(model, call)
        for call, eager in zip(calls, theirs, strict=True):
            wide = {k: v.double() if v.is_floating_point() else v for k, v in call.items()}
            draws.append(draw(run(model, call), eager, run(exact, wide)))
        assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
        if not seed:
            assert hfpatch.restore(model) == len(report.swaps)
            assert all(torch.equal(run(model, c), y) for c, y in zip(calls, theirs, strict=True))
    assert_as_near(draws, dtype, name)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "gemma3", "olmo2", "mixtral", "bert", "bert, eager", "t5", "t5, eager"],
)
def test_padding_on_either_side(name: str) -> None:
    model, inputs = build(name)
    call = inputs(3, 9)
    for left in (True, False):
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, :4] = 0 if left else 1
        mask[1, 5:] = 1 if left else 0
        padded = call | {"attention_mask": mask}
        expected = run(model, padded)
        hfpatch.apply(model, decoding=False, blocks=True)
        for _ in range(2):
            found = run(model, padded)
            kept = mask.bool()
            assert (found - expected)[kept].abs().max() <= 1e-5 * expected[kept].abs().max()
        hfpatch.restore(model)


def steps_of(model: Any, inputs: Any) -> Any:
    """A prompt, two single tokens, several tokens, a single one: what each gives, and the cache."""
    prompt = inputs(2, 9)
    after = "decoder_input_ids" in prompt
    with torch.no_grad():
        first = model(**prompt, use_cache=True)
    cache = first.past_key_values
    outs = [first[0]]
    for tokens in (1, 1, 4, 1):
        ids = inputs(2, tokens + 40)["decoder_input_ids" if after else "input_ids"][:, :tokens]
        call: dict[str, Any] = {"decoder_input_ids" if after else "input_ids": ids}
        if after:
            call["encoder_outputs"] = (first.encoder_last_hidden_state,)
        with torch.no_grad():
            outs.append(model(**call, past_key_values=cache, use_cache=True)[0])
    return outs, cache


def layers_of(cache: Any) -> list[Any]:
    pair = hasattr(cache, "cross_attention_cache")
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if pair else (cache,)
    return [layer for part in parts for layer in part.layers]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "phi3", "gpt2", "t5, both halves"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen3", "gemma2", "bart", "whisper, both halves")
        ),
    ],
)
def test_a_cache_is_filled_as_by_the_original_and_goes_on(name: str) -> None:
    model, inputs = build(name)
    expected, theirs = steps_of(model, inputs)
    hfpatch.apply(model, decoding=False, blocks=True)
    steps_of(model, inputs)
    found, ours = steps_of(model, inputs)
    assert states(model) == {("fused", "")}
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert getattr(ours, "is_updated", None) == getattr(theirs, "is_updated", None)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(layers_of(ours), layers_of(theirs), strict=True):
        assert a.keys.shape == b.keys.shape and a.keys.is_contiguous() == b.keys.is_contiguous()
        assert (a.keys - b.keys).abs().max() <= 1e-5 * b.keys.abs().max()
        assert (a.values - b.values).abs().max() <= 1e-5 * b.values.abs().max()


def test_steps_of_any_length_run_by_one_capture() -> None:
    forget()
    model, inputs = build("llama")
    hfpatch.apply(model, decoding=False, blocks=True)
    steps_of(model, inputs)
    steps_of(model, inputs)
    marks: list[Any] = [swap.swapped(b) for b in model.layers]
    (kind,) = {id(m.details.kind): m.details.kind for m in marks}.values()
    lengths = [v for k, found in kind.variants.items() for v in found if k[0].cache.past]
    assert len(lengths) <= 3  # a token, several tokens; not one for each length of the cache


def test_a_static_cache_is_left_to_the_original() -> None:
    from transformers import StaticCache

    forget()  # kinds are shared with other models of equal code
    model, inputs = build("llama")
    call = inputs(2, 9)
    expected = run(model, call)
    hfpatch.apply(model, decoding=False, blocks=True)
    for _ in range(2):
        cache = StaticCache(model.config, max_cache_len=16)
        found = run(model, call | {"past_key_values": cache})
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert states(model) == {("left", "its argument `past_key_values` is a `StaticCache`")}
