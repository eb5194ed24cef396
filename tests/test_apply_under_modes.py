"""`apply` and `plan` under a mode of PyTorch's decide what they decide without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch.decoding import layer
from hfpatch.proof.proofs import forget_proofs

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.device("meta"),
        FakeTensorMode,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["meta", "fake", "inference", "autocast"],
)
def test_a_model_with_weights(
    kernels_module: object, context: Callable[[], Any], mode: str
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().bfloat16()
    expected = hfpatch.plan(model, mode=mode)
    forget_proofs()
    layer.forget()
    with context():
        planned = hfpatch.plan(model, mode=mode)
        report = hfpatch.apply(model, mode=mode)
    for found in (planned, report.plan):
        assert [(s.path, s.op) for s in found.swaps] == [(s.path, s.op) for s in expected.swaps]
        assert found.skips == expected.skips
    assert hfpatch.restore(model) == len(expected.swaps) > 0


def test_a_default_device_that_was_set_before_the_import(kernels_module: object) -> None:
    """What a family holds since its import lies where proofs are made."""
    code = """
import torch
torch.set_default_device("meta")
import hfpatch
from torch import nn
with torch.device("cpu"):
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU()).eval()
report = hfpatch.apply(model, kernels="local")
assert [s.op for s in report.swaps] == ["layer_norm", "gelu"], report
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_of_fake_tensors() -> None:
    with FakeTensorMode():
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        hfpatch.apply(model)
        with torch.no_grad():
            assert model(torch.arange(9)[None]).logits.shape == (1, 9, 99)
        hfpatch.restore(model)
