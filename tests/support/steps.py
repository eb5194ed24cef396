"""Decoding steps in half types against the same steps in fp32, teacher forced, in many draws."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from decoding.families import make
from torch import Tensor, nn

import hfpatch
from hfpatch.decoding import cache as caches
from hfpatch.decoding import kept
from support.nearness import Draw, draw

#: (other weights, rows): one draw a row. 64 of them put the limit where one kernel's error is 1.10
#: times the other's.
DRAWS = (*((seed, 2) for seed in range(8)), *((seed, 16) for seed in range(8, 11)))
#: The same number, of fewer models.
WIDE = tuple((seed, 16) for seed in range(4))
PROMPT = 8


def redraw(model: nn.Module, seed: int) -> None:
    """Other weights, distributed as `make` draws them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=generator)
            vector = p.dim() == 1
            p.copy_(1 + 0.2 * drawn if vector else drawn * 1.5 / p.shape[-1] ** 0.5)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """`[rows, tokens - PROMPT, vocabulary]`, a call for each token."""
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], use_cache=True)[caches.NAME]
        steps = [
            model(ids[:, i : i + 1], use_cache=True, **{caches.NAME: cache}).logits
            for i in range(PROMPT, ids.shape[1])
        ]
    return torch.cat(steps, 1)


def drawn(
    family: str,
    dtype: torch.dtype,
    device: str = "cpu",
    tokens: int = 24,
    chosen: tuple[tuple[int, int], ...] = DRAWS,
) -> list[Draw]:
    """The errors of each text's logits; an engine runs every step but the first, and is never
    refused."""
    found = []
    for seed, rows in chosen:
        plain = make(family, dtype)
        redraw(plain, seed)
        exact, patched = copy.deepcopy(plain).float(), copy.deepcopy(plain)
        plain, exact, patched = (m.to(device) for m in (plain, exact, patched))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 300, (rows, tokens), generator=generator).to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hfpatch.apply(patched, include=type(patched).__name__)
            ours, theirs, truth = (logits_of(m, ids) for m in (patched, plain, exact))
        assert kept.decoders[patched].steps == tokens - PROMPT - 1
        found += [draw(*row) for row in zip(ours, theirs, truth, strict=True)]
    return found
