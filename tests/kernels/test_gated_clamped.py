"""`gated_clamped` on the CPU: against fp64, bit for bit against its parts, layouts, gradients."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from test_c_api import (
    COLS,
    DTYPES,
    RELU,
    SILU,
    activation_bound,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    call,
    lib,  # noqa: F401
    run_activation,
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close
from torch import Tensor

from hfpatch.ops import OPS
from hfpatch.ops.activation import ACTIVATIONS

INF = math.inf
#: gate_min, gate_max, up_min, up_max: of DeepSeek-V4, of no model, none, the wrong way round, and
#: numbers that no half type holds.
LIMITS = [
    (-INF, 1.5, -1.5, 1.5),
    (-0.7, 0.9, -INF, 0.4),
    (-INF, INF, -INF, INF),
    (2.0, -1.0, 1.0, -2.0),
    (-0.3333333, 1.1111111, -1.7777777, 2.2222222),
]
REFERENCE = OPS["gated_clamped"].reference


def tensors(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple((torch.randn(2, rows, cols) * 2).to(dtype))  # type: ignore[return-value]


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high) if (low, high) != (-INF, INF) else x


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_against_fp64(lib, dtype, activation):
    name = next(n for n, code in ACTIVATIONS.items() if code == activation)
    for rows, cols in itertools.product((1, 7, 0), COLS):
        gate, up = tensors(rows, cols, dtype)
        for alpha in (1.0, 1.702, 0.5) if activation == SILU else (1.0,):
            for offset in (0.0, 1.0):
                args = (-1.5, 1.25, -0.75, 2.0, offset)  # which every dtype holds
                y = REFERENCE(gate.double(), up.double(), name, *args, alpha)
                act = REFERENCE(
                    gate.double(), torch.ones_like(up.double()), name, -1.5, 1.25, alpha=alpha
                )
                factor = up.double().clamp(-0.75, 2.0) + offset
                added = ROUNDING[dtype] * factor.abs() if offset else 0.0
                bound = activation_bound(gate.double().clamp(-1.5, 1.25), act, activation, dtype)
                bound = bound * factor.abs() + (act.abs() + bound) * added
                bound = bound + ROUNDING[dtype] * (y.abs() + bound) + SUBNORMAL[dtype]
                out = call(lib, "gated_clamped", gate, up, activation, alpha, *args, 0)
                assert_close(out, y, bound, f"gated_clamped {rows}x{cols}")


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_where_eager_does(lib, dtype, activation):
    """PyTorch's clamps around our activation, its sum and its product, bit for bit; values that are
    bounds, NaN, infinities and zeros of both signs included."""
    gate, up = tensors(3, 4099, dtype)
    odd = torch.tensor([math.nan, INF, -INF, 0.0, -0.0, 1.5, -1.5, 0.9, -1.0, 2.0], dtype=dtype)
    pairs = torch.cartesian_prod(odd, odd)
    gate[0, : len(pairs)], up[0, : len(pairs)] = pairs.T
    for limits, offset, after in itertools.product(LIMITS, (0.0, 1.0, -0.5), (0, 1)):
        out = call(lib, "gated_clamped", gate, up, activation, 1.0, *limits, offset, after)
        of_gate = limits[:2]
        act = run_activation(lib, gate if after else clamp(gate, *of_gate), activation)
        act = clamp(act, *of_gate) if after else act
        factor = clamp(up, *limits[2:])
        expected = act * (factor + offset if offset else factor)
        assert torch.equal(out.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert same_bits(out[known], expected[known]), (limits, offset, after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_limits_it_is_gated(lib, dtype):
    gate, up = tensors(5, 1000, dtype)
    out = call(lib, "gated_clamped", gate, up, SILU, 1.0, -INF, INF, -INF, INF, 0.0, 0)
    assert same_bits(out, call(lib, "gated", gate, up, SILU))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_in_place(lib, dtype):
    base = (torch.randn(4, 5, 6, 64) * 2).to(dtype)
    codes = (SILU, 1.0, -INF, 1.5, -1.5, 1.5, 1.0, 0)
    for view in (
        lambda t: (t[..., :32], t[..., 32:]),  # the halves of a packed projection
        lambda t: (t[:, 1:3, 0, 8:40], t[:, 2:4, 1, 3:35]),
        lambda t: (t.transpose(0, 1)[:, :, 2, :24], t.transpose(0, 1)[:, :, 3, :24]),
        lambda t: (t[0, 0, 0, :24], t[0, 0, 1, :24]),
    ):
        gate, up = view(base)
        out = call(lib, "gated_clamped", gate, up, *codes)
        plain = (gate.contiguous(), up.contiguous())
        assert same_bits(out, call(lib, "gated_clamped", *plain, *codes))
        over = plain[1].clone()  # a result may be an input
        lib.call("gated_clamped", over, plain[0], over, *codes)
        assert same_bits(over, out)


CASES: list[dict[str, Any]] = [
    {"gate_max": 1.0, "up_min": -1.0, "up_max": 1.0},
    {"gate_min": -0.5, "gate_max": 1.0, "up_max": 0.5, "up_offset": 1.0, "alpha": 1.702},
    {"activation": "gelu", "gate_max": 0.75, "up_min": -0.5, "clamp_activated": True},
    {"activation": "gelu_tanh", "gate_max": 0.75},
    {"activation": "gelu_sigmoid", "up_max": 0.75},
    {"activation": "relu", "gate_max": 0.75, "up_offset": 0.5},
    {},
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_function(dtype: torch.dtype, case: int, kernels_module: ModuleType) -> None:
    """The function, the formula that it uses under autograd, and the references; gradients as those
    of PyTorch's clamps: 0 outside, and passed on at a bound."""
    params = CASES[case]
    generator = torch.Generator().manual_seed(0)
    gate, up = ((torch.randn(2, 5, 33, generator=generator) * 2).to(dtype) for _ in range(2))
    gate[0, 0, :4] = up[0, 0, 4:8] = torch.tensor([1.0, -1.0, -0.5, 0.75])
    y = kernels_module.gated_clamped(gate, up, **params)
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    formula = kernels_module.gated_clamped(*leaves, **params)
    op = OPS["gated_clamped"]
    eps = 2 * torch.finfo(dtype).eps
    for other in (formula.detach(), op.reference(gate, up, **params), op.aten(gate, up, **params)):
        assert other.dtype == y.dtype == dtype
        torch.testing.assert_close(y, other, rtol=eps, atol=1e-5)
    grads = torch.autograd.grad(formula.float().sum(), leaves)
    wide = [t.double().requires_grad_() for t in (gate, up)]
    truth = torch.autograd.grad(op.reference(*wide, **params).sum(), wide)
    for a, e in zip(grads, truth, strict=True):
        assert (a[e == 0] == 0).all()
        torch.testing.assert_close(a.double(), e, rtol=8 * eps, atol=8 * eps)


def test_bad_calls_of_the_function(kernels_module: ModuleType) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"`activation`.*got 'glu'"):
        kernels_module.gated_clamped(x, x, "glu")
    with pytest.raises(ValueError, match=r"`alpha` must be 1 with 'relu', got 2\.0"):
        kernels_module.gated_clamped(x, x, "relu", alpha=2.0)
    assert ACTIVATIONS["relu"] == RELU
