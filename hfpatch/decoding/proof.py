"""Does a recipe say what a replica computes? Decoding steps with a cache, both in fp64."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hfpatch.decoding import cache as caches
from hfpatch.decoding import reference
from hfpatch.decoding.analysis import Analysis
from hfpatch.decoding.replica import (
    VOCAB,
    Recording,
    WithoutCasts,
    has_axes,
    rope_limit,
    same,
    text_config,
    without_casts_in,
)
from hfpatch.decoding.rules import Recipe, Unexplained
from hfpatch.decoding.spec import CacheTable, Model

_ROWS, _PROMPT = 3, 11
_PADDING = (0, 2, 5)
#: Steps: new tokens of each. The last one is far behind the positions of training.
_STEPS = (1, 1, 1, 3, 1)
#: Before `[rows, tokens]` of `position_ids`, where an image's places have several numbers.
_AXES = (4, 3, 1)
#: A step's logits may differ by so much: the order of sums, through all layers.
_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Proof:
    """What steps were proven of.

    Attributes:
        output: the class of what a forward returns.
        axes: how many axes `position_ids` may have in front of `[rows, tokens]`, one position of
            each; 0: that dimension is not there.
        by_default: whether a call without positions has those that follow the cache.
        beside: arguments that change nothing.
        tokenizer: whether the forward has an argument of that name.
    """

    output: type
    axes: frozenset[int]
    by_default: bool
    beside: frozenset[str]
    tokenizer: bool


def prove(recipe: Recipe, replica: Any) -> Proof:
    """Compare logits and cache over several steps, some rows padded on the left.

    Raises:
        Unexplained: they differ.
    """
    config = text_config(replica.config)
    tried = (0, *_AXES) if has_axes(config) else (0,)
    known = inspect.signature(type(replica).forward).parameters
    beside = frozenset(_BESIDE).intersection(known)
    proven: dict[int, tuple[type, bool]] = {}
    problem: Exception | None = None
    for taken in dict.fromkeys((beside, frozenset())):
        for axes in tried:
            try:
                proven[axes] = _steps(recipe, replica, axes, taken)
            except Exception as e:  # any class's own, or other results
                problem = problem or e
        if proven:
            output, by_default = next(iter(proven.values()))
            # those of several axes go on from where an image left them
            by_default = by_default and set(proven) == {0}
            return Proof(output, frozenset(proven), by_default, taken, "tokenizer" in known)
    assert problem is not None
    raise problem


def _of_an_image(rows: int, tokens: int) -> dict[str, Tensor]:
    """What `generate` hands on from a prompt's image, as it is in a step."""
    kinds = torch.arange(rows * tokens).reshape(rows, tokens) % 3
    grid = torch.tensor([[1, 4, 4]])
    return {
        "mm_token_type_ids": kinds,
        "image_grid_thw": grid,
        "video_grid_thw": grid,
        "second_per_grid_ts": torch.ones(1),
    }


_BESIDE = tuple(_of_an_image(1, 1))


def _given(positions: Tensor, axes: int) -> Tensor:
    """As a forward is given them: over several axes alike; the first of four is the text's place,
    which may be another."""
    if not axes:
        return positions
    wide = positions.expand(axes, *positions.shape).clone()
    if axes == _AXES[0]:
        wide[0] += 3
    return wide


