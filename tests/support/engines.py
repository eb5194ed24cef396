"""What is asked of an engine's step, on every device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hfpatch.decoding.engine import Engine
from hfpatch.decoding.spec import CacheTable, Model

from .decoders import Oracle, Shape, copied, decoder, distance, table

Tensor = torch.Tensor


def arguments(
    model: Model, rows: int, tokens: int, length: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """ids and positions of new tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.embedding.shape[0], (rows, tokens), generator=g)
    positions = length + torch.arange(tokens).expand(rows, tokens)
    return ids.to(model.device), positions.to(model.device)


def padded(rows: int, keys: int, length: int) -> Tensor:
    """Left padding, another one for each row, and a hole."""
    mask = torch.ones(rows, keys, dtype=torch.int64)
    for row in range(rows):
        mask[row, : min(2 * row, length)] = 0
        if length > 20:
            mask[row, 11 + row % 5] = 0
    return mask


def pass_held_to(level: str, file: Path, which: str) -> None:
    """The tests of `file` that `-k which` takes pass in a process with that instruction set."""
    code = (
        "import sys, pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', "
        f"{str(file)!r}, '-k', {which!r}]))"
    )
    environment = os.environ | {"HFPATCH_SIMD": level, "HFPATCH_TEST_BUILD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def check(
    engine: Engine,
    ids: Tensor,
    positions: Tensor,
    cache: CacheTable,
    mask: Tensor | None,
    seed: int,
    like: Model | None = None,
) -> None:
    """Logits, the hidden state and the cache against fp64, and what must not be written; `like`:
    the model that it computes, if that is not the engine's own."""
    model = engine.model if like is None else like
    dtype = model.dtype
    rows, tokens = ids.shape
    before, end = copied(cache), cache.length + tokens
    vocab, width = model.head.weight.shape[0], model.embedding.shape[1]
    # canaries in front of the results and behind them
    logits, hidden = (
        torch.full((rows * tokens * n + 64,), 7.0, dtype=dtype, device=model.device)
        for n in (vocab, width)
    )
    inside = logits[32:-32].view(rows, tokens, vocab)
    engine.step(
        ids, positions, cache, inside, mask, hidden=hidden[32:-32].view(rows, tokens, width)
    )
    assert cache.length == before.length
    for whole in (logits, hidden):
        assert (whole[:32] == 7).all() and (whole[-32:] == 7).all()
    for ours, theirs in zip(
        (*cache.keys, *cache.values), (*before.keys, *before.values), strict=True
    ):
        assert torch.equal(ours[:, :, : before.length], theirs[:, :, : before.length])
        assert ours[:, :, end:].isnan().all()
    true = Oracle(model).step(ids, positions, before, mask)
    rounded = Oracle(model, dtype).step(ids, positions, before, mask)
    pairs = [(inside, 0), (hidden[32:-32].view(rows, tokens, width), 1)]
    found = [(distance(got, true[at]), distance(rounded[at], true[at])) for got, at in pairs]
    for which, ours in ((2, cache.keys), (3, cache.values)):
        for got, want, like in zip(ours, true[which], rounded[which], strict=True):
            cut = (slice(None), slice(None), slice(end - tokens, end))
            found.append((distance(got[cut], want[cut]), distance(like[cut], want[cut])))
    for error, expected in found:
        assert math.isfinite(error)
        # fp32: sums of a few hundred products; half types: as far as the same roundings alone lead
        bound = 3e-5 if dtype == torch.float32 else 1.6 * expected + 1e-4
        assert error <= bound, (seed, error, expected)


def cut(cache: CacheTable, rows: list[int]) -> CacheTable:
    """A copy of some rows of a cache."""
    keys, values = ([t[rows].contiguous() for t in kept] for kept in (cache.keys, cache.values))
    return CacheTable(keys, values, cache.length)


