"""`group_norm` on the CPU: against fp64, layouts, statistics, gradients, errors."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import KernelError
from test_c_api import (
    DTYPES,
    F32,
    Canary,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    lib,  # noqa: F401
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance
from torch import Tensor

from hfpatch.ops import OPS

# samples, channels, positions, groups
SHAPES = [
    (1, 1, 1, 1),
    (2, 32, 1, 32),
    (2, 6, 35, 3),
    (1, 40, 64, 4),
    (3, 64, 17, 32),
    (1, 30, 300, 2),
    (0, 8, 4, 2),
    (2, 8, 0, 2),
    (1, 64, 4099, 2),
    # of NHWC the CPU computes groups of up to 512 channels together: two such runs and the rest of
    # one, a group that is one by itself, and one that is too wide
    (2, 1056, 7, 96),
    (1, 1029, 67, 3),
    (1, 640, 9, 1),
]


def group_call(lib, x, weight, bias, groups, eps=1e-5, silu=0, last=0):
    """(result, statistics) through the C function."""
    channels, positions = (x.shape[2], x.shape[1]) if last else (x.shape[1], x.shape[2])
    parts = lib.dll.hfp_group_parts(channels, positions, groups, last)
    out, stats = Canary(x.shape, x.dtype), Canary((x.shape[0], groups, parts + 1, 2), F32)
    lib.call("group_norm", out.out, stats.out, x, weight, bias, groups, eps, silu, last)
    return out.check(), stats.check()


def group64(x, weight, bias, groups, eps, silu):
    """fp64 value for [N, C, S], and the bound that the rounding points of the header allow."""
    dtype, y = x.dtype, x.double()
    grouped = y.reshape(x.shape[0], groups, -1)
    grouped = grouped - grouped.mean(-1, keepdim=True)
    y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).view(x.shape)
    error = tolerance("norm") * (y.abs() + 1)
    if weight is not None:
        y, error = y * weight.double()[:, None], error * weight.double().abs()[:, None]
    if bias is not None:
        y = y + bias.double()[:, None]
        error = error + ROUNDING[F32] * y.abs()
    error = error + ROUNDING[dtype] * (y.abs() + error) + SUBNORMAL[dtype]
    if silu:
        value = y * torch.sigmoid(y)
        # the slope of silu is at most 1.1
        error = 1.1 * error + tolerance("activation", dtype) * y.abs()
        y = value
        error = error + ROUNDING[dtype] * (y.abs() + error) + SUBNORMAL[dtype]
    return y, error


@pytest.mark.parametrize("last", [0, 1], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("silu", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(lib, dtype, silu, last):
    for samples, channels, positions, groups in SHAPES:
        x = (torch.randn(samples, channels, positions) * 3 + 5).to(dtype)
        for parameter in DTYPES:
            weight, bias = torch.randn(2, channels).to(parameter)
            for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
                given = x.transpose(1, 2).contiguous() if last else x
                out, stats = group_call(lib, given, w, b, groups, 1e-5, silu, last)
                out = out.transpose(1, 2) if last else out
                if x.numel() == 0:
                    continue
                y, bound = group64(x, w, b, groups, 1e-5, silu)
                assert_close(out, y, bound, f"{tuple(x.shape)} in {groups} groups")
                grouped = x.double().reshape(samples, groups, -1)
                rstd = torch.rsqrt(grouped.var(-1, correction=0) + 1e-5)
                torch.testing.assert_close(
                    stats[:, :, -1].double(),
                    torch.stack((grouped.mean(-1), rstd), -1),
                    rtol=4e-6,
                    atol=4e-6,
                )


@pytest.mark.parametrize("last", [0, 1], ids=["NCHW", "NHWC"])
def test_large_offset_costs_no_digits(lib, last):
    x = torch.randn(2, 8, 500) + 10000
    given = x.transpose(1, 2).contiguous() if last else x
    out, _ = group_call(lib, given, None, None, 2, last=last)
    out = out.transpose(1, 2) if last else out
    y, _ = group64(x, None, None, 2, 1e-5, 0)
    assert (out - y).abs().max() < 1e-3  # the spacing of fp32 at 10000
    constant, stats = group_call(lib, torch.full((1, 4, 9), 3.3), None, None, 2)
    assert (constant == 0).all() and stats[0, 0, -1, 1] == torch.tensor(1e-5).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_before_the_activation(lib, dtype):
    x, (w, b) = torch.randn(2, 64, 300).to(dtype), torch.randn(2, 64).to(dtype)
    out, _ = group_call(lib, x, w, b, 8, silu=1)
    expected = F.silu(group_call(lib, x, w, b, 8)[0])
    assert (out != expected).float().mean() < 0.01
    once = F.silu(group_call(lib, x.float(), w, b, 8)[0]).to(dtype)
    assert (once != expected).float().mean() > 0.05  # the test can tell them apart


@pytest.mark.parametrize("last", [0, 1], ids=["NCHW", "NHWC"])
def test_nan_stays_in_its_group_and_batch_does_not_matter(lib, last):
    def call(x):
        given = x.transpose(1, 2).contiguous() if last else x
        out, _ = group_call(lib, given, None, None, 4, silu=1, last=last)
        return out.transpose(1, 2).contiguous() if last else out

    x = torch.randn(3, 8, 40)
    whole = call(x)
    for i in range(3):
        assert same_bits(call(x[i : i + 1]), whole[i : i + 1])
    x[1, 3, 7] = float("nan")
    out = call(x)
    assert out[1, 2:4].isnan().all()
    out[1, 2:4], whole[1, 2:4] = 0, 0
    assert same_bits(out, whole)
    in_place = torch.randn(2, 40, 8) if last else torch.randn(2, 8, 40)
    expected, stats = group_call(lib, in_place, None, None, 4, last=last)
    lib.call("group_norm", in_place, stats, in_place, None, None, 4, 1e-5, 0, last)
    assert same_bits(in_place, expected)


@pytest.mark.parametrize("last", [0, 1], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", [96, 1056])
def test_threads_change_no_bit(lib, channels, last):
    """Which groups one thread computes together is another split."""
    shape = (2, 600, channels) if last else (2, channels, 600)
    x, found = torch.randn(shape), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(group_call(lib, x, None, None, 32 if channels == 96 else 96, last=last))
    finally:
        torch.set_num_threads(before)
    for out, stats in found[1:]:
        assert same_bits(out, found[0][0]) and same_bits(stats, found[0][1])


def test_bad_calls(lib):
    x, w = torch.ones(2, 12, 4), torch.ones(12)
    stats = torch.ones(2, 3, 2, 2)
    for args, message in (
        ((x, w, w, 5, 1e-5, 0, 0), r"`groups` must be at least 1 and divide .* \(12\), got 5"),
        ((x, w, w, 0, 1e-5, 0, 0), r"`groups` must be at least 1"),
        ((x, w, w, 3, 1e-5, 0, 1), r"`groups` must be at least 1 and divide .* \(4\), got 3"),
        ((x, w, w, 3, -1.0, 0, 0), r"`eps` must be finite and >= 0"),
        ((x, w, w, 3, 1e-5, 2, 0), r"`silu` must be 0 or 1, got 2"),
        ((x, w, w, 3, 1e-5, 0, 2), r"`channels_last` must be 0 or 1, got 2"),
        ((x, w[:4], w, 3, 1e-5, 0, 0), r"`weight` must have shape \[12\]"),
        ((x, w, w.half(), 3, 1e-5, 0, 0), r"`bias` must have the dtype of `weight`"),
        ((x[..., 0], w, w, 3, 1e-5, 0, 0), r"`x` must have stride 1 in its last dimension"),
        ((torch.ones(2, 12, 8)[..., :4], w, w, 3, 1e-5, 0, 0), r"`x` must be contiguous"),
        ((x[0], w, w, 3, 1e-5, 0, 0), r"`x` must be contiguous and have 3 dimensions"),
    ):
        out = torch.full(args[0].shape, 7.0)
        with pytest.raises(KernelError, match=message):
            lib.call("group_norm", out, stats, *args)
        assert (out == 7).all()
    with pytest.raises(KernelError, match=r"`stats` must have shape \[2, 3, 2, 2\]"):
        lib.call("group_norm", torch.empty_like(x), stats[:, :2], x, w, w, 3, 1e-5, 0, 0)


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_function(
    dtype: torch.dtype, silu: bool, last: bool, kernels_module: ModuleType
) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    plain = [randn(2, 9, 32) if last else randn(2, 32, 9), randn(32), randn(32)]
    tail = (8, 1e-5, silu, last)
    y = kernels_module.group_norm(*plain, *tail)
    assert y.is_contiguous()
    leaves = [t.clone().requires_grad_() for t in plain]
    formula = kernels_module.group_norm(*leaves, *tail)
    op = OPS["group_norm"]
    eps = tolerance("torch norm", dtype)  # half types: a few start from a neighbour
    for other in (formula.detach(), op.reference(*plain, *tail), op.aten(*plain, *tail)):
        assert other.dtype == y.dtype == dtype
        torch.testing.assert_close(y, other, rtol=eps, atol=4e-6)
    grads = torch.autograd.grad(formula.float().square().sum(), leaves)
    wide = [t.double().requires_grad_() for t in plain]
    truth = torch.autograd.grad(op.reference(*wide, *tail).square().sum(), wide)
    for a, e in zip(grads, truth, strict=True):
        assert (a.double() - e).abs().max() <= 16 * max(1e-6, eps) * e.abs().max()


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_no_channels(last: bool, kernels_module: ModuleType) -> None:
    """Any number of groups divides none: an empty result, as PyTorch's."""
    x = torch.ones(3, 4, 0) if last else torch.ones(3, 0, 4)
    codes = (2, 1e-5, 0, int(last))
    for weight in (None, torch.ones(0)):
        y = kernels_module.group_norm(x, weight, weight, 2, channels_last=last)
        plain = kernels_module.calls.bind("group_norm", codes)(x, weight, weight)
        assert y.shape == plain.shape == x.shape
        # Without the comparison of values: nothing writes the statistics.
        only = ("test_schema", "test_faketensor")
        operator = kernels_module.ops.group_norm.default
        torch.library.opcheck(operator, (x, weight, weight, *codes), test_utils=only)


def test_channels_last_takes_no_multiple_of_the_time(kernels_module: ModuleType) -> None:
    """A group has two to four channels at a position: computed one by one, 8 to 30 times."""
    weight = torch.ones(64)

    def least(shape: tuple[int, ...], last: bool) -> float:
        x, times = torch.randn(shape), []
        for _ in range(7):
            start = time.thread_time()
            kernels_module.group_norm(x, weight, weight, 32, channels_last=last)
            times.append(time.thread_time() - start)
        return min(times)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert least((1, 4096, 64), True) < 4 * least((1, 64, 4096), False)
    finally:
        torch.set_num_threads(before)
