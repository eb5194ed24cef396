"""SmolLM2-135M's real weights: the texts that decoding steps write are the original's.

Where they part in a half type, the original's own two best logits lie within that type's noise.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.families import device, here
from torch.nn import functional as F

import hfpatch
from hfpatch.decoding import kept

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import _smollm2

ROOT = Path(__file__).resolve().parents[2]
#: Real English, cut into prompts of so many tokens.
TEXTS = ("LICENSE", "README.md", "CONTRIBUTING.md", "docs/design.md")
PROMPT = 128


@pytest.fixture(scope="module")
def plain(kernels_module: object) -> tuple[Any, Any]:
    try:
        _smollm2.gguf_file()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    return _smollm2.load(torch.float32, device())


@pytest.fixture(scope="module")
def patched(plain: tuple[Any, Any]) -> Any:
    model = copy.deepcopy(plain[0])
    report = hfpatch.apply(model)
    assert report.swaps[0].op == "decoding"
    return model


@pytest.fixture(scope="module")
def halves(plain: tuple[Any, Any]) -> tuple[Any, Any]:
    """In bf16: the original, and with decoding steps."""
    half = copy.deepcopy(plain[0]).to(torch.bfloat16)
    ours = copy.deepcopy(half)
    assert hfpatch.apply(ours).swaps[0].op == "decoding"
    return half, ours


def texts(tokenizer: Any, count: int, length: int = PROMPT) -> torch.Tensor:
    """[count, length] tokens of different places."""
    text = "\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    step = (len(ids) - length) // count
    assert step > PROMPT // 4
    return here(torch.stack([ids[i * step : i * step + length] for i in range(count)]))


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of several lengths, filled up on the left."""
    mask = torch.ones_like(ids)
    for row in range(ids.shape[0]):
        mask[row, : 11 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def write(
    model: Any, inputs: dict[str, torch.Tensor], new: int, seed: int = 11, **more: Any
) -> torch.Tensor:
    torch.manual_seed(seed)
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **more}
    out: torch.Tensor = model.generate(**inputs, **settings)
    return out[:, PROMPT:]


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "new"),
    [pytest.param(2, 16), pytest.param(50, 128, marks=pytest.mark.exhaustive)],
)
def test_texts_in_fp32_are_identical(
    plain: tuple[Any, Any], patched: Any, count: int, new: int
) -> None:
    model, tokenizer = plain
    ids = texts(tokenizer, count)
    steps = kept.decoders[patched].steps
    for i in range(count):
        one = {"input_ids": ids[i : i + 1], "attention_mask": torch.ones_like(ids[i : i + 1])}
        assert torch.equal(write(patched, one, new), write(model, one, new)), i
        if i % 4 == 0:
            sampled = write(patched, one, new, **SAMPLED)
            assert torch.equal(sampled, write(model, one, new, **SAMPLED)), i
    # the last four as well, where they begin in the middle of the batch before
    for i in sorted({*range(0, count - 3, 4), max(count - 4, 0)}):
        four = padded(ids[i : i + 4])
        assert torch.equal(write(patched, four, new), write(model, four, new)), i
        drawn = {"seed": 11 + i, **SAMPLED}
        assert torch.equal(write(patched, four, new, **drawn), write(model, four, new, **drawn)), i
    assert kept.decoders[patched].steps - steps > count


