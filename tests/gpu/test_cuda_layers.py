"""Decoder layers under autograd on a GPU: the tests of tests/training there, and packed rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# ruff: noqa: F401
from decoding.families import on_device
from training.test_deferred_masks import (
    count,
    test_a_layer_that_runs_as_it_is_is_given_the_mask,
    test_a_window_alone,
    test_checkpoints,
    test_more_sequences_than_are_computed_in_turn,
    test_none_is_made,
    test_other_arguments_are_the_models_own,
    test_whatever_reads_it_reads_the_mask,
    test_who_is_given_what_a_layer_is_given_sees_the_mask,
)
from training.test_layers import (
    assert_equal,
    batch,
    build,
    gradients,
    layers_of,
    served,
    test_accumulated_retained_and_second_gradients,
    test_adapters_in_all_products,
    test_adapters_put_in_before,
    test_adapters_under_autocast,
    test_an_adapter_that_is_proven_inside_of_a_checkpoint,
    test_autocast_over_fp32_parameters,
    test_biases_and_half_of_them,
    test_both_halves_run_in_every_layer,
    test_checkpointing_does_not_make_a_layers_last_product_again,
    test_frozen_parts,
    test_gradient_checkpointing,
    test_gradients_of_families,
)

import hfpatch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_the_gpu(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sequences_in_a_row_are_those_apart(family: str, dtype: torch.dtype) -> None:
    """Half types go through PyTorch's flash attention of sequences of several lengths."""
    model = build(family, dtype)
    lengths = (70, 1, 57, 130)
    ids = batch(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    given = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    theirs = gradients(model, **given)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2, [s.reason for s in report.skips]
    ours = gradients(model, **given)
    hfpatch.restore(model)
    truth = gradients(model.double(), **given)
    eps = torch.finfo(dtype).eps
    whole = max(t.norm() for t in truth.values())
    for name, true in truth.items():
        scale = true.norm() + 1e-3 * whole
        own, original = ((g[name].double() - true).norm() / scale for g in (ours, theirs))
        assert own <= 1.3 * original + (24 if dtype == torch.float32 else 1) * eps, name
