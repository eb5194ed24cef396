"""`generate`'s loop on the CPU, also as a GPU has it: what it gives is transformers' own."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

# ruff: noqa: F401
from decoding.loop_cases import (
    accepted,
    loops_of,
    on,
    pair_of,
    prompts,
    test_a_cache_goes_on_between_both,
    test_a_default_device_that_is_another,
    test_a_generate_of_the_users_stays,
    test_a_hook_in_the_middle_of_a_text,
    test_a_mode,
    test_a_model_that_changes_under_a_streamer,
    test_a_streamer_gets_each_token_once,
    test_a_streamer_that_raises_leaves_the_cache_usable,
    test_a_text_that_ends_behind_its_last_engine_step,
    test_a_text_that_no_engine_steps_in,
    test_a_text_that_outgrows_its_room_and_ends_by_one_of_three,
    test_another_text_in_the_middle_of_one,
    test_copies_restore_and_pickles,
    test_greedy_tokens_are_chosen_by_the_steps,
    test_hooks_of_the_model_itself_are_called,
    test_nothing_is_kept,
    test_texts_of_several_threads_choose_their_own_tokens,
    test_what_goes_to_transformers_loop,
)
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from hfpatch.decoding import loop
from hfpatch.proof.trial import OperatorCounter


@pytest.fixture(params=["ahead", "in turn"])
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """As on a GPU, whose answers are read while the next step runs, and as on a CPU."""
    if request.param == "ahead":
        monkeypatch.setattr(loop, "AHEAD", frozenset({"cpu"}))
    return "cpu"


def test_a_prompt_is_called_before_the_model_is_made_ready_for_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' way with experts in steps, on a GPU, copies the weights of each token's."""
    order: list[str] = []

    @contextlib.contextmanager
    def ready(self: Any) -> Iterator[None]:
        order.append("ready")
        yield
        order.append("as it was")

    def call(module: Any, args: Any, kwargs: Any) -> None:
        order.append(f"{kwargs['input_ids'].shape[1]} tokens")

    models = pair_of("mixtral", device)
    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", ready)
    inputs = on(device, prompts(1))
    seen = []
    for model in models:
        before = 0 if model is models[0] else loops_of(model)
        handle = model.register_forward_pre_hook(call, with_kwargs=True)
        model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None)
        handle.remove()
        assert model is models[0] or loops_of(model) == before + 1
        seen.append(tuple(order))
        order.clear()
    assert seen[0] == seen[1]
    assert seen[0].index("ready") == 1


@pytest.mark.parametrize(
    ("rows", "launched"),
    [
        (1, ["argmax", "ne", "copy_"]),
        (2, ["argmax", "where", "copy_", "ne", "bitwise_and", "copy_"]),
    ],
)
def test_what_a_token_costs_beside_its_step(rows: int, launched: list[str]) -> None:
    """A GPU's stream has nothing else meanwhile: each launch is some µs of a token's 800."""
    config = GenerationConfig()
    config._pad_token_tensor = torch.tensor(0)
    end = types.SimpleNamespace(eos_token_id=torch.tensor([3]))
    call = types.SimpleNamespace(config=config, processors=[], criteria=[end], streamer=None)
    text = loop._Text(cast(Any, call), torch.ones(rows, 4, dtype=torch.int64))
    logits = torch.zeros(rows, 1, 8)
    logits[:, :, 5] = 1
    text.add(logits)  # makes room for more tokens
    with OperatorCounter() as seen:
        answer, _ = text.add(logits)
    assert seen.names == [f"aten::{name}" for name in launched]
    assert answer is not None and not answer.read(text, None)
    assert text.columns.all().tolist() == [[1, 1, 1, 1, 5, 5]] * rows
