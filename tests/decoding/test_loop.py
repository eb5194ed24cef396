"""`generate`'s loop without waits, on the CPU, where it is not used: what it gives is the same."""

from __future__ import annotations

import pytest

# ruff: noqa: F401
from decoding.loop_cases import (
    test_a_cache_goes_on_between_both,
    test_a_generate_of_the_users_stays,
    test_a_mode,
    test_a_model_that_changes_under_a_streamer,
    test_a_streamer_gets_each_token_once,
    test_a_streamer_that_raises_leaves_the_cache_usable,
    test_a_text_that_outgrows_its_room_and_ends_by_one_of_three,
    test_copies_restore_and_pickles,
    test_hooks_of_the_model_itself_are_called,
    test_nothing_is_kept,
    test_what_goes_to_transformers_loop,
)

from hfpatch.decoding import loop


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(loop, "DEVICES", frozenset({"cpu"}))
    return "cpu"
