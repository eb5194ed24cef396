"""What steps, caches and changed models must give, on a GPU: the tests of tests/decoding there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# ruff: noqa: F401
from decoding.families import on_device
from decoding.test_around_generate import test_a_cache_on_another_device_is_the_originals_error
from decoding.test_cache import (
    test_a_cache_goes_from_the_patched_model_to_the_unpatched_one_and_back,
    test_a_cache_of_a_model_with_a_shorter_window_goes_on_in_another,
    test_a_cache_that_is_none_of_its_own_goes_to_the_original,
    test_a_prompts_cache_serves_several_continuations,
    test_an_arena_grows_and_dies_with_its_cache,
    test_steps_between_any_operations_give_what_they_give_unpatched,
)
from decoding.test_image_models import (
    test_positions_of_several_axes,
    test_texts_about_an_image_are_what_they_were,
)
from decoding.test_interrupts import (
    test_an_interrupt_at_any_line_leaves_model_and_cache_usable,
    test_an_interrupt_at_each_line_around_a_gpus_buffers,
    way,
)
from decoding.test_model_generate import (
    pair,
    test_a_mask_with_holes_and_one_of_four_dimensions,
    test_an_exception_leaves_model_and_cache_usable,
)
from decoding.test_modes import (
    test_a_chat_goes_on_in_its_cache,
    test_a_mode_gives_what_it_gave,
    test_a_static_cache_of_the_users_own,
    test_a_static_cache_with_which_transformers_compiles,
    test_behind_resize_token_embeddings,
    test_prompts_of_int32,
    test_stop_strings,
    test_streamers_of_transformers,
    test_under_inference_mode_and_out_of_it_again,
    tokenizer,
)
from decoding.test_restore import (
    test_a_change_is_noticed_within_the_call,
    test_a_copy_a_pickle_and_another_dtype,
    test_a_hook_that_goes_lets_steps_serve_again,
    test_a_streamer_that_restores_the_model,
    test_restore_frees_and_leaves_nothing,
)
from decoding.test_watch import model, test_a_change_is_seen

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield
