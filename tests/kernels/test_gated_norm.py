"""`gated_rms_norm` on the CPU: against fp64, groups, no gate, layouts, gradients, errors."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import KernelError
from test_c_api import (
    DTYPES,
    F32,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    call,
    lib,  # noqa: F401
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance
from torch import Tensor

from hfpatch.ops import OPS

INPUT, SILU = 1, 0


def gated64(x, gate, weight, eps, group, norm_first, cast, sigmoid):
    """fp64 value, and the bound that the rounding points of the header allow."""
    dtype, y = x.dtype, x.double()
    if gate is None:
        silu, silu_error, norm_first = torch.ones_like(y), torch.zeros_like(y), False
    else:
        g = gate.double()
        silu = torch.sigmoid(g) if sigmoid else g * torch.sigmoid(g)
        silu_error = tolerance("activation", dtype) * (torch.ones_like(g) if sigmoid else g.abs())

    def rounded(y, error, last):
        if not last and not cast:
            return error + ROUNDING[F32] * y.abs()
        return error + ROUNDING[dtype] * (y.abs() + error) + SUBNORMAL[dtype]

    error = torch.zeros_like(y)
    if not norm_first:
        error, y = y.abs() * silu_error, y * silu
    shape = (-1, group or x.shape[-1])
    groups, errors = y.unflatten(-1, shape), error.unflatten(-1, shape)
    rstd = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    # The mean square moves with its terms; d rstd / rstd is at most the root mean square of theirs.
    moved = groups.abs() * rstd.square() * errors.square().mean(-1, keepdim=True).sqrt()
    error = ((errors + moved) * rstd).flatten(-2)
    y = (groups * rstd).flatten(-2)
    error = error + tolerance("norm") * y.abs()
    error = rounded(y, error, weight is None and not norm_first)
    if weight is not None:
        y, error = y * weight.double(), error * weight.double().abs()
        error = rounded(y, error, not norm_first)
    if norm_first:
        y, error = y * silu, error * silu.abs() + (y.abs() + error) * silu_error
        error = rounded(y, error, True)
    return y, error + ROUNDING[F32] * y.abs()


@pytest.mark.parametrize("cast", [0, 1])
@pytest.mark.parametrize("sigmoid", [0, 1])
@pytest.mark.parametrize("norm_first", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(lib, dtype, norm_first, sigmoid, cast):
    for rows, (cols, group) in itertools.product(
        (1, 9, 0), [(1, 0), (17, 0), (96, 32), (60, 12), (1000, 250), (4098, 2049)]
    ):
        x, gate = torch.randn(2, rows, cols, dtype=dtype) * 2
        weight = torch.randn(cols, dtype=dtype)
        for g, w in itertools.product((gate, None), (weight, None)):
            args = (x, g, w, 1e-6, group, norm_first, cast, sigmoid)
            y, bound = gated64(*args)
            out = call(lib, "gated_rms_norm", *args)
            assert_close(out, y, bound, f"{rows}x{cols} groups of {group}")


@pytest.mark.parametrize("norm_first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_where_eager_does(lib, dtype, norm_first):
    x, gate = torch.randn(2, 64, 512, dtype=dtype)
    weight = torch.randn(512, dtype=dtype)
    expected = OPS["gated_rms_norm"].reference(x, gate, weight, 1e-6, 128, bool(norm_first))
    out = call(lib, "gated_rms_norm", x, gate, weight, 1e-6, 128, norm_first, INPUT, SILU)
    for w in (weight, weight.float()):  # rounded once, the weight of any dtype
        args = (x, gate, w, 1e-6, 128)
        kernel = call(lib, "gated_rms_norm", *args, norm_first, 0, SILU)
        formula = OPS["gated_rms_norm"].reference(*args, bool(norm_first), "none")
        assert kernel.dtype == formula.dtype and (kernel != formula).float().mean() < 0.01
    assert (out != expected).float().mean() < 0.01
    once = OPS["gated_rms_norm"].reference(
        x.float(), gate.float(), weight.float(), 1e-6, 128, bool(norm_first)
    )
    assert (once.to(dtype) != expected).float().mean() > 0.05  # the test can tell them apart


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_split(lib, dtype):
    weight = torch.randn(24, dtype=dtype)
    base, gate = torch.randn(2, 4, 5, 6, 32, dtype=dtype)
    for view in (
        lambda t: t[..., :24],
        lambda t: t[:, 1:3, 0, 8:],
        lambda t: t.transpose(0, 1)[:, :, 2, :24],
        lambda t: t[0, 0, 0, :24],
        lambda t: t[:1, :1, :1, 4:28],
    ):
        x = view(base)
        for group, g in itertools.product((0, 8, 24), (view(gate), None)):
            tail = (weight, 1e-6, group, 0, INPUT, SILU)
            out = call(lib, "gated_rms_norm", x, g, *tail)
            dense = None if g is None else g.contiguous()
            plain = call(lib, "gated_rms_norm", x.contiguous(), dense, *tail)
            assert same_bits(out, plain)
            first = None if g is None else g[:1].contiguous()
            alone = (
                call(lib, "gated_rms_norm", x[:1].contiguous(), first, *tail)
                if x.dim() > 1
                else out
            )
            assert same_bits(alone, out[:1] if x.dim() > 1 else out)
    in_place = base.clone()
    lib.call("gated_rms_norm", in_place, in_place, gate, None, 1e-6, 8, 1, INPUT, SILU)
    plain = call(lib, "gated_rms_norm", base, gate, None, 1e-6, 8, 1, INPUT, SILU)
    assert same_bits(in_place, plain)


def test_bad_calls(lib):
    x, w = torch.ones(2, 3, 4, 12), torch.ones(12)
    strided = torch.ones(4, 4, 7, 16)[::2, :3, ::2][:, :, :, :12]
    for args, message in (
        ((x, x, w, 1e-6, 5, 0, 1, 0), r"`group_size` must be 0 or divide .* \(12\), got 5"),
        ((x, x, w, 1e-6, -4, 0, 1, 0), r"`group_size` must be 0 or divide"),
        ((x, x, w, 1e-6, 4, 2, 1, 0), r"`norm_before_gate` must be 0 or 1, got 2"),
        ((x, x, w.half(), 1e-6, 4, 0, 1, 0), r"`weight` must have the dtype of `x`"),
        ((x, x[:1], w, 1e-6, 4, 0, 1, 0), r"`gate` must have the shape of `x`"),
        ((x, x, w[:3], 1e-6, 4, 0, 1, 0), r"`weight` must have shape \[12\]"),
        (
            (strided, strided, w, 1e-6, 4, 0, 1, 0),
            r"merge into at most 2 strides beside its groups",
        ),
        ((x, x, w, 1e-6, 4, 0, 2, 0), r"`cast` must be 0 \(none\) or 1 \(input\), got 2"),
        ((x, x, w, 1e-6, 4, 0, 1, 2), r"`gate_activation` must be 0 \(silu\) or 1 .*, got 2"),
    ):
        out = torch.full(args[0].shape, 7.0)
        with pytest.raises(KernelError, match=message):
            lib.call("gated_rms_norm", out, *args)
        assert (out == 7).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("cast", ["none", "input"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_function(
    dtype: torch.dtype,
    norm_first: bool,
    cast: str,
    act: str,
    gated: bool,
    kernels_module: ModuleType,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    plain = [randn(2, 5, 32), randn(2, 5, 32) if gated else None, randn(32)]
    tail = (1e-6, 8, norm_first, cast, act)
    y = kernels_module.gated_rms_norm(*plain, *tail)
    given = [None if t is None else t.clone().requires_grad_() for t in plain]
    leaves = [t for t in given if t is not None]
    formula = kernels_module.gated_rms_norm(*given, *tail)
    reference = OPS["gated_rms_norm"].reference
    # Half types: a few results start from a neighbour, of up to two roundings before.
    eps = tolerance("torch norm", dtype)
    for other in (formula.detach(), reference(*plain, *tail)):
        assert other.dtype == y.dtype == dtype
        torch.testing.assert_close(y, other, rtol=eps, atol=4e-6)
        if dtype != torch.float32:
            assert (y != other).float().mean() < 0.02
    grads = torch.autograd.grad(formula.float().square().sum(), leaves)
    wide = [None if t is None else t.double().requires_grad_() for t in plain]
    inputs = [t for t in wide if t is not None]
    truth = torch.autograd.grad(reference(*wide, *tail).square().sum(), inputs)
    for a, e in zip(grads, truth, strict=True):
        assert (a.double() - e).abs().max() <= 16 * max(1e-6, eps) * e.abs().max()
