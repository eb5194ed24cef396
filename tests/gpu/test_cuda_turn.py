"""What turns behind a cache must give, on a GPU: the tests of tests/decoding there, memory, and the
order of work."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# ruff: noqa: F401
from decoding.families import on_device
from decoding.test_turn import (
    begun,
    ids_of,
    make,
    near,
    order,
    proven,
    same_caches,
    test_a_cache_goes_on_between_turns_steps_and_the_unpatched_model,
    test_a_cache_or_mask_that_does_not_fit,
    test_a_chat_about_an_image,
    test_a_dtype_without_kernels_is_the_originals_and_ends_nothing,
    test_a_mask_for_heads_that_share_keys,
    test_a_prefixs_cache_serves_several_continuations,
    test_a_rope_that_changes_with_the_length_is_the_originals_from_there_on,
    test_a_turn_that_disagrees_is_not_used,
    test_a_turn_that_fails_is_the_originals,
    test_an_assistant_with_many_candidates,
    test_an_interrupt_at_any_line_leaves_model_and_cache_usable,
    test_beams_and_several_texts_behind_a_prefix,
    test_changed_weights_settings_hooks_and_modes_count_at_once,
    test_chats,
    test_copies_and_restore,
    test_each_attention,
    test_half_types_are_no_farther_from_fp32,
    test_more_tokens_than_are_served,
    test_other_calls_are_the_originals,
    test_plain_calls,
    test_prompt_lookup_with_many_candidates,
    test_prompts_in_chunks,
    test_random_decoders,
    test_settings_that_go_to_and_fro,
    test_turns_between_any_operations_give_what_they_give_unpatched,
    test_what_is_padding_among_the_new_tokens_is_a_number,
    test_windows_that_are_passed_in_a_turn,
    turns_of,
)
from transformers import DynamicCache

import hfpatch
from hfpatch.decoding import kept

pytestmark = pytest.mark.gpu

LENGTH, LAYERS, HEADS, DIM = 60_000, 16, 8, 128


@pytest.fixture(autouse=True)
def on_the_gpu(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_chats_in_half_types(name: str, dtype: torch.dtype) -> None:
    """Turns of many lengths behind caches of many: each as near to fp32 as the original's."""
    plain = make(name, dtype)
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    hfpatch.apply(patched, include=type(patched).__name__)
    errors = [0.0, 0.0]
    for seed, lengths in enumerate(((30, 9, 100), (500, 33, 20), (12, 300, 64), (90, 512, 9))):
        found: list[list[torch.Tensor]] = []
        for model in (exact, plain, patched):
            cache = DynamicCache(config=model.config)
            found.append(
                [
                    model(ids_of(2, n, 9 * seed + i), past_key_values=cache).logits.double()
                    for i, n in enumerate(lengths)
                ][1:]
            )
        for i in range(2):
            errors[i] += sum(
                float((a - b).square().sum()) for a, b in zip(found[1 + i], found[0], strict=True)
            )
    held = kept.decoders[patched]
    assert held.turns_refused is None and held.turns_served >= 5, kept.notes(patched)
    assert errors[1] <= 1.2 * errors[0], errors


@torch.no_grad()
def test_a_turn_on_another_stream_waits_for_the_step_before() -> None:
    """And the other way round: nobody else makes one wait for the other."""
    plain, patched = proven()
    theirs, ours = begun(plain), begun(patched)
    given = [ids_of(1, n, i) for i, n in enumerate((12, 1, 300, 1, 9, 1, 40))]
    wanted = [plain(ids, past_key_values=theirs).logits for ids in given]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for number, ids in enumerate(given):
        with torch.cuda.stream(streams[number % 2]):
            got.append(patched(ids, past_key_values=ours).logits)
    torch.cuda.synchronize()
    for a, b in zip(got, wanted, strict=True):
        near(a, b)
    same_caches(theirs, ours)
    assert turns_of(patched) >= 3, kept.notes(patched)


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_is_never_there_twice(first: bool) -> None:
    """Its first turn, beside which the original runs, and one that is served: each takes the cache
    into an arena."""
    model: Any = make(
        "llama", torch.bfloat16, num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM,
        num_attention_heads=HEADS, max_position_embeddings=2 * LENGTH,
    )  # fmt: skip
    hfpatch.apply(model)
    with torch.no_grad():
        for rows in (2,) if first else (1, 2):
            for _ in range(2):
                model(ids_of(rows, 20), past_key_values=begun(model, rows))
        cache = DynamicCache(config=model.config)
        for index in range(LAYERS):
            shape = (1, HEADS, LENGTH, DIM)
            cache.update(
                *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"), index
            )
        gc.collect()
        torch.cuda.synchronize()
        before, served = torch.cuda.memory_allocated(), turns_of(model)
        torch.cuda.reset_peak_memory_stats()
        model(ids_of(1, 40), past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
    layer = 2 * HEADS * LENGTH * DIM * 2
    more = torch.cuda.max_memory_allocated() - before
    assert more <= 3 * layer + (64 << 20), f"{more / layer:.1f} layers more"
    assert turns_of(model) == served + (not first), kept.notes(model)
