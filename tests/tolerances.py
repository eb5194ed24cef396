"""How far results may be from their fp64 values: one table, by kind of op and dtype.

The C interface's tests bound each element by what it is made of: `TOLERANCES` has what a kernel's
fp32 arithmetic adds, and the roundings to a dtype (`ROUNDING`, `SUBNORMAL`) are the test's, which
knows where they are. Kinds that begin with "cuda" or "torch" are of whole results, which are
compared with the largest value of their row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

#: Half a unit in the last place, relative: one rounding to the dtype costs at most this.
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
#: Half the smallest subnormal: the same where the result is too small for a full significand.
SUBNORMAL = {F32: 2.0**-150, F16: 2.0**-25, BF16: 2.0**-134}

_Row = dict[torch.dtype, float]


def _inside(roundings: float, half: float | None = None) -> _Row:
    """Roundings of fp32 inside a kernel; `half`: those of half types, if they are others."""
    other = (roundings if half is None else half) * ROUNDING[F32]
    return {F32: roundings * ROUNDING[F32], F16: other, BF16: other}


def _whole(fp32: float, half: float, both: float = 0.0) -> _Row:
    """fp32: relative; half types: in epsilons, and `both` more."""
    eps = {t: torch.finfo(t).eps for t in (F16, BF16)}
    return {F32: fp32, **{t: both + half * eps[t] for t in eps}}


TOLERANCES: dict[str, _Row] = {
    # The reduction (kBlock / (4 lanes) additions in a row, errors of both signs), rsqrt, three
    # products; relative to the size of what is added up.
    "norm": _inside(12),
    # Relative to |x|: Phi and sigmoid are at most 1, within 4 roundings (simd_math.h); the argument
    # of gelu tanh's sigmoid carries 3 more, times max z sigmoid'(z) = 0.22. For half types exp has
    # 2^-17, times max(sigmoid (1 - sigmoid)) = 1/4 and rounded up.
    "activation": _inside(6, half=2**6),
    # Two products and a sum.
    "rope": _inside(3),
    # The forward's roundings (12), and again as many for the second reduction and the products,
    # relative to the terms that are added up.
    "norm gradient": _inside(24),
    # Sums over n rows, one after the other: n / 2 roundings would be the worst of one sign; the
    # parts and the errors' signs keep it far below sqrt(n) + what each xhat brings.
    "sum over rows": _inside(24),
    # Relative to |grad|: the derivative is about 1, of 4 factors with a few roundings each; half
    # types have exp to 2^-17 and the normal tail to 2^-19.
    "activation gradient": _inside(12, half=2**8),
    # The loss and lse: of sizes up to max |z|, and of the sum's logarithm.
    "loss": _inside(8),
    # exp, a sum of positive terms and a quotient.
    "softmax": _inside(4),
    # A step, relative to the terms: the gradient's factor, three or four operations for a moment;
    # root, quotient, correction and two products for the parameter.
    "adamw": _inside(12),
    # Sums of positive terms: a few for each of kBlock / (4 lanes) additions in a row.
    "norm of a list": _inside(12),
    "clip": _inside(4),
    # Half types round once (or as the original, twice) on top of an fp32 result; fp32 itself
    # accumulates a few roundings over a row.
    "cuda norm": _whole(8e-7, 1.01),
    "cuda activation": _whole(4e-7, 1.0),
    # Half types round the norm twice at most, products once, the result once, each by half an eps.
    "cuda rope": _whole(1e-6, 2.1),
    # As far as the roundings of the dtype go; fp32: a reduction's.
    "cuda group norm": _whole(8e-6, 2.0),
    # Exponents of size 20, exp, a sum and a quotient; then a rounding.
    "cuda softmax": _whole(8e-6, 1.0, both=8e-6),
    # Sums over a row or over the rows; roundings to a half type come on top.
    "cuda gradient": _whole(4e-6, 0.0),
    # A chain of ops, of which some round: a few results start from a neighbour, or from the second
    # next where the sum before was its neighbour too.
    "cuda chain": _whole(8e-6, 4.0),
    "torch chain": _whole(4e-6, 2.0),
    "torch norm": _whole(4e-6, 3.0),
    # Two orders of adding up one row: fp32 sums of both signs; a half type then rounds once, as its
    # forward did before (so: two roundings).
    "torch reordered": _whole(4e-6, 2.0, both=4e-6),
}


def tolerance(kind: str, *dtypes: torch.dtype) -> float:
    """The largest of a kind's for these dtypes; of none, that of fp32."""
    row = TOLERANCES[kind]
    return max(row[dtype] for dtype in dtypes or (F32,))


def assert_close(out: Tensor, expected: Tensor, bound: Any, what: Any = None) -> None:
    """No element is farther from `expected` than `bound` says."""
    error = (out.double() - expected).abs()
    worst = (error - bound).max().item() if out.numel() else 0.0
    assert worst <= 0, f"{what}: {worst:.3g} above the bound"  # false for NaN too


def assert_like(
    actual: Any, expected: Any, *dtypes: torch.dtype, spare: float = 0.0, deviations: float = 0.0
) -> None:
    """Results of a chain of ops on a GPU: the same dtypes, and fp32 accuracy but where a value on
    its way was rounded to a half type among ``dtypes``.

    There 2 % may start from a neighbour, and of few results more by chance: `spare` besides, or so
    many `deviations` of the 2 % (of one column there are 111 results). The norm of one or a few
    columns can be near 0 / 0: the scale is that of the row.
    """
    some, others = ([t] if isinstance(t, Tensor) else list(t) for t in (actual, expected))
    usual = tolerance("cuda chain")
    for a, e in zip(some, others, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert a.is_contiguous() and not a.isnan().any()
        scale = 1 + e.double().abs().amax(-1, keepdim=True)
        error = (a.double() - e.double()).abs() / scale
        assert error.max() <= tolerance("cuda chain", *dtypes)
        share = 0.02 * error.numel()
        assert (error > usual).sum() <= share + spare + deviations * share**0.5
