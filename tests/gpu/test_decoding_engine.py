"""`decoding/engine.py` on a GPU: every path of its kernels against a step in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.decoders import Oracle, Shape, copied, decoder, distance, random_shape, table
from support.engines import SMALL, WIDE, arguments, check, padded, same_rows, visit

from hfpatch.decoding.engine import Engine
from hfpatch.decoding.spec import Norm
from hfpatch.errors import DecodingError

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = DTYPES[1:]
LENGTHS = (0, 1, 5, 63, 64, 65, 130, 1100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_random_decoders(kernels_module: ModuleType, dtype: torch.dtype, seed: int) -> None:
    """Any choices of the grammar together; most sizes are no multiples of 16 bytes."""
    model = decoder(random_shape(seed), dtype, "cuda", seed)
    rows, tokens, length = (1, 2, 3, 5, 16)[seed % 5], 1 + seed % 4, LENGTHS[seed % 8]
    ids, positions = arguments(model, rows, tokens, length, seed)
    mask = padded(rows, length + tokens, length).cuda() if seed % 3 == 0 else None
    cache = table(model, rows, length, length + tokens + 2)
    check(Engine(model, rows, tokens, package=kernels_module), ids, positions, cache, mask, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SMALL, *WIDE])
def test_each_path(kernels_module: ModuleType, dtype: torch.dtype, name: str) -> None:
    visit((SMALL | WIDE)[name], dtype, kernels_module)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(
    kernels_module: ModuleType, dtype: torch.dtype, dim: int, masked: bool
) -> None:
    """Nor on whether its parts are put together by a cluster; up to 16 tokens of all rows."""
    shape = Shape(width=256, inner=512, heads=8, key_heads=2, dim=dim, vocab=512, qk_norm="head")
    model = decoder(shape, dtype, "cuda")
    parts = [list(range(n)) for n in range(1, 16)] + [[15], [7, 3], [0] * 3 + [9]]
    for length in (4, 200, 900, 3000):
        same_rows(model, 16, 1, length, masked, parts, kernels_module)
    for rows, tokens in ((8, 2), (5, 3), (4, 4), (2, 8)):
        parts = [[rows - 1], list(range(rows))[::-1], [1, 1]]
        same_rows(model, rows, tokens, 300, masked, parts, kernels_module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_rows_of_any_decoder(kernels_module: ModuleType, dtype: torch.dtype, seed: int) -> None:
    """Whatever the model computes; most sizes are no multiples of 16 bytes."""
    tokens = 1 + seed % 4
    rows = 1 + (7 * seed + 3) % (16 // tokens)
    model = decoder(random_shape(seed), dtype, "cuda", seed)
    parts = [[0], [rows - 1], list(range(rows))[::-1], [rows // 2] * 2]
    for masked in (False, True):
        same_rows(model, rows, tokens, LENGTHS[seed % 8], masked, parts, kernels_module, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_without_cublaslt(
    kernels_module: ModuleType, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Their products are then those of sixteen rows, in rounds, and a row is what it is alone."""
    code = f"""
import torch
from support.decoders import Shape, decoder, table
from support.engines import SMALL, arguments, visit
from hfpatch.decoding.engine import Engine
from hfpatch.decoding.spec import CacheTable
import hfpatch.kernels.sources as sources

dtype, package = {dtype}, sources.local_package().module
for name in SMALL:
    if name.startswith("many rows"):
        visit(SMALL[name], dtype, package)
model = decoder(Shape(width=256, inner=512, heads=8, key_heads=2, dim=64, vocab=512), dtype, "cuda")
ids, positions = arguments(model, 24, 1, 200)
cache = table(model, 24, 200, 201)
whole, alone = (torch.empty(n, 1, 512, dtype=dtype, device="cuda") for n in (24, 1))
Engine(model, 24, package=package).step(ids, positions, cache, whole)
cut = CacheTable(
    [k[20:21].clone() for k in cache.keys], [v[20:21].clone() for v in cache.values], 200
)
Engine(model, 1, package=package).step(ids[20:21], positions[20:21], cut, alone)
assert torch.equal(alone[0], whole[20])
"""
    here = Path(__file__).parents[1]
    environment = os.environ | {
        "HFPATCH_CUBLASLT": str(tmp_path / "none.so"),
        "HFPATCH_TEST_BUILD": "0",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=here.parent,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_graphs_serve_every_length_and_cache(
    kernels_module: ModuleType, dtype: torch.dtype
) -> None:
    model = decoder(Shape(width=128, inner=256, dim=64, vocab=256), dtype, "cuda")
    engine = Engine(model, 2, package=kernels_module)
    for length in (3, 4, 5, 500, 64, 2000, 1022, 1, 0):
        cache = table(model, 2, length, length + 9, seed=length)
        for step in range(3):
            ids, positions = arguments(model, 2, 1, cache.length, step)
            before = copied(cache)
            logits = torch.empty(2, 1, 256, dtype=dtype, device="cuda")
            engine.step(ids, positions, cache, logits)
            true = Oracle(model).step(ids, positions, before)[0]
            rounded = Oracle(model, dtype).step(ids, positions, before)[0]
            bound = 3e-5 if dtype == torch.float32 else 1.6 * distance(rounded, true) + 1e-4
            assert distance(logits, true) <= bound
            cache.length += 1


def test_masks_come_and_go(kernels_module: ModuleType) -> None:
    """With and without a mask, and one that outgrows its buffer."""
    model = decoder(Shape(width=128, inner=256, dim=64, vocab=256), torch.bfloat16, "cuda")
    engine = Engine(model, 3, package=kernels_module)
    for length in (30, 30, 2500, 30):
        ids, positions = arguments(model, 3, 1, length)
        mask = padded(3, length + 1, length).cuda()
        for given in (mask, None, mask.bool()):
            cache = table(model, 3, length, length + 4)
            before = copied(cache)
            logits = torch.empty(3, 1, 256, dtype=torch.bfloat16, device="cuda")
            engine.step(ids, positions, cache, logits, given)
            true = Oracle(model).step(ids, positions, before, given)[0]
            rounded = Oracle(model, torch.bfloat16).step(ids, positions, before, given)[0]
            assert distance(logits, true) <= 1.6 * distance(rounded, true) + 1e-4


def test_logits_in_both_forms_and_embeds(kernels_module: ModuleType) -> None:
    shape = Shape(width=128, inner=256, dim=64, vocab=256, embedding_scale=2.0)
    model = decoder(shape, torch.bfloat16, "cuda")
    engine = Engine(model, 2, 3, package=kernels_module)
    ids, positions = arguments(model, 2, 3, 5)
    embeds = model.embedding[ids] * 2.0
    found = []
    for tokens, dtype in ((3, torch.bfloat16), (1, torch.bfloat16), (3, torch.float32)):
        for given in (None, embeds):
            logits = torch.empty(2, tokens, 256, dtype=dtype, device="cuda")
            one = None if given is not None else ids
            engine.step(one, positions, table(model, 2, 5, 8), logits, embeds=given)
            found.append(logits.float())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[4])
    assert torch.equal(found[0][:, -1:], found[2]) and torch.equal(found[2], found[3])
    assert torch.equal(found[4], found[5])


