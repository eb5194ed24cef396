"""`decoding/engine.py` on the CPU against a step in fp64, over the whole grammar."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import decoders
from support.decoders import Oracle, Shape, copied, decoder, distance, random_shape, table
from support.engines import arguments, check, padded, pass_held_to, same_rows

from hfpatch.decoding import reference
from hfpatch.decoding.engine import Call, Engine, Table, unsupported
from hfpatch.decoding.halves import HalvesEngine
from hfpatch.decoding.spec import CacheTable, Layer, Mlp, Model, Norm, Opaque, Product
from hfpatch.errors import DecodingError

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 5, 63, 64, 65, 130, 1100)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_random_decoders(kernels_module: ModuleType, dtype: torch.dtype, seed: int) -> None:
    shape = random_shape(seed)
    model = decoder(shape, dtype, seed=seed)
    rows, tokens, length = (1, 2, 3, 5, 16)[seed % 5], 1 + seed % 4, LENGTHS[seed % 8]
    ids, positions = arguments(model, rows, tokens, length, seed)
    mask = padded(rows, length + tokens, length) if seed % 3 == 0 else None
    cache = table(model, rows, length, length + tokens + 2)
    engine = Engine(model, rows, tokens, package=kernels_module)
    check(engine, ids, positions, cache, mask, seed)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layer", "norm_bias": True, "bias": True},
        {"placement": "after"},
        {"placement": "both", "offset": 1.0, "rounded": False},
        {"placement": "parallel", "norm": "layer", "rounded": False, "logit_scale": 0.0625},
        {"placement": "parallel_two"},
        {"qk_norm": "head"},
        {"qk_norm": "across"},
        {"qk_norm": "after_rope"},
        {"qk_norm": "head", "of_heads": "rows"},
        {"qk_norm": "head", "of_heads": "list", "norm": "layer", "norm_bias": True},
        {"qk_norm": "after_rope", "of_heads": "rows", "norm": "layer", "norm_bias": True},
        {"qk_norm": "after_rope", "of_heads": "list", "offset": 1.0, "rounded": False},
        {"qk_norm": "head", "of_heads": "list", "heads": 6, "key_heads": 1, "dim": 20},
        {"rope_dims": None},
        {"rope_dims": 6},
        {"interleaved": True, "rope_rounded": False},
        {"rope_scaling": 1.5, "ropes": 2},
        {"softcap": 2.0, "logit_softcap": 1.5},
        {"windows": (3, None)},
        {"sinks": True},
        {"clip": 0.5},
        {"activation": "gelu_tanh"},
        {"activation": "gelu"},
        {"activation": "relu2", "gated": False},
        {"multiplier": 0.22, "embedding_scale": 12.0},
        {"tied": True},
        {"packed": True},
        {"heads": 9, "key_heads": 3, "dim": 20, "width": 50, "inner": 37, "vocab": 13},
        {"heads": 8, "key_heads": 1, "dim": 256},
        {"final_norm": False},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_each_choice(kernels_module: ModuleType, change: dict[str, object]) -> None:
    shape = replace(Shape(), **change)  # type: ignore[arg-type]
    plain = decoder(Shape(), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        model = decoder(shape, dtype)
        ids, positions = arguments(model, 2, 2, 9)
        engine = Engine(model, 2, 2, package=kernels_module)
        check(engine, ids, positions, table(model, 2, 9, 11), None, 0)
    assert unsupported(plain, 2, package=kernels_module) is None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(
    kernels_module: ModuleType, dtype: torch.dtype, masked: bool
) -> None:
    """In every size of a batch up to 16, and in a larger one."""
    model = decoder(Shape(heads=6, key_heads=2, dim=20, inner=100), dtype)
    for length in (4, 200, 1300):
        parts = [list(range(n)) for n in range(1, 16)] + [[15], [7, 3], [0] * 3 + [9]]
        same_rows(model, 16, 1, length, masked, parts, kernels_module)
    same_rows(model, 37, 1, 70, masked, [[36], [20, 3], list(range(30))], kernels_module)


#: One to three parts of a batch of up to 16 rows, as numbers that are taken modulo its size.
_PARTS = st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=17), min_size=1, max_size=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**20), rows=st.integers(1, 16), tokens=st.integers(1, 4),
    length=st.sampled_from(LENGTHS[:-1]), masked=st.booleans(), parts=_PARTS,
)  # fmt: skip
def test_rows_of_any_decoder(
    kernels_module: ModuleType,
    dtype: torch.dtype,
    seed: int,
    rows: int,
    tokens: int,
    length: int,
    masked: bool,
    parts: list[list[int]],
) -> None:
    """Whatever the model computes, however many tokens a row has, and which others there are."""
    model = decoder(random_shape(seed), dtype, seed=seed)
    parts = [[row % rows for row in part] for part in parts]
    same_rows(model, rows, tokens, length, masked, parts, kernels_module, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(
    kernels_module: ModuleType, dtype: torch.dtype, threads: None
) -> None:
    model = decoder(Shape(layers=3, heads=6, key_heads=3, vocab=517), dtype)
    engine = Engine(model, 3, 2, package=kernels_module)
    for length in (3, 150, 1200):
        ids, positions = arguments(model, 3, 2, length)
        found = []
        for count in (1, 4, 3, 2):
            torch.set_num_threads(count)
            cache = table(model, 3, length, length + 2)
            logits = torch.empty(3, 2, 517, dtype=dtype)
            engine.step(ids, positions, cache, logits)
            found.append((logits, *cache.keys, *cache.values))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_text_token_by_token_and_at_once(kernels_module: ModuleType) -> None:
    """Several tokens in a step are as near to one step each as rounding allows; fp32."""
    model = decoder(Shape(windows=(None, 6)), torch.float32)
    ids, positions = arguments(model, 2, 4, 0)
    one, four = table(model, 2, 0, 4), table(model, 2, 0, 4)
    every = torch.empty(2, 4, 131)
    Engine(model, 2, 4, package=kernels_module).step(ids, positions, four, every)
    engine = Engine(model, 2, package=kernels_module)
    for t in range(4):
        logits = torch.empty(2, 1, 131)
        engine.step(ids[:, t : t + 1], positions[:, t : t + 1], one, logits)
        one.length += 1
        torch.testing.assert_close(logits[:, 0], every[:, t], rtol=1e-5, atol=1e-5)


def test_last_token_alone_and_fp32_logits(kernels_module: ModuleType) -> None:
    model = decoder(Shape(), torch.bfloat16)
    engine = Engine(model, 2, 3, package=kernels_module)
    ids, positions = arguments(model, 2, 3, 5)
    whole = torch.empty(2, 3, 131, dtype=torch.bfloat16)
    last, wide = torch.empty(2, 1, 131, dtype=torch.bfloat16), torch.empty(2, 3, 131)
    for logits in (whole, last, wide):
        engine.step(ids, positions, table(model, 2, 5, 8), logits)
    assert torch.equal(whole[:, -1:], last)
    assert torch.equal(whole.float(), wide)


def test_embeds_are_taken_as_they_are(kernels_module: ModuleType) -> None:
    model = decoder(Shape(embedding_scale=3.0), torch.float32)
    engine = Engine(model, 2, package=kernels_module)
    ids, positions = arguments(model, 2, 1, 5)
    by_ids, by_embeds = torch.empty(2, 1, 131), torch.empty(2, 1, 131)
    engine.step(ids, positions, table(model, 2, 5, 8), by_ids)
    embeds = model.embedding[ids] * 3.0
    engine.step(None, positions, table(model, 2, 5, 8), by_embeds, embeds=embeds)
    assert torch.equal(by_ids, by_embeds)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.int32])
def test_masks_of_every_kind(kernels_module: ModuleType, kind: torch.dtype) -> None:
    model = decoder(Shape(), torch.float32)
    engine = Engine(model, 3, package=kernels_module)
    ids, positions = arguments(model, 3, 1, 30)
    mask = padded(3, 40, 30)
    found = []
    for one in (mask, mask.to(kind)):
        logits = torch.empty(3, 1, 131)
        engine.step(ids, positions, table(model, 3, 30, 31), logits, one)
        found.append(logits)
    assert torch.equal(*found)


def test_what_is_masked_is_not_seen(kernels_module: ModuleType) -> None:
    """Left padding gives what the row gives without it."""
    model = decoder(Shape(ropes=1), torch.float32)
    ids, positions = arguments(model, 1, 1, 20)
    cache = table(model, 1, 20, 21)
    cut = CacheTable(
        [k[:, :, 8:].clone() for k in cache.keys], [v[:, :, 8:].clone() for v in cache.values], 12
    )
    mask = torch.ones(1, 21, dtype=torch.bool)
    mask[:, :8] = False
    engine = Engine(model, 1, package=kernels_module)
    padded_logits, plain = torch.empty(1, 1, 131), torch.empty(1, 1, 131)
    engine.step(ids, positions, cache, padded_logits, mask)
    engine.step(ids, positions, cut, plain)
    torch.testing.assert_close(padded_logits, plain, rtol=1e-5, atol=1e-5)
    # nothing at all is seen: attention gives 0, not NaN
    engine.step(ids, positions, cache, plain, torch.zeros(1, 21, dtype=torch.bool))
    assert plain.isfinite().all()


def test_the_cache_may_move_and_grow(kernels_module: ModuleType) -> None:
    model = decoder(Shape(), torch.float32)
    engine = Engine(model, 2, package=kernels_module)
    reference = Engine(model, 2, package=kernels_module)
    cache, other = table(model, 2, 5, 6), table(model, 2, 5, 64)
    for step in range(8):
        ids, positions = arguments(model, 2, 1, cache.length, step)
        if cache.keys[0].shape[2] == cache.length:
            for kept in (cache.keys, cache.values):
                kept[:] = [torch.nn.functional.pad(k, (0, 0, 0, 3)) for k in kept]
        logits, want = torch.empty(2, 1, 131), torch.empty(2, 1, 131)
        engine.step(ids, positions, cache, logits)
        reference.step(ids, positions, other, want)
        assert torch.equal(logits, want)
        cache.length += 1
        other.length += 1


def _bad(name: str) -> dict[str, object]:
    model = decoder(Shape(), torch.float32)
    ids, positions = arguments(model, 2, 1, 5)
    good: dict[str, object] = {
        "ids": ids,
        "positions": positions,
        "cache": table(model, 2, 5, 8),
        "logits": torch.full((2, 1, 131), 7.0),
        "mask": None,
        "embeds": None,
        "hidden": None,
    }
    half = table(decoder(Shape(), torch.float16), 2, 5, 8)
    strided = table(model, 2, 5, 8)
    strided.keys[1] = strided.keys[1].transpose(1, 2).contiguous().transpose(1, 2)
    shorter = table(model, 2, 5, 8)
    shorter.values[0] = shorter.values[0][:, :, :7].contiguous()
    negative = table(model, 2, 5, 8)
    negative.length = -1
    few = table(model, 2, 5, 8)
    few.keys.pop()
    bad: dict[str, dict[str, object]] = {
        "ids: no tensor": {"ids": None},
        "ids: int32": {"ids": ids.int()},
        "ids: another shape": {"ids": ids[:1]},
        "ids: beyond the vocabulary": {"ids": ids + 131},
        "ids: below 0": {"ids": ids - 131},
        "positions: fp32": {"positions": positions.float()},
        "positions: on meta": {"positions": positions.to("meta")},
        "cache: full": {"cache": table(model, 2, 5, 5)},
        "cache: of one row": {"cache": table(model, 1, 5, 8)},
        "cache: of another dtype": {"cache": half},
        "cache: strided": {"cache": strided},
        "cache: keys and values differ": {"cache": shorter},
        "cache: a negative length": {"cache": negative},
        "cache: a layer is missing": {"cache": few},
        "logits: another vocabulary": {"logits": torch.full((2, 1, 130), 7.0)},
        "logits: int64": {"logits": torch.full((2, 1, 131), 7)},
        "logits: strided": {"logits": torch.full((131, 1, 2), 7.0).transpose(0, 2)},
        "mask: too short": {"mask": torch.ones(2, 5)},
        "mask: fp32": {"mask": torch.ones(2, 8)},
        "mask: of four dimensions": {"mask": torch.ones(2, 1, 1, 8, dtype=torch.bool)},
        "embeds: fp16": {"embeds": torch.ones(2, 1, 64, dtype=torch.float16)},
        "embeds: another width": {"embeds": torch.ones(2, 1, 65)},
        "hidden: another shape": {"hidden": torch.ones(2, 2, 64)},
    }
    return good | bad[name]


BAD = (
    "ids: no tensor", "ids: int32", "ids: another shape", "ids: beyond the vocabulary",
    "ids: below 0", "positions: fp32", "positions: on meta", "cache: full", "cache: of one row",
    "cache: of another dtype", "cache: strided", "cache: keys and values differ",
    "cache: a negative length", "cache: a layer is missing", "logits: another vocabulary",
    "logits: int64", "logits: strided", "mask: too short", "mask: fp32",
    "mask: of four dimensions", "embeds: fp16", "embeds: another width", "hidden: another shape",
)  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(kernels_module: ModuleType, name: str) -> None:
    call = _bad(name)
    engine = Engine(decoder(Shape(), torch.float32), 2, package=kernels_module)
    cache = call["cache"]
    assert isinstance(cache, CacheTable)
    before = copied(cache)
    with pytest.raises(DecodingError, match=rf"`{name.split(':')[0]}"):
        engine.step(**call)  # type: ignore[arg-type]
    assert (call["logits"] == 7).all()  # type: ignore[union-attr]
    for ours, theirs in zip(
        (*cache.keys, *cache.values), (*before.keys, *before.values), strict=True
    ):
        assert torch.equal(ours, theirs) or ours.isnan().any()
    # the next good step works, also with the memory that was refused a layer
    good = _bad("ids: no tensor") | {"ids": torch.zeros(2, 1, dtype=torch.int64)}
    engine.step(**good)  # type: ignore[arg-type]


def test_results_may_not_lie_in_the_model(kernels_module: ModuleType) -> None:
    model = decoder(Shape(vocab=64), torch.float32)
    engine = Engine(model, 1, package=kernels_module)
    ids, positions = arguments(model, 1, 1, 5)
    before = model.embedding.clone()
    for result in (model.embedding[3].view(1, 1, 64), model.layers[1].mlp.down.weight[0, :64]):  # type: ignore[union-attr]
        with pytest.raises(DecodingError, match=r"`logits` must not overlap `model"):
            engine.step(ids, positions, table(model, 1, 5, 8), result.view(1, 1, 64))
    assert torch.equal(before, model.embedding)


class _Called(torch.nn.Module):
    """An MLP as a module that gives a tuple."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return reference.mlp_result(x, self.mlp), None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_halves(kernels_module: ModuleType, dtype: torch.dtype, seed: int) -> None:
    """Layers whose second halves are modules give what the same layers give whole; all of them, the
    last one, or all but it."""
    shape = random_shape(seed)
    model = decoder(shape, dtype, seed=seed)
    count = len(model.layers)
    opaque = [range(count), range(count - 1, count), range(max(1, count - 1))][seed % 3]
    layers = [
        replace(layer, mlp=Opaque(_Called(layer.mlp)))
        if i in opaque and isinstance(layer.mlp, Mlp)
        else layer
        for i, layer in enumerate(model.layers)
    ]
    halves = replace(model, layers=tuple(layers))
    assert unsupported(halves, 2, package=kernels_module) is None and not halves.whole
    rows, tokens, length = (1, 2, 5)[seed % 3], 1 + seed % 2, LENGTHS[seed % 8]
    ids, positions = arguments(model, rows, tokens, length, seed)
    mask = padded(rows, length + tokens, length) if seed % 2 else None
    results = []
    for engine in (
        Engine(model, rows, tokens, package=kernels_module),
        HalvesEngine(halves, rows, tokens, package=kernels_module),
    ):
        assert engine.workspace_bytes > 0 and model.layers[0].attention.q.weight.data_ptr() in (
            engine.addresses
        )
        cache = table(model, rows, length, length + 2 * tokens)
        found = []
        for _ in range(2):  # a second step of the same cache
            logits = torch.empty(rows, tokens, model.head.weight.shape[0], dtype=dtype)
            hidden = torch.empty(rows, tokens, model.embedding.shape[1], dtype=dtype)
            now = (
                None
                if mask is None
                else torch.nn.functional.pad(mask, (0, cache.length - length), value=1)
            )
            engine.step(ids, positions, cache, logits, now, hidden=hidden)
            cache.length += tokens
            found += [logits, hidden]
        new = slice(length, cache.length)
        results.append([*found, *(t[:, :, new] for t in (*cache.keys, *cache.values))])
    bound = 24 * torch.finfo(dtype).eps
    for whole, ours in zip(*results, strict=True):
        assert (ours.double() - whole.double()).norm() <= bound * whole.double().norm()
    with pytest.raises(DecodingError, match="`cache`: expected room"):
        engine.step(ids, positions, cache, logits, None)


