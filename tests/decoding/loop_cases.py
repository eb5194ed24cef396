"""What `generate`'s loop without waits must give, on whichever device; a test module that imports
these has a fixture `device`."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decoding.families import make, prompts
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hfpatch
from hfpatch.decoding import greedy, kept, layer, loop

NEW = 14


def pair_of(name: str, device: str, **more: Any) -> tuple[Any, Any]:
    """A model, and its patched copy that has proven its steps."""
    plain = make(name, **more).to(device)
    patched = copy.deepcopy(plain)
    report = hfpatch.apply(patched)
    assert any(s.op == "decoding" for s in report.swaps), report
    for rows in (1, 2, 3):
        inputs = on(device, prompts(rows))
        patched.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None)
    return plain, patched


def on(device: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.to(device) for k, v in inputs.items()}


def loops_of(model: Any) -> int:
    return int(kept.decoders[model].loops)


def random_state(device: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


class Streamer:
    """Holds what it is given, and raises at a length."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.tokens: list[list[int]] = []
        self.fail_at, self.ended = fail_at, False

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.tokens.append(value.flatten().tolist())
        if self.fail_at is not None and len(self.tokens) >= self.fail_at:
            raise ValueError("the streamer's own")

    def end(self) -> None:
        self.ended = True


def an_end(plain: Any, device: str, rows: int, **more: Any) -> int:
    """A token that the first row's text has in its middle, so that it ends there."""
    torch.manual_seed(3)
    inputs = on(device, prompts(rows))
    text = plain.generate(**inputs, max_new_tokens=NEW, eos_token_id=None, **more)
    return int(text[0, -NEW + 5])


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "several texts": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "at least": {"min_new_tokens": 9},
    "three rows": {"rows": 3},
    "one row": {"rows": 1},
    "one row, sampled": {"rows": 1, "do_sample": True, "top_k": 20},
    "one row, several ends": {"rows": 1, "another_end": 5},
    "two rows, several ends": {"another_end": 5},
    "by length": {"max_length": 17, "max_new_tokens": None},
    "no padding": {"padding": 0},
}


def _of_texts(states: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Keys or values, [B, H, S, D], with 0 where a text is padded."""
    mask = inputs["attention_mask"].bool()
    states = states.clone()
    padded = ~mask.repeat_interleave(states.shape[0] // mask.shape[0], 0)
    states[:, :, : mask.shape[1]].masked_fill_(padded[:, None, :, None], 0)
    return states


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ends", [False, True], ids=["to the length", "to an end"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode(device: str, family: str, mode: str, ends: bool) -> None:
    """Texts, scores, logits, the cache and the random numbers after it are transformers' own."""
    plain, patched = pair_of(family, device)
    own = dict(MODES[mode])
    rows = own.pop("rows", 1 if own.get("num_return_sequences") else 2)
    inputs = on(device, prompts(rows, padding=own.pop("padding", 3)))
    own = {"max_new_tokens": NEW, "do_sample": False, **own}
    chosen = {k: own[k] for k in ("do_sample", "temperature", "top_k", "top_p") if k in own}
    others = [own.pop("another_end")] if "another_end" in own else []
    own["eos_token_id"] = [an_end(plain, device, rows, **chosen), *others] if ends else None
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

    def run(model: Any, **more: Any) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(3)
        return model.generate(**inputs, **own, **more), random_state(device)

    (wanted, after), before = run(plain, **asked), loops_of(patched)
    got, ours_after = run(patched, **asked)
    assert loops_of(patched) == before + 1
    assert torch.equal(got.sequences, wanted.sequences)
    assert got.sequences.shape[1] < 40
    for name in ("scores", "logits"):
        for a, b in zip(getattr(wanted, name), getattr(got, name), strict=True):
            torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3)
    assert got.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    layers = zip(wanted.past_key_values.layers, got.past_key_values.layers, strict=True)
    for theirs, ours in layers:
        for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            if device != "cpu":  # what a query that sees nothing gets depends on PyTorch's kernel
                a, b = _of_texts(a, inputs), _of_texts(b, inputs)
            torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3)
    assert torch.equal(ours_after, after)
    assert torch.equal(run(patched)[0], wanted.sequences)  # as a tensor


