"""The modes of `generate` over several families: texts and scores are what they were."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from decoding.families import device, make, prompts
from decoding.loop_cases import random_state
from transformers import (
    CompileConfig,
    DynamicCache,
    PreTrainedTokenizerFast,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
)

import hfpatch
from hfpatch.decoding import cache as caches
from hfpatch.decoding import kept

FAMILIES = ("llama-tied", "gemma2", "phi3", "cohere2", "gpt-oss")


def pair(name: str) -> tuple[Any, Any]:
    return _pair(name, device())


@functools.cache
def _pair(name: str, _on: str) -> tuple[Any, Any]:
    plain = make(name)
    patched = copy.deepcopy(plain)
    report = hfpatch.apply(patched)
    assert any(s.op == "decoding" for s in report.swaps), report
    return plain, patched


def steps_of(model: torch.nn.Module) -> int:
    return int(kept.decoders[model].steps)


def _only_some(batch: int, ids: torch.Tensor) -> list[int]:
    return [t for t in range(3, 300) if t % 3 == len(ids) % 3]


def _own_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A loop of the user's: the second best token each time."""
    mask = kwargs["attention_mask"]
    past = DynamicCache(config=model.config)
    new = input_ids
    for _ in range(6):
        logits = model(new, attention_mask=mask, past_key_values=past).logits
        new = logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, new], dim=1)
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    return input_ids


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k": {"do_sample": True, "top_k": 7},
    "top-p": {"do_sample": True, "top_p": 0.7, "top_k": 0},
    "min-p": {"do_sample": True, "min_p": 0.05},
    "typical": {"do_sample": True, "typical_p": 0.8},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 1e-3},
    "eta": {"do_sample": True, "eta_cutoff": 1e-3},
    "several texts": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beams sampled": {"num_beams": 3, "do_sample": True},
    "early stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": [7, 11, 13]},
    "prompt lookup": {"rows": 1, "prompt_lookup_num_tokens": 3, "max_new_tokens": 24},
    "prompt lookup, sampled": {
        "rows": 1,
        "prompt_lookup_num_tokens": 2,
        "do_sample": True,
        "max_new_tokens": 24,
    },
    "bad words": {"bad_words_ids": [[5], [6, 7]]},
    "suppressed": {"suppress_tokens": [9, 10, 11], "begin_suppress_tokens": [12]},
    "bias": {"sequence_bias": {(20,): 9.0, (21, 22): -9.0}},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 6},
    "at least": {"min_length": 14, "eos_token_id": list(range(3, 150))},
    "longer is worse": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 17},
    "normalized": {"renormalize_logits": True, "do_sample": True},
    "guided": {"guidance_scale": 1.6},
    "allowed tokens": {"prefix_allowed_tokens_fn": _only_some},
    "in time": {"max_time": 1000.0},
    "many ends": {"eos_token_id": [5, 6, 7]},
    "a loop of one's own": {"custom_generate": _own_loop},
    "chunks": {"prefill_chunk_size": 4},
    "no text": {"max_new_tokens": 1},
    "hidden states": {"output_hidden_states": True},
}
#: Those that no engine serves.
_NONE = {"no text", "hidden states"}


#: Each mode with two of the five families, in turns, and with all in `make test-all`.
_CASES = [
    pytest.param(
        mode,
        family,
        id=f"{mode}-{family}",
        marks=() if (i + j) % len(FAMILIES) in (0, 2) else pytest.mark.exhaustive,
    )
    for i, mode in enumerate(MODES)
    for j, family in enumerate(FAMILIES)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "family"), _CASES)
def test_a_mode_gives_what_it_gave(family: str, mode: str) -> None:
    plain, patched = pair(family)
    own = dict(MODES[mode])
    inputs = prompts(own.pop("rows", 2))
    whole = mode != "a loop of one's own"
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, **own}
    if whole:
        arguments |= {"return_dict_in_generate": True, "output_scores": True}

    def run(model: Any) -> Any:
        torch.manual_seed(5)
        return model.generate(**inputs, **arguments), random_state(device())

    before = steps_of(patched)
    (wanted, random), (got, ours) = run(plain), run(patched)
    assert torch.equal(random, ours)
    if not whole:
        assert torch.equal(got, wanted)
    else:
        assert torch.equal(got.sequences, wanted.sequences)
        for a, b in zip(wanted.scores, got.scores, strict=True):
            torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3)
        if wanted.past_key_values is not None:
            lengths = [o.past_key_values.get_seq_length() for o in (wanted, got)]
            assert lengths[0] == lengths[1]
    assert (steps_of(patched) > before) == (mode not in _NONE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # a token is a letter; "a" to "f" are what transformers' matching of strings begins with
    letters = {chr(0x4E00 + i if i < 290 else 0x61 + i - 290): i for i in range(300)}
    unknown = next(iter(letters))
    made = Tokenizer(models.WordLevel(letters, unk_token=unknown))
    made.decoder = decoders.Fuse()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unknown, pad_token=unknown)


