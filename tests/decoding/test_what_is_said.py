"""Who generates at the original's speed is told why: in the status, and by one warning. Who only
leaves the fast loop finds it in the status, and nothing is said in ordinary use."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from decoding.families import make, prompts
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hfpatch
from hfpatch.decoding import kept

_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
_NOT_USED = "decoding steps not used: "
_LOOP = "decoding: steps in transformers' own loop: "
_TURNS = "decoding: turns left to the original: "


@pytest.fixture(autouse=True)
def _kernels(kernels_module: ModuleType) -> None:
    """The compiled kernels must be there: these tests are about them."""


def patched(name: str = "llama") -> Any:
    """A model that has proven its steps of one and two rows."""
    model = make(name)
    hfpatch.apply(model)
    for rows in (1, 2):
        model.generate(**prompts(rows), **_GREEDY)
    return model


def steps_of(model: Any) -> int:
    return int(kept.decoders[model].steps)


def said_by(call: Callable[[Any], Any], model: Any) -> list[str]:
    """What hfpatch warns of decoding in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(model)
    texts = [str(w.message) for w in caught if str(w.message).startswith("hfpatch: ")]
    return [t for t in texts if "decod" in t]


def notes_of(model: Any, begin: str) -> list[str]:
    return [n.removeprefix(begin) for n in hfpatch.status(model).notes if n.startswith(begin)]


def _generate(rows: int = 1, **more: Any) -> Callable[[Any], Any]:
    return lambda model: model.generate(**prompts(rows), **{**_GREEDY, **more})


def _under_autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**prompts(1), **_GREEDY)


def _by_hand(enabled: bool = False, **more: Any) -> Callable[[Any], Any]:
    """Three tokens of somebody's own loop."""

    def write(model: Any) -> None:
        with torch.set_grad_enabled(enabled):
            cache = DynamicCache(config=model.config)
            ids = prompts(1)["input_ids"]
            for _ in range(3):
                given = more if cache.get_seq_length() else {}
                output = model(input_ids=ids, past_key_values=cache, **given)
                ids = output.logits[:, -1:].argmax(-1)

    return write


def _config(**settings: Any) -> Callable[[Any], Any]:
    def write(model: Any) -> None:
        config = GenerationConfig(**{**_GREEDY, **settings})
        model.generate(**prompts(1), generation_config=config)

    return write


def _default(**settings: Any) -> Callable[[Any], Any]:
    """Of the model's own generation config."""

    def write(model: Any) -> None:
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        model.generate(**prompts(1), **_GREEDY)

    return write


def _static(model: Any) -> None:
    cache = StaticCache(config=model.config, max_cache_len=40)
    model.generate(**prompts(1), **_GREEDY, past_key_values=cache, disable_compile=True)


_HIDDEN = {"output_hidden_states": True, "return_dict_in_generate": True}
_ATTENTIONS = {"output_attentions": True, "return_dict_in_generate": True}