@pytest.mark.parametrize("ends", [False, True], ids=["to the length", "to an end"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_streamer_gets_each_token_once(device: str, rows: int, ends: bool) -> None:
    plain, patched = pair_of("llama", device)
    inputs = on(device, prompts(rows))
    end = an_end(plain, device, rows, do_sample=False) if ends else None
    streamers = Streamer(), Streamer()
    before = loops_of(patched)
    for model, streamer in zip((plain, patched), streamers, strict=True):
        model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, streamer=streamer, eos_token_id=end
        )
    assert loops_of(patched) == before + 1
    assert streamers[0].tokens == streamers[1].tokens
    assert streamers[0].ended and streamers[1].ended


@pytest.mark.parametrize("rows", [1, 3])
def test_a_text_that_outgrows_its_room_and_ends_by_one_of_three(
    device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are made a few at a time; rows that have ended are padded."""
    monkeypatch.setattr(loop, "_ROOM", 4)
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(rows))
    end = an_end(plain, device, rows, do_sample=False)
    for ends in (None, end, [end, 298, 299]):
        more: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends}
        before, given = loops_of(patched), {k: v.clone() for k, v in inputs.items()}
        got = patched.generate(**inputs, **more, pad_token_id=7)
        assert torch.equal(got, plain.generate(**inputs, **more, pad_token_id=7))
        assert loops_of(patched) == before + 1
        assert got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes
        assert all(torch.equal(given[k], inputs[k]) for k in inputs)


def test_a_streamer_that_raises_leaves_the_cache_usable(device: str) -> None:
    plain, patched = pair_of("llama", device)
    inputs = on(device, prompts(1, padding=0))
    more: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 299}
    wanted = plain.generate(**inputs, **more)
    lengths = []
    for model in (plain, patched):
        cache = DynamicCache(config=model.config)
        with pytest.raises(ValueError, match="own"):
            model.generate(**inputs, **more, past_key_values=cache, streamer=Streamer(5))
        lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]
    begun = wanted[:, : lengths[1] + 1]
    rest = {**more, "max_new_tokens": wanted.shape[1] - begun.shape[1]}
    assert torch.equal(patched.generate(begun, past_key_values=cache, **rest), wanted)


def test_a_cache_goes_on_between_both(device: str) -> None:
    """Each continues what the other began, also where the text ended one step late."""
    plain, patched = pair_of("mistral", device)
    inputs = on(device, prompts(1, padding=0))
    end = an_end(plain, device, 1, do_sample=False)
    more: dict[str, Any] = {"do_sample": False, "eos_token_id": end}
    for first, then in ((plain, patched), (patched, plain), (patched, patched)):
        cache = DynamicCache(config=plain.config)
        begun = first.generate(**inputs, max_new_tokens=NEW, past_key_values=cache, **more)
        assert cache.get_seq_length() == begun.shape[1] - 1
        asked = torch.cat([begun, begun[:, :3]], dim=1)
        got = then.generate(asked, max_new_tokens=6, past_key_values=cache, do_sample=False)
        assert torch.equal(got, plain.generate(asked, max_new_tokens=6, do_sample=False))


def _trained(model: Any, how: str) -> None:
    if how == "checkpoints":
        model.gradient_checkpointing_enable()
    model.train(how != "autocast")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["training", "checkpoints", "autocast"])
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_a_text_that_no_engine_steps_in(device: str, family: str, how: str) -> None:
    """It ends with its first token, behind which a step was begun, or goes on. A model that trains
    with checkpoints returns no cache, or adds nothing to it."""
    pair = pair_of(family, device)
    inputs = {"input_ids": torch.arange(5, 25, device=device)[None]}
    more: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    enabled = how == "autocast"
    with torch.autocast(device, torch.bfloat16, enabled=enabled):
        for model in pair:
            _trained(model, how)
        first = pair[0].generate(**inputs, **more, eos_token_id=None)[0, 20:]
        for end in (int(first[0]), None):
            found = []
            for model in pair:
                cache = DynamicCache(config=model.config)
                text = model.generate(**inputs, **more, eos_token_id=end, past_key_values=cache)
                found.append((text.tolist(), cache.get_seq_length()))
                found[-1] += ([None if k is None else k.shape for k, *_ in cache],)
            assert found[0] == found[1]


class Hooking(Streamer):
    """Puts a hook into the model when it is given its third tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside, self.handle = model.model.layers[0].mlp, None

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.tokens) == 3:
            self.handle = self.inside.register_forward_hook(lambda *args: None)


@pytest.mark.filterwarnings("ignore")
def test_a_text_that_ends_behind_its_last_engine_step(device: str) -> None:
    pair = pair_of("mistral", device)
    ids = torch.arange(5, 25, device=device)[None]
    more: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    full = pair[0].generate(ids, **more, eos_token_id=None)[0, 20:].tolist()
    for end in dict.fromkeys(full):
        found = []
        for model in pair:
            cache, streamer = DynamicCache(config=model.config), Hooking(model)
            options = {**more, "eos_token_id": end, "past_key_values": cache}
            text = model.generate(ids, **options, streamer=streamer)
            if streamer.handle is not None:
                streamer.handle.remove()
            found.append((text.tolist(), cache.get_seq_length(), [k.shape for k, *_ in cache]))
        assert found[0] == found[1]


class Odd(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores


class At(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15, device=input_ids.device)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_default_device_that_is_another(device: str, family: str) -> None:
    """Engines, caches and answers are made in calls: they lie where they must all the same."""
    plain, patched = pair_of(family, device)
    copied = copy.deepcopy(patched)
    layer.forget()  # so that the copy is described in its first call
    for model, rows in ((patched, 1), (patched, 4), (copied, 4)):
        inputs = on(device, prompts(rows))
        streamers = Streamer(), Streamer()
        with torch.device("meta"):
            wanted, got = (
                m.generate(**inputs, max_new_tokens=6, do_sample=False, streamer=s)
                for m, s in zip((plain, model), streamers, strict=True)
            )
        assert torch.equal(got, wanted)
        assert streamers[0].tokens == streamers[1].tokens
    assert kept.decoders[copied].steps > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "more",
    [
        {"logits_processor": LogitsProcessorList([Odd()])},
        {"stopping_criteria": StoppingCriteriaList([At()])},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"max_time": 1000.0},
        {"guidance_scale": 1.5},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_goes_to_transformers_loop(device: str, more: dict[str, Any]) -> None:
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(1))
    more = {"max_new_tokens": 6, "do_sample": False, **more}
    before = loops_of(patched)
    wanted, got = plain.generate(**inputs, **more), patched.generate(**inputs, **more)
    if more.get("return_dict_in_generate"):
        wanted, got = wanted.sequences, got.sequences
    assert torch.equal(got, wanted)
    assert loops_of(patched) == before


def test_hooks_of_the_model_itself_are_called(device: str) -> None:
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(1))
    calls = {id(plain): 0, id(patched): 0}

    def count(module: Any, args: Any, output: Any) -> None:
        calls[id(module)] += 1

    for model in (plain, patched):
        model.register_forward_hook(count)
        model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert calls[id(plain)] == calls[id(patched)] == 6


