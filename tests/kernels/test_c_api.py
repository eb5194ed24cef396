"""The C interface on the CPU: numbers against fp64, rounding points, memory, bad input.

The library is built from the sources once per session and loaded once per instruction set.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from pathlib import Path

import c_api
import emulated
import pytest
import torch
from c_api import CONSTANTS, Library, dltensor, int64_array
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
NONE, INPUT, WEIGHT = (CONSTANTS["HFP_CAST_" + name] for name in ("NONE", "INPUT", "WEIGHT"))
ERF, TANH, SIGMOID, SILU, RELU = range(CONSTANTS["HFP_ACT_COUNT"])
INVALID = CONSTANTS["HFP_INVALID_ARGUMENT"]
COLS = [1, 3, 17, 127, 128, 1000, 2048, 4097]
ROWS = [1, 7, 64, 0]


X86 = platform.machine() in ("x86_64", "AMD64")


#: A build for aarch64 to run instead, in an emulator: see `run_emulated.py`.
EMULATED = os.environ.get("HFPATCH_TEST_EMULATED")
LEVELS = ["aarch64"] if EMULATED else ["baseline", "avx2", "avx512"] if X86 else ["baseline"]


@pytest.fixture(scope="session")
def built() -> Path:
    if EMULATED:
        pytest.skip("calls a library of this machine's own")
    library = c_api.built_library()
    if library is None:
        pytest.skip("no C++ compiler: set CXX, or install g++")
    return library


@pytest.fixture(scope="session", params=LEVELS)
def lib(request) -> Library:
    """The library held to one instruction set."""
    if EMULATED:
        return emulated.library(EMULATED)
    library = c_api.held_to(request.getfixturevalue("built"), request.param)
    if library is None:
        pytest.skip(f"this CPU has no {request.param}")
    return library


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(int(os.environ.get("HFPATCH_TEST_SEED", "0")))


class Canary:
    """A contiguous `out` between two stretches of memory that must not change."""

    MARGIN = 64

    def __init__(self, shape, dtype):
        numel = math.prod(shape)
        self.all = torch.full((numel + 2 * self.MARGIN,), -7.0, dtype=dtype)
        self.out = self.all[self.MARGIN : self.MARGIN + numel].view(shape)

    def check(self):
        edges = torch.cat([self.all[: self.MARGIN], self.all[-self.MARGIN :]])
        assert (edges == -7.0).all(), "wrote outside of `out`"
        return self.out


def call(lib, name, *args, shape=None, dtype=None):
    """The op's result in a fresh `out` with canaries."""
    first = args[0]
    canary = Canary(shape or first.shape, dtype or first.dtype)
    lib.call(name, canary.out, *args)
    return canary.check()


def same_bits(a, b):
    kind = torch.int32 if a.dtype == F32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# --- rms_norm ---------------------------------------------------------------------------------


def rms_result(x, weight, cast):
    if weight is None or cast == NONE:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype) if cast == INPUT else weight.dtype


def rms_reference(x, weight, bias, eps, offset, cast):
    """fp64 value, and the bound that the rounding points of the header allow."""
    x64 = x.double()
    y = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)
    out_type = rms_result(x, weight, cast)
    size = y.abs() * (1 if weight is None else (weight.double() + offset).abs())
    bound = tolerance("norm") * size
    if weight is not None:
        y = y * (weight.double() + offset)
        if cast != NONE:
            hat = x.dtype if cast == INPUT else weight.dtype
            # xhat, and the product before a bias, are rounded on the way
            bound = bound + (ROUNDING[hat] + ROUNDING[out_type]) * size
            bound = bound + SUBNORMAL[hat] * weight.double().abs() + SUBNORMAL[out_type]
    if bias is not None:
        y = y + bias.double()
        bound = bound + tolerance("norm") * bias.double().abs()
    bound = bound + (ROUNDING[out_type] * (y.abs() + bound) + SUBNORMAL[out_type])
    return y, bound, out_type