def test_a_layer_that_ends_behind_attention(kernels_module: ModuleType) -> None:
    """Without an MLP; and without logits the hidden state must be asked for."""
    model = decoder(Shape(), torch.float32)
    layers = tuple(replace(layer, mlp=None) for layer in model.layers)
    model = replace(model, layers=layers)
    ids, positions = arguments(model, 2, 1, 5, 0)
    cache, other = (table(model, 2, 5, 8) for _ in range(2))
    logits, wanted = (torch.empty(2, 1, model.head.weight.shape[0]) for _ in range(2))
    Engine(model, 2, package=kernels_module).step(ids, positions, cache, logits)
    reference.Reference(model, 2).step(ids, positions, other, wanted)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    call, entries = Call(model, 2, 1, kernels_module), Table(model, 2, 1)
    entries.take(cache)
    with pytest.raises(DecodingError, match="`logits` must be a tensor where `hidden` is NULL"):
        call(None, None, entries.entries, ids, None, positions, None)
    hidden = torch.empty(2, 1, model.embedding.shape[1])
    call(None, hidden, entries.entries, ids, None, positions, None)
    assert hidden.isfinite().all()


def test_how_many_keys_there_are_at_most_changes_no_result(kernels_module: ModuleType) -> None:
    model = decoder(Shape(), torch.float32)
    ids, positions = arguments(model, 2, 1, 5, 0)
    call, entries = Call(model, 2, 1, kernels_module), Table(model, 2, 1)
    found = []
    for most in (0, 6, 2, 1 << 40):  # not known, right, too few, many
        cache = table(model, 2, 5, 8)  # the table does not hold it
        entries.take(cache)
        logits = torch.empty(2, 1, model.head.weight.shape[0])
        call(logits, None, entries.entries, ids, None, positions, None, most)
        found.append(logits)
    assert all(torch.equal(logits, found[0]) for logits in found)
    with pytest.raises(DecodingError, match="`most_keys` must be 0 or more"):
        call(found[0], None, entries.entries, ids, None, positions, None, -1)