def same_rows(
    model: Model,
    rows: int,
    tokens: int,
    length: int,
    masked: bool,
    parts: Sequence[list[int]],
    package: Any,
    seed: int = 0,
) -> None:
    """The bits of a row, of its logits, its hidden state and its new keys and values, are the same
    in the whole batch and in each of these parts of it; a row may be there twice."""
    ids, positions = arguments(model, rows, tokens, length, seed)
    mask = padded(rows, length + tokens, length).to(model.device) if masked else None
    cache = table(model, rows, length, length + tokens, seed)
    vocab, width = model.head.weight.shape[0], model.embedding.shape[1]

    def step(of: list[int], kept: CacheTable) -> list[Tensor]:
        logits, hidden = (
            torch.full((len(of), tokens, n), 7, dtype=model.dtype, device=model.device)
            for n in (vocab, width)
        )
        engine = Engine(model, len(of), tokens, package=package)
        given = None if mask is None else mask[of]
        engine.step(ids[of], positions[of], kept, logits, given, hidden=hidden)
        return [logits, hidden, *kept.keys, *kept.values]

    chosen = [(part, cut(cache, part)) for part in parts]  # before the step writes to it
    whole = step(list(range(rows)), cache)
    for part, kept in chosen:
        for i, (got, want) in enumerate(zip(step(part, kept), whole, strict=True)):
            found = "logits" if i == 0 else "hidden" if i == 1 else f"cache {i - 2}"
            assert torch.equal(got, want[part]), (found, part, rows, tokens, length, masked, seed)


