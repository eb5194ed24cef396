"""Adapters in fp32 over half weights on a GPU: the tests of tests/training there, and captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# ruff: noqa: F401
from decoding.families import on_device
from training.test_layers import served
from training.test_wide_adapters import (
    adapted,
    own_linears,
    test_checkpointed,
    test_curves_are_as_near_to_fp64,
    test_gradients_are_as_near_to_fp64,
    test_gradients_of_gradients,
    test_some_of_the_models_dtype_and_some_wide,
    test_what_pefts_own_code_refuses,
)

from hfpatch.training import lora

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_the_gpu(kernels_module: object) -> Iterator[None]:
    with on_device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_proof_waits_until_a_capture_is_over(dtype: torch.dtype) -> None:
    layer = next(own_linears(adapted(dtype=dtype)))
    lora._widening.clear()
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1.0)
        inside = lora.widens(layer, dtype, "cuda")
    assert not inside and not lora._widening
    assert lora.widens(layer, dtype, "cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1.0)
        assert lora.widens(layer, dtype, "cuda")


def test_tf32_that_is_on_hides_no_error_from_the_proof() -> None:
    layer = next(own_linears(adapted()))
    lora._widening.clear()
    torch.set_float32_matmul_precision("high")
    try:
        assert lora.widens(layer, torch.bfloat16, "cuda")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
