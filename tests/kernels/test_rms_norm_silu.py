"""`rms_norm_silu` and `add_bias` on the CPU: against fp64, layouts, gradients, errors."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

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


def with_bound(dtype: torch.dtype, *args: Any) -> tuple[Tensor, Tensor]:
    """fp64 value, and the bound that one rounding at the end allows.

    z is what the SiLU is of, a sum of terms of `size`; the SiLU's slope is at most 1.1.
    """
    x, addend, weight, scale, shift, eps = (
        t.double() if isinstance(t, Tensor) else t for t in args
    )
    y = OPS["rms_norm_silu"].reference(x, addend, weight, scale, shift, eps)
    total = x if addend is None else x + addend
    terms = x.abs() if addend is None else x.abs() + addend.abs()
    factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    # The mean square moves with its terms, as in `gated_rms_norm`.
    moved = total.abs() * factor.square() * terms.square().mean(-1, keepdim=True)
    size = (terms + moved * factor) * factor
    if weight is not None:
        size = size * weight.abs()
    if scale is not None:
        size = size * (1 + scale.abs()) + shift.abs()
    bound = 1.1 * tolerance("norm") * size + tolerance("activation", dtype) * size
    return y, bound + ROUNDING[dtype] * (y.abs() + bound) + SUBNORMAL[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(lib, dtype):
    for rows, cols in itertools.product((1, 9, 0), (1, 17, 96, 128, 1000, 4098)):
        x = torch.randn(2, rows, cols, dtype=dtype) * 2
        addend = torch.randn(cols, dtype=dtype)
        for other in {dtype, F32}:
            weight, shift = torch.randn(2, cols, dtype=other)
            scale = torch.randn(2, 1, cols, dtype=other)
            for args in (
                (x, addend, weight, scale, shift, 1e-6),
                (x, None, None, scale, shift, 1e-6),
                (x, addend, None, None, None, 1e-3),
                (x, None, weight, None, None, 0.0),
            ):
                out = call(lib, "rms_norm_silu", *args)
                assert_close(out, *with_bound(dtype, *args), f"{rows}x{cols}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_bias_against_fp64(lib, dtype):
    for shape in [(1, 1), (7, 17), (3, 5, 128), (2, 3, 1000), (0, 8), (3, 0)]:
        x, residual = torch.randn(2, *shape, dtype=dtype) * 3
        bias = torch.randn(shape[-1], dtype=dtype)
        for r in (None, residual):
            terms = [t.double() for t in (x, bias, r) if t is not None]
            y = sum(terms)
            bound = 2 * ROUNDING[F32] * sum(t.abs() for t in terms)
            bound = bound + ROUNDING[dtype] * (y.abs() + bound) + SUBNORMAL[dtype]
            assert_close(call(lib, "add_bias", x, bias, r), y, bound, f"{shape}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_split(lib, dtype):
    base = torch.randn(4, 5, 6, 32, dtype=dtype)
    weight, bias = torch.randn(2, 24, dtype=dtype)
    for view in (
        lambda t: t[..., :24],
        lambda t: t[:, 1:3, 0, 8:],
        lambda t: t.transpose(0, 1)[:, :, 2, :24],
        lambda t: t[0, 0, 0, :24],
    ):
        x = view(base)
        for op, tail in (
            ("rms_norm_silu", (bias, weight, weight, bias, 1e-6)),
            ("add_bias", (bias, x)),
        ):
            out = call(lib, op, x, *tail)
            tail = tuple(t.contiguous() if isinstance(t, Tensor) else t for t in tail)
            assert same_bits(out, call(lib, op, x.contiguous(), *tail))
            if x.dim() > 1:
                few = tuple(t[:1] if isinstance(t, Tensor) and t.dim() > 1 else t for t in tail)
                assert same_bits(call(lib, op, x[:1].contiguous(), *few), out[:1])
    for op, tail in (("rms_norm_silu", (None,) * 4 + (1e-6,)), ("add_bias", (base[0, 0, 0], base))):
        over = base.clone()  # a result may be x itself
        lib.call(op, over, over, *tail)
        assert same_bits(over, call(lib, op, base, *tail))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_once(lib, dtype):
    x, bias = torch.randn(64, 512, dtype=dtype), torch.randn(512, dtype=dtype)
    for op, args in (
        ("rms_norm_silu", (x, bias, bias, bias, bias, 1e-6)),
        ("add_bias", (x, bias, x.flip(0))),
    ):
        wide = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
        expected = OPS[op].reference(*wide).to(dtype)
        assert (call(lib, op, *args) != expected).float().mean() < 0.01
    stepwise = torch.nn.functional.silu(
        (x + bias) * torch.rsqrt((x + bias).float().var()).to(dtype)
    )
    assert (stepwise != expected).any()  # the formulas above are not trivial


def test_bad_calls(lib):
    x, v = torch.ones(2, 3, 12), torch.ones(12)
    for op, args, message in (
        ("rms_norm_silu", (x, v.half(), None, None, None, 1e-6), "`addend` must have the dtype of"),
        ("rms_norm_silu", (x, v[:3], None, None, None, 1e-6), r"`addend` must have shape \[12\]"),
        ("rms_norm_silu", (x, v, v[:3], None, None, 1e-6), r"`weight` must have shape \[12\]"),
        ("rms_norm_silu", (x, None, None, v, None, 1e-6), "`scale` must be NULL exactly when"),
        ("rms_norm_silu", (x, None, None, None, v, 1e-6), "`scale` must be NULL exactly when"),
        ("rms_norm_silu", (x, None, None, v, v.half(), 1e-6), "`shift` must have the dtype of"),
        ("rms_norm_silu", (x, None, None, x[:, :2], v, 1e-6), "`scale`"),
        ("rms_norm_silu", (x, None, None, None, None, -1.0), "`eps` must be finite and >= 0"),
        ("add_bias", (x, None, None), "`bias` must be a tensor, got NULL"),
        ("add_bias", (x, v.half(), None), "`bias` must have the dtype of `x`"),
        ("add_bias", (x, v[:3], None), r"`bias` must have shape \[12\]"),
        ("add_bias", (x, v, x[:1]), "`residual` must have the shape of `x`"),
        ("add_bias", (x, v, x.half()), "`residual` must have the dtype of `x`"),
    ):
        out = torch.full(x.shape, 7.0)
        with pytest.raises(KernelError, match=message):
            lib.call(op, out, *args)
        assert (out == 7).all()


@pytest.mark.parametrize("op", ["rms_norm_silu", "add_bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_function(dtype: torch.dtype, op: str, kernels_module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, v = randn(2, 5, 32), randn(2, 5, 32), randn(32)
    tensors = [x, v, v + 1, randn(2, 32), randn(2, 1, 32)]
    if op == "add_bias":
        tensors = [x, v, residual]
    function, reference = getattr(kernels_module, op), OPS[op].reference
    y = function(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    formula = function(*leaves)
    eps = tolerance("torch chain", dtype)
    for other in (formula.detach(), reference(*tensors)):
        assert other.dtype == y.dtype == dtype
        torch.testing.assert_close(y, other, rtol=eps, atol=4e-6)
    grads = torch.autograd.grad(formula.float().square().sum(), leaves)
    wide = [t.double().requires_grad_() for t in tensors]
    truth = torch.autograd.grad(reference(*wide).square().sum(), wide)
    for a, e in zip(grads, truth, strict=True):
        assert (a.double() - e).abs().max() <= 16 * max(1e-6, eps) * e.abs().max()
