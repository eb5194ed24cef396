"""Norms with a residual sum or a modulation, on the CPU through the C interface, against fp64."""

# ruff: noqa: F811  (a fixture that is imported, and used as a parameter)
from __future__ import annotations

import itertools

import pytest
import torch
from c_api import CONSTANTS, KernelError
from test_c_api import (
    BF16,
    DTYPES,
    F16,
    F32,
    INPUT,
    NONE,
    WEIGHT,
    Canary,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    call,
    lib,  # noqa: F401
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance

RMS, LAYER = CONSTANTS["HFP_NORM_RMS"], CONSTANTS["HFP_NORM_LAYER"]
COLS = [1, 3, 17, 128, 1000, 4097]


def call2(lib, name, *args, dtypes=None):
    """Both results of an op with two outputs, in fresh memory with canaries."""
    canaries = [Canary(args[0].shape, t) for t in dtypes or [args[0].dtype] * 2]
    lib.call(name, *(c.out for c in canaries), *args)
    return [c.check() for c in canaries]


def norm64(x, weight, bias, eps, norm):
    """(value, size): the fp64 norm, and the sum of what rounds on the way."""
    y = x.double()
    if norm == LAYER:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    size = y.abs()
    if norm == LAYER:
        size = size + size.mean(-1, keepdim=True)
    if weight is not None:
        y, size = y * weight.double(), size * weight.double().abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, size


def rounded(value, error, dtype):
    """The error after one more rounding of value +- error to dtype."""
    return error + ROUNDING[dtype] * (value.abs() + error) + SUBNORMAL[dtype]


def modulated64(x, scale, shift, weight, bias, eps, norm, cast):
    """(fp64 value, bound, dtype of the result) with the rounding points of the header."""
    y, size = norm64(x, weight, bias, eps, norm)
    error = tolerance("norm") * size
    scale64, shift64 = 1 + scale.double(), shift.double()
    scale_error = torch.zeros_like(scale64)
    middle = F32
    if cast == INPUT:
        error = rounded(y, error, x.dtype)
        scale_error = rounded(scale64, scale_error, scale.dtype)
        middle = torch.promote_types(x.dtype, scale.dtype)
    scale_error = rounded(scale64, scale_error, F32)  # the sum in fp32
    product = y * scale64
    error = error * (scale64.abs() + scale_error) + y.abs() * scale_error
    error = rounded(product, error, middle)
    out = product + shift64
    out_type = middle if cast == INPUT else x.dtype
    return out, rounded(out, rounded(out, error, F32), out_type), out_type


def check_modulate(lib, x, scale, shift, weight, bias, norm, cast, eps=1e-6):
    y, bound, dtype = modulated64(x, scale, shift, weight, bias, eps, norm, cast)
    args = (x, scale, shift, weight, bias, eps, norm, cast)
    out = call(lib, "norm_modulate", *args, dtype=dtype)
    assert_close(out, y, bound, f"{tuple(x.shape)} {x.dtype} norm {norm} cast {cast}")


@pytest.mark.parametrize("norm", [RMS, LAYER])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_modulate_shapes(lib, dtype, norm):
    for rows, cols in itertools.product((1, 7, 0), COLS):
        x = torch.randn(rows, cols, dtype=dtype) + 1
        scale, shift = torch.randn(2, rows, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=dtype)
        for cast in (INPUT, NONE):
            check_modulate(lib, x, scale, shift, None, None, norm, cast)
            check_modulate(lib, x, scale[:1] if rows else scale, shift, weight, bias, norm, cast)


@pytest.mark.parametrize("modulation_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_modulate_mixed_dtypes(lib, dtype, modulation_type):
    x = torch.randn(5, 77, dtype=dtype)
    scale, shift = torch.randn(2, 5, 77, dtype=modulation_type)
    for w, norm, cast in itertools.product([None, *DTYPES], (RMS, LAYER), (INPUT, NONE)):
        weight, bias = (None, None) if w is None else torch.randn(2, 77, dtype=w)
        check_modulate(lib, x, scale, shift, weight, bias, norm, cast)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rounds_where_eager_does(lib, dtype):
    """A wrong rounding point changes more than a tenth of the results; fp32 noise, almost none."""
    x, scale, shift, gate, residual = torch.randn(5, 64, 576, dtype=dtype)

    def steps(h, cast):
        hat = torch.nn.functional.layer_norm(h.float(), (576,), eps=1e-6)
        if cast == INPUT:
            return hat.to(dtype) * (1 + scale) + shift
        return (hat * (1 + scale.float()) + shift.float()).to(dtype)

    def differ(a, b):
        return (a != b).float().mean()

    for cast in (INPUT, NONE):
        out = call(lib, "norm_modulate", x, scale, shift, None, None, 1e-6, LAYER, cast)
        assert differ(out, steps(x, cast)) < 0.01, cast
        total = residual + gate * x
        if cast == NONE:
            total = (residual.float() + gate.float() * x.float()).to(dtype)
        out = call(lib, "gate_residual", residual, gate, x, cast)
        assert differ(out, total) < 0.001, cast
        args = (residual, gate, x, scale, shift, None, None, 1e-6, LAYER, cast)
        total_out, out = call2(lib, "gate_residual_norm_modulate", *args)
        assert differ(total_out, total) < 0.001, cast
        assert differ(out, steps(total_out, cast)) < 0.01, cast
    assert differ(steps(x, INPUT), steps(x, NONE)) > 0.1  # the test can tell them apart


@pytest.mark.parametrize("gate_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_residual(lib, dtype, gate_type):
    for rows, cols, cast in itertools.product((1, 7, 0), COLS, (INPUT, NONE)):
        residual, x = torch.randn(2, rows, cols, dtype=dtype)
        gate = torch.randn(rows, cols, dtype=gate_type)
        out_type = torch.promote_types(dtype, gate_type) if cast == INPUT else dtype
        product = gate.double() * x.double()
        y = residual.double() + product
        error = rounded(product, torch.zeros_like(y), out_type if cast == INPUT else F32)
        error = rounded(y, rounded(y, error, F32), out_type)
        out = call(lib, "gate_residual", residual, gate, x, cast, dtype=out_type)
        assert_close(out, y, error, f"{rows}x{cols} cast {cast}")


def broadcasts(batch, tokens, cols, dtype):
    """Modulation tensors for x [batch, tokens, cols], with their values at full shape."""
    chunked = torch.randn(batch, 6, cols, dtype=dtype)
    flat = torch.randn(batch, 6 * cols, dtype=dtype)
    full = torch.randn(batch, tokens, 6 * cols, dtype=dtype)
    shape = (batch, tokens, cols)
    for what, t in {
        "[D]": torch.randn(cols, dtype=dtype),
        "[1, 1, D]": torch.randn(1, 1, cols, dtype=dtype),
        "[B, 1, D] of [B, 6, D]": chunked[:, 2:3],
        "[1, S, D]": full[:1, :, :cols],
        "[B, S, D] of [B, S, 6 D]": full.chunk(6, -1)[4],
    }.items():
        yield what, t, t.expand(shape)
    for what, t in {
        "[B, D] of [B, 6, D]": chunked.unbind(1)[5],
        "[B, D] of [B, 6 D]": flat.chunk(6, -1)[1],
    }.items():
        yield what, t, t[:, None].expand(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(lib, dtype):
    """Every accepted shape gives the bits of the tensor written out in full."""
    for batch, tokens, cols in ((3, 5, 48), (1, 7, 33), (2, 1, 16)):
        x = torch.randn(batch, tokens + 2, cols + 8, dtype=dtype)[:, 1:-1, 3:-5]  # strided
        residual = torch.randn(batch, tokens, cols, dtype=dtype)
        for what, t, full in broadcasts(batch, tokens, cols, dtype):
            t2, full2 = t * 2, full.contiguous() * 2
            full = full.contiguous()
            tail = (None, None, 1e-6, LAYER, INPUT)
            assert same_bits(
                call(lib, "norm_modulate", x, t, t2, *tail),
                call(lib, "norm_modulate", x, full, full2, *tail),
            ), what
            assert same_bits(
                call(lib, "gate_residual", residual, t, x, INPUT),
                call(lib, "gate_residual", residual, full, x, INPUT),
            ), what
            for a, b in zip(
                call2(lib, "gate_residual_norm_modulate", residual, t, x, t2, t, *tail),
                call2(lib, "gate_residual_norm_modulate", residual, full, x, full2, full, *tail),
                strict=True,
            ):
                assert same_bits(a, b), what


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_both_at_once_is_one_after_the_other(lib, dtype):
    residual, x = torch.randn(2, 3, 50, 200, dtype=dtype)
    gate, scale, shift = torch.randn(3, 3, 200, dtype=dtype)
    for norm, cast in itertools.product((RMS, LAYER), (INPUT, NONE)):
        tail = (scale, shift, None, None, 1e-6, norm, cast)
        total, y = call2(lib, "gate_residual_norm_modulate", residual, gate, x, *tail)
        assert same_bits(total, call(lib, "gate_residual", residual, gate, x, cast))
        assert same_bits(y, call(lib, "norm_modulate", total, *tail))


def assert_same_but_for_fma(a, b):
    """Two kernels of one formula: a compiler may fuse a multiply-add in one of them. That is an ulp
    or two of fp32, which a half type shows in one result of some thousands."""
    if a.dtype == F32:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    else:
        assert (a != b).sum().item() <= 2 + 1e-3 * a.numel()


@pytest.mark.parametrize("weight_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norms(lib, dtype, weight_type):
    """The sum is rounded as torch rounds it; the norm is that of the rounded sum."""
    for rows, cols in itertools.product((1, 7, 0), COLS):
        x, residual = torch.randn(2, rows, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=weight_type)
        for w, b, offset, cast in [
            (weight, None, 0.0, INPUT),
            (weight, bias, 0.0, INPUT),
            (weight, None, 0.0, WEIGHT),
            (weight, bias, 0.0, WEIGHT),
            (weight, None, 1.0, NONE),
            (weight, bias, 1.0, NONE),
            (None, None, 0.0, NONE),
            (None, bias, 0.0, WEIGHT),
        ]:
            out_type = dtype
            if w is not None and cast != NONE:
                promoted = torch.promote_types(dtype, weight_type)
                out_type = promoted if cast == INPUT else weight_type
            tail = (w, b, 1e-6, offset, cast)
            dtypes = (out_type, dtype)
            y, total = call2(lib, "add_rms_norm", x, residual, *tail, dtypes=dtypes)
            assert same_bits(total, x + residual)
            expected = call(lib, "rms_norm", total, *tail, dtype=out_type)
            assert_same_but_for_fma(y, expected)
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            y, total = call2(lib, "add_layer_norm", x, residual, w, b, 1e-5)
            assert same_bits(total, x + residual)
            expected = call(lib, "layer_norm", total, w, b, 1e-5)
            assert_same_but_for_fma(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_and_bits_of_a_split(lib, dtype):
    residual, x = torch.randn(2, 257, 1003, dtype=dtype)
    gate, scale, shift = torch.randn(3, 257, 1003, dtype=dtype)
    tail = (None, None, 1e-6, LAYER, INPUT)
    name = "gate_residual_norm_modulate"
    total, y = call2(lib, name, residual, gate, x, scale, shift, *tail)
    for begin, end in ((0, 1), (1, 5), (200, 257)):
        part = [t[begin:end] for t in (residual, gate, x, scale, shift)]
        for alone, whole in zip(call2(lib, name, *part, *tail), (total, y), strict=True):
            assert same_bits(alone, whole[begin:end])
    into, y_into = residual.clone(), x.clone()
    lib.call(name, into, y_into, into, gate, y_into, scale, shift, *tail)
    assert same_bits(into, total)
    assert same_bits(y_into, y)


X, D = torch.ones(2, 3, 8), torch.ones(8)
TAIL = (None, None, 1e-6, LAYER, INPUT)
FUSED = "gate_residual_norm_modulate"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("norm_modulate", (X, D[:4], D, *TAIL), r"`scale` must have shape \[8\].*got \[4\]"),
        ("norm_modulate", (X, X[:, :2], D, *TAIL), r"`scale`.*of `x` \[2, 3, 8\].*got \[2, 2, 8\]"),
        ("norm_modulate", (X, torch.ones(3, 8), D, *TAIL), r"`scale` must have.*got \[3, 8\]"),
        ("norm_modulate", (X, D, D.half(), *TAIL), r"`shift` must have the dtype of `scale`"),
        ("norm_modulate", (X, D, D, None, None, 1e-6, 2, INPUT), r"`norm_type` must be 0 \(rms\)"),
        ("norm_modulate", (X, D, D, None, None, 1e-6, RMS, WEIGHT), r"`cast` must be 0 \(none\)"),
        ("norm_modulate", (X, D, D, None, None, -1.0, RMS, NONE), r"`eps` must be finite"),
        ("gate_residual", (X, D, X[:1], INPUT), r"`x` must have the shape of `residual`"),
        ("gate_residual", (X, D, X.half(), INPUT), r"`x` must have the dtype of `residual`"),
        (FUSED, (X, D.half(), X, D.half(), D.half(), *TAIL), r"`gate` must have the dtype of"),
        (FUSED, (X, D, X, D.half(), D.half(), *TAIL), r"`gate` must have the dtype of `scale`"),
        ("add_rms_norm", (X, X, D, None, 1e-6, 1.0, INPUT), r"`weight_offset` must be 0 unless"),
        ("add_layer_norm", (X, X, D, D.half(), 1e-5), r"`bias` must have the dtype of `weight`"),
    ],
)
def test_bad_calls(lib, name, args, message):
    two = name in (FUSED, "add_rms_norm", "add_layer_norm")
    outs = [torch.full_like(X, 7.0) for _ in range(1 + two)]
    with pytest.raises(KernelError, match=message) as error:
        lib.call(name, *outs, *args)
    assert error.value.status == CONSTANTS["HFP_INVALID_ARGUMENT"]
    assert all((out == 7).all() for out in outs)


def test_second_output_is_checked_by_its_name(lib):
    for bad, message in ((X[:1].clone(), "`sum` must have shape"), (X.half(), "`sum` must be")):
        with pytest.raises(KernelError, match=message):
            lib.call("add_layer_norm", X.clone(), bad, X, X, None, None, 1e-5)
