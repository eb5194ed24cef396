"""The C interface of the rotary embeddings on the CPU: numbers against fp64, layouts, bad input."""

# ruff: noqa: F811  (fixtures of test_c_api)

from __future__ import annotations

import itertools
import re

import pytest
import torch
from c_api import Library
from test_c_api import (  # noqa: F401  (fixtures)
    BF16,
    DTYPES,
    F16,
    F32,
    INPUT,
    INVALID,
    NONE,
    built,
    lib,
    seed,
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance


def tables(*shape, dtype, wide=False, interleaved=False):
    """cos, sin [..., R / 2] as given, or [..., R] with each value twice."""
    angle = torch.rand(*shape) * 6
    pair = [angle.cos().to(dtype), angle.sin().to(dtype)]
    if wide:
        pair = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in pair]
    return pair


def rotate(x, cos, sin, interleaved, r):
    """(value, sum of the magnitudes added up) by complex numbers in fp64; cos, sin broadcast."""
    x = x.double()
    turn = torch.complex(cos.double(), sin.double())
    part = x[..., :r]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = torch.complex(a, b) * turn
    size = torch.complex((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs())
    out = []
    for z, rest in ((turned, x[..., r:]), (size, x[..., r:].abs())):
        halves = (z.real, z.imag)
        y = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
        out.append(torch.cat((y, rest), -1))
    return out


def rope_bound(y, size, dtype, table, rounded):
    bound = tolerance("rope") * size
    if rounded and table == dtype:
        bound = bound + ROUNDING[dtype] * size + 2 * SUBNORMAL[dtype]
    return bound + ROUNDING[dtype] * (y.abs() + bound) + SUBNORMAL[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rope_widths(lib, dtype, interleaved):
    cases = [
        (2, 0),
        (6, 0),
        (64, 0),
        (72, 0),
        (80, 32),
        (128, 0),
        (127, 20),
        (33, 2),
        (256, 64),
        (4096, 0),
        (4100, 4098),
    ]
    for (dim, rotary), table, wide, rounded in itertools.product(
        cases, {F32, dtype}, (False, True), (0, 1)
    ):
        r = rotary or dim
        x = torch.randn(2, 3, 2, dim, dtype=dtype)
        compact = tables(3, r // 2, dtype=table)
        cos, sin = compact
        if wide:
            cos, sin = (
                t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
                for t in compact
            )
        out = torch.full_like(x, float("nan"))
        lib.call("rope", out, x, cos, sin, 1, interleaved, rotary, rounded)
        y, size = rotate(x, *(t[:, None] for t in compact), interleaved, r)
        bound = rope_bound(y, size, dtype, table, rounded)
        assert_close(out, y, bound, (dim, rotary, table, wide, rounded))
        assert torch.equal(out[..., r:], x[..., r:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rope_table_shapes(lib, dtype, interleaved):
    b, s, h, d = 2, 5, 3, 48
    half = d // 2
    forms = [  # x's shape, seq_dim, table's leading shape, that as it broadcasts
        ((b, s, h, d), 1, (s,), (1, s, 1)),
        ((b, s, h, d), 1, (b, s), (b, s, 1)),
        ((b, s, h, d), 1, (1, s), (1, s, 1)),
        ((b, s, h, d), 1, (1, s, 1), (1, s, 1)),
        ((b, s, h, d), 1, (b, s, h), (b, s, h)),
        ((b, h, s, d), 2, (b, s), (b, 1, s)),
        ((b, h, s, d), 2, (s,), (1, 1, s)),
        ((b, h, s, d), 2, (b, 1, s), (b, 1, s)),
        ((b, h, s, d), 2, (1, h, s), (1, h, s)),
        ((b, s, d), 1, (b, s), (b, s)),
        ((b, s, d), 1, (s,), (1, s)),
        ((s, h, d), 0, (s,), (s, 1)),
        ((s, h, d), 0, (s, 1), (s, 1)),
        ((s, d), 0, (s,), (s,)),
        ((1, s, h, d), 1, (s,), (1, s, 1)),
        ((b, 1, h, d), 1, (b, 1), (b, 1, 1)),
        ((b, s, h, d), 1, (1, 1, 1), (1, 1, 1)),
    ]
    for shape, seq_dim, lead, broadcast in forms:
        x = torch.randn(shape, dtype=dtype)
        cos, sin = tables(*lead, half, dtype=F32)
        out = torch.full_like(x, float("nan"))
        lib.call("rope", out, x, cos, sin, seq_dim, interleaved, 0, 0)
        wide = [t.reshape(*broadcast, half) for t in (cos, sin)]
        y, size = rotate(x, *wide, interleaved, d)
        assert_close(out, y, rope_bound(y, size, dtype, F32, 0), (shape, lead))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_in_place_equal_contiguous(lib, dtype):
    b, s, h, kv, d = 2, 7, 4, 2, 40
    cos, sin = tables(s, d // 2, dtype=F32)
    weights = torch.randn(2, d, dtype=dtype)
    for interleaved in (0, 1):
        packed = torch.randn(b, s, (h + 2 * kv) * d + 3, dtype=dtype)[..., 3:]
        q = packed[..., : h * d].unflatten(-1, (h, d))
        k = packed[..., h * d : (h + kv) * d].unflatten(-1, (kv, d))
        before = packed.clone()
        plain = [t.contiguous() for t in (q, k)]
        options = (1, interleaved, 24, 0)
        cos24, sin24 = cos[:, :12].contiguous(), sin[:, :12].contiguous()
        norm = (*weights, cos24, sin24, 1e-6, 0.0, INPUT, 0, *options)
        for name, rest in (("rope_qk", (cos24, sin24, *options)), ("qk_norm_rope", norm)):
            expected = [torch.empty_like(t) for t in plain]
            lib.call(name, *expected, *plain, *rest)
            outs = [torch.empty_like(t) for t in plain]
            lib.call(name, *outs, q, k, *rest)
            assert all(map(torch.equal, outs, expected)), name
            # [B, H, S, D] views of the same memory
            turned = [t.transpose(1, 2) for t in (q, k)]
            outs = [torch.empty(t.shape, dtype=dtype) for t in turned]
            moved = list(rest)
            moved[-4] = 2
            lib.call(name, *outs, *turned, *moved)
            assert all(
                torch.equal(o.transpose(1, 2), e) for o, e in zip(outs, expected, strict=True)
            ), name
            # into the packed buffer, and nothing but q and k of it
            lib.call(name, q, k, q, k, *rest)
            assert all(map(torch.equal, (q, k), expected)), name
            assert torch.equal(packed[..., (h + kv) * d :], before[..., (h + kv) * d :])
            packed.copy_(before)


def norm_rope_expected(x, weight, offset, cast, across, cos, sin, interleaved, r, dtype):
    """fp64 value and bound of one of q and k [B, S, H, D]; cos, sin broadcast or None."""
    x64 = x.double()
    rows = x64.flatten(2) if across else x64
    y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    size = y.abs()
    if weight is not None:
        y = y * (weight.double() + offset)
        size = size * (weight.double() + offset).abs()
    y, size = y.reshape(x.shape), size.reshape(x.shape)
    error = (tolerance("norm") + ROUNDING[dtype] * (2 if cast else 1)) * 1.01 * size
    error = error + 2 * SUBNORMAL[dtype] * (1 if weight is None else weight.abs().max())
    if cos is None:
        return y, error
    value, sizes = rotate(y, cos, sin, interleaved, r)
    # An error of both sides of a pair counts at most sqrt(2) times; the copied part, once.
    part = error[..., :r]
    if interleaved:
        pair = part.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)
    else:
        pair = torch.maximum(*part.chunk(2, -1)).repeat(1, 1, 1, 2)
    error = torch.cat((1.42 * pair, error[..., r:]), -1)
    return value, error + rope_bound(value, sizes, dtype, F32, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("across", [0, 1])
def test_qk_norm_rope(lib, dtype, interleaved, across):
    for (h, kv, d, rotary), weight_type, angles in itertools.product(
        [(4, 2, 64, 0), (3, 3, 72, 24), (2, 2, 37, 10), (32, 32, 64, 0), (1, 1, 2048, 0)],
        (None, *{F32, dtype}),
        (True, False),
    ):
        r = rotary or d
        q, k = torch.randn(2, 3, h, d, dtype=dtype), torch.randn(2, 3, kv, d, dtype=dtype) * 4
        cos, sin = tables(2, 3, r // 2, dtype=F32)
        broadcast = (cos[:, :, None], sin[:, :, None]) if angles else (None, None)
        weights = [None, None]
        if weight_type is not None:
            sizes = [n * d if across else d for n in (h, kv)]
            weights = [torch.randn(n).to(weight_type) for n in sizes]
        casts = [(NONE, 0.0), (NONE, 1.0)]
        if weight_type in (None, dtype):
            casts.append((INPUT, 0.0))
        for cast, offset in casts:
            outs = [torch.full_like(t, float("nan")) for t in (q, k)]
            passed = (cos, sin) if angles else (None, None)
            lib.call(
                "qk_norm_rope",
                *outs,
                q,
                k,
                *weights,
                *passed,
                1e-5,
                offset,
                cast,
                across,
                1,
                interleaved,
                rotary,
                0,
            )
            for out, x, w in zip(outs, (q, k), weights, strict=True):
                y, bound = norm_rope_expected(
                    x, w, offset, cast, across, *broadcast, interleaved, r, dtype
                )
                assert_close(out, y, bound, (h, d, weight_type, angles, cast, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(lib, dtype):
    q, k = torch.randn(2, 3, 300, 8, 64, dtype=dtype)
    cos, sin = tables(3, 300, 32, dtype=F32)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs = torch.empty_like(q), torch.empty_like(k)
            lib.call("qk_norm_rope", *outs, q, k, None, None, cos, sin, 1e-6, 0.0, 0, 0, 1, 1, 0, 0)
            seen.append(outs)
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, outs, seen[0])) for outs in seen[1:])


def test_zero_size(lib):
    for b, s, h, kv, d in [(0, 3, 2, 2, 8), (2, 0, 2, 2, 8), (2, 3, 0, 0, 8), (2, 3, 2, 2, 0)]:
        q, k = torch.empty(b, s, h, d), torch.empty(b, s, kv, d)
        cos, sin = tables(s, d // 2, dtype=F32)
        lib.call("rope_qk", q, k, q, k, cos, sin, 1, 0, 0, 0)
        lib.call("qk_norm_rope", q, k, q, k, None, None, cos, sin, 1e-6, 0.0, 0, 1, 1, 0, 0, 0)
    # only one of the two is empty
    q, k = torch.empty(2, 3, 0, 8), torch.ones(2, 3, 1, 8)
    cos, sin = torch.zeros(3, 4), torch.ones(3, 4)
    out = torch.empty_like(k)
    lib.call("rope_qk", q, out, q, k, cos, sin, 1, 0, 0, 0)
    assert torch.equal(out, torch.cat((-torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4)), -1))


X, T = torch.ones(2, 3, 4, 8), torch.ones(3, 4)
OUT = torch.ones(2, 3, 4, 8)


def rope(out=OUT, x=X, cos=T, sin=T, seq_dim=1, interleaved=0, rotary_dim=0, rounded=0):
    return ("rope", out, x, cos, sin, seq_dim, interleaved, rotary_dim, rounded)


def norm(
    q=X,
    k=X,
    q_weight=None,
    k_weight=None,
    cos=T,
    sin=T,
    eps=1e-6,
    offset=0.0,
    cast=0,
    across=0,
    k_out=None,
):
    k_out = torch.empty_like(k) if k_out is None else k_out
    return (
        "qk_norm_rope",
        OUT,
        k_out,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        offset,
        cast,
        across,
        1,
        0,
        0,
        0,
    )


W, W32 = torch.ones(8), torch.ones(32)
BAD_CALLS = [
    (rope(x=None), r"`x` must be a tensor, got NULL"),
    (rope(x=torch.ones(8)), r"`x` must have 2 to 4 dimensions, .* got 1"),
    (rope(x=torch.ones(1, 2, 3, 4, 8)), r"`x` must have 2 to 4 dimensions, .* got 5"),
    (rope(seq_dim=0), r"`seq_dim` must be 1 to 2 for a `x` of 4 dimensions, got 0"),
    (rope(seq_dim=3), r"`seq_dim` must be 1 to 2 .* got 3"),
    (rope(interleaved=2), r"`interleaved` must be 0 or 1, got 2"),
    (rope(rounded=-1), r"`round_products` must be 0 or 1, got -1"),
    (rope(rotary_dim=7), r"`rotary_dim` must be even and 2 to 8, .* got 7"),
    (rope(rotary_dim=10), r"`rotary_dim` must be even and 2 to 8, .* got 10"),
    (rope(rotary_dim=-2), r"`rotary_dim` must be even and 2 to 8, .* got -2"),
    (
        rope(x=torch.ones(3, 4, 7), out=torch.ones(3, 4, 7), seq_dim=0),
        r"`x` must have an even last dimension, got 7; or pass `rotary_dim`",
    ),
    (rope(cos=None), r"`cos` must be a tensor, got NULL"),
    (
        rope(cos=T.half(), sin=T.half()),
        r"`cos` must be float32 or have the dtype of `x` \(float32\), got float16",
    ),
    (rope(sin=torch.ones(3, 8)), r"`sin` must have the shape of `cos` \[3, 4\], got \[3, 8\]"),
    (
        rope(cos=torch.ones(2, 4), sin=torch.ones(2, 4)),
        r"`cos` must have the shape of `x` \[2, 3, 4, 8\] or .* 4 or 8 columns, got \[2, 4\]",
    ),
    (rope(cos=torch.ones(3, 5), sin=torch.ones(3, 5)), r"`cos` must .* got \[3, 5\]"),
    (rope(cos=torch.ones(3, 3, 4), sin=torch.ones(3, 3, 4)), r"`cos` must .* got \[3, 3, 4\]"),
    (rope(out=torch.ones(2, 3, 4, 9)), r"`out` must have shape \[2, 3, 4, 8\] to match `x`"),
    (rope(out=OUT.half()), r"`out` must be float32, got float16"),
    (rope(out=torch.ones(3, 4, 8).expand(2, 3, 4, 8)), r"`out` must not repeat elements"),
    (norm(k=torch.ones(2, 4, 4, 8)), r"`k` must have the shape of `q` .* got \[2, 4, 4, 8\]"),
    (norm(k=X.half()), r"`k` must have the dtype of `q` \(float32\), got float16"),
    (norm(q_weight=W), r"`k_weight` must be NULL exactly when `q_weight` is"),
    (norm(q_weight=W32, k_weight=W), r"`q_weight` must have shape \[8\] to match `q`, got \[32\]"),
    (norm(q_weight=W32, k_weight=W, across=1), r"`k_weight` must have shape \[32\]"),
    (
        norm(q_weight=W.half(), k_weight=W.half(), cast=INPUT),
        r"`q_weight` must have the dtype of `q` \(float32\) unless",
    ),
    (norm(sin=None), r"`cos` must be the real view"),
    (norm(eps=-1.0), r"`eps` must be finite and >= 0"),
    (norm(cast=3), r"`cast` must be"),
    (norm(offset=1.0, cast=INPUT), r"`weight_offset` must be 0 unless `cast`"),
    (norm(across=2), r"`norm_across_heads` must be 0 or 1, got 2"),
    (norm(k_out=torch.ones(2, 3, 4, 7)), r"`k_out` must have shape"),
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
