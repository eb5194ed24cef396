"""What users do to caches between calls, done to a plain one and to a patched model's alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from decoding.families import here
from torch import Tensor

#: The moves of `moved`, by name.
MOVES = ("crop", "reorder", "repeat", "select", "written")


def moved(move: str, seed: int, caches: Sequence[Any], mask: Tensor) -> Tensor | None:
    """Do one of `MOVES` to each cache.

    Args:
        seed: which rows, how many tokens.
        mask: `[rows, tokens]` of what they hold.

    Returns:
        the mask of what they hold now; None where the caches are of no use to anybody.
    """
    count = mask.shape[0]
    if move == "crop":
        outcomes = []
        for cache in caches:
            try:
                cache.crop(-1 - seed % 2 if cache.get_seq_length() > 3 else -1)
                outcomes.append("")
            except RuntimeError as e:  # a window that has left keys behind
                outcomes.append(str(e))
        assert outcomes[0] == outcomes[1]
        lengths = {layer.get_seq_length() for layer in caches[0].layers}
        if outcomes[0] or len(lengths) > 1 or lengths == {0}:
            return None
        return mask[:, : lengths.pop()]
    if move == "reorder":
        generator = torch.Generator().manual_seed(seed)
        order = here(torch.randint(0, count, (count,), generator=generator))
        for cache in caches:
            cache.reorder_cache(order)
        return mask[order]
    if move == "repeat":
        if count >= 3:
            return mask
        for cache in caches:
            cache.batch_repeat_interleave(2)
        return mask.repeat_interleave(2, 0)
    if move == "select":
        which = here(torch.tensor([seed % count]))
        for cache in caches:
            cache.batch_select_indices(which)
        return mask[which]
    assert move == "written", move
    for cache in caches:
        layer = cache.layers[seed % len(cache.layers)]
        layer.values = layer.values * 0.5
    return mask
