"""Every mode of `generate` gives on a patched model what it gives on an unpatched one."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from decoding.families import device, here, make, prompts
from support.nearness import assert_as_near
from support.steps import drawn
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hfpatch
from hfpatch.decoding import kept


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return _pair(device())


@functools.cache
def _pair(_on: str) -> tuple[Any, Any]:
    plain = make("qwen3")
    patched = copy.deepcopy(plain)
    report = hfpatch.apply(patched)
    assert any(s.op == "decoding" for s in report.swaps)
    return plain, patched


def steps_of(model: torch.nn.Module) -> int:
    held = kept.decoders.get(model)
    return 0 if held is None else held.steps


class _Odd(LogitsProcessor):
    """No even token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores


class _After(StoppingCriteria):
    """Stops at a length, or raises there."""

    def __init__(self, length: int, error: BaseException | None = None) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        reached = input_ids.shape[1] >= self.length
        if reached and self.error is not None:
            raise self.error
        return torch.full((input_ids.shape[0],), reached, device=input_ids.device)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "several texts": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams sampled": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "rows": 1},
    "processor": {"logits_processor": LogitsProcessorList([_Odd()])},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "criterion": {"stopping_criteria": StoppingCriteriaList([_After(15)])},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "hidden states": {"output_hidden_states": True, "output_attentions": True},
    "no cache": {"use_cache": False, "max_new_tokens": 4},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "one row": {"rows": 1},
    "sixteen rows": {"rows": 16, "max_new_tokens": 4},
    "seventeen rows": {"rows": 17, "max_new_tokens": 4},
}
#: Those that no engine serves.
_ORIGINALS = {"hidden states", "no cache", "static cache", "seventeen rows"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_what_it_gave(pair: tuple[Any, Any], mode: str) -> None:
    plain, patched = pair
    own = dict(MODES[mode])
    inputs = prompts(own.pop("rows", 2))
    arguments = {"max_new_tokens": 12, "do_sample": False, **own}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

    def run(model: Any) -> Any:
        torch.manual_seed(3)
        return model.generate(**inputs, **arguments)

    before, wanted = steps_of(patched), run(plain)
    got = run(patched)
    assert torch.equal(got.sequences, wanted.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(wanted, name), getattr(got, name), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    assert (steps_of(patched) > before) == (mode not in _ORIGINALS)


def test_a_prompt_of_embeddings(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    embeds = plain.get_input_embeddings()(prompts(2)["input_ids"]).detach()
    more = {"max_new_tokens": 8, "do_sample": False}
    before = steps_of(patched)
    wanted = plain.generate(inputs_embeds=embeds, **more)
    assert torch.equal(patched.generate(inputs_embeds=embeds, **more), wanted)
    assert steps_of(patched) > before


def test_assisted_decoding(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    inputs = prompts(1)
    more = {"max_new_tokens": 12, "do_sample": False}
    wanted = plain.generate(**inputs, **more)
    helper = make("qwen3", num_hidden_layers=1)
    assert torch.equal(patched.generate(**inputs, **more, assistant_model=helper), wanted)
    hfpatch.apply(helper)
    assert torch.equal(patched.generate(**inputs, **more, assistant_model=helper), wanted)
    assert torch.equal(patched.generate(**inputs, **more), wanted)


class _Streamer:
    def __init__(self, fail_at: int | None = None, error: type[BaseException] = ValueError) -> None:
        self.tokens: list[int] = []
        self.fail_at, self.error, self.ended = fail_at, error, False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if self.fail_at is not None and len(self.tokens) >= self.fail_at:
            raise self.error("the streamer's own")

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token(pair: tuple[Any, Any]) -> None:
    _plain, _patched = pair
    inputs = prompts(1)
    streamers = _Streamer(), _Streamer()
    for model, streamer in zip(pair, streamers, strict=True):
        model.generate(**inputs, max_new_tokens=8, do_sample=False, streamer=streamer)
    assert streamers[0].tokens == streamers[1].tokens and streamers[1].ended


@pytest.mark.parametrize("name", ["into", "model", "streamers"])
def test_an_argument_that_nobody_has_is_the_originals_error(
    pair: tuple[Any, Any], name: str
) -> None:
    for model in pair:
        with pytest.raises(ValueError, match=rf"not used by the model: \['{name}'\]"):
            model.generate(**prompts(1), max_new_tokens=2, **{name: 3})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["streamer", "criterion"])
def test_an_exception_leaves_model_and_cache_usable(
    pair: tuple[Any, Any], where: str, error: type[BaseException]
) -> None:
    plain, patched = pair
    inputs = prompts(1)
    more: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    wanted = plain.generate(**inputs, **more)
    cache = DynamicCache(config=patched.config)
    length = inputs["input_ids"].shape[1] + 4
    fault: dict[str, Any] = {"streamer": _Streamer(length, error)}
    if where == "criterion":
        fault = {"stopping_criteria": StoppingCriteriaList([_After(length, error())])}
    with pytest.raises(error):
        patched.generate(**inputs, **more, **fault, past_key_values=cache)
    there = cache.get_seq_length()
    assert there in (length - 1, length)
    # what was cached serves to go on from
    rest = {"max_new_tokens": wanted.shape[1] - length, "do_sample": False}
    begun = wanted[:, :length]
    assert torch.equal(patched.generate(begun, past_key_values=cache, **rest), wanted)
    assert torch.equal(patched.generate(**inputs, **more), wanted)


def test_a_pipeline() -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    letters = {chr(0x4E00 + i): i for i in range(300)}  # a token is a letter
    unknown, *text_letters = list(letters)[:6]
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, pad_token=unknown)
    model = make("llama")
    text = "".join(text_letters)
    write = pipeline("text-generation", model=model, tokenizer=fast, device="cpu")
    wanted = write(text, max_new_tokens=10, do_sample=False)[0]["generated_text"]
    hfpatch.apply(write)
    assert write(text, max_new_tokens=10, do_sample=False)[0]["generated_text"] == wanted
    assert steps_of(model) > 4


def test_threads_write_each_its_own_text(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    more = {"max_new_tokens": 10, "do_sample": False}
    given = [{k: v[i : i + 1] for k, v in prompts(4, padding=0).items()} for i in range(4)]
    wanted = [plain.generate(**inputs, **more) for inputs in given]
    got: dict[int, torch.Tensor] = {}

    def write(i: int) -> None:
        got[i] = patched.generate(**given[i], **more)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], wanted[i]) for i in range(4))