@torch.no_grad()
def _steps(recipe: Recipe, replica: Any, axes: int, beside: frozenset[str]) -> tuple[type, bool]:
    """The output's class, and whether a call without positions has those that follow the cache."""
    from transformers import DynamicCache

    described = recipe.read(replica)
    generator = torch.Generator().manual_seed(4)
    total = _PROMPT + sum(_STEPS)
    ids = torch.randint(0, VOCAB, (_ROWS, total), generator=generator)
    mask = torch.ones(_ROWS, total, dtype=torch.int64)
    for row, padding in enumerate(_PADDING):
        mask[row, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    config = text_config(replica.config)
    limit = rope_limit(config)
    if limit is None:
        positions[:, -1] += 4 * int(getattr(config, "max_position_embeddings", 0))
    elif limit <= total + 1:
        raise Unexplained(f"RoPE: its frequencies are others from {limit} tokens on")
    cache = DynamicCache(config=replica.config)
    length = 0
    table: CacheTable | None = None
    for tokens in (_PROMPT, *_STEPS):
        now = slice(length, length + tokens)
        extra = _of_an_image(_ROWS, tokens) if table is not None else {}
        with WithoutCasts():
            output = replica(
                **{k: v for k, v in extra.items() if k in beside},
                input_ids=ids[:, now],
                attention_mask=mask[:, : now.stop],
                position_ids=_given(positions[:, now], axes),
                use_cache=True,
                **{caches.NAME: cache},
            )
        if table is None:
            table = _table(described, cache, total)
        else:
            logits = torch.empty(_ROWS, tokens, described.head.weight.shape[0]).double()
            engine = reference.Reference(described, _ROWS, tokens)
            with without_casts_in(not described.whole):
                engine.step(ids[:, now], positions[:, now], table, logits, mask=mask)
            _compare(table, cache, now, logits, output.logits)
        length = table.length = now.stop
    assert table is not None  # the prompt came first
    return type(output), not axes and _by_default(described, replica, cache, table)


def _by_default(described: Model, replica: Any, cache: Any, table: CacheTable) -> bool:
    """Whether a step without positions has those that follow the cache."""
    rows, length = _ROWS, table.length
    ids = torch.arange(rows)[:, None]
    with WithoutCasts():
        output = replica(input_ids=ids, use_cache=True, **{caches.NAME: cache})
    for memory in (table.keys, table.values):
        memory[:] = [torch.cat([t, t[:, :, :1]], dim=2) for t in memory]
    logits = torch.empty(rows, 1, described.head.weight.shape[0]).double()
    positions = torch.full((rows, 1), length)
    with without_casts_in(not described.whole):
        reference.Reference(described, rows, 1).step(ids, positions, table, logits)
    return same(logits, output.logits, _TOLERANCE)


def _table(described: Model, cache: Any, capacity: int) -> CacheTable:
    table = CacheTable()
    for held in cache.layers:
        for kept, into in ((held.keys, table.keys), (held.values, table.values)):
            rows, heads, there, dim = kept.shape
            memory = kept.new_zeros(rows, heads, capacity, dim)
            memory[:, :, _PROMPT - there : _PROMPT] = kept
            into.append(memory)
    return table


def _compare(table: CacheTable, cache: Any, now: slice, ours: Tensor, theirs: Tensor) -> None:
    for index, held in enumerate(cache.layers):
        for name in ("keys", "values"):
            new = getattr(held, name)[:, :, now.start - now.stop :]
            if not same(getattr(table, name)[index][:, :, now], new, _TOLERANCE):
                raise Unexplained(f"layer {index}: other {name} than the original's when decoding")
    if not same(ours, theirs, _TOLERANCE):
        raise Unexplained("other logits than the original's when decoding")


@torch.no_grad()
def with_rounding(recipe: Recipe, analysis: Analysis) -> Recipe:
    """The recipe with where RoPE and the embedding's scale round: what explains more of the bits of
    the replica in bf16."""
    with _in_half(analysis.replica):
        return _rounding(recipe, analysis)


@contextmanager
def _in_half(replica: Any) -> Iterator[None]:
    """The replica itself in bf16 meanwhile, which takes a tenth of the time of a copy."""
    before = [(p, p.data) for p in replica.parameters()]
    buffers = [(m._buffers, dict(m._buffers)) for m in replica.modules()]
    try:
        for parameter, data in before:
            parameter.data = data.to(torch.bfloat16)
        for own, values in buffers:  # frequencies and factors are fp32 in every model
            for name, buffer in values.items():
                if buffer is not None and buffer.is_floating_point():
                    own[name] = buffer.to(torch.float32, copy=True)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for own, values in buffers:
            own.update(values)


def _rounding(recipe: Recipe, analysis: Analysis) -> Recipe:
    from transformers import DynamicCache

    half = analysis.replica
    cache = DynamicCache(config=half.config)
    with Recording(half) as run:
        half(input_ids=analysis.ids, use_cache=True, **{caches.NAME: cache})
    first = recipe.layers[0].attention.path.rpartition(".")[0]
    embedded = torch.nn.functional.embedding(
        analysis.ids, half.get_submodule(recipe.embedding).weight
    )
    truth = run.inputs[first]

    def wrong(x: Tensor, y: Tensor) -> int:
        return int((x != y).sum())

    exact, rounded = (
        embedded * replace(recipe, scale_rounded=r).read(half).embedding_scale
        for r in (False, True)
    )
    recipe = replace(recipe, scale_rounded=wrong(rounded, truth) < wrong(exact, truth))
    ropes = list(recipe.ropes)
    for index, rope in enumerate(ropes):
        users = [i for i, r in enumerate(recipe.layers) if r.attention.rope == index]
        if not users:
            continue
        layer = recipe.layers[users[0]]
        x = run.inputs[layer.attention.k.path]
        kept = cache.layers[users[0]].keys
        counts = []
        for r in (True, False):
            like = replace(recipe, ropes=tuple(replace(o, rounded=r) for o in recipe.ropes))
            described = like.read(half)
            attention = described.layers[users[0]].attention
            _, k, _ = reference.queries_keys_values(
                x, attention, described.ropes, analysis.positions
            )
            counts.append(wrong(k[:, :, -kept.shape[2] :], kept))
        ropes[index] = replace(rope, rounded=counts[0] <= counts[1])
    return replace(recipe, ropes=tuple(ropes))
