"""The CUDA row operations: against fp64 and a stable sort, every layout, bit for bit per row."""

from __future__ import annotations

import math
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS
from hfpatch.ops.sample import keep

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Parts of a warp, a warp, a CTA, the parts of wide rows; whole vectors and not.
COLS = [1, 7, 64, 128, 333, 512, 1000, 1024, 4096, 8192, 12345, 16384, 16400, 50257, 128256, 262144]
INF, NAN = float("inf"), float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(actual: Tensor, truth: Tensor, dtype: torch.dtype, scale: Any = 1.0) -> None:
    info = torch.finfo(dtype)
    bound = tolerance("cuda softmax", dtype) * truth.abs() * 1.01
    bound = bound + tolerance("cuda softmax") * scale
    bound = bound + info.smallest_normal * max(info.eps, 2.0**-20)
    assert ((actual.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
def test_softmax(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    k = kernels_module
    for rows in (1, 9, 300):
        if rows * cols > 2**24:
            continue
        x, grad = randn(rows, cols, dtype=dtype) * 3, randn(rows, cols, dtype=dtype)
        same = randn(rows, cols, dtype=dtype)
        for mask, scale in ((None, 1.0), (randn(cols), 0.5), (same, -1.0)):
            z = x.double() * scale + (0 if mask is None else mask.double())
            y = k.softmax(x, mask, scale)
            truth = torch.softmax(z, -1)
            close(y, truth, dtype, 0.0 if dtype != torch.float32 else truth)
            dx, _ = k.ops.softmax_backward.default(grad, y, scale)
            wide, g = y.double(), grad.double()
            expected = scale * wide * (g - (g * wide).sum(-1, keepdim=True))
            close(dx, expected, dtype, wide * g.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [40, 1000, 4096, 30000, 128256])
def test_softmax_of_a_row_is_its_own(
    kernels_module: ModuleType, cols: int, dtype: torch.dtype
) -> None:
    """Also where few rows are shared out among CTAs and many are not."""
    k = kernels_module
    rows = 300 if cols > 16384 else 40
    x, grad = randn(rows, cols, dtype=dtype), randn(rows, cols, dtype=dtype)
    y = k.softmax(x)
    dx, _ = k.ops.softmax_backward.default(grad, y, 1.0)
    padded = torch.zeros(rows, cols + 3, device="cuda", dtype=dtype)
    padded[:, 1:-2] = x
    assert torch.equal(k.softmax(padded[:, 1:-2]), y)
    for part in (slice(0, 1), slice(5, 7), slice(rows - 1, rows)):
        assert torch.equal(k.softmax(x[part]), y[part])
        alone, _ = k.ops.softmax_backward.default(grad[part], y[part], 1.0)
        assert torch.equal(alone, dx[part])
    workspace = k.ops.softmax.default(x, None, 1.0)[1]
    k.ops.softmax_out.default(x, workspace, x, None, 1.0)
    assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("repeat", [1, 30, 2000, 10000])
def test_softmax_odd_values(kernels_module: ModuleType, repeat: int, dtype: torch.dtype) -> None:
    rows = [
        [0.0, -INF, 1.0, 2.0],
        [-INF] * 4,
        [INF, 0.0, 1.0, -INF],
        [NAN, 0.0, 1.0, 2.0],
        [-3e4, 3e4, 0.0, -0.0],
    ]
    x = torch.tensor(rows, device="cuda").repeat(1, repeat)
    x[0, : x.shape[1] // 2] = -INF  # whole parts of a row that are -inf
    x = x.to(dtype)
    y, truth = kernels_module.softmax(x), torch.softmax(x.double(), -1)
    assert torch.equal(y.isnan(), truth.isnan())
    good = ~truth.isnan()
    close(y[good], truth[good], dtype)


def rows_for_order(dtype: torch.dtype, cols: int) -> Tensor:
    x = randn(7, cols, dtype=dtype)
    x[1] = torch.randint(3, (cols,), device="cuda").to(dtype)
    x[2, :: max(cols // 5, 1)] = NAN
    x[3, cols // 2 :] = INF
    x[4] = -INF
    x[5] = torch.where(torch.arange(cols, device="cuda") % 2 == 0, -0.0, 0.0).to(dtype)
    x[6] = 1.0
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
def test_argmax_and_topk(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    k = kernels_module
    x = rows_for_order(dtype, cols)
    order = torch.sort(x, dim=-1, descending=True, stable=True)[1]
    many = x.repeat(40, 1)  # a CTA per row
    for count in {1, *(min(cols, k) for k in (2, 50, 192, 193, 1024, 2048))}:
        values, indices = k.topk(x, count)
        assert torch.equal(indices, order[:, :count]), count
        expected = x.gather(-1, order[:, :count])
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(k.topk(many, count)[1], indices.repeat(40, 1))
    assert torch.equal(k.argmax(x), order[:, 0])
    assert torch.equal(k.argmax(many), order[:, 0].repeat(40))
    for row in range(7):
        assert k.argmax(x[row : row + 1])[0] == order[row, 0]
    shifted = torch.zeros(7, cols + 5, device="cuda", dtype=dtype)
    shifted[:, 3:-2] = x
    assert torch.equal(k.argmax(shifted[:, 3:-2]), order[:, 0])
    assert torch.equal(k.topk(shifted[:, 3:-2], 1)[1], order[:, :1])


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 40, 0.5, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 100, 0.95, 0.02),
    (1.5, 0, 0.0, 0.0),
    (0.0, 5, 0.5, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 5, 100, 1001, 32000, 50257, 128256])
@pytest.mark.parametrize("settings", SETTINGS)
def test_sample(kernels_module: ModuleType, settings: Any, cols: int, dtype: torch.dtype) -> None:
    """Those of the CPU, except for the last bits of exp and log; the same whoever shares a row."""
    k = kernels_module
    logits = randn(100, cols, dtype=dtype) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (100,), device="cuda")
    args = (torch.arange(100, device="cuda"), *settings)
    tokens = k.sample(logits, seeds, *args)
    cpu = k.sample(logits.cpu(), seeds.cpu(), args[0].cpu(), *settings)
    assert (tokens.cpu() == cpu).float().mean() >= 0.97
    for part in (slice(0, 1), slice(3, 15)):  # a cluster of CTAs per row, where there are any
        few = k.sample(logits[part], seeds[part], args[0][part], *settings)
        assert torch.equal(few, tokens[part])
    padded = torch.zeros(100, cols + 3, device="cuda", dtype=dtype)
    padded[:, 1:-2] = logits
    assert torch.equal(k.sample(padded[:, 1:-2], seeds, *args), tokens)
    temperature, top_k, top_p, min_p = settings
    if temperature > 0:
        # A token at the edge of top-p may fall to either side by the rounding of a sum.
        mine = keep(logits.double() / temperature, top_k, min(top_p + 1e-5, 1.0), min_p * 0.9999)
        assert mine.gather(-1, tokens[:, None]).all()
    else:
        assert torch.equal(tokens, OPS["argmax"].reference(logits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 40])  # a cluster of CTAs per row, and one CTA
def test_sample_at_the_edge_of_ties(
    kernels_module: ModuleType, rows: int, dtype: torch.dtype
) -> None:
    """All equal: top-p keeps the last ones, as many as it takes, and every one of them is drawn."""
    cols = 40000
    logits = torch.ones(rows, cols, device="cuda", dtype=dtype)
    seeds = torch.arange(rows, device="cuda")
    # 0.001 is a little more in fp32, so that 40 of 40000 equal ones are not enough; 0.0008 is less.
    for top_p, kept in ((0.001, 41), (0.0008, 32), (2.0**-10, 40)):
        assert kept == math.ceil(Fraction(torch.tensor(top_p).item()) * cols)
        tokens = torch.cat(
            [
                kernels_module.sample(logits, seeds + start, top_p=top_p)
                for start in range(0, 400, rows)
            ]
        )
        assert tokens.unique().tolist() == list(range(cols - kept, cols))
    odd = logits.clone()
    odd[0, 5], odd[1], odd[2, 7] = NAN, -INF, INF
    tokens = kernels_module.sample(odd, seeds, top_k=3)
    assert tokens[:3].tolist() == [5, 0, 7]


def hard_rows(dtype: torch.dtype, cols: int) -> Tensor:
    """Of which more are equal, or in the way of the greatest ones, than a list has room for."""
    up = torch.arange(cols, device="cuda")
    step = torch.linspace(-5, 5, cols, device="cuda")
    rows = [
        step,
        -step,
        torch.ones(cols, device="cuda"),
        (up % 3).float(),
        torch.where(up >= cols - 300, 2.0, step / 5),
        torch.where(up == cols // 2, 3.0, torch.where(up % 2 == 0, -0.0, 0.0)),
        torch.where(up % (cols // 20) == 1, step, -INF),
        torch.full((cols,), -INF, device="cuda"),
        torch.where(up % 2 == 1, INF, step),
        torch.where(up % 4 == 2, NAN, step),
        torch.where(up < 40, 4 + step, torch.where(up % 5 == 0, -1.0, -2.0)),
        torch.randn(cols, device="cuda"),
    ]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [4096, 8192, 8200, 32000, 128256])
def test_many_hard_rows(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    """So many rows that each CTA has several: as a stable sort, and as few of them at a time."""
    k = kernels_module
    rows = hard_rows(dtype, cols)
    count = len(rows)
    many = rows.repeat(30, 1)
    order = torch.sort(rows, dim=-1, descending=True, stable=True)[1]
    for wanted in (1, 7, 50, 64):
        values, indices = k.topk(many, wanted)
        assert torch.equal(indices, order[:, :wanted].repeat(30, 1)), wanted
        expected = many.gather(-1, indices)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(many),), device="cuda")
    settings = [
        (0.8, 50, 0.95, 0.0),
        (1.0, 64, 1.0, 0.0),
        (0.7, 3, 0.5, 0.02),
        (1.3, 20, 0.01, 0.0),
    ]
    settings += [(INF, 5, 0.9, 0.0), (0.0, 5, 0.5, 0.0), (2.0, 60, 1.0, 0.3)]
    for temperature, *others in settings:
        of_row = torch.full(
            (len(many),), temperature, device="cuda"
        )  # a number may not be infinite
        tokens = k.sample(many, seeds, None, of_row, *others)
        for at in range(0, len(many), 5 * count):
            few = slice(at, at + count)
            again = k.sample(rows, seeds[few], None, of_row[few], *others)
            assert torch.equal(tokens[few], again), (temperature, *others)
            if temperature < INF:
                again = k.sample(rows, seeds[few], None, temperature, *others)
                assert torch.equal(tokens[few], again), (temperature, *others)


def test_distribution(kernels_module: ModuleType) -> None:
    """Chi-square with fixed seeds; the limit is the mean and five deviations."""
    count = 100000
    row = torch.linspace(-2, 2, 64, device="cuda")
    tokens = kernels_module.sample(row.expand(count, -1), torch.arange(count, device="cuda"))
    counts = torch.bincount(tokens, minlength=64).double()
    expected = count * torch.softmax(row.double(), -1)
    assert ((counts - expected).square() / expected).sum() < 63 + 5 * 126**0.5


def test_graph(kernels_module: ModuleType) -> None:
    """Both launches, and those of clusters, are in a CUDA graph, on the capturing stream."""
    k = kernels_module
    x = randn(2, 128256, dtype=torch.bfloat16)
    seeds = torch.arange(2, device="cuda")

    def step() -> tuple[Tensor, ...]:
        tokens = k.sample(x, seeds, temperature=0.8, top_k=50, top_p=0.9)
        return k.softmax(x), k.argmax(x), *k.topk(x, 40), tokens

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, step()))
