"""`generate`'s loop on the CPU, also as a GPU has it: what it gives is transformers' own."""

from __future__ import annotations

import types
from typing import Any, cast

import pytest
import torch

# ruff: noqa: F401
from decoding.loop_cases import (
    accepted,
    test_a_cache_goes_on_between_both,
    test_a_generate_of_the_users_stays,
    test_a_hook_in_the_middle_of_a_text,
    test_a_mode,
    test_a_model_that_changes_under_a_streamer,
    test_a_streamer_gets_each_token_once,
    test_a_streamer_that_raises_leaves_the_cache_usable,
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

from hfpatch.decoding import loop
from hfpatch.proof.trial import OperatorCounter


@pytest.fixture(params=["ahead", "in turn"])
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """As on a GPU, whose answers are read while the next step runs, and as on a CPU."""
    if request.param == "ahead":
        monkeypatch.setattr(loop, "AHEAD", frozenset({"cpu"}))
    return "cpu"


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
