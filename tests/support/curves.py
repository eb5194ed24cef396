"""Loss curves of models that are trained patched and unpatched on the same text."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from expect import relative_error
from torch import Tensor

import hfpatch
import hfpatch.optim
from support.nearness import Draw

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import _smollm2  # noqa: E402

#: What SmolLM2 is trained on.
TEXTS = ("docs/usage.md", "docs/training.md", "docs/design.md", "docs/limits.md", "LICENSE")
RATE = 3e-5


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


def text() -> str:
    """Of the files that SmolLM2 is trained on."""
    return "\n\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)


def curve(
    patched: bool, steps: int, tokens: int, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of SmolLM2, each step on other text.

    Raises:
        FileNotFoundError: the package with its weights is not installed.
    """
    model, tokenizer = _smollm2.load(dtype)
    ids = torch.tensor(tokenizer(text(), verbose=False)["input_ids"])
    data = ids.repeat(-(-steps * tokens // len(ids)))[: steps * tokens].view(steps, 1, tokens)
    losses = trained(model, data, patched, RATE)
    del model
    gc.collect()
    return losses


def draws_of(ours: list[float], theirs: list[float], exact: list[float], parts: int) -> list[Draw]:
    """How far two curves are from a third, by parts of the way."""
    a, b, c = (torch.tensor(x).view(parts, -1) for x in (ours, theirs, exact))
    return [Draw(*(relative_error(x[i], c[i]) for x in (a, b))) for i in range(parts)]
