"""Row operations as torch operators on the CPU: references, transformers' warpers, chi-square."""

from __future__ import annotations

import math
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hfpatch.ops import OPS
from hfpatch.ops.sample import keep

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# temperature, top_k, top_p, min_p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 40, 0.5, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 100, 0.95, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.5, 0, 0.0, 0.0),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What transformers' warpers make of the logits, in the order in which it calls them."""
    ids, scores = torch.empty(0, dtype=torch.int64), logits.float()
    if temperature != 1.0:
        scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return MinPLogitsWarper(min_p)(ids, scores) if min_p else scores


def drawn(kernels_module: ModuleType, row: Tensor, count: int, settings: Any) -> Tensor:
    temperature, top_k, top_p, min_p = settings
    return kernels_module.sample(
        row.expand(count, -1),
        torch.arange(count),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_keeps_what_the_warpers_keep(settings: Any, kernels_module: ModuleType) -> None:
    """Exactly, for distinct scores: flat rows, so that every token that is kept will be drawn."""
    temperature, top_k, top_p, min_p = settings
    row = torch.linspace(-1.5, 1.5, 60)[torch.randperm(60, generator=torch.manual_seed(3))]
    kept = warped(row[None], *settings)[0].isfinite()
    assert torch.equal(keep(row[None] / temperature, top_k, top_p, min_p)[0], kept)
    tokens = drawn(kernels_module, row, 6000, settings)
    counts = torch.bincount(tokens, minlength=60)
    assert torch.equal(counts > 0, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_never_draws_what_the_warpers_drop(
    settings: Any, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """With equal logits as well, by value: which of several stays, torch.sort decides."""
    temperature, top_k, top_p, min_p = settings
    logits = (randn(20, 997) * 3).to(dtype)
    scores = warped(logits, *settings)
    mine = keep(logits.float() / temperature, top_k, top_p, min_p)
    for row in range(20):
        kept, ours = scores[row].isfinite(), mine[row]
        assert torch.equal(logits[row][kept].sort()[0], logits[row][ours].sort()[0])
        tokens = drawn(kernels_module, logits[row], 200, settings)
        assert ours[tokens].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS[:6])
def test_distribution(settings: Any, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """Chi-square of 20000 draws with fixed seeds; classes of less than 10 expected draws are one.

    The limit is the mean of chi-square with n - 1 degrees of freedom plus five of its deviations.
    """
    temperature, top_k, top_p, min_p = settings
    count, row = 20000, (randn(300, seed=5) * 2).to(dtype)
    scores = row.double() / temperature
    kept = keep((row.float() / temperature)[None], top_k, top_p, min_p)[0]
    expected = count * torch.softmax(scores.masked_fill(~kept, -torch.inf), -1)
    counts = torch.bincount(drawn(kernels_module, row, count, settings), minlength=300).double()
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    assert counts[-1] == 0 or expected[-1] > 0
    some = expected > 0
    chi_square = ((counts - expected)[some].square() / expected[some]).sum().item()
    freedom = int(some.sum()) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_p_among_equal_logits(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """The last ones are kept, as many as reach top-p as a float, and every one of them is drawn."""
    cols = 40000
    # 0.001 is a little more in fp32, so that 40 of 40000 equal ones are not enough; 0.0008 is less.
    for top_p, kept in ((0.001, 41), (0.0008, 32), (2.0**-10, 40)):
        assert kept == math.ceil(Fraction(torch.tensor(top_p).item()) * cols)
        tokens = drawn(kernels_module, torch.ones(cols, dtype=dtype), 400, (1.0, 0, top_p, 0.0))
        assert tokens.unique().tolist() == list(range(cols - kept, cols))


def test_positions_are_independent(kernels_module: ModuleType) -> None:
    """One seed, many positions: as good as many seeds; neighbours agree by chance only."""
    row, count = torch.zeros(16), 16000
    seeds, positions = torch.full((count,), 7), torch.arange(count) + 2**33
    tokens = kernels_module.sample(row.expand(count, -1), seeds, positions)
    counts = torch.bincount(tokens, minlength=16).double()
    assert ((counts - 1000).square() / 1000).sum() < 15 + 5 * math.sqrt(30)
    pairs = torch.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256).double()
    mean = (count - 1) / 256
    assert ((pairs - mean).square() / mean).sum() < 255 + 5 * math.sqrt(510)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_sample_is_its_reference(
    settings: Any, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """The same random words, so the same tokens, unless two candidates tie within rounding."""
    logits = (randn(300, 211, seed=2) * 3).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=torch.manual_seed(1))
    args = (logits, seeds, torch.arange(300), *settings)
    tokens = kernels_module.sample(*args)
    assert (OPS["sample"].reference(*args) == tokens).float().mean() >= 0.99
    shaped = kernels_module.sample(logits.view(3, 100, 211), seeds.view(3, 100), None, *settings)
    assert torch.equal(shaped.view(-1), kernels_module.sample(logits, seeds, None, *settings))


def test_philox_is_that_of_the_paper() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10, at counters that we use."""
    from hfpatch.ops.sample import philox

    zero = torch.zeros(1, dtype=torch.int64)
    words = philox(zero, zero, zero)
    assert [f"{w:08x}" for w in words.flatten().tolist()] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]


def test_parameters_per_row(kernels_module: ModuleType) -> None:
    logits, seeds = randn(len(SETTINGS), 500) * 3, torch.arange(len(SETTINGS))
    columns = [torch.tensor(c) for c in zip(*SETTINGS, strict=True)]
    tokens = kernels_module.sample(logits, seeds, None, *columns)
    for i, settings in enumerate(SETTINGS):
        one = kernels_module.sample(logits[i : i + 1], seeds[i : i + 1], None, *settings)
        assert tokens[i] == one[0]
    greedy = kernels_module.sample(logits, seeds, temperature=0.0)
    assert torch.equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, (6,), (2, 6), (2, 1, 4, 6)])
def test_softmax(mask: Any, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    x = (randn(2, 3, 4, 6) * 3).to(dtype)
    m = None if mask is None else randn(*mask, seed=1)
    reference = OPS["softmax"].reference
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    y = kernels_module.softmax(leaf, m, 0.5)
    truth = reference(wide, None if m is None else m.double(), 0.5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), truth, rtol=max(eps, 1e-6), atol=1e-7)
    seed = randn(2, 3, 4, 6, seed=2).to(dtype)
    (actual,) = torch.autograd.grad(y, leaf, seed)
    (expected,) = torch.autograd.grad(truth, wide, seed.double())
    assert actual.dtype == dtype
    # the result that the gradient is made of was rounded once, and the gradient is
    assert (actual.double() - expected).abs().max() <= 4 * max(eps, 1e-6) * expected.abs().max()
    with torch.no_grad():
        assert torch.equal(kernels_module.softmax(leaf, m, 0.5), y)
    if m is not None:
        m.requires_grad_()
        formula = kernels_module.softmax(x, m, 0.5)
        torch.testing.assert_close(formula, y.detach(), rtol=2 * max(eps, 1e-6), atol=1e-7)
        assert torch.autograd.grad(formula.float().square().sum(), m)[0].shape == m.shape


def test_argmax_and_topk(kernels_module: ModuleType) -> None:
    x = randn(3, 4, 50).requires_grad_()
    values, indices = kernels_module.topk(x, 7)
    expected, order = OPS["topk"].reference(x.detach(), 7)
    assert torch.equal(values, expected) and torch.equal(indices, order)
    values.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4, 50).scatter(-1, order, 1.0))
    with torch.no_grad():
        assert all(map(torch.equal, kernels_module.topk(x, 7), (expected, order)))
        assert torch.equal(kernels_module.argmax(x), OPS["argmax"].reference(x))
        assert kernels_module.argmax(x[0, 0]).shape == ()
        assert torch.equal(kernels_module.topk(x[0, 0], 3)[1], order[0, 0, :3])
        strange = x.transpose(-1, -2)[:, ::2]  # copied: the last stride is not 1
        assert torch.equal(kernels_module.argmax(strange), strange.argmax(-1))


def test_compile_without_graph_breaks(kernels_module: ModuleType) -> None:
    k = kernels_module

    def step(x: Tensor, seeds: Tensor) -> Tensor:
        scores = torch.log(k.softmax(x, scale=0.5))
        values, _ = k.topk(scores, 5)
        scores = scores.masked_fill(scores < values[:, -1:], -torch.inf)
        return k.sample(scores, seeds, top_p=0.9) + k.argmax(scores)

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for rows in (4, 5, 6):  # then the number of rows is a symbol
        x, seeds = randn(rows, 40), torch.arange(rows)
        assert torch.equal(compiled(x, seeds), step(x, seeds))
    assert counter.frame_count <= 2