def test_bad_models(kernels_module: ModuleType) -> None:
    good = decoder(Shape(), torch.float32)
    layer = good.layers[1]

    def changed(**parts: object) -> Model:
        return replace(good, layers=(good.layers[0], replace(layer, **parts)))  # type: ignore[arg-type]

    def attention(**parts: object) -> Model:
        return changed(attention=replace(layer.attention, **parts))  # type: ignore[arg-type]

    assert isinstance(layer.mlp, Mlp)
    wrong = Norm("rms", torch.ones(63))
    cases = {
        r"`layers\[1\].mlp.activation`.*'tanh'": changed(mlp=replace(layer.mlp, activation="tanh")),
        r"`layers\[1\].before_mlp.kind`.*'group'": changed(before_mlp=replace(wrong, kind="group")),
        r"`layers\[1\].before_mlp.weight` must have shape \[64\], got \[63\]": changed(
            before_mlp=wrong
        ),
        r"`layers\[1\].attention.heads`.*multiple": attention(heads=3),
        r"`layers\[1\].attention.k.weight`": attention(k=Product(torch.ones(32, 63))),
        r"`layers\[1\].attention.o.weight` must be float32": attention(
            o=Product(torch.ones(64, 64, dtype=torch.float16))
        ),
        r"`layers\[1\].attention.q.bias`": attention(
            q=Product(layer.attention.q.weight, torch.ones(3))
        ),
        r"`layers\[1\].attention.rope`": attention(rope=4),
        r"`layers\[1\].attention.scale`.*finite": attention(scale=math.nan),
        r"`layers\[1\].attention.q.weight`.*stride 1": attention(
            q=Product(torch.ones(64, 128)[:, ::2])
        ),
        r"`ropes\[0\].inv_freq`": replace(good, ropes=(replace(good.ropes[0], dims=12),)),
        r"`ropes.inv_freq` must be float32": replace(
            good, ropes=(replace(good.ropes[0], inv_freq=good.ropes[0].inv_freq.double()),)
        ),
        r"`embedding`": replace(good, embedding=good.embedding.double()),
        r"`head.weight`": replace(good, head=Product(torch.ones(131, 65))),
        r"`layers\[0\].attention.q.weight`.*device|`layers\[0\].*meta|no kernels": decoder(
            Shape(), torch.float32, "meta"
        ),
    }
    with pytest.raises(DecodingError, match=r"`layers\[1\].mlp`: a module of the model's own"):
        Engine(changed(mlp=Opaque(torch.nn.Identity())), 2, package=kernels_module)
    for message, model in cases.items():
        why = unsupported(model, 2, package=kernels_module)
        assert why is not None
        with pytest.raises(DecodingError, match=message):
            Engine(model, 2, package=kernels_module)
    assert unsupported(good, 0, package=kernels_module) is not None
    assert unsupported(good, 2, "cuda", package=kernels_module) is not None


