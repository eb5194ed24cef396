"""Memory of a GPU while a long cache grows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from decoding.families import make, prompts
from transformers import DynamicCache

import hfpatch

LENGTH, LAYERS, HEADS, DIM = 60_000, 16, 8, 128


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_is_never_there_twice(first: bool, kernels_module: object) -> None:
    """Its first step, whose cache is taken into an arena, and those by which that grows."""
    model: Any = make(
        "llama", num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM,
        num_attention_heads=8, max_position_embeddings=2 * LENGTH,
    )  # fmt: skip
    model = model.to("cuda", torch.bfloat16)
    hfpatch.apply(model)
    for rows in (2,) if first else (1, 2):
        given = {k: v.cuda() for k, v in prompts(rows).items()}
        model.generate(**given, max_new_tokens=4, do_sample=False)
    cache = DynamicCache(config=model.config)
    for index in range(LAYERS):
        shape = (1, HEADS, LENGTH, DIM)
        cache.update(
            *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"), index
        )
    ids = torch.randint(3, 300, (1, LENGTH + 1), device="cuda")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.generate(
        ids, past_key_values=cache, max_new_tokens=80, do_sample=False, eos_token_id=None
    )
    layer = 2 * HEADS * LENGTH * DIM * 2
    more = torch.cuda.max_memory_allocated() - before
    assert more <= 3 * layer + (48 << 20), f"{more / layer:.1f} layers more"
    steps = hfpatch.status(model).notes[0]
    assert "decoding: " in steps and int(steps.split()[1]) >= 70, steps