#: (shape, rows, tokens, length, masked): small models that visit every kernel.
_EVEN = Shape(layers=1, width=128, inner=256, heads=4, key_heads=2, dim=64, vocab=264)
SMALL: dict[str, tuple[Shape, int, int, int, bool]] = {
    "one row": (_EVEN, 1, 1, 70, False),
    "twelve rows": (_EVEN, 12, 1, 70, True),
    "more rows than a round": (replace(_EVEN, gated=False, activation="relu2"), 19, 1, 7, False),
    "many rows": (_EVEN, 17, 1, 70, True),
    "many rows, layer norm": (
        replace(_EVEN, norm="layer", norm_bias=True, bias=True), 33, 1, 9, False,
    ),
    "many rows, numbers": (
        replace(_EVEN, multiplier=0.5, logit_scale=0.5, logit_softcap=2.0, clip=1.0, vocab=1000),
        64, 1, 9, True,
    ),
    "many rows, packed": (replace(_EVEN, packed=True, placement="both"), 40, 1, 9, False),
    "many rows, odd sizes": (
        replace(_EVEN, width=100, inner=33, heads=6, key_heads=3, dim=20, vocab=17, bias=True),
        12, 2, 140, True,
    ),
    "several tokens": (_EVEN, 2, 4, 1500, True),
    "many tokens": (replace(_EVEN, windows=(50,)), 1, 9, 60, False),
    "one query a key": (replace(_EVEN, heads=2), 2, 1, 130, False),
    "two queries, 96": (replace(_EVEN, dim=96, sinks=True), 2, 1, 130, False),
    "80": (replace(_EVEN, dim=80, rope_dims=20, heads=8), 2, 1, 200, False),
    "128, eight queries": (replace(_EVEN, dim=128, heads=16, qk_norm="head"), 3, 1, 300, True),
    "128, many queries": (replace(_EVEN, dim=128, heads=12, key_heads=1), 1, 2, 90, False),
    # a head's parts as a cluster, or too many for one: rows, keys
    "128, cluster": (replace(_EVEN, dim=128, qk_norm="head"), 1, 1, 200, False),
    "128, cluster, parts in turns": (replace(_EVEN, dim=128, heads=16), 1, 1, 900, False),
    "128, cluster, one query": (replace(_EVEN, dim=128, heads=2), 2, 1, 1023, False),
    "128, ten rows": (replace(_EVEN, dim=128), 10, 1, 700, False),
    "128, many keys": (replace(_EVEN, dim=128), 1, 1, 1500, False),
    "64, cluster": (replace(_EVEN, heads=8), 2, 1, 700, False),
    "96, cluster": (replace(_EVEN, dim=96), 1, 1, 1000, False),
    "256, cluster": (replace(_EVEN, dim=256, heads=8), 1, 1, 1000, False),
    "256": (replace(_EVEN, dim=256, heads=8, key_heads=1, softcap=3.0), 2, 1, 1100, True),
    "256, one query": (replace(_EVEN, dim=256, heads=2), 1, 1, 65, False),
    "layer norm": (replace(_EVEN, norm="layer", norm_bias=True, bias=True), 2, 1, 9, False),
    "norms after": (replace(_EVEN, placement="both", offset=1.0, rounded=False), 2, 1, 9, False),
    "parallel": (replace(_EVEN, placement="parallel", interleaved=True), 2, 1, 9, False),
    "across": (replace(_EVEN, qk_norm="across", clip=1.0), 2, 1, 9, False),
    "after the rotation": (replace(_EVEN, qk_norm="after_rope"), 2, 1, 9, False),
    "rows of heads": (replace(_EVEN, qk_norm="head", of_heads="rows"), 2, 1, 9, False),
    "rows of heads, layer norm, after the rotation": (
        replace(_EVEN, norm="layer", norm_bias=True, qk_norm="after_rope", of_heads="rows"),
        2, 1, 130, True,
    ),
    # more queries than warps, and than a block has: a warp prepares several heads
    "list of heads": (
        replace(_EVEN, dim=128, heads=24, norm="layer", qk_norm="head", of_heads="list"),
        2, 1, 300, False,
    ),
    "list of heads, tokens": (
        replace(_EVEN, norm="layer", norm_bias=True, qk_norm="head", of_heads="list", offset=1.0),
        2, 3, 70, True,
    ),
    "list of heads, 256": (
        replace(_EVEN, dim=256, heads=8, key_heads=1, qk_norm="head", of_heads="list"),
        1, 2, 90, False,
    ),
    "list of heads, odd sizes": (
        replace(_EVEN, dim=20, heads=6, key_heads=3, qk_norm="head", of_heads="list"),
        3, 2, 40, False,
    ),
    "numbers": (
        replace(_EVEN, multiplier=0.5, logit_scale=0.5, logit_softcap=2.0, embedding_scale=4.0),
        2, 1, 9, True,
    ),
    "packed": (replace(_EVEN, packed=True), 2, 1, 9, False),
    "odd sizes": (
        replace(_EVEN, width=100, inner=33, heads=6, key_heads=3, dim=20, vocab=17, sinks=True),
        3, 2, 140, True,
    ),
}  # fmt: skip
#: Rows too wide to lie beside a deep ring, or at all, in a multiprocessor's memory.
WIDE: dict[str, tuple[Shape, int, int, int, bool]] = {
    "wide": (replace(_EVEN, width=4096, inner=8200, vocab=72), 1, 1, 20, False),
    "wider, one row": (replace(_EVEN, width=9000, inner=17000, vocab=72), 1, 1, 20, False),
    "wide, three rows": (replace(_EVEN, width=5000, inner=8200, vocab=72), 3, 1, 20, False),
    "wide, sixteen rows": (replace(_EVEN, width=3000, inner=3000, vocab=72), 16, 1, 20, False),
    "wide, eight rows": (replace(_EVEN, width=7000, inner=4096, vocab=72), 8, 1, 20, False),
    "wider than fits": (replace(_EVEN, width=9000, inner=4096, vocab=72), 16, 1, 20, False),
}


def visit(case: tuple[Shape, int, int, int, bool], dtype: torch.dtype, package: Any) -> None:
    """A case's step against fp64, twice: launched, and from the graph."""
    shape, rows, tokens, length, masked = case
    model = decoder(shape, dtype, "cuda")
    engine = Engine(model, rows, tokens, package=package)
    for seed in range(2):
        ids, positions = arguments(model, rows, tokens, length, seed)
        mask = padded(rows, length + tokens, length).cuda() if masked else None
        cache = table(model, rows, length, length + tokens + 2, seed)
        check(engine, ids, positions, cache, mask, seed)