def test_a_mask_with_holes_and_one_of_four_dimensions(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    inputs = prompts(2)
    inputs["attention_mask"][1, 4:6] = 0
    more = {"max_new_tokens": 8, "do_sample": False}
    wanted = plain.generate(**inputs, **more)
    assert torch.equal(patched.generate(**inputs, **more), wanted)
    ids, token = inputs["input_ids"], here(torch.tensor([[5], [6]]))
    seen = here(torch.ones(2, 1, 1, 10, dtype=torch.bool))
    seen[:, :, :, 3] = False
    results = []
    with torch.no_grad():
        for model in pair:
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache)
            results.append(model(token, past_key_values=cache, attention_mask=seen).logits)
    torch.testing.assert_close(results[1], results[0])


def test_an_id_outside_of_the_vocabulary_is_the_originals_error(pair: tuple[Any, Any]) -> None:
    _, patched = pair
    with torch.no_grad():
        cache = DynamicCache(config=patched.config)
        patched(prompts(1)["input_ids"], past_key_values=cache)
        with pytest.raises(IndexError):
            patched(torch.tensor([[300]]), past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_follow_the_original(dtype: torch.dtype) -> None:
    """Teacher forced: the engine is no farther from fp32 than the original."""
    assert_as_near(drawn("qwen3", dtype), dtype, "decoding steps")