@torch.no_grad()
def logits_after(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Teacher forced, one token after another: [tokens from `first` on, vocab] in fp64."""
    out = model(ids[:, :first], use_cache=True, logits_to_keep=1)
    rows = [out.logits[0, -1]]
    for i in range(first, ids.shape[1] - 1):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows).double()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "new"),
    [pytest.param(2, 20), pytest.param(20, 64, marks=pytest.mark.exhaustive)],
)
def test_texts_in_bf16_part_within_its_noise(
    plain: tuple[Any, Any], halves: tuple[Any, Any], count: int, new: int
) -> None:
    exact, tokenizer = plain
    half, ours = halves
    steps = kept.decoders[ours].steps
    ids = texts(tokenizer, count)
    for i in range(count):
        one = {"input_ids": ids[i : i + 1], "attention_mask": torch.ones_like(ids[i : i + 1])}
        wanted, got = write(half, one, new)[0], write(ours, one, new)[0]
        length = min(len(wanted), len(got))
        parted = (wanted[:length] != got[:length]).nonzero()
        if len(parted):
            at = int(parted[0])
            text = torch.cat([ids[i], wanted[: at + 1]])[None]
            truth, theirs = (logits_after(m, text, PROMPT)[-1] for m in (exact, half))
            best = theirs.topk(2)
            noise = (theirs - truth).abs().max()
            assert int(got[at]) in best.indices.tolist(), (i, at)
            assert best.values[0] - best.values[1] <= 2 * noise, (i, at, best, noise)
    assert kept.decoders[ours].steps - steps > count


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "new"),
    [pytest.param(2, 20), pytest.param(20, 100, marks=pytest.mark.exhaustive)],
)
def test_perplexity_in_bf16_is_no_farther_from_fp32s(
    plain: tuple[Any, Any], halves: tuple[Any, Any], count: int, new: int
) -> None:
    """Teacher forced, over real text that follows the prompts, one step after the other."""
    exact, tokenizer = plain
    half, ours = halves
    steps = kept.decoders[ours].steps
    losses: dict[str, list[torch.Tensor]] = {"exact": [], "half": [], "ours": []}
    errors = dict.fromkeys(losses, 0.0)
    for text in texts(tokenizer, count, PROMPT + new):
        truth = logits_after(exact, text[None], PROMPT)
        for name, model in (("exact", exact), ("half", half), ("ours", ours)):
            logits = truth if model is exact else logits_after(model, text[None], PROMPT)
            losses[name].append(F.cross_entropy(logits, text[PROMPT:], reduction="none"))
            errors[name] += float((logits - truth).square().sum())
    # an error passes from token to token: a text is one draw, and two are none to judge by
    assert count < 20 or errors["ours"] <= 1.1 * errors["half"], errors
    assert kept.decoders[ours].steps - steps >= count * (new - 2)
    true, theirs, mine = (torch.cat(kept_) for kept_ in losses.values())
    # of so many tokens a mean is known to this, whichever way the errors point
    spread = (mine - theirs).std() / len(true) ** 0.5
    farther = (mine - true).mean().abs() - (theirs - true).mean().abs()
    assert farther <= 2 * spread, (farther, spread)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_weights_of_8_bits_find_a_text_as_likely(plain: tuple[Any, Any], count: int) -> None:
    model, tokenizer = plain
    ids = texts(tokenizer, count, 60)
    found = []
    for choice in (False, "int8"):
        hfpatch.apply(model, decoding=choice)
        sums = [F.cross_entropy(logits_after(model, row[None], 8), row[8:]).item() for row in ids]
        found.append(sum(sums) / len(sums))
        hfpatch.restore(model)
    assert 1 < found[0] < 5 and 0 < abs(found[1] - found[0]) < 0.02 * found[0], found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "new"),
    [pytest.param(3, 20), pytest.param(20, 100, marks=pytest.mark.exhaustive)],
)
@torch.no_grad()
def test_a_step_in_bf16_is_no_farther_from_fp32s(
    plain: tuple[Any, Any], halves: tuple[Any, Any], count: int, new: int
) -> None:
    """Each step goes on from the original's cache, so that each is a draw of its own: an error that
    passes from token to token makes one draw of a text. Draws differ by a factor of three and more,
    so what their mean is known to is allowed for."""
    half, ours = halves
    exact = copy.deepcopy(half).float()
    steps, ratios = kept.decoders[ours].steps, []
    for text in texts(plain[1], count, PROMPT + new):
        out = half(text[None, :PROMPT], use_cache=True, logits_to_keep=1)
        for token in text[PROMPT:-1]:
            cache, wide = copy.deepcopy(out.past_key_values), copy.deepcopy(out.past_key_values)
            for layer in wide.layers:
                layer.keys, layer.values = layer.keys.float(), layer.values.float()
            step = token.view(1, 1)
            truth, mine = (
                model(step, past_key_values=held, use_cache=True).logits.double()
                for model, held in ((exact, wide), (ours, cache))
            )
            out = half(step, past_key_values=out.past_key_values, use_cache=True)
            far, farther = ((x.double() - truth).square().sum() for x in (out.logits, mine))
            ratios.append(farther / far)
    assert kept.decoders[ours].steps - steps >= len(ratios) - 1
    logs = torch.stack(ratios).log()
    known_to = 3 * float(logs.std()) / len(logs) ** 0.5
    assert float(logs.mean()) <= 0.095 + known_to, (logs.mean(), known_to)  # a tenth