#: By a pattern of the reason: calls of which none makes a step.
REASONS: dict[str, Callable[[Any], Any]] = {
    "more than 16 rows": _generate(17),
    "more than 16 rows$": _generate(6, num_beams=3),
    "`output_hidden_states` is given": _generate(**_HIDDEN),
    "`output_attentions` is given": _generate(**_ATTENTIONS),
    "it is in training mode; call": lambda m: m.train().generate(**prompts(1), **_GREEDY),
    "autocast is on": _under_autocast,
    "its cache is a StaticCache": _generate(cache_implementation="static", disable_compile=True),
    "its cache is a StaticCache$": _static,
    "`use_cache` is False": _generate(use_cache=False),
    "`use_cache` is False$": _config(use_cache=False),
    "^`use_cache` is False": _default(use_cache=False),
    "^`use_cache` is False$": _generate(use_cache=False, num_beams=2),
    "gradients are on; call it under `torch.no_grad": _by_hand(enabled=True),
    "`attention_mask` has 4 dim": _by_hand(attention_mask=torch.ones(1, 1, 1, 30).bool()),
    "`attention_mask` has not one column": _by_hand(attention_mask=torch.ones(1, 30).long()),
    "`labels` is given": _by_hand(labels=torch.ones(1, 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("why", REASONS)
def test_the_status_and_one_warning_say_why_steps_were_not_used(why: str) -> None:
    model = patched()
    assert not notes_of(model, _NOT_USED) and not notes_of(model, _LOOP)
    steps = steps_of(model)
    texts = [t for _ in range(2) for t in said_by(_quietly(REASONS[why]), model)]
    assert steps_of(model) == steps
    (note,) = notes_of(model, _NOT_USED)
    assert re.search(why, note) and not notes_of(model, _LOOP)
    (text,) = texts
    assert "`LlamaForCausalLM` was called where decoding steps cannot be used" in text
    assert text.endswith(note)


def _quietly(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What the original raises is another matter."""

    def called(model: Any) -> None:
        try:
            call(model)
        except (RuntimeError, ValueError):
            assert "attention_mask" in str(kept.decoders[model].reasons)

    return called


def test_another_model_is_told_as_well() -> None:
    for model in (patched(), patched("qwen3")):
        (text,) = said_by(_generate(17), model)
        assert f"`{type(model).__name__}`" in text


def test_candidates_that_are_too_many_are_warned_of() -> None:
    """Of 12 tokens that prompt lookup finds all are looked at in one call, and a mixture of experts
    is called for more than a step's."""
    model = patched("olmoe")
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    ids = prompts(1, padding=0)["input_ids"].repeat(1, 4)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_GREEDY}
    asked |= {"prompt_lookup_num_tokens": 12, "max_new_tokens": 20, "min_new_tokens": 20}
    texts = [t for _ in range(2) for t in said_by(lambda m: m.generate(**asked), model)]
    assert torch.equal(model.generate(**asked), plain.generate(**asked))
    (text,) = texts
    assert text.endswith("more than 8 tokens at once, as candidates are")
    assert notes_of(model, _NOT_USED) == ["more than 8 tokens at once, as candidates are"]


def test_a_copy_that_no_description_explains_any_more_is_warned_of() -> None:
    model = copy.deepcopy(patched())
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, y: y * 1.5)
    texts = [t for _ in range(2) for t in said_by(_generate(), model)]
    (text,) = texts
    assert "decodes as it did" in text and steps_of(model) == 0
    assert "left as it was" in hfpatch.status(model).notes[0]


class _Odd(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores


class _After(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 15)


#: By the reason: texts whose steps are an engine's, in the loop of transformers.
LOOPS: dict[str, Callable[[Any], Any]] = {
    "`num_beams` is 3": _generate(num_beams=3),
    "`num_beams` is 2": _config(num_beams=2),
    "`num_beams` is 4": _default(num_beams=4),
    "`prompt_lookup_num_tokens` is 3": _generate(prompt_lookup_num_tokens=3),
    "a criterion is a MaxTimeCriteria": _generate(max_time=1000.0),
    "a criterion is a _After": _generate(stopping_criteria=StoppingCriteriaList([_After()])),
    "a processor is a _Odd": _generate(logits_processor=LogitsProcessorList([_Odd()])),
    "`custom_generate` is given": lambda m: m.generate(
        **prompts(1), **_GREEDY, custom_generate=type(m)._sample
    ),
    "its arguments are given by position": lambda m: m.generate(
        prompts(1)["input_ids"], GenerationConfig(**_GREEDY)
    ),
}


@pytest.mark.parametrize("why", LOOPS)
def test_the_status_says_why_a_text_left_the_loop_and_no_warning_does(why: str) -> None:
    model = patched()
    steps, loops = steps_of(model), kept.decoders[model].loops
    assert not said_by(LOOPS[why], model) + said_by(LOOPS[why], model)
    assert steps_of(model) > steps and kept.decoders[model].loops == loops
    assert notes_of(model, _LOOP) == [why] and not notes_of(model, _NOT_USED)


def test_a_class_with_a_loop_of_its_own_is_named() -> None:
    """It still says what its calls of the model do not show."""
    model = patched("phi3")
    (note,) = notes_of(model, _LOOP)
    assert note == "`Phi3ForCausalLM` has a `prepare_inputs_for_generation` of its own"
    (text,) = said_by(_generate(use_cache=False), model)
    assert text.endswith("`use_cache` is False")


def _chat(model: Any) -> None:
    ids, cache = prompts(1, padding=0)["input_ids"], DynamicCache(config=model.config)
    for _ in range(3):
        ids = model.generate(ids, past_key_values=cache, **_GREEDY)
        ids = torch.cat([ids, prompts(1, 12, 0)["input_ids"]], dim=1)


def _trained(model: Any) -> None:
    model.train().requires_grad_(True)
    ids = prompts(2)["input_ids"]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    model.eval().requires_grad_(False)


@torch.no_grad()
def _judged(model: Any) -> None:
    model(**prompts(17), use_cache=False)
    model(**prompts(1), output_hidden_states=True)
    model(**prompts(1), past_key_values=DynamicCache(config=model.config))


ORDINARY: dict[str, Callable[[Any], Any]] = {
    "greedy": _generate(),
    "sampled": _generate(2, do_sample=True, top_k=5),
    "many rows": _generate(16),
    "one token": _generate(max_new_tokens=1, min_new_tokens=1),
    "one token, no cache": _generate(max_new_tokens=1, min_new_tokens=1, use_cache=False),
    "scores": _generate(return_dict_in_generate=True, output_scores=True),
    "by hand": _by_hand(),
    "a chat": _chat,
    "training": _trained,
    "an evaluation": _judged,
}


@pytest.mark.filterwarnings("ignore:.*where autograd records:RuntimeWarning")
@pytest.mark.parametrize("what", ORDINARY)
def test_nothing_is_said_in_ordinary_use(what: str) -> None:
    model = patched()
    assert not said_by(ORDINARY[what], model) and not notes_of(model, _LOOP)
    assert not notes_of(model, _NOT_USED) and not notes_of(model, _TURNS)


def test_a_chat_with_a_mixture_of_experts_has_a_note_of_its_turns() -> None:
    model = patched("olmoe")
    assert not said_by(_chat, model) and not notes_of(model, _NOT_USED)
    assert notes_of(model, _TURNS) == ["more than 8 tokens behind a cache"]


def test_an_id_outside_of_the_vocabulary_is_the_originals_error_alone() -> None:
    model = patched()

    def write(model: Any) -> None:
        with torch.no_grad():
            cache = model(prompts(1)["input_ids"], use_cache=True).past_key_values
            with pytest.raises(IndexError):
                model(torch.tensor([[300]]), past_key_values=cache)

    assert not said_by(write, model)
    assert notes_of(model, _NOT_USED) == ["an id is not in the vocabulary"]


def test_a_warning_points_at_who_calls_generate() -> None:
    model = patched()
    with pytest.warns(RuntimeWarning, match="`use_cache` is False") as caught:
        model.generate(**prompts(1), **_GREEDY, use_cache=False)
    (one,) = [w for w in caught if "use_cache" in str(w.message)]
    assert one.filename == __file__


def test_a_filter_that_makes_errors_of_warnings_changes_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hfpatch import announce

    model = patched()
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    wanted = plain.generate(**prompts(1), **_GREEDY, use_cache=False)
    shown: list[str] = []
    monkeypatch.setattr(announce, "_not_raised", lambda w, _: shown.append(str(w)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = model.generate(**prompts(1), **_GREEDY, use_cache=False)
    assert torch.equal(got, wanted) and len(shown) == 1