def test_bad_norms_of_heads(kernels_module: ModuleType) -> None:
    """q has 4 heads of 16; what Python sees, and what the C function does."""
    good = decoder(Shape(), torch.float32)
    layer, heads = good.layers[1], 4

    def engine(layer: Layer) -> Engine:
        return Engine(replace(good, layers=(good.layers[0], layer)), 2, package=kernels_module)

    def with_norm(**parts: object) -> Layer:
        norm = replace(Norm("layer", None), **parts)  # type: ignore[arg-type]
        return replace(layer, attention=replace(layer.attention, q_norm=norm))

    rows, own = torch.ones(heads, 16), tuple(torch.ones(heads, 16))
    there = torch.tensor([t.data_ptr() for t in own])
    for fitting in ({"weight": rows}, {"biases": own}, {"weight": there, "bias": there}):
        engine(with_norm(**fitting))
    cases: dict[str, dict[str, object]] = {
        r"weight` must have shape \[4, 16\], got \[3, 16\]": {"weight": rows[:3]},
        r"weight` must have shape \[4, 16\], got \[4, 15\]": {"weight": torch.ones(4, 15)},
        r"weight` must be contiguous, got rows 32 ": {"weight": torch.ones(4, 32)[:, :16]},
        r"bias` must have shape \[4, 16\]": {"weight": rows, "bias": torch.ones(4, 1)},
        r"weight` must be float32": {"weight": rows.half()},
        r"bias` must be one for all heads, a row for each": {"weight": rows, "bias": own[0]},
        r"bias` must be one for all heads": {"weight": rows, "biases": own},
        r"weight`: 3 tensors, expected one for each of 4": {"weights": own[:3]},
        r"bias\[2\]`: .*\[15\] on cpu, expected.*\[16\]": {
            "biases": (*own[:2], torch.ones(15), own[3])
        },
        r"weight\[0\]`: torch.float64.*expected contiguous torch.float32": {
            "weights": tuple(t.double() for t in own)
        },
        r"weight\[1\]`: .*on meta": {"weights": (own[0], own[1].to("meta"), *own[2:])},
        r"weight\[1\]`: .*contiguous": {"weights": (own[0], torch.ones(32)[::2], *own[2:])},
        r"weight` must hold the aligned address of head 1's, got 0": {
            "weight": there * torch.tensor([1, 0, 1, 1])
        },
        r"bias` must hold the aligned address of head 0's": {"bias": there + 2},
        r"weight` must be a contiguous tensor of 4 addresses.*shape \[3\]": {"weight": there[:3]},
        r"weight` must be a contiguous tensor of 4 addresses": {"weight": there.repeat(2)[::2]},
        r"weight` must be a contiguous tensor of 4 addresses.*\[4, 1\]": {"weight": there[:, None]},
    }
    for message, parts in cases.items():
        with pytest.raises(DecodingError, match=r"`layers\[1\].attention.q_norm." + message):
            engine(with_norm(**parts))
    across = with_norm(weight=rows)
    across = replace(across, attention=replace(across.attention, norm_across=True))
    with pytest.raises(DecodingError, match=r"q_norm.weight` must have shape \[64\], got \[4, 16"):
        engine(across)
    for elsewhere, message in (
        (Norm("rms", rows), r"`layers\[1\].before_mlp`: weights of heads"),
        (Norm("rms", there), r"`layers\[1\].before_mlp.weight`.*int64"),
    ):
        with pytest.raises(DecodingError, match=message):
            engine(replace(layer, before_mlp=elsewhere))


