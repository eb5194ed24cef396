"""Row operations through the C interface, on the CPU: numbers, order, layouts, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import Library
from test_c_api import (
    DTYPES,
    INVALID,
    Canary,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    lib,  # noqa: F401
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance

I64 = torch.int64
INF, NAN = math.inf, math.nan
COLS = [1, 2, 15, 33, 1000, 4097, 50257]


def workspace(lib, x):
    size = lib.dll.hfp_row_workspace(x[..., 0].numel(), x.shape[-1])
    return torch.full((size,), -7, dtype=I64)


def softmax(lib, x, mask=None, scale=1.0):
    canary = Canary(x.shape, x.dtype)
    lib.call("softmax", canary.out, workspace(lib, x), x, mask, scale)
    return canary.check()


def argmax(lib, x):
    canary = Canary(x.shape[:-1], I64)
    lib.call("argmax", canary.out, workspace(lib, x), x)
    return canary.check()


def topk(lib, x, k):
    values, indices = Canary((*x.shape[:-1], k), x.dtype), Canary((*x.shape[:-1], k), I64)
    lib.call("topk", values.out, indices.out, x, k)
    return values.check(), indices.check()


def sample(lib, x, seeds, *codes, tensors=(None,) * 5):
    canary = Canary(x.shape[:-1], I64)
    lib.call("sample", canary.out, x, seeds, *tensors, *codes)
    return canary.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(lib, dtype):
    for rows, cols in itertools.product((1, 3, 0), COLS):
        x = (torch.randn(rows, cols) * 4).to(dtype)
        grad = torch.randn(rows, cols).to(dtype)
        vector = torch.randn(cols).to(dtype)
        for mask, scale in ((None, 1.0), (vector, -0.7), (torch.ones(cols), 0)):
            z = x.double() * scale + (0 if mask is None else mask.double())
            y = torch.softmax(z, -1)
            out = softmax(lib, x, mask, scale)
            size = 1 + z.abs().amax(-1, keepdim=True)
            bound = y * (tolerance("softmax") * size + ROUNDING[dtype]) * 1.01 + SUBNORMAL[dtype]
            # below the range of the kernels' exp, results are 0
            assert_close(out, y, bound + 2.0**-126, f"{rows}x{cols} {scale}")
            dx = Canary(x.shape, dtype)
            lib.call("softmax_backward", dx.out, workspace(lib, x), grad, out, scale)
            y = out.double()
            dot = (grad.double() * y).sum(-1, keepdim=True)
            expected = scale * y * (grad.double() - dot)
            largest = grad.double().abs().amax(-1, keepdim=True)
            bound = (
                abs(scale) * y * largest * 2 * tolerance("softmax")
                + ROUNDING[dtype] * expected.abs()
            )
            assert_close(dx.check(), expected, bound * 1.01 + SUBNORMAL[dtype], f"dx {cols}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_softmax(lib, dtype):
    """From 12 MB the results are written past the caches; their rows start at any alignment."""
    rows, cols = (31 if dtype is torch.float32 else 61), 50257
    assert 2 * rows * cols * dtype.itemsize >= 12_000_000
    grad, y = torch.randn(2, rows, cols).to(dtype)
    for mask in (None, torch.randn(cols)):
        out = softmax(lib, y, mask)
        assert same_bits(out, torch.stack([softmax(lib, row[None], mask)[0] for row in y]))
        same = y.clone()
        lib.call("softmax", same, workspace(lib, y), same, mask, 1.0)
        assert same_bits(out, same)  # in place

    def backward(out, grad, y):
        lib.call("softmax_backward", out, workspace(lib, y), grad, y, 0.5)
        return out

    canary = Canary(y.shape, dtype)
    backward(canary.out, grad, y)
    dx = canary.check()
    one_by_one = [
        backward(torch.empty_like(g), g, r) for g, r in zip(grad.split(1), y.split(1), strict=True)
    ]
    assert same_bits(dx, torch.cat(one_by_one))
    assert same_bits(dx, backward(grad, grad, y))  # in place


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_odd_values(lib, dtype):
    rows = [
        [0.0, -INF, 1.0, 2.0],
        [-INF] * 4,
        [INF, 0.0, 1.0, -INF],
        [NAN, 0.0, 1.0, 2.0],
        [-3e4, 3e4, 0.0, -0.0],
        [-INF, -INF, -INF, 5.0],
    ]
    for repeat in (1, 9, 3000):  # past the parts of a row, too
        x = torch.tensor(rows).repeat(1, repeat).to(dtype)
        expected = torch.softmax(x.double(), -1)
        out = softmax(lib, x)
        assert torch.equal(out.isnan(), expected.isnan())
        good = ~expected.isnan()
        bound = 2 * ROUNDING[dtype] + 4 * SUBNORMAL[dtype]
        assert_close(out[good], expected[good], bound, f"{repeat}")
        assert (out[0, 1::4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_whose_maximum_rises(lib, dtype):
    """The sum goes by blocks of columns; each may raise the maximum, or hold what is not finite."""
    cols = 5003
    at = torch.arange(cols)
    x = torch.stack([at / 250.0, -at / 250.0, torch.where(at < 2000, -INF, at / 500.0)])
    x = x.to(dtype)
    y = torch.softmax(x.double(), -1)
    bound = y * (tolerance("softmax") * 22 + ROUNDING[dtype]) * 1.01 + SUBNORMAL[dtype]
    out = softmax(lib, x)
    assert_close(out, y, bound + 2.0**-126, "rising")
    for value, column in itertools.product((NAN, INF), (0, 1500, cols - 1)):
        odd = x.clone()
        odd[1:, column] = value
        mixed = softmax(lib, odd)
        assert same_bits(mixed[0], out[0]) and mixed[1:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_layouts(lib, dtype):
    base = torch.randn(3, 4, 5, 40).to(dtype)
    mask = torch.randn(3, 1, 5, 40).to(dtype)
    for x in (base[..., :24], base[:, 1:3, :, 3:20], base.transpose(0, 1), base[0, 0, 0, :7]):
        out = softmax(lib, x)
        assert same_bits(out, softmax(lib, x.contiguous()))
        flat = out.reshape(-1, out.shape[-1])
        for row in range(0, flat.shape[0], 7):  # a row alone, from the middle of the batch
            alone = x.reshape(-1, x.shape[-1])[row : row + 1]
            assert same_bits(softmax(lib, alone), flat[row : row + 1])
    masked = softmax(lib, base, mask, 0.5)
    assert same_bits(masked, softmax(lib, base, mask.expand(base.shape).contiguous(), 0.5))
    in_place = base.clone()
    lib.call("softmax", in_place, workspace(lib, base), in_place, mask, 0.5)
    assert same_bits(in_place, masked)


def ordered(x):
    """The order that argmax and topk promise, by a stable sort."""
    return torch.sort(x, dim=-1, descending=True, stable=True)[1]


def rows_for_order(dtype, cols):
    """Distinct, tied, with infinities and NaNs, -0 and 0, all equal."""
    x = torch.randn(8, cols).to(dtype)
    x[1] = torch.randint(3, (cols,)).to(dtype)
    x[2, :: max(cols // 5, 1)] = NAN
    x[3, cols // 2 :] = INF
    x[4] = -INF
    x[5] = torch.where(torch.arange(cols) % 2 == 0, -0.0, 0.0).to(dtype)
    x[6] = -(torch.rand(cols) + 1).to(dtype) * torch.finfo(dtype).smallest_normal / 2  # subnormal
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_and_topk(lib, dtype):
    for cols in [*COLS, 70000]:
        x = rows_for_order(dtype, cols)
        order = ordered(x)
        assert torch.equal(argmax(lib, x), order[:, 0]), cols
        for k in {1, min(cols, 2), min(cols, 50), min(cols, 1024), min(cols, 2048)}:
            values, indices = topk(lib, x, k)
            assert torch.equal(indices, order[:, :k]), (cols, k)
            torch.testing.assert_close(
                values, x.gather(-1, order[:, :k]), rtol=0, atol=0, equal_nan=True
            )
    strided = rows_for_order(dtype, 500).repeat(2, 2).view(2, 8, 1000)[:, ::2, 3:300]
    assert torch.equal(argmax(lib, strided), ordered(strided)[..., 0])
    assert torch.equal(topk(lib, strided, 20)[1], ordered(strided)[..., :20])
    assert argmax(lib, torch.empty(0, 5, dtype=dtype)).shape == (0,)
    assert topk(lib, torch.empty(0, 5, dtype=dtype), 3)[1].shape == (0, 3)


def rows_for_topk(dtype, cols):
    """What fills the buffer of candidates again and again, and what never does."""
    up = torch.arange(cols, dtype=torch.float32)
    x = torch.stack(
        [
            up - cols // 2,  # each element is among the greatest so far
            -up,
            up % 97,
            (up >= cols - 3).float(),  # the greatest ones last, in the row's tail
            torch.where(up % 3 == 0, NAN, up),
            torch.where(up >= cols - 60, NAN, -INF),
            torch.where(up == cols - 1, -INF, NAN),
            torch.full((cols,), -INF),
            torch.where(up == cols // 2, -0.0, 0.0),
        ]
    )
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_of_hard_rows(lib, dtype):
    for k in (1, 3, 50, 2048):
        room = 2 * k + 512  # of topk.cpp's buffer
        for cols in {max(k, 17), *range(room - 2, room + 3), room + 64, room + 67, 3 * room + 1}:
            x = rows_for_topk(dtype, cols)
            values, indices = topk(lib, x, k)
            order = ordered(x)[:, :k]
            assert torch.equal(indices, order), (cols, k)
            assert same_bits(values, x.gather(-1, order)), (cols, k)  # -0 stays -0
    x = rows_for_topk(dtype, 300_001)
    assert torch.equal(topk(lib, x, 2048)[1], ordered(x)[:, :2048])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_is_a_function_of_the_row(lib, dtype):
    x = (torch.randn(40, 3001) * 3).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (40,))
    codes = (0.8, 50, 0.9, 0.01)
    tokens = sample(lib, x, seeds, *codes)
    turn = torch.randperm(40)
    assert torch.equal(sample(lib, x[turn], seeds[turn], *codes), tokens[turn])
    for part in (slice(0, 1), slice(7, 30)):
        assert torch.equal(sample(lib, x[part], seeds[part], *codes), tokens[part])
    wide = torch.zeros(40, 3100, dtype=dtype)
    wide[:, 5:3006] = x
    assert torch.equal(sample(lib, wide[:, 5:3006], seeds, *codes), tokens)
    per_row = (
        torch.arange(40),
        torch.full((40,), 0.8),
        torch.full((40,), 50),
        torch.full((40,), 0.9),
        torch.full((40,), 0.01),
    )
    moved = sample(lib, x, seeds, 1.0, 0, 1.0, 0.0, tensors=per_row)
    assert moved[0] == tokens[0]  # position 0
    assert (moved != tokens).float().mean() > 0.3
    assert not torch.equal(sample(lib, x, seeds + 1, *codes), tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_of_sample_is_a_mask(lib, dtype):
    """The same token as from logits that are -inf where top-k cuts off: another way through."""
    cols = 9001
    x = torch.randn(8, cols)
    x[1] = -x[1].abs() - 1
    x[2] = torch.randint(4, (cols,)).float()  # thousands of ties
    x[3] *= 1e-36  # z and x subnormal, or 0 in fp16
    x[4, 7:] = -INF
    x[5] = torch.arange(cols) / 500
    x[6, ::2] = 0.0
    x[7] *= 100
    x = x.to(dtype)
    for temperature, k in itertools.product((0.3, 1.0, 1.7), (1, 50, 2048, 4000)):
        z = x.float() / torch.tensor(temperature)
        least = z.sort(-1, descending=True)[0][:, k - 1 : k]
        masked = x.masked_fill(z < least, -INF)
        for top_p, min_p in ((1.0, 0.0), (0.8, 0.0), (0.95, 0.01)):
            seeds = torch.randint(2**62, (8,))
            tokens = sample(lib, x, seeds, temperature, k, top_p, min_p)
            expected = sample(lib, masked, seeds, temperature, 0, top_p, min_p)
            assert torch.equal(tokens, expected), (temperature, k, top_p)


def test_sample_odd_values(lib):
    x = torch.tensor(
        [[0.0, 3.0, 3.0], [NAN, 5.0, 1.0], [INF, 5.0, INF], [-INF, -INF, -INF], [-INF, 2.0, -INF]]
    )
    seeds = torch.arange(5)
    expected = torch.tensor([1, 0, 0, 0, 1])
    assert torch.equal(sample(lib, x, seeds, 0.0, 0, 1.0, 0.0), expected)
    for s in range(20):
        tokens = sample(lib, x, seeds + s, 1.0, 2, 0.5, 0.0)
        assert torch.equal(tokens[1:], expected[1:])
        assert tokens[0] == 2  # of equals, top-p takes the last one first
    # fp32 logits that the temperature takes to infinity
    big = torch.tensor([[1e38, 3e38, 2e38]])
    assert sample(lib, big, seeds[:1], 1e-3, 0, 1.0, 0.0).item() == 1
    # per row: below 0 and NaN are as documented
    odd = torch.tensor([-1.0, NAN, 0.0, -INF, 1.0])
    tensors = (None, odd, None, None, None)
    assert torch.equal(sample(lib, x, seeds, 1.0, 0, 1.0, 0.0, tensors=tensors), expected)
    tensors = (None, None, torch.tensor([-5, 0, 99, 1, 1]), odd, None)
    tokens = sample(lib, x, seeds, 1.0, 0, 1.0, 0.0, tensors=tensors)
    assert torch.equal(tokens[1:], expected[1:])


X, W = torch.zeros(4, 8), torch.zeros(0, dtype=I64)
OUT, IDX = torch.zeros(4, 8), torch.zeros(4, dtype=I64)
NONE5 = (None,) * 5
CODES = (1.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("softmax", OUT, W, X, None, NAN), ["`scale`", "nan"]),
        (("softmax", OUT, W, X, X[:, :3], 1.0), ["`mask`", "[4, 3]"]),
        (("softmax", OUT, W, X, X.double(), 1.0), ["`mask`", "float64"]),
        (("softmax", OUT.half(), W, X, None, 1.0), ["`out`", "float32", "float16"]),
        (("softmax", OUT, IDX, X, None, 1.0), ["`workspace`", "[0]", "[4]"]),
        (("softmax", OUT, None, X, None, 1.0), ["`workspace`", "NULL"]),
        (("softmax_backward", OUT, W, X[:2], X, 1.0), ["`y`", "`grad`"]),
        (("softmax_backward", OUT, W, X, X.half(), 1.0), ["float16"]),
        (("argmax", IDX, W, X[0]), ["`x`", "2 dimensions"]),
        (("argmax", IDX, W, X[:, :0]), ["`x`", "at least one column"]),
        (("argmax", IDX.int(), W, X), ["`out`", "int64", "int32"]),
        (("argmax", IDX[:3], W, X), ["`out`", "[4]", "[3]"]),
        (("topk", OUT, OUT.long(), X, 9), ["`k`", "between 1 and 8", "got 9"]),
        (("topk", OUT, OUT.long(), X, 0), ["`k`", "got 0"]),
        (("topk", OUT, OUT.long(), X, 3), ["`values`", "[4, 3]"]),
        (("topk", OUT, OUT, X, 8), ["`indices`", "int64"]),
        (("sample", IDX, X, IDX.int(), *NONE5, *CODES), ["`seeds`", "int64"]),
        (("sample", IDX, X, IDX[:1], *NONE5, *CODES), ["`seeds`", "[4]"]),
        (("sample", IDX, X, IDX, None, IDX, None, None, None, *CODES), ["`temperatures`"]),
        (("sample", IDX, X, IDX, None, None, X[:, 0], None, None, *CODES), ["`top_ks`", "int64"]),
        (("sample", IDX, X, IDX, *NONE5, -1.0, 0, 1.0, 0.0), ["`temperature`", "-1"]),
        (("sample", IDX, X, IDX, *NONE5, 1.0, -3, 1.0, 0.0), ["`top_k`", "-3"]),
        (("sample", IDX, X, IDX, *NONE5, 1.0, 0, 1.5, 0.0), ["`top_p`", "1.5"]),
        (("sample", IDX, X, IDX, *NONE5, 1.0, 0, 1.0, NAN), ["`min_p`", "nan"]),
    ],
)
def test_bad_input(built, call, words):
    library = Library(built)
    name, *arguments = call
    assert library.status(name, *arguments) == INVALID
    message = library.last_error()
    assert message.startswith(f"hfp_{name}: `"), message
    assert all(word in message for word in words), message


def test_workspace_is_asked_for_where_rows_are_few_and_wide(built):
    size = Library(built).dll.hfp_row_workspace
    assert size(1, 128256) == math.ceil(128256 / 2048)
    assert size(256, 16384) == 256 * 8
    assert size(257, 128256) == size(1, 16383) == size(0, 128256) == 0
    assert size(1, 2**31) <= 1024