@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_stop_strings(family: str, tokenizer: Any) -> None:
    plain, patched = pair(family)
    inputs = prompts(2)
    more: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "tokenizer": tokenizer}
    whole = plain.generate(**inputs, **more)
    stop = tokenizer.decode(whole[1, -6:-4]).replace(" ", "")
    before = steps_of(patched)
    wanted = plain.generate(**inputs, **more, stop_strings=[stop])
    assert torch.equal(patched.generate(**inputs, **more, stop_strings=[stop]), wanted)
    assert steps_of(patched) > before


def test_streamers_of_transformers(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = prompts(1)
    more: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    printed, iterated = [], []
    for model in pair("llama-tied"):
        model.generate(**inputs, **more, streamer=TextStreamer(tokenizer))
        printed.append(capsys.readouterr().out)
        pieces = TextIteratorStreamer(tokenizer, timeout=60)
        arguments = {**inputs, **more, "streamer": pieces}
        thread = threading.Thread(target=model.generate, kwargs=arguments)
        thread.start()
        iterated.append("".join(pieces))
        thread.join()
    assert printed[0] == printed[1] and len(printed[0]) > 10
    assert iterated[0] == iterated[1] and len(iterated[0]) > 10


@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_a_static_cache_of_the_users_own(family: str) -> None:
    plain, patched = pair(family)
    inputs = prompts(2)
    texts = [
        m.generate(
            **inputs,
            past_key_values=StaticCache(config=m.config, max_cache_len=40),
            max_new_tokens=10,
            do_sample=False,
            disable_compile=True,
        )
        for m in (plain, patched)
    ]
    assert torch.equal(*texts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [False, True], ids=["by name", "the user's own"])
@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_a_static_cache_with_which_transformers_compiles(family: str, given: bool) -> None:
    """Its default on a GPU, for each call behind the prompt's. What is compiled is the patched
    model's forward, which hands such calls to the original, and stays on the model."""
    torch.compiler.reset()
    plain = make(family)
    patched = copy.deepcopy(plain)
    hfpatch.apply(patched)
    inputs = prompts(2)
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    compiling: dict[str, Any] = {}
    if device() == "cpu":  # where transformers compiles for tests alone
        config = CompileConfig(backend="eager", mode="default")
        config._compile_all_devices = True  # type: ignore[assignment]
        compiling = {"compile_config": config}

    def static(model: Any, **more: Any) -> torch.Tensor:
        kind: dict[str, Any] = {"cache_implementation": "static"}
        if given:
            kind = {"past_key_values": StaticCache(config=model.config, max_cache_len=40)}
        text: torch.Tensor = model.generate(**inputs, **greedy, **kind, **more)
        return text

    wanted = static(plain, disable_compile=True)
    for _ in range(2):  # the second finds what the first compiled
        assert torch.equal(static(plain, **compiling), wanted)
        assert torch.equal(static(patched, **compiling), wanted)
    assert hasattr(plain, "_compiled_call") and hasattr(patched, "_compiled_call")
    assert steps_of(patched) == 0
    said = [n for n in hfpatch.status(patched).notes if "steps not used" in n]
    assert said == ["decoding steps not used: its cache is a StaticCache"]
    # a cache that grows has steps before and behind
    for _ in range(2):
        text = patched.generate(**inputs, **greedy)
        assert torch.equal(text, plain.generate(**inputs, **greedy))
    steps = steps_of(patched)
    assert steps > 0
    assert torch.equal(static(patched, **compiling), wanted)
    assert torch.equal(patched.generate(**inputs, **greedy), text) and steps_of(patched) > steps
    hfpatch.restore(patched)
    assert torch.equal(static(patched, **compiling), wanted)


def test_a_chat_goes_on_in_its_cache() -> None:
    plain, patched = pair("gemma2")
    more: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    texts = []
    for model in (plain, patched):
        ids, cache = prompts(1, padding=0)["input_ids"], DynamicCache(config=model.config)
        for turn in range(4):
            ids = model.generate(ids, past_key_values=cache, **more)
            ids = torch.cat([ids, prompts(1, 3 + turn, 0)["input_ids"]], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_prompts_of_int32(rows: int, sampled: bool) -> None:
    """As tokenizers in C++ give them; transformers' texts of them are int64."""
    plain, patched = pair("gemma2")
    inputs = prompts(rows)
    inputs["input_ids"] = inputs["input_ids"].int()
    texts = []
    for model in (plain, patched):
        torch.manual_seed(5)
        texts.append(model.generate(**inputs, max_new_tokens=10, do_sample=sampled))
    assert texts[0].dtype == texts[1].dtype and torch.equal(*texts)


def test_gradients_through_the_loop_without_its_decorator() -> None:
    """`generate.__wrapped__`, by which people differentiate what is generated."""
    plain, patched = pair("gemma2")
    kept = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    found = []
    for model in (plain, patched):
        given = prompts(1) | kept | {"return_dict_in_generate": True}
        logits = model.generate.__wrapped__(model, **given).logits
        assert logits[-1].requires_grad
        found.append(torch.stack(logits).detach())
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_behind_resize_token_embeddings(before: bool) -> None:
    """The new head is in training mode, which nothing reads."""
    plain = make("phi3")
    model = copy.deepcopy(plain)
    if not before:
        hfpatch.apply(model)
    for each in (plain, model):
        torch.manual_seed(1)
        each.resize_token_embeddings(each.config.vocab_size + 8, mean_resizing=False)
    if before:
        hfpatch.apply(model)
    assert any(m.training for m in model.modules()) and not model.training
    texts = [m.generate(**prompts(2), max_new_tokens=8, do_sample=False) for m in (plain, model)]
    assert torch.equal(*texts) and steps_of(model) > 0


def test_a_module_in_training_mode_is_named() -> None:
    model = make("gemma2")
    hfpatch.apply(model)
    model.model.layers[1].mlp.train()
    with pytest.warns(RuntimeWarning, match=r"`model\.layers\.1\.mlp.* is in training mode; call"):
        model.generate(**prompts(1), max_new_tokens=4, do_sample=False)
    assert steps_of(model) == 0


def test_under_inference_mode_and_out_of_it_again() -> None:
    """What a cache got under inference mode goes on outside of it."""
    plain, patched = pair("llama-tied")
    ids = prompts(1, padding=0)["input_ids"]
    more: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    texts = []
    for model in (plain, patched):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            text = model.generate(ids, past_key_values=cache, **more)
        texts.append(model.generate(text.clone(), past_key_values=cache, **more))
    assert torch.equal(*texts)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_a_copy_whose_first_call_has_the_tensors_of_others() -> None:
    """An ensemble of copies by `functional_call`, under a transform and without."""
    plain, patched = pair("llama-tied")
    base, ids = copy.deepcopy(patched), prompts(1, padding=0)["input_ids"]
    other = {k: p.detach() * 0.9 for k, p in plain.named_parameters()}
    stacked = {k: torch.stack([p.detach(), other[k]]) for k, p in plain.named_parameters()}
    found = []
    for model in (plain, base):

        def call(p: dict[str, torch.Tensor], m: Any = model) -> torch.Tensor:
            given = {"input_ids": ids, "use_cache": False}
            return torch.func.functional_call(m, p, (), given).logits  # type: ignore[no-any-return]

        found.append(torch.cat([torch.func.vmap(call)(stacked), call(other)[None]]))
    assert torch.allclose(*found, atol=1e-4)
    texts = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (plain, base)]
    assert torch.equal(*texts) and steps_of(base) > 0


@torch.no_grad()
def test_tensors_of_others_in_a_step_are_named_as_such() -> None:
    _, patched = pair("phi3")
    model, ids = copy.deepcopy(patched), prompts(1, padding=0)["input_ids"]
    cache = model(ids, use_cache=True).past_key_values
    other = {k: p.detach() for k, p in model.named_parameters()}
    given = {"input_ids": ids[:, :1], "past_key_values": cache}
    with pytest.warns(RuntimeWarning, match=r"`model\.embed.* is no parameter, but a tensor"):
        torch.func.functional_call(model, other, (), given)


def test_a_first_step_whose_output_calls_the_cache_as_transformers_5_24_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, patched = pair("llama-tied")
    with torch.no_grad():
        output = plain(torch.arange(3, 9)[None], use_cache=True)
    layers = output.past_key_values.layers
    ours = {name: [getattr(x, name)[:, :, -1:] for x in layers] for name in ("keys", "values")}
    renamed = type(output)(logits=output.logits)
    renamed["cache"] = output.past_key_values
    monkeypatch.setattr(caches, "NAME", "cache")
    assert kept.decoders[patched]._difference(ours, output.logits[:, -1:], 1, renamed) is None
