"""SmolLM2-135M's real weights on real English: a patched model's loss curve is the original's."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hfpatch
import hfpatch.optim

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import _smollm2

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("docs/usage.md", "docs/training.md", "docs/design.md", "docs/limits.md", "LICENSE")


@pytest.fixture(autouse=True)
def _weights(kernels_module: object) -> None:
    try:
        _smollm2.gguf_file()
    except FileNotFoundError as e:
        pytest.skip(str(e))


def curve(patched: bool, steps: int, tokens: int) -> list[float]:
    """The loss of each step, each on other text."""
    model, tokenizer = _smollm2.load(torch.float32)
    model.train()
    text = "\n\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    data = ids.repeat(-(-steps * tokens // len(ids)))[: steps * tokens].view(steps, 1, tokens)
    optimizer: torch.optim.Optimizer
    clip: Any
    if patched:
        report = hfpatch.apply(model, mode="training")
        layers, heads = (
            sum(s.op == op for s in report.swaps) for op in ("layer", "linear_cross_entropy")
        )
        assert (layers, heads) == (model.config.num_hidden_layers, 1), report
        optimizer = hfpatch.optim.AdamW(model.parameters(), lr=3e-5)
        clip = hfpatch.optim.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
        clip = torch.nn.utils.clip_grad_norm_
    losses = []
    for row in data:
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    del model, optimizer
    gc.collect()
    return losses


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("steps", "tokens"),
    # the loss's gradients are made in its backward, and, with more tokens than the 576 that the
    # hidden states are wide, in its forward
    [(50, 64), (6, 640)],
)
def test_a_curve_in_fp32_is_the_originals(steps: int, tokens: int) -> None:
    theirs, ours = (curve(patched, steps, tokens) for patched in (False, True))
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{steps} steps of {tokens} tokens: loss {theirs[0]:.4f} to {theirs[-1]:.4f}, ", end="")
    print(f"{apart:.2g} apart at most")
    assert apart <= 1e-4, (ours, theirs)
    assert theirs[-1] != theirs[0]  # it was trained
