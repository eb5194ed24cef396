"""`hfpatch.loss` on a GPU: a model's numbers, and what it takes of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import hfpatch
from hfpatch import loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_of_a_model(autocast: bool, dtype: torch.dtype, kernels_module: object) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32000,
    )
    model = LlamaForCausalLM(config).to("cuda", dtype)
    hfpatch.apply(model, mode="training")
    ids = torch.randint(32000, (2, 300), device="cuda")
    items = torch.tensor(700, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            value = model(input_ids=ids, labels=ids, num_items_in_batch=items).loss
        value.backward()
        return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    value, gradient = step()
    model.loss_function = loss.causal_lm
    fused_value, fused_gradient = step()
    torch.testing.assert_close(fused_value, value, rtol=2e-6, atol=0)
    eps = torch.finfo(torch.bfloat16 if autocast else dtype).eps
    apart = (fused_gradient - gradient).norm() / gradient.norm()
    assert apart <= max(eps, 1e-5)


def test_memory(kernels_module: object) -> None:
    """The logits' own size for the gradient; transformers' loss takes some five times that."""
    logits = torch.randn(1, 2048, 128256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(128256, (1, 2048), device="cuda")
    size = logits.numel() * logits.element_size()

    def peak(function: Any) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(logits, labels, 128256), logits)
        return (torch.cuda.max_memory_allocated() - before) / size

    assert peak(loss.causal_lm) < 1.01
    assert peak(ForCausalLMLoss) > 4.9