def test_a_model_that_changes_under_a_streamer(device: str) -> None:
    """Weights that a callback replaces count from the step at which transformers' loop has them,
    or from the next."""
    plain, patched = pair_of("qwen3", device)
    inputs = on(device, prompts(1))

    class Changing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 5:
                weight = patched.lm_head.weight
                patched.lm_head.weight = torch.nn.Parameter(weight.detach().flip(0).clone())

    text = patched.generate(
        **inputs, max_new_tokens=9, do_sample=False, streamer=Changing(), eos_token_id=None
    )[0, -9:].tolist()
    old = plain.generate(**inputs, max_new_tokens=9, do_sample=False, eos_token_id=None)
    same = [a == b for a, b in zip(old[0, -9:].tolist(), text, strict=True)]
    assert all(same[:4]) and not all(same)


def test_copies_restore_and_pickles(device: str) -> None:
    import pickle

    plain, patched = pair_of("llama", device)
    inputs = on(device, prompts(2))
    more = {"max_new_tokens": 6, "do_sample": False}
    wanted = plain.generate(**inputs, **more)
    other = copy.deepcopy(patched)
    assert torch.equal(other.generate(**inputs, **more), wanted)
    assert other.generate.__self__ is other
    assert "generate" not in vars(pickle.loads(pickle.dumps(patched)))
    hfpatch.apply(patched, decoding=False)
    assert "generate" not in vars(patched)
    hfpatch.apply(patched)
    assert "generate" in vars(patched)
    hfpatch.restore(patched)
    assert "generate" not in vars(patched)
    assert torch.equal(patched.generate(**inputs, **more), wanted)


def test_a_generate_of_the_users_stays(device: str) -> None:
    model = make("llama").to(device)
    own = lambda *args, **kwargs: "mine"  # noqa: E731
    model.generate = own
    hfpatch.apply(model)
    assert model.generate is own
    hfpatch.restore(model)
    assert model.generate is own