def test_an_unknown_id_gives_nan(kernels_module: ModuleType) -> None:
    """It is not seen before the launch; the other row is what it would be."""
    model = decoder(Shape(width=128, inner=256, dim=64, vocab=256), torch.bfloat16, "cuda")
    engine = Engine(model, 2, package=kernels_module)
    ids, positions = arguments(model, 2, 1, 5)
    good = torch.empty(2, 1, 256, dtype=torch.bfloat16, device="cuda")
    engine.step(ids, positions, table(model, 2, 5, 8), good)
    for wrong in (256, -1, 2**40):
        ids[0] = wrong
        bad = torch.empty_like(good)
        engine.step(ids, positions, table(model, 2, 5, 8), bad)
        assert bad[0].isnan().all() and torch.equal(bad[1], good[1])


def test_bad_arguments(kernels_module: ModuleType) -> None:
    model = decoder(Shape(width=128, inner=256, dim=64, vocab=256), torch.bfloat16, "cuda")
    engine = Engine(model, 2, package=kernels_module)
    ids, positions = arguments(model, 2, 1, 5)
    cache = table(model, 2, 5, 8)
    logits = torch.full((2, 1, 256), 7.0, dtype=torch.bfloat16, device="cuda")
    shifted = copied(cache)
    memory = torch.zeros(shifted.keys[1].numel() + 1, dtype=torch.bfloat16, device="cuda")
    shifted.keys[1] = memory[1:].view(shifted.keys[1].shape)
    calls = {
        "`ids`": (ids.cpu(), positions, cache, logits),
        "`positions`": (ids, positions.cpu(), cache, logits),
        "`cache`": (ids, positions, table(model, 2, 8, 8), logits),
        r"`cache.keys\[1\]`.*16 bytes": (ids, positions, shifted, logits),
        "`logits`": (ids, positions, cache, logits.cpu()),
    }
    for message, call in calls.items():
        with pytest.raises(DecodingError, match=message):
            engine.step(*call)
        assert (logits == 7).all()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DecodingError, match="captures"):
        engine.step(ids, positions, cache, logits)
    engine.step(ids, positions, cache, logits)
    assert logits.isfinite().all()