def check_rms(lib, x, weight, bias, offset, cast, eps=1e-6):
    expected, bound, out_type = rms_reference(x, weight, bias, eps, offset, cast)
    out = call(lib, "rms_norm", x, weight, bias, eps, offset, cast, dtype=out_type)
    what = f"{tuple(x.shape)} {x.dtype} weight {weight is not None and weight.dtype} cast {cast}"
    assert_close(out, expected, bound, what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_shapes(lib, dtype):
    for rows, cols in itertools.product(ROWS, COLS):
        x = torch.randn(rows, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=dtype)
        check_rms(lib, x, weight, None, 0.0, INPUT)
        check_rms(lib, x, None, None, 0.0, NONE)
        check_rms(lib, x, weight, bias, 1.0, NONE)


@pytest.mark.parametrize("weight_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_casts_and_mixed_dtypes(lib, dtype, weight_type):
    for cols in (5, 64, 200):
        x = torch.randn(9, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=weight_type)
        for cast, b in itertools.product((NONE, INPUT, WEIGHT), (None, bias)):
            for offset in (0.0, 1.0) if cast == NONE else (0.0,):
                check_rms(lib, x, weight, b, offset, cast)
        check_rms(lib, x, None, bias, 0.0, WEIGHT)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rms_norm_rounds_where_eager_does(lib, dtype):
    """A wrong rounding point changes about a quarter of the results; fp32 noise, almost none."""
    x, weight, bias = torch.randn(64, 576, dtype=dtype), *torch.randn(2, 576, dtype=dtype)
    hat32 = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wide = weight.float()
    eager = {
        (NONE, F32): (hat32 * wide).to(dtype),
        (INPUT, dtype): weight * hat32.to(dtype),
        (INPUT, F32): wide * hat32.to(dtype),
        (WEIGHT, dtype): hat32.to(dtype) * weight,
        (WEIGHT, F32): hat32 * wide,
    }
    for (cast, weight_type), expected in eager.items():
        w = weight.to(weight_type)
        out = call(lib, "rms_norm", x, w, None, 1e-6, 0.0, cast, dtype=expected.dtype)
        if expected.dtype == F32:
            assert ((out / expected - 1).abs() > 1e-6).float().mean() < 0.01, (cast, weight_type)
        else:
            assert (out != expected).float().mean() < 0.01, (cast, weight_type)
    out = call(lib, "rms_norm", x, weight, bias, 1e-6, 0.0, WEIGHT)
    assert (out != hat32.to(dtype) * weight + bias).float().mean() < 0.01
    # the test can tell the rules apart
    assert (eager[NONE, F32] != eager[INPUT, dtype]).float().mean() > 0.05


def test_rms_norm_eps(lib):
    x = torch.randn(4, 64) * 1e-3
    for eps in (0.0, 1e-12, 1e-5, 1.0):
        check_rms(lib, x, None, None, 0.0, NONE, eps=eps)
    assert call(lib, "rms_norm", torch.zeros(2, 8), None, None, 1e-6, 0.0, NONE).eq(0).all()
    assert call(lib, "rms_norm", torch.zeros(2, 8), None, None, 0.0, 0.0, NONE).isnan().all()


# --- layer_norm -------------------------------------------------------------------------------


def check_layer(lib, x, weight, bias, eps=1e-5):
    x64 = x.double()
    d = x64 - x64.mean(-1, keepdim=True)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    size = y.abs()
    if weight is not None:
        y, size = y * weight.double(), size * weight.double().abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    bound = tolerance("norm") * (size + size.mean(-1, keepdim=True))
    bound = bound + ROUNDING[x.dtype] * (y.abs() + bound) + SUBNORMAL[x.dtype]
    out = call(lib, "layer_norm", x, weight, bias, eps)
    assert_close(out, y, bound, f"{tuple(x.shape)} {x.dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_shapes(lib, dtype):
    for rows, cols in itertools.product(ROWS, COLS):
        x = torch.randn(rows, cols, dtype=dtype) + 2
        weight, bias = torch.randn(2, cols, dtype=dtype)
        check_layer(lib, x, weight, bias)
        check_layer(lib, x, None, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_mixed_dtypes(lib, dtype):
    x = torch.randn(5, 77, dtype=dtype)
    for w, b in itertools.product([None, *DTYPES], [None, *DTYPES]):
        weight = None if w is None else torch.randn(77, dtype=w)
        bias = None if b is None else torch.randn(77, dtype=b)
        check_layer(lib, x, weight, bias)


def test_layer_norm_large_mean(lib):
    """The mean is a million standard deviations away; every digit that fp32 input has is kept."""
    check_layer(lib, torch.randn(3, 1000).mul_(0.01).add_(1e4), None, None, eps=1e-12)
    assert call(lib, "layer_norm", torch.full((2, 999), 0.1), None, None, 1e-5).eq(0).all()
    # Squares beyond fp32, but not those of the deviations.
    check_layer(lib, torch.randn(3, 1000).mul_(3e16).add_(3e19), None, None)


# --- activations ------------------------------------------------------------------------------


def activate64(x, activation):
    x = x.double()
    if activation == ERF:
        return 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5))
    if activation == TANH:
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    if activation == SIGMOID:
        return x * torch.sigmoid(1.702 * x)
    return x * torch.sigmoid(x) if activation == SILU else x.clamp_min(0)


def eager(x, activation):
    functional = torch.nn.functional
    if activation == SIGMOID:
        return x * torch.sigmoid(1.702 * x)
    return {
        ERF: functional.gelu,
        TANH: lambda t: functional.gelu(t, approximate="tanh"),
        SILU: functional.silu,
        RELU: functional.relu,
    }[activation](x)


def run_activation(lib, x, activation):
    if activation == RELU:  # no entry of its own: relu(x) * 1
        return call(lib, "gated", x, torch.ones_like(x), RELU)
    if activation == SILU:
        return call(lib, "silu", x)
    return call(lib, "gelu", x, activation)


def activation_bound(x, y, activation, dtype):
    exact = activation == RELU
    bound = 0 if exact else tolerance("activation", dtype) * x.double().abs()
    return bound + ROUNDING[dtype] * y.abs() * 1.02 + SUBNORMAL[dtype]


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_over_the_whole_range(lib, dtype, activation):
    if dtype == F32:
        exponents = torch.logspace(-44, 38, 20_001, dtype=torch.float64).float()
        x = torch.cat([torch.linspace(-120, 120, 200_003), exponents, -exponents])
    else:  # every finite value
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite()]
    y = activate64(x, activation)
    out = run_activation(lib, x, activation)
    assert_close(out, y, activation_bound(x, y, activation, dtype), f"activation {activation}")


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_is_no_worse_than_eager(lib, dtype, activation):
    x = (torch.randn(200_000) * 3).to(dtype)
    y = activate64(x, activation)
    ours = (run_activation(lib, x, activation).double() - y).abs()
    theirs = (eager(x, activation).double() - y).abs()
    assert ours.mean() <= theirs.mean() * 1.05
    assert ours.max() <= theirs.max() + (ROUNDING[dtype] * y.abs()).max()


def test_gelu_erf_keeps_its_left_tail(lib):
    """1 + erf(x) has no correct digit below -5.5; the kernel's tail has at least 4 down to -13."""
    x = torch.linspace(-13, -3, 10_001)
    error = (call(lib, "gelu", x, ERF).double() / activate64(x, ERF) - 1).abs()
    assert error.max() < 1e-4


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_as_eager(lib, dtype, activation):
    # In fp64: the AVX-512 erf gelu of torch 2.13 makes NaN of +inf in fp32 and bf16 only.
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0] * 9, dtype=dtype)
    out, expected = run_activation(lib, x, activation), eager(x.double(), activation).to(dtype)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=0, equal_nan=True)
    zero = out == 0
    assert torch.equal(zero, expected == 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_nan_and_infinity_as_eager(lib, dtype):
    x = torch.randn(5, 70, dtype=dtype)
    x[1, 3], x[2, 60], x[3, 0] = math.nan, math.inf, -math.inf
    weight = torch.randn(70, dtype=dtype)
    wide = x.float()
    hat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    out = call(lib, "rms_norm", x, weight, None, 1e-6, 0.0, INPUT)
    torch.testing.assert_close(out, weight * hat.to(dtype), rtol=2e-2, atol=1e-2, equal_nan=True)
    expected = torch.nn.functional.layer_norm(x, (70,), weight)
    out = call(lib, "layer_norm", x, weight, None, 1e-5)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_shapes(lib, dtype, activation):
    for rows, cols in itertools.product((1, 7, 0), COLS):
        packed = torch.randn(rows, 2 * cols, dtype=dtype)
        first, second = packed[:, :cols], packed[:, cols:]
        for gate, up, gate_first in ((first, second, 1), (second, first, 0)):
            act = activate64(gate, activation)
            y = act * up.double()
            bound = activation_bound(gate, act, activation, dtype) * up.double().abs()
            bound = bound + ROUNDING[dtype] * (y.abs() + bound) + SUBNORMAL[dtype]
            pair = call(lib, "gated", gate.contiguous(), up.contiguous(), activation)
            assert_close(pair, y, bound, f"gated {rows}x{cols}")
            halves = call(lib, "gated_packed", packed, activation, gate_first, shape=(rows, cols))
            assert same_bits(pair, halves)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gated_rounds_the_activation_first(lib, dtype):
    gate, up = torch.randn(2, 100_000, dtype=dtype)
    once = (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype)
    twice = torch.nn.functional.silu(gate) * up
    out = call(lib, "gated", gate, up, SILU)
    assert (out != twice).float().mean() < 0.005
    assert (once != twice).float().mean() > 0.05


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_conversions_are_exact(lib, dtype):
    """relu passes every half value through unchanged, and rounds fp32 as torch does."""
    x = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = run_activation(lib, x, RELU)
    assert same_bits(out[x.isfinite()], x[x.isfinite()])
    assert torch.equal(out.isnan(), x.isnan())
    wide = torch.randint(0, 0x7F800000, (100_000,), dtype=torch.int32).view(F32)
    # With a weight of 0 and an fp32 bias, rms_norm is the bias rounded to the dtype of x.
    wide[:4] = torch.tensor([0.0, math.inf, 1e-45, 65519.9])
    ones, zeros = torch.ones(1, wide.numel(), dtype=dtype), torch.zeros(wide.numel())
    out = call(lib, "rms_norm", ones, zeros, wide, 1e-6, 0.0, NONE)
    assert same_bits(out[0], wide.to(dtype))


# --- strides, aliasing, threads ---------------------------------------------------------------


def views(dtype):
    """Strided inputs whose last dimension has stride 1."""
    base = torch.randn(3, 4, 5, 6, 64, dtype=dtype)
    yield "sliced columns", base[..., 8:47]
    yield "every other row", base[:, :, :, ::2]
    yield "transposed", base.permute(0, 2, 1, 3, 4)[:, :, :, 0]
    yield "expanded", base[0, 0, 0, 0].expand(7, 64)
    yield "three strides", base[:, ::2, :, 1:4].permute(2, 0, 3, 1, 4)[0]
    yield "misaligned", base.flatten()[1:641].view(10, 64)
    yield "one column", base[..., :1]
    yield "vector", base[0, 0, 0, 0, 3:50]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_equals_contiguous(lib, dtype):
    for what, x in views(dtype):
        cols = x.shape[-1]
        weight, up = torch.randn(cols, dtype=dtype), torch.randn(x.shape, dtype=dtype)
        calls = [
            ("rms_norm", (weight, None, 1e-6, 0.0, INPUT)),
            ("layer_norm", (weight, weight, 1e-5)),
            ("silu", ()),
            ("gelu", (TANH,)),
            ("gated", (up, SILU)),
        ]
        for name, rest in calls:
            strided = call(lib, name, x, *rest)
            assert same_bits(strided, call(lib, name, x.contiguous(), *rest)), (what, name)
        assert same_bits(
            call(lib, "gated", up, x, SILU), call(lib, "gated", up, x.contiguous(), SILU)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(lib, dtype):
    for cols in (17, 1000):
        x, up = torch.randn(2, 9, cols, dtype=dtype)
        weight = torch.randn(cols, dtype=dtype)
        for name, rest in [
            ("rms_norm", (weight, None, 1e-6, 0.0, INPUT)),
            ("layer_norm", (weight, None, 1e-5)),
            ("gelu", (ERF,)),
            ("silu", ()),
            ("gated", (up, RELU)),
        ]:
            expected, inside = call(lib, name, x, *rest), x.clone()
            lib.call(name, inside, inside, *rest)
            assert same_bits(inside, expected), name
        inside = up.clone()
        lib.call("gated", inside, x, inside, SILU)
        assert same_bits(inside, call(lib, "gated", x, up, SILU))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_split(lib, dtype):
    x, up = torch.randn(2, 257, 1003, dtype=dtype)  # enough for several threads
    weight = torch.randn(1003, dtype=dtype)
    before = torch.get_num_threads()
    for name, rest in [
        ("rms_norm", (weight, None, 1e-6, 0.0, INPUT)),
        ("layer_norm", (weight, weight, 1e-5)),
        ("gelu", (ERF,)),
        ("silu", ()),
        ("gated", (up, TANH)),
    ]:
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(call(lib, name, x, *rest))
        finally:
            torch.set_num_threads(before)
        assert all(same_bits(results[0], other) for other in results[1:]), name
        for begin, end in ((0, 1), (1, 5), (200, 257)):
            part = tuple(r[begin:end] if r is up else r for r in rest)
            alone = call(lib, name, x[begin:end], *part)
            assert same_bits(alone, results[0][begin:end]), name


def test_null_strides_and_byte_offset(lib):
    x, out = torch.randn(6, 8), torch.empty(4, 8)
    expected = call(lib, "silu", x[2:])
    view, result = dltensor(x), dltensor(out)
    view.strides = result.strides = None
    view.byte_offset = 2 * 8 * x.element_size()
    view.shape = int64_array(out.shape)
    lib.call("silu", result, view)
    assert same_bits(out, expected)
