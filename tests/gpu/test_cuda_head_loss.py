"""The loss without the logits on a GPU: numbers, what it takes of memory, a model's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nearness import Draw, assert_as_near, draw
from test_head_loss import CLASSES, drawn, ids_of, loss_and_gradients, plain, step, targets
from test_head_loss import training_model as model_of
from torch import Tensor

import hfpatch
from hfpatch.losses import head_loss
from hfpatch.losses.head_loss import linear_cross_entropy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"softcap": 3.0, "scale": 2.0}, {"reduction": "none"}],
    ids=str,
)
def test_no_farther_from_fp64_than_pytorch(
    dtype: torch.dtype, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(head_loss, "LEAST", 16)
    draws: list[list[Draw]] = []
    for seed in range(12):
        leaves: list[Tensor | None] = [
            drawn(seed, 3, 70, 64).to(dtype),
            drawn(seed + 100, CLASSES, 64, scale=0.3).to(dtype),
            drawn(seed + 200, CLASSES).to(dtype),
        ]
        target = targets(seed, 3, 70)
        wide = [None if t is None else t.double() for t in leaves]
        there = [None if t is None else t.cuda() for t in leaves]
        ours = loss_and_gradients(linear_cross_entropy, there, target.cuda(), **options)
        theirs = loss_and_gradients(plain, there, target.cuda(), **options)
        truth = loss_and_gradients(plain, wide, target, **options)
        rows = zip(ours, theirs, truth, strict=True)
        draws.append([draw(a.cpu(), b.cpu(), c) for a, b, c in rows])
    for name, found in zip(
        ("loss", "hidden", "weight", "bias"), zip(*draws, strict=True), strict=True
    ):
        assert_as_near(found, dtype, name, like=16 if name == "loss" else 64)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_class_that_is_none(recompute: bool) -> None:
    """Also where the head has a further class of that number."""
    assert head_loss.is_odd(torch.empty(1, device="cuda", dtype=torch.bfloat16), CLASSES)
    hidden = drawn(1, 40, 64).cuda().bfloat16().requires_grad_()
    weight = drawn(2, CLASSES, 64).cuda().bfloat16().requires_grad_()
    target = targets(3, 40).cuda()
    for none in (CLASSES, CLASSES + 1, -3):
        target[7] = none
        loss = linear_cross_entropy(hidden, weight, target, recompute=recompute)
        assert loss.isnan()


@pytest.mark.parametrize(("recompute", "most"), [(True, 0.25), (None, 0.75)])
def test_memory(recompute: bool | None, most: float) -> None:
    """The weight's gradient, and beside it only a part of the logits: by default what is kept of
    them saves the second product, where memory allows it."""
    x = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(65536, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(65536, (8192,), device="cuda")
    logits = 8192 * 65536 * 2
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(linear_cross_entropy(x, w, t, recompute=recompute), [x, w])
        peak = torch.cuda.max_memory_allocated() - before
    assert peak - w.nbytes < logits * most, (peak, logits)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_models_step(name: str) -> None:
    model = model_of(name, torch.float32).cuda()
    ids = ids_of(model).cuda()
    before = step(model, ids)
    report = hfpatch.apply(model, mode="training", include="lm_head")
    assert [s.op for s in report.swaps] == ["linear_cross_entropy"]
    for ours, theirs in zip(step(model, ids), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
