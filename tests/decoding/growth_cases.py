"""A long cache that grows in a process with little memory left: run by test_growth.py."""

from __future__ import annotations

import copy
import gc
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent.parent))

from decoding.families import make, prompts

import hfpatch
from hfpatch.decoding.engine import Engine

LENGTH, LAYERS, HEADS, DIM = 3000, 6, 4, 256
#: Keys and values of one layer are 23 MiB, of all 141. Two layers' beside the cache may be needed.
LEFT = 64 << 20


def filled(model: Any) -> Any:
    """A cache of random keys and values."""
    generator = torch.Generator().manual_seed(1)
    cache = DynamicCache(config=model.config)
    for index in range(LAYERS):
        shape = (1, HEADS, LENGTH, DIM)
        keys, values = (0.3 * torch.randn(shape, generator=generator) for _ in range(2))
        cache.update(keys, values, index)
    return cache


def text(model: Any, left: int | None, turn: int = 1) -> torch.Tensor:
    """80 tokens behind the cache and `turn` more, with so many bytes left for the process."""
    cache = filled(model)
    ids = torch.randint(3, 300, (1, LENGTH + turn), generator=torch.Generator().manual_seed(0))
    gc.collect()
    if left is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
    try:
        return model.generate(  # type: ignore[no-any-return]
            ids, past_key_values=cache, max_new_tokens=80, do_sample=False, eos_token_id=None
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def main(family: str, case: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    window = {"sliding_window": 2000} if family == "gemma2" else {}
    plain = make(
        family, num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM,
        max_position_embeddings=9000, **window,
    )  # fmt: skip
    plain.generation_config.max_length = None
    model = copy.deepcopy(plain)
    turn = 40 if "turn" in case else 1
    wanted = text(plain, LEFT, turn)
    hfpatch.apply(model)
    model.generate(**prompts(2), max_new_tokens=4, do_sample=False)  # all that is made once
    if case != "its first step":
        model.generate(**prompts(1), max_new_tokens=4, do_sample=False)
    if case == "a turn":
        text(model, None, turn)  # beside the original
    if case == "a step that fails":
        step, calls = Engine.step, []

        def failing(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) % 20 == 7:
                raise torch.OutOfMemoryError("no room")
            step(self, *args, **kwargs)

        Engine.step = failing  # type: ignore[method-assign]
    found = text(model, LEFT, turn)
    assert torch.equal(found, wanted), "another text"
    print("steps", hfpatch.status(model).notes)


if __name__ == "__main__":
    main(*sys.argv[1:])
