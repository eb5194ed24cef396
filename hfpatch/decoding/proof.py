"""Does a recipe say what a replica computes? Decoding steps with a cache, both in fp64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hfpatch.decoding import cache as caches
from hfpatch.decoding import reference
from hfpatch.decoding.analysis import Analysis
from hfpatch.decoding.replica import VOCAB, Recording, WithoutCasts, same, text_config
from hfpatch.decoding.rules import Recipe, Unexplained
from hfpatch.decoding.spec import CacheTable, Model

_ROWS, _PROMPT = 3, 11
_PADDING = (0, 2, 5)
#: Steps: new tokens of each. The last one is far behind the positions of training.
_STEPS = (1, 1, 1, 3, 1)
#: A step's logits may differ by so much: the order of sums, through all layers.
_TOLERANCE = 1e-7


@torch.no_grad()
def prove(recipe: Recipe, replica: Any) -> type:
    """Compare logits and cache over several steps, some rows padded on the left.

    Returns:
        the class of the replica's output

    Raises:
        Unexplained: they differ.
    """
    from transformers import DynamicCache

    described = recipe.read(replica)
    generator = torch.Generator().manual_seed(4)
    total = _PROMPT + sum(_STEPS)
    ids = torch.randint(0, VOCAB, (_ROWS, total), generator=generator)
    mask = torch.ones(_ROWS, total, dtype=torch.int64)
    for row, padding in enumerate(_PADDING):
        mask[row, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    positions[:, -1] += 4 * int(getattr(text_config(replica.config), "max_position_embeddings", 0))
    cache = DynamicCache(config=replica.config)
    length = 0
    table: CacheTable | None = None
    with WithoutCasts():
        for tokens in (_PROMPT, *_STEPS):
            now = slice(length, length + tokens)
            output = replica(
                input_ids=ids[:, now],
                attention_mask=mask[:, : now.stop],
                position_ids=positions[:, now],
                use_cache=True,
                **{caches.NAME: cache},
            )
            if table is None:
                table = _table(described, cache, total)
            else:
                logits = torch.empty(_ROWS, tokens, described.head.weight.shape[0]).double()
                engine = reference.Reference(described, _ROWS, tokens)
                engine.step(ids[:, now], positions[:, now], table, logits, mask=mask)
                _compare(table, cache, now, logits, output.logits)
            length = table.length = now.stop
    return type(output)


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
    from transformers import DynamicCache

    half = copy.deepcopy(analysis.replica)
    for p in half.parameters():
        p.data = p.data.to(torch.bfloat16)
    for module in half.modules():  # frequencies and factors are fp32 in every model
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
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
