"""The C interface on the CPU: numbers against fp64, rounding points, memory, bad input.

The library is built from the sources once per session and loaded once per instruction set.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import c_api
from c_api import CONSTANTS, DLDataType, DLDevice, DLTensor, Library, dltensor, int64_array

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
NONE, INPUT, WEIGHT = (CONSTANTS["HFP_CAST_" + name] for name in ("NONE", "INPUT", "WEIGHT"))
ERF, TANH, SIGMOID, SILU, RELU = range(CONSTANTS["HFP_ACT_COUNT"])
INVALID = CONSTANTS["HFP_INVALID_ARGUMENT"]
COLS = [1, 3, 17, 127, 128, 1000, 2048, 4097]
ROWS = [1, 7, 64, 0]

# Half a unit in the last place, relative: one rounding to the dtype costs at most this.
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
# Half the smallest subnormal: the same where the result is too small for a full significand.
SUBNORMAL = {F32: 2.0**-150, F16: 2.0**-25, BF16: 2.0**-134}
# Roundings of fp32 arithmetic inside a kernel, relative to the size of what is added up. Norms: the
# reduction (kBlock / (4 lanes) additions in a row, errors of both signs), rsqrt, three products.
NORM_FP32 = 12 * 2.0**-24
# Activations, relative to |x|: Phi and sigmoid are at most 1, within 4 roundings (simd_math.h); the
# argument of gelu tanh's sigmoid carries 3 more, times max z sigmoid'(z) = 0.22. For half types
# exp has 2^-17, times max(sigmoid (1 - sigmoid)) = 1/4 and rounded up.
ACT_FP32 = {F32: 6 * 2.0**-24, F16: 2.0**-18, BF16: 2.0**-18}

X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        pytest.skip(f"no C++ compiler `{compiler}`")
    return c_api.build(tmp_path_factory.mktemp("c_api"), compiler)


@pytest.fixture(scope="session", params=["baseline", "avx2", "avx512"] if X86 else ["baseline"])
def lib(request, built) -> Library:
    """The library held to one instruction set: a copy of the file decides for itself, once."""
    copy = built.with_name(f"libhfpatch_{request.param}.so")
    shutil.copy(built, copy)
    before = os.environ.get("HFPATCH_SIMD")
    os.environ["HFPATCH_SIMD"] = request.param
    try:
        library = Library(copy)
        level = json.loads(library.dll.hfp_build_info())["simd"]
    finally:
        os.environ.pop("HFPATCH_SIMD")
        if before is not None:
            os.environ["HFPATCH_SIMD"] = before
    if level != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return library


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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


def assert_close(out, expected, bound, what):
    error = (out.double() - expected).abs()
    worst = (error - bound).max().item() if out.numel() else 0.0
    assert worst <= 0, f"{what}: {worst:.3g} above the bound"  # false for NaN too


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
    bound = NORM_FP32 * size
    if weight is not None:
        y = y * (weight.double() + offset)
        if cast != NONE:
            hat = x.dtype if cast == INPUT else weight.dtype
            # xhat, and the product before a bias, are rounded on the way
            bound = bound + (ROUNDING[hat] + ROUNDING[out_type]) * size
            bound = bound + SUBNORMAL[hat] * weight.double().abs() + SUBNORMAL[out_type]
    if bias is not None:
        y = y + bias.double()
        bound = bound + NORM_FP32 * bias.double().abs()
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
    bound = NORM_FP32 * (size + size.mean(-1, keepdim=True))
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
    bound = 0 if exact else ACT_FP32[dtype] * x.double().abs()
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
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(call(lib, name, x, *rest))
        finally:
            torch.set_num_threads(before)
        assert all(same_bits(results[0], other) for other in results[1:]), name
        for begin, end in ((0, 1), (1, 5), (200, 257)):
            part = tuple(r[begin:end] if r is up else r for r in rest)
            alone = call(lib, name, x[begin:end], *part)
            assert same_bits(alone, results[0][begin:end]), name


# --- bad input --------------------------------------------------------------------------------


def changed(tensor, **fields):
    t = dltensor(tensor)
    for name, value in fields.items():
        setattr(t, name, value)
    t.keep = tensor  # the memory outlives the view
    return t


X, W, OUT = torch.ones(4, 8), torch.ones(8), torch.ones(4, 8)
HUGE = int64_array([2**40, 2**40])
FLOAT8 = DLDataType(10, 8, 1)


def rms(out=OUT, x=X, weight=W, bias=None, eps=1e-6, offset=0.0, cast=INPUT):
    return ("rms_norm", out, x, weight, bias, eps, offset, cast)


BAD_CALLS = [
    (rms(x=None), r"hfp_rms_norm: `x` must be a tensor, got NULL"),
    (rms(out=None), r"`out` must be a tensor, got NULL"),
    (
        rms(weight=torch.ones(4)),
        r"hfp_rms_norm: `weight` must have shape \[8\] to match the last dimension of `x`, "
        r"got \[4\]",
    ),
    (rms(weight=torch.ones(1, 8)), r"`weight` must have shape \[8\].*got \[1, 8\]"),
    (rms(bias=torch.ones(9)), r"`bias` must have shape \[8\].*got \[9\]"),
    (
        rms(bias=torch.ones(8, dtype=F16)),
        r"`bias` must have the dtype of `weight` \(float32\), got float16; convert",
    ),
    (rms(weight=torch.ones(16)[::2]), r"`weight` must have stride 1 in its last dimension"),
    (rms(x=X.double()), r"`x` must be float32, float16 or bfloat16, got float64; convert"),
    (rms(x=X.to(torch.int8)), r"`x` must be float32.* got int8"),
    (rms(x=changed(X, dtype=FLOAT8)), r"`x` must be .* got DLPack type code 10 of 8 bits"),
    (rms(x=changed(X, dtype=DLDataType(2, 32, 4))), r"got float32 with 4 lanes"),
    (rms(x=torch.tensor(1.0)), r"`x` must have 1 to 64 dimensions, got 0"),
    (rms(x=changed(X, ndim=-1)), r"`x` must have 1 to 64 dimensions, got -1"),
    (rms(x=changed(X, ndim=65)), r"`x` must have 1 to 64 dimensions, got 65"),
    (rms(x=changed(X, shape=None)), r"`x` must have a shape, got shape == NULL"),
    (rms(x=changed(X, shape=int64_array([4, -8]))), r"sizes >= 0, got shape \[4, -8\]"),
    (rms(x=changed(X, shape=HUGE)), r"`x` must have fewer than 2\^63 bytes"),
    (rms(x=changed(X, strides=int64_array([2**62, 1]))), r"`x` must span fewer than 2\^63"),
    (rms(x=changed(X, strides=int64_array([-(2**63), 1]))), r"`x` must span fewer than 2\^63"),
    (rms(x=changed(X, data=None)), r"`x` must point to data, got data == NULL for shape"),
    (rms(x=changed(X, byte_offset=2)), r"`x` must be aligned to its element size of 4 bytes"),
    (rms(x=changed(X, byte_offset=2**63)), r"`x` must have a byte_offset below 2\^63"),
    (rms(x=changed(X, device=DLDevice(7, 0))), r"`x` must be on the CPU .*device type 7"),
    (rms(x=changed(X, device=DLDevice(2, -3))), r"`x` must have a CUDA device id >= 0, got -3"),
    (
        rms(weight=changed(W, device=DLDevice(2, 1))),
        r"`weight` must be on the device of `x` \(cpu:0\), got cuda:1; move",
    ),
    (rms(x=torch.ones(8, 4).t()), r"`x` must have stride 1 in its last dimension, got stride 4"),
    (
        rms(x=torch.ones(2, 4, 4, 4, 4, 8)[:, ::2, ::2, ::2, ::2].permute(4, 3, 2, 1, 0, 5)),
        r"`x` must have leading dimensions that merge into at most 3 strides.*contiguous",
    ),
    (rms(eps=-1e-6), r"`eps` must be finite and >= 0, got -1e-06"),
    (rms(eps=math.nan), r"`eps` must be finite and >= 0, got -?nan"),
    (rms(eps=math.inf), r"`eps` must be finite and >= 0, got inf"),
    (rms(offset=math.nan, cast=NONE), r"`weight_offset` must be finite, got -?nan"),
    (rms(offset=1.0), r"`weight_offset` must be 0 unless `cast` is 0 \(none\), got 1"),
    (rms(cast=3), r"`cast` must be 0 \(none\), 1 \(input\) or 2 \(weight\), got 3"),
    (rms(cast=-1), r"`cast` must be .* got -1"),
    (rms(out=torch.ones(4, 8, dtype=BF16)), r"`out` must be float32, got bfloat16"),
    (rms(weight=W.to(F16), cast=WEIGHT), r"`out` must be float16, got float32"),
    (
        rms(x=X.to(BF16), weight=W.to(F16), out=OUT.to(BF16)),
        r"`out` must be float32, got bfloat16",
    ),
    (rms(out=torch.ones(4, 9)), r"`out` must have shape \[4, 8\] to match `x`, got \[4, 9\]"),
    (rms(out=torch.ones(4, 16)[:, :8]), r"`out` must be contiguous"),
    (rms(x=torch.ones(0, 8)), r"`out` must have shape \[0, 8\]"),
    (("layer_norm", OUT, X, W, torch.ones(3), 1e-5), r"hfp_layer_norm: `bias` must have shape"),
    (("layer_norm", OUT, X, W, None, -1.0), r"hfp_layer_norm: `eps` must be"),
    (("gelu", OUT, X, 3), r"hfp_gelu: `approximate` must be 0 \(erf\), 1 .* got 3"),
    (("silu", torch.ones(32), X), r"hfp_silu: `out` must have shape \[4, 8\]"),
    (("gated", OUT, X, torch.ones(4, 7), 0), r"`up` must have the shape of `gate` \[4, 8\]"),
    (("gated", OUT, X, X.to(F16), 0), r"`up` must have the dtype of `gate` \(float32\)"),
    (("gated", OUT, X, X, 5), r"`activation` must be an activation: 0 \(gelu erf\).* got 5"),
    (
        ("gated_packed", torch.ones(4, 3), torch.ones(4, 7), 0, 1),
        r"`x` must have an even last dimension, the gate and up halves, got 7",
    ),
    (("gated_packed", OUT, X, 0, 1), r"`out` must have shape \[4, 4\] to match `x`, got \[4, 8\]"),
    (("gated_packed", torch.ones(4, 4), X, 0, 2), r"`gate_first` must be 0 or 1, got 2"),
]


@pytest.mark.parametrize("index", range(len(BAD_CALLS)))
def test_bad_call(built, index):
    (name, *arguments), message = BAD_CALLS[index]
    lib = Library(built)
    OUT.fill_(5)
    assert lib.status(name, *arguments) == INVALID
    assert re.search(message, lib.last_error()), lib.last_error()
    assert lib.last_error().startswith(f"hfp_{name}: ")
    assert OUT.eq(5).all(), "a failed call wrote"


def test_cuda_tensor_without_cuda_build(built):
    lib = Library(built)
    x, out = (changed(t, device=DLDevice(2, 0)) for t in (X, OUT))
    assert lib.status("silu", out, x) == CONSTANTS["HFP_NOT_AVAILABLE"]
    assert re.search(r"hfp_silu: this build has no CUDA kernels", lib.last_error())


def test_zero_size_needs_no_data(built):
    lib = Library(built)
    for shape in ([0, 8], [4, 0], [0, 0]):
        kept = int64_array(shape)
        x = changed(torch.ones(0, 8), data=None, shape=kept)
        out = changed(torch.ones(0, 8), data=None, shape=kept)
        assert lib.status("silu", out, x) == 0
        assert lib.status("layer_norm", out, x, None, None, 1e-5) == 0
        assert lib.status("gated", out, x, x, SILU) == 0


def test_null_strides_and_byte_offset(lib):
    x = torch.randn(6, 8)
    expected = call(lib, "silu", x[2:])
    out = torch.empty(4, 8)
    view = changed(x, strides=None, byte_offset=2 * 8 * 4, shape=int64_array([4, 8]))
    lib.call("silu", changed(out, strides=None), view)
    assert same_bits(out, expected)


def test_build_info_and_table(built):
    lib = Library(built)
    info = json.loads(lib.dll.hfp_build_info())
    assert info["abi"] == lib.dll.hfp_abi_version() == CONSTANTS["HFP_ABI_VERSION"]
    assert info["devices"] == ["cpu"]
    assert info["cuda_archs"] == []
    assert info["compiler"]
    functions = set(re.findall(r"int32_t (hfp_\w+)\(DLTensor", c_api.HEADER.read_text()))
    assert functions == {op.function for op in c_api.OPS.values()}


SIZES = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 8, 2**31, 2**62, 2**63 - 1])
FLOATS = st.sampled_from([0.0, 1e-6, -1.0, math.nan, math.inf, 1e300])
INTS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 5, 2**63 - 1])


@st.composite
def hostile_tensor(draw):
    """Any DLTensor that fails validation before its memory would be read, or NULL."""
    ndim = draw(st.integers(1, 5))
    t = dltensor(X)
    t.ndim = draw(st.sampled_from([ndim, ndim, ndim, 0, -5, 2**31 - 1]))
    t.shape = int64_array(draw(st.lists(SIZES, min_size=5, max_size=5)))
    if draw(st.booleans()):
        t.strides = int64_array(draw(st.lists(SIZES, min_size=5, max_size=5)))
    else:
        t.strides = None
    t.dtype = DLDataType(draw(st.integers(0, 6)), draw(st.sampled_from([8, 16, 32, 64])), 1)
    t.device = DLDevice(draw(st.sampled_from([0, 1, 1, 1, 2, 9])), draw(st.integers(-1, 1)))
    t.data = draw(st.sampled_from([None, X.data_ptr(), X.data_ptr() + 1]))
    t.byte_offset = draw(st.sampled_from([0, 0, 1, 2**64 - 1]))
    return draw(st.sampled_from([t, t, t, None]))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_calls(built, data):
    """Every random call is refused with a message, and the next good one works.

    `out` is never valid (float64), so whatever passes the other checks cannot be launched."""
    lib = Library(built)
    op = data.draw(st.sampled_from(sorted(c_api.OPS.values(), key=lambda o: o.name)))
    kinds = {"float": FLOATS, "int": INTS}
    values = [data.draw(kinds.get(kind, hostile_tensor())) for kind, _ in op.arguments]
    out = data.draw(st.sampled_from([None, OUT.double()]))
    assert lib.status(op.name, out, *values) == INVALID
    assert lib.last_error().startswith(f"{op.function}: `")
    good = torch.empty(4, 8)
    lib.call("silu", good, X)
    torch.testing.assert_close(good, torch.nn.functional.silu(X))


def test_message_is_per_thread(built):
    import threading

    lib, seen = Library(built), []
    lib.status("silu", OUT, None)
    thread = threading.Thread(target=lambda: seen.append(lib.last_error()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert "`x`" in lib.last_error()


def test_long_shape_is_cut(built):
    lib = Library(built)
    x = changed(X, ndim=64, shape=int64_array([10**9] * 64), strides=None)
    assert lib.status("silu", OUT, x) == INVALID
    assert re.search(r"\[1000000000, .*, \.\.\.\]$", lib.last_error())
    assert len(lib.last_error()) < 400
    assert ctypes.sizeof(DLTensor) == 48