def test_changed_weights_are_seen_at_once(kernels_module: ModuleType) -> None:
    """The kernels begin to read weights before the kernel before them has ended: not in front of
    what the caller's stream did last."""
    shape = Shape(layers=1, width=512, inner=1024, dim=64, heads=8, key_heads=8, vocab=4096)
    model = decoder(shape, torch.bfloat16, "cuda")
    engine = Engine(model, 1, package=kernels_module)
    ids, positions = arguments(model, 1, 1, 5)
    weight = model.layers[0].attention.q.weight
    first, second = (torch.randn_like(weight) * 0.04 for _ in range(2))
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    logits = torch.empty(1, 1, 4096, dtype=torch.bfloat16, device="cuda")
    cache = table(model, 1, 5, 8)
    for step in range(40):
        weight.copy_(second if step % 2 else first)
        engine.step(ids, positions, cache, logits)
        found[step % 2].append(logits.clone())
    for same in found.values():
        assert all(torch.equal(same[0], other) for other in same[1:])
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("of_heads", ["rows", "list"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_heads_own_norm_is_read_where_it_lies(
    kernels_module: ModuleType, dtype: torch.dtype, of_heads: str
) -> None:
    """By the graph too: it holds addresses, and what lies there may change. Both forms give the
    same bits."""
    shape = Shape(
        width=256, inner=512, dim=64, heads=24, vocab=256, norm="layer", norm_bias=True,
        qk_norm="head", of_heads=of_heads,
    )  # fmt: skip
    model = decoder(shape, dtype, "cuda")
    other = decoder(
        replace(shape, of_heads="list" if of_heads == "rows" else "rows"), dtype, "cuda"
    )
    engine = Engine(model, 2, package=kernels_module)
    ids, positions = arguments(model, 2, 1, 70)
    found = []
    for one in (engine, engine, Engine(other, 2, package=kernels_module)):
        logits = torch.empty(2, 1, 256, dtype=dtype, device="cuda")
        one.step(ids, positions, table(model, 2, 70, 71), logits)
        found.append(logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for norm in (model.layers[1].attention.q_norm, model.layers[0].attention.k_norm):
        assert norm is not None
        for rows, each in ((norm.weight, norm.weights), (norm.bias, norm.biases)):
            (each[-1] if rows is None else rows[-1]).mul_(-1.5)
            check(engine, ids, positions, table(model, 2, 70, 73), None, 0)
            engine.step(ids, positions, table(model, 2, 70, 71), logits)
            assert distance(logits, found[0]) > 1e-3
            found[0] = logits.clone()


def test_bad_norms_of_heads(kernels_module: ModuleType) -> None:
    """Addresses lie on the GPU, as the tensors do; what they are is not seen."""
    model = decoder(Shape(layers=1, width=128, dim=64), torch.bfloat16, "cuda")
    layer = model.layers[0]
    own = tuple(torch.ones(4, 64, dtype=torch.bfloat16, device="cuda"))
    there = torch.tensor([t.data_ptr() for t in own], device="cuda")
    for message, parts in {
        r"weight` must be a contiguous tensor of 4 addresses.*on cpu": {"weight": there.cpu()},
        r"weight` must be a contiguous tensor of 4 addresses.*\[3\]": {"weight": there[:3]},
        r"weight\[1\]`: .*on cpu, expected contiguous.*cuda": {
            "weights": (own[0], own[1].cpu(), *own[2:])
        },
    }.items():
        norm = replace(Norm("rms", None), **parts)  # type: ignore[arg-type]
        attention = replace(layer.attention, q_norm=norm)
        bad = replace(model, layers=(replace(layer, attention=attention),))
        with pytest.raises(DecodingError, match=r"`layers\[0\].attention.q_norm." + message):
            Engine(bad, 2, package=kernels_module)