def test_nothing_is_kept(device: str) -> None:
    _, patched = pair_of("llama", device)
    inputs = on(device, prompts(1))
    counts = []
    for _ in range(3):
        patched.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=7)
        gc.collect()
        counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert counts[1] == counts[2]


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step whose tokens it has chosen itself."""
    found: list[int] = []
    accept = greedy.Chain.accept

    def noted(chain: greedy.Chain) -> None:
        found.append(len(chain.ids))
        accept(chain)

    monkeypatch.setattr(greedy.Chain, "accept", noted)
    return found


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("ends", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_greedy_tokens_are_chosen_by_the_steps(
    device: str, family: str, rows: int, ends: int, padding: int, accepted: list[int]
) -> None:
    """Texts and caches are transformers' own, rows that end one after the other among them."""
    plain, patched = pair_of(family, device)
    inputs = on(device, prompts(rows, padding=padding))
    end = [an_end(plain, device, 1), an_end(plain, device, rows)][:ends] or None
    more = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    expected = plain.generate(**inputs, return_dict_in_generate=True, **more)
    accepted.clear()
    streamer = Streamer() if rows == 1 else None
    result = patched.generate(**inputs, return_dict_in_generate=True, streamer=streamer, **more)
    torch.testing.assert_close(result.sequences, expected.sequences, rtol=0, atol=0)
    assert set(accepted) <= {rows}
    new = result.sequences.shape[1] - inputs["input_ids"].shape[1]
    assert new - 2 <= len(accepted) <= new  # all but the prompt's
    cache, wanted = result.past_key_values, expected.past_key_values
    assert cache.get_seq_length() == wanted.get_seq_length()
    for mine, theirs in zip(cache.layers, wanted.layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
    if streamer is not None:
        tokens = [t for step in streamer.tokens for t in step]
        assert tokens == result.sequences[0].tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_another_text_in_the_middle_of_one(device: str, rows: int, accepted: list[int]) -> None:
    """Both use the engine's memory, in turns."""
    plain, patched = pair_of("qwen3", device)
    accepted.clear()
    inputs = on(device, prompts(rows, padding=0))
    other = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    more = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = [plain.generate(**i, **more).tolist() for i in (inputs, other)]

    class Between(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) in (4, 5, 9):
                assert patched.generate(**other, **more).tolist() == expected[1]

    if rows == 1:
        assert patched.generate(**inputs, streamer=Between(), **more).tolist() == expected[0]
        assert len(accepted) > 60
        return
    # transformers takes no streamer of several rows: a look from within
    look = loop._ChainedAnswer.read
    with pytest.MonkeyPatch.context() as patch:

        def read(answer: Any, *given: Any) -> bool:
            patch.setattr(loop._ChainedAnswer, "read", look)
            assert patched.generate(**other, **more).tolist() == expected[1]
            return look(answer, *given)

        patch.setattr(loop._ChainedAnswer, "read", read)
        assert patched.generate(**inputs, **more).tolist() == expected[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_hook_in_the_middle_of_a_text(device: str, rows: int, accepted: list[int]) -> None:
    """It may keep what the model was given and has returned: neither is written to again."""
    plain, patched = pair_of("qwen3", device)
    accepted.clear()
    inputs = on(device, prompts(rows))
    more = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(**inputs, **more)
    kept_ids: list[torch.Tensor] = []
    kept_logits: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        kept_ids.append(kwargs["input_ids"])
        kept_logits.append(output.logits[:, -1])

    look = loop._ChainedAnswer.read
    with pytest.MonkeyPatch.context() as patch:

        def read(answer: Any, *given: Any) -> bool:
            if len(accepted) == 6 and not patched._forward_hooks:
                patched.register_forward_hook(hook, with_kwargs=True)
            return look(answer, *given)

        patch.setattr(loop._ChainedAnswer, "read", read)
        result = patched.generate(**inputs, **more)
    assert result.tolist() == expected.tolist()
    assert 6 <= len(accepted) <= 7 and len(kept_ids) > 8
    tokens = torch.stack([logits.argmax(-1) for logits in kept_logits], dim=1)
    assert tokens.tolist() == expected[:, -tokens.shape[1] :].tolist()
    assert torch.cat(kept_ids, dim=1)[:, 1:].tolist() == tokens[:, :-1].tolist()


def test_texts_of_several_threads_choose_their_own_tokens(device: str, accepted: list[int]) -> None:
    """One engine's memory, several texts in the making."""
    plain, patched = pair_of("qwen3", device)
    accepted.clear()
    more = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    asked = [on(device, prompts(1 + i % 2, padding=i % 3)) for i in range(6)]
    asked = [i | {"input_ids": i["input_ids"].roll(n, 1)} for n, i in enumerate(asked)]
    expected = [plain.generate(**inputs, **more).tolist() for inputs in asked]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda inputs: patched.generate(**inputs, **more).tolist(), asked)
            assert list(found) == expected
    assert len(accepted) > 3 * 6 * 20
