"""`group_norm` on CUDA: against the formula in fp64, layouts, alignment, bits, graphs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# samples, channels, positions, groups: vectors and none, all kernels over channels-last rows
SHAPES = [
    (1, 1, 1, 1),
    (2, 32, 1, 32),
    (3, 30, 35, 3),
    (2, 320, 4096, 32),
    (2, 1280, 64, 32),
    (1, 2560, 256, 32),
    (1, 5120, 33, 32),
    (1, 128, 65536, 32),
    (2, 36, 1001, 4),
    (1, 16, 524288, 1),  # 16 MB of a half type
    (
        2,
        1920,
        640,
        32,
    ),  # channels last: slabs of groups; then all of them
    (3, 72, 777, 9),
    (1, 2048, 100, 1),
    (1, 8192, 50, 1),  # more than a CTA takes
    (2, 96, 5000, 32),
]


def given(
    shape: tuple[int, int, int, int], dtype: torch.dtype, parameter: torch.dtype, last: bool
) -> list[Tensor]:
    samples, channels, positions, _ = shape
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(samples, channels, positions, device="cuda", generator=g) * 2 + 3
    weight, bias = torch.randn(2, channels, device="cuda", generator=g).to(parameter)
    x = x.to(dtype)
    return [x.transpose(1, 2).contiguous() if last else x, weight, bias]


def assert_near(actual: Tensor, args: list[Tensor], *tail: object) -> None:
    truth = OPS["group_norm"].reference(*(t.double() for t in args), *tail)
    scale = 1 + truth.abs()
    assert actual.shape == args[0].shape and actual.is_contiguous()
    error = ((actual.double() - truth).abs() / scale).max()
    assert error <= tolerance("cuda group norm", actual.dtype)


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(
    kernels_module: ModuleType, dtype: torch.dtype, silu: bool, last: bool
) -> None:
    for shape in SHAPES:
        if shape[1] // shape[3] * shape[2] == 1:
            continue  # 0 * rsqrt(eps): rounding noise only
        for parameter in DTYPES:
            args = given(shape, dtype, parameter, last)
            tail = (shape[3], 1e-5, silu, last)
            assert_near(kernels_module.group_norm(*args, *tail), args, *tail)
        odd = torch.empty(args[0].numel() + 1, dtype=dtype, device="cuda")[1:]
        x = odd.copy_(args[0].flatten()).view(args[0].shape)  # misaligned
        assert_near(kernels_module.group_norm(x, *args[1:], *tail), [x, *args[1:]], *tail)
        assert_near(
            kernels_module.group_norm(args[0], None, None, *tail),
            [args[0], torch.ones_like(args[1]), torch.zeros_like(args[2])],
            *tail,
        )


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_large_offset_and_constants(kernels_module: ModuleType, last: bool) -> None:
    x = torch.randn(2, 64, 4096, device="cuda") + 10000
    x = x.transpose(1, 2).contiguous() if last else x
    y = kernels_module.group_norm(x, None, None, 4, 1e-5, False, last)
    truth = OPS["group_norm"].reference(x.double(), None, None, 4, 1e-5, False, last)
    assert (y - truth).abs().max() < 2e-3  # the spacing of fp32 at 10000
    x = torch.full_like(x, 3.3)
    assert (kernels_module.group_norm(x, None, None, 4, 1e-5, False, last) == 0).all()


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_same_bits(kernels_module: ModuleType, last: bool) -> None:
    args = given((4, 320, 1024, 32), torch.bfloat16, torch.bfloat16, last)
    tail = (32, 1e-5, True, last)
    y = kernels_module.group_norm(*args, *tail)
    assert torch.equal(kernels_module.group_norm(*args, *tail), y)
    alone = kernels_module.group_norm(args[0][2:3], *args[1:], *tail)
    assert torch.equal(alone, y[2:3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels_module.group_norm(*args, *tail)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, y)


@pytest.mark.parametrize("shape", [(5, 256, 16384, 8), (3, 48, 131072, 4)], ids=str)
def test_groups_in_more_than_one_wave(
    kernels_module: ModuleType, shape: tuple[int, int, int, int]
) -> None:
    args = given(shape, torch.bfloat16, torch.bfloat16, last=False)
    tail = (shape[3], 1e-5, True, False)
    y = kernels_module.group_norm(*args, *tail)
    assert_near(y, args, *tail)
    assert torch.equal(kernels_module.group_norm(*args, *tail), y)
    alone = kernels_module.group_norm(args[0][1:2], *args[1:], *tail)
    assert torch.equal(alone, y[1:2])


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_nan_stays_in_its_group(kernels_module: ModuleType, last: bool) -> None:
    x, w, b = given((2, 64, 256, 8), torch.float32, torch.float32, last)
    first = x.transpose(1, 2) if last else x
    first[1, 20, 100] = float("nan")
    y = kernels_module.group_norm(x, w, b, 8, 1e-5, True, last)
    y = y.transpose(1, 2) if last else y
    assert y[1, 16:24].isnan().all()
    assert int(y.isnan().sum()) == 8 * 256
