"""Loss curves on real English, of SmolLM2-135M's real weights and of small models: in fp32 a
patched model's curve is the original's, in bf16 it is no farther from that of fp32."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import relative_error
from support.nearness import Draw, assert_as_near
from test_layers import build
from test_mini_convergence import text
from torch import Tensor

import hfpatch
import hfpatch.optim

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import _smollm2

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("docs/usage.md", "docs/training.md", "docs/design.md", "docs/limits.md", "LICENSE")


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture
def _weights() -> None:
    try:
        _smollm2.gguf_file()
    except FileNotFoundError as e:
        pytest.skip(str(e))


def trained(model: Any, data: Tensor, patched: bool, lr: float) -> list[float]:
    """The loss of each step. data: [steps, rows, tokens]."""
    model.train()
    optimizer: torch.optim.Optimizer
    clip: Any
    if patched:
        report = hfpatch.apply(model, mode="training")
        layers, heads = (
            sum(s.op == op for s in report.swaps) for op in ("layer", "linear_cross_entropy")
        )
        assert (layers, heads) == (model.config.num_hidden_layers, 1), report
        optimizer = hfpatch.optim.AdamW(model.parameters(), lr=lr)
        clip = hfpatch.optim.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        clip = torch.nn.utils.clip_grad_norm_
    losses = []
    for row in data:
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def curve(
    patched: bool, steps: int, tokens: int, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of SmolLM2, each step on other text."""
    model, tokenizer = _smollm2.load(dtype)
    text = "\n\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    data = ids.repeat(-(-steps * tokens // len(ids)))[: steps * tokens].view(steps, 1, tokens)
    losses = trained(model, data, patched, 3e-5)
    del model
    gc.collect()
    return losses


def draws_of(ours: list[float], theirs: list[float], exact: list[float], parts: int) -> list[Draw]:
    """How far two curves are from a third, by parts of the way."""
    a, b, c = (torch.tensor(x).view(parts, -1) for x in (ours, theirs, exact))
    return [Draw(*(relative_error(x[i], c[i]) for x in (a, b))) for i in range(parts)]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("steps", "tokens"),
    # the loss's gradients are made in its backward, and, with more tokens than the 576 that the
    # hidden states are wide, in its forward
    [(50, 64), (6, 640)],
)
@pytest.mark.usefixtures("_weights")
def test_a_curve_in_fp32_is_the_originals(steps: int, tokens: int) -> None:
    theirs, ours = (curve(patched, steps, tokens) for patched in (False, True))
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{steps} steps of {tokens} tokens: loss {theirs[0]:.4f} to {theirs[-1]:.4f}, ", end="")
    print(f"{apart:.2g} apart at most")
    assert apart <= 1e-4, (ours, theirs)
    assert theirs[-1] != theirs[0]  # it was trained


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("_weights")
def test_a_curve_in_bf16_is_no_farther_from_fp32() -> None:
    exact = curve(False, 200, 32)
    theirs, ours = (curve(patched, 200, 32, torch.bfloat16) for patched in (False, True))
    assert exact[0] != exact[-1]
    draws = draws_of(ours, theirs, exact, 10)
    print("SmolLM2", ", ".join(f"{d.ours:.3g}/{d.theirs:.3g}" for d in draws))
    assert_as_near(draws, torch.bfloat16, "SmolLM2's loss")


#: Other weights, and another place in the text.
SEEDS = 6


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_curves_of_small_models_in_bf16_are_no_farther_from_fp32(family: str) -> None:
    """200 steps from the same weights."""
    draws = []
    for seed in range(SEEDS):
        start = build(family)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in start.parameters():
                p.add_(0.02 * torch.randn_like(p))
        start.to(torch.bfloat16)
        data = text(99, 1, 24, 200).roll(29 * seed, 0)
        exact = trained(copy.deepcopy(start).float(), data, False, 1e-3)
        theirs, ours = (trained(copy.deepcopy(start), data, p, 1e-3) for p in (False, True))
        assert sum(exact[-50:]) < 0.97 * sum(exact[:50]), "it was not trained"
        draws += draws_of(ours, theirs, exact, 1)
    print(family, ", ".join(f"{d.ours:.3g}/{d.theirs:.3g}" for d in draws))
    assert_as_near(draws, torch.bfloat16, f"{family}'s loss")