def test_what_an_engine_says_of_itself(kernels_module: ModuleType) -> None:
    model = decoder(Shape(), torch.float32)
    engine = Engine(model, 4, package=kernels_module)
    weight = model.layers[1].attention.q.weight
    assert weight.data_ptr() in engine.addresses and model.embedding.data_ptr() in engine.addresses
    small = Engine(model, 1, package=kernels_module)
    assert 0 < small.workspace_bytes < engine.workspace_bytes
    assert engine.device == torch.device("cpu")


def test_changed_weights_are_seen(kernels_module: ModuleType) -> None:
    """The engine reads the model's memory, not a copy."""
    model = decoder(Shape(), torch.float32)
    engine = Engine(model, 1, package=kernels_module)
    ids, positions = arguments(model, 1, 1, 5)
    model.layers[0].attention.q.weight.mul_(1.5)
    check(engine, ids, positions, table(model, 1, 5, 8), None, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_heads", ["rows", "list"])
def test_each_heads_own_norm_is_read_where_it_lies(
    kernels_module: ModuleType, of_heads: str, dtype: torch.dtype
) -> None:
    """Both forms and the reference give the same; a head's weight that is changed is seen, and its
    memory is what the engine says that it reads."""
    shape = Shape(qk_norm="head", of_heads=of_heads, norm="layer", norm_bias=True)
    model = decoder(shape, dtype)
    engine = Engine(model, 2, package=kernels_module)
    ids, positions = arguments(model, 2, 1, 9)
    other = decoder(replace(shape, of_heads="rows" if of_heads == "list" else "list"), dtype)

    def logits(one: Engine | reference.Reference) -> Tensor:
        made = torch.empty(2, 1, 131, dtype=dtype)
        one.step(ids, positions, table(model, 2, 9, 11), made)
        return made

    before = logits(engine)
    assert torch.equal(before, logits(Engine(other, 2, package=kernels_module)))
    epsilons = 24 if dtype == torch.float32 else 4
    assert (
        distance(logits(reference.Reference(model, 2)), before) <= epsilons * torch.finfo(dtype).eps
    )
    attention = [layer.attention for layer in model.layers]
    for norm, head in ((attention[1].q_norm, 3), (attention[0].k_norm, 1)):
        assert norm is not None and norm.by_head
        for rows, each in ((norm.weight, norm.weights), (norm.bias, norm.biases)):
            own = each[head] if rows is None else rows[head]
            assert (own if rows is None else rows).data_ptr() in engine.addresses
            own.mul_(-1.5)
            check(engine, ids, positions, table(model, 2, 9, 11), None, head)
            after = logits(engine)
            assert distance(after, before) > 1e-3
            before = after


@pytest.mark.parametrize("level", ["baseline", "avx2"])
def test_other_instruction_sets(kernels_dir: Path, level: str) -> None:
    """The same checks in a process that takes a lower instruction set."""
    which = "random_decoders or row_does_not or threads_change or rows_of_any"
    pass_held_to(level, Path(__file__), which)


def test_the_oracle_reads_the_grammar() -> None:
    """Every choice of `Shape` changes the fp64 step: one that does not is not tested."""
    base = Shape()
    model = decoder(base, torch.float32)
    ids, positions = arguments(model, 1, 2, 9)
    want = Oracle(model).step(ids, positions, table(model, 1, 9, 11))[0]
    changes: list[dict[str, object]] = [
        {"softcap": 0.5}, {"windows": (3,)}, {"sinks": True}, {"clip": 0.5}, {"multiplier": 0.5},
        {"embedding_scale": 2.0}, {"logit_scale": 0.5}, {"logit_softcap": 1.0}, {"norm": "layer"},
        {"placement": "parallel"}, {"qk_norm": "head"}, {"interleaved": True}, {"rope_dims": 8},
        {"rope_scaling": 2.0}, {"activation": "relu"}, {"gated": False}, {"final_norm": False},
    ]  # fmt: skip
    for change in changes:
        other = decoder(replace(base, **change), torch.float32)  # type: ignore[arg-type]
        got = Oracle(other).step(ids, positions, table(other, 1, 9, 11))[0]
        assert distance(got, want) > 1e-3, change
    shared = replace(base, qk_norm="head")
    want, rows, each = (
        Oracle(decoder(replace(shared, of_heads=form), torch.float32)).step(
            ids, positions, table(model, 1, 9, 11)
        )[0]
        for form in (None, "rows", "list")
    )
    assert distance(rows, want) > 1e-3 and torch.equal(rows, each)
    assert decoders.distance(want, want) == 0
