"""`sample`: one token of each row of logits, at random but reproducible."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.ops.base import Op, Tensor, compute_dtype

_LOW = 0xFFFFFFFF


def philox(seeds: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
    """Philox-4x32-10 (Salmon et al., SC 2011) in int64 arithmetic.

    Args:
        seeds, positions: `[..., 1]` int64: the key, and the upper half of the counter.
        blocks: `[N]` int64, below 2**32: the lowest word of the counter.

    Returns:
        `[..., N, 4]` int64, random 32-bit words.
    """
    k0, k1 = seeds & _LOW, seeds >> 32 & _LOW
    shape = (*seeds.shape[:-1], blocks.shape[0])
    c0, c1 = blocks.expand(shape), torch.zeros(shape, dtype=torch.int64, device=seeds.device)
    c2, c3 = (positions & _LOW).expand(shape), (positions >> 32 & _LOW).expand(shape)
    for _ in range(10):
        # Products wrap around at 2**64; their bits are those of the unsigned ones.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.stack([c0, c1, c2, c3], -1)


def _column(value: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., 1]`, for a number as for a tensor of one per row."""
    column = torch.as_tensor(value, dtype=dtype, device=like.device)
    return column.expand(like.shape[:-1])[..., None]


def keep(
    scores: Tensor, top_k: int | Tensor, top_p: float | Tensor, min_p: float | Tensor
) -> Tensor:
    """Which of the scores `[..., V]` (logits / temperature) may be drawn, as booleans."""
    # Descending, and the greater index first where scores are equal.
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True)[1]
    order = scores.shape[-1] - 1 - order
    ranked = scores.gather(-1, order)
    k = _column(top_k, scores, torch.int64)
    last = torch.where((k > 0) & (k < scores.shape[-1]), k, scores.shape[-1]) - 1
    kept = ranked >= ranked.gather(-1, last)
    share = torch.softmax(ranked.masked_fill(~kept, -torch.inf), -1)
    p = _column(top_p, scores, scores.dtype)
    before = share.cumsum(-1) - share
    first = torch.zeros_like(kept)
    first[..., 0] = True
    kept &= (before < p) | (p >= 1) | first
    kept &= torch.exp(ranked - ranked[..., :1]) >= _column(min_p, scores, scores.dtype)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Draw a token from what temperature, top-k, top-p and min-p leave of each row.

    Args:
        logits: `[..., V]`, any floating dtype.
        seeds, positions: `[...]` int64; positions are 0 if None.
        temperature: >= 0; 0: the greatest logit. Like the others a number, or `[...]`.
        top_k: >= 0; tokens with at least the score of the k-th greatest; 0: all.
        top_p: tokens, by descending score, before which the probabilities add up to less.
        min_p: tokens with at least this part of the greatest probability.

    Returns:
        `[...]` int64: the greatest `score - log(E)`, with `E` exponentially distributed.
    """
    wide = logits.to(compute_dtype(logits))
    t = _column(temperature, logits, wide.dtype)
    scores = wide / torch.where(t > 0, t, 1.0)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    positions = torch.zeros_like(seeds) if positions is None else positions
    words = philox(seeds[..., None], columns[: (len(columns) + 3) // 4], positions[..., None])
    words = words.flatten(-2)[..., : len(columns)]
    # (word + 1/2) / 2**32, below 1
    u = (words.to(wide.dtype) * 2.0**-32 + 2.0**-33).clamp(max=0.99999994)
    noisy = scores - torch.log(-torch.log1p(-u))
    kept = keep(scores, top_k, top_p, min_p)
    drawn = noisy.masked_fill(~kept, -torch.inf).argmax(-1)
    greatest = wide.argmax(-1)
    finite = scores.amax(-1).isfinite()
    return torch.where((t[..., 0] > 0) & finite, drawn, greatest)


def encode(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params.get("temperature", 1.0),
        params.get("top_k", 0),
        params.get("top_p", 1.0),
        params.get("min_p", 0.0),
    )


OP = Op("sample", sample, sample, encode, direct=False)
