"""As near to fp64 as the original: decided over several draws, on the mean square of the error.

*Its error against fp64 is at most the original's* is a statement about errors, and the error of a
whole model for one seed is one draw of them. Two equally good kernels that add up in another order
differ by a tenth in such a draw, either way, and by which one depends on the CPU. So it is asked of
`n` draws: other weights, other inputs.

**One draw.** Let `p²` be the square of our relative error (Frobenius norm of the difference from
fp64, over that of the fp64 value), `e²` the original's, and `a² = e² + r²` what is allowed: the
original's and the roundings that a kernel may add (`allowance`). What is decided on is

    d = (p² - a²) / (p² + a²),    which lies in [-1, 1] and is 0 where both are the same.

**What chance does to it.** An error is a sum over elements that hang together, since an early
rounding moves whole rows: `e²` is distributed like a chi-square of `k` independent parts over `k`,
with `k` far below the number of elements. If both are as good, and at worst independent of each
other, then `p² / e²` is F-distributed with (k, k) degrees of freedom, `p² / (p² + e²)` has the
distribution Beta(k/2, k/2), and `d` mean 0 and variance `1 / (k + 1)`. A symmetric beta
distribution is sub-Gaussian with its own variance (Marchal and Arbel, arXiv:1705.00048), hence so
is the mean of `n` draws with `1 / (n (k + 1))`:

    P(mean d > z / sqrt(n (k + 1))) <= exp(-z² / 2),    whatever n and k are.

With `z` = 6 that is 1.5e-8 for a comparison, and a run makes about a thousand. `d` cannot be
larger than 1: a draw that is out of the ordinary counts as one, while a plain mean of squares would
be that draw alone.

**The bound.** `LIKE` = 64 stands for `k + 1`, of whole models and blocks. Measured over the zoo,
dtypes and instruction sets, `d` varies less (docs/nearness.md), but where a recurrence or a single
token leaves few parts: there `k + 1` is 16, and there are more draws. For 12 draws the mean square
may be 1.55 times the original's and `r²`, for 24 it is 1.36 (in the root: 1.25 and 1.17), and it
goes down with `1 / sqrt(n)`: more draws, not a wider bound, are the answer to noise.

**The worst draw** is bounded apart, and loosely: `d = tanh(z)` with Fisher's `z`, half the
logarithm of F, which is nearly normal with variance `1 / k`. 8.8 of its deviations are 0.80 for
`LIKE` (our error three times the original's) and 0.98 for 16 (nine times).

A single op keeps its bound for each element (`tolerances`). Its errors are many and nearly
independent, so that `like` is in the thousands there, and the bound on the mean square close: one
more rounding to fp32 shows (test_leaves.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from expect import relative_error
from torch import Tensor

#: k + 1: one more than the independent parts of a whole model's error.
LIKE = 64
#: Deviations of the mean of the draws.
DEVIATIONS = 6.0
#: Of Fisher's `z` of a single draw.
WORST_DEVIATIONS = 8.8
#: Roundings of fp32 inside a kernel, as `tolerances` counts a norm's.
INSIDE = 12

EPS32 = torch.finfo(torch.float32).eps


def allowance(dtype: torch.dtype, inside: float = INSIDE, roundings: float = 1.0) -> float:
    """`r²`: the mean square of `inside` roundings to fp32 and, for half types, `roundings` to them.

    A rounding is off by at most half a unit in the last place, evenly distributed: by
    `eps / sqrt(12)` in the mean square, relative to a value just above a power of two, and by less
    elsewhere.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    own = torch.finfo(dtype).eps ** 2 / 12 * roundings if half else 0.0
    return EPS32**2 / 12 * inside + own


@dataclass(frozen=True)
class Draw:
    """The relative errors of one draw, ours and the original's."""

    ours: float
    theirs: float

    def excess(self, allowed: float) -> float:
        """`d` of the module's docstring; `allowed` is `r²`. NaN where an error is."""
        mine, limit = self.ours**2, self.theirs**2 + allowed
        if mine == limit:  # both 0
            return 0.0
        if math.isinf(mine):
            return 1.0
        return (mine - limit) / (mine + limit)


def draw(ours: Tensor, theirs: Tensor, truth: Tensor) -> Draw:
    """The errors of one result; it must have the original's dtype and shape."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape == truth.shape
    return Draw(relative_error(ours, truth), relative_error(theirs, truth))


def limit(draws: int, like: int = LIKE) -> float:
    """What the mean of so many draws' `d` may be."""
    return DEVIATIONS / math.sqrt(draws * like)


def worst_limit(like: int = LIKE) -> float:
    """What a single draw's `d` may be."""
    return math.tanh(WORST_DEVIATIONS / math.sqrt(like))


@dataclass(frozen=True)
class Verdict:
    """The mean of `d` over the draws and the worst draw's, and their limits."""

    mean: float
    limit: float
    worst: float
    worst_limit: float

    @property
    def is_near(self) -> bool:
        """False for NaN too."""
        return self.mean <= self.limit and self.worst <= self.worst_limit


def verdict(draws: Sequence[Draw], allowed: float, like: int = LIKE) -> Verdict:
    """What the draws say; `allowed` as `allowance` gives it."""
    found = [d.excess(allowed) for d in draws]
    worst = max(found, key=lambda d: (math.isnan(d), d))
    return Verdict(sum(found) / len(found), limit(len(found), like), worst, worst_limit(like))


def assert_as_near(
    draws: Iterable[Draw], dtype: torch.dtype, what: object = "", like: int = LIKE
) -> None:
    """No farther from fp64 than the original, except for roundings and chance."""
    draws = list(draws)
    found = verdict(draws, allowance(dtype), like)
    errors = ", ".join(f"{d.ours:.3g}/{d.theirs:.3g}" for d in draws)
    assert found.is_near, (
        f"{what}: the mean excess over {len(draws)} draws is {found.mean:.3f}, expected "
        f"<= {found.limit:.3f}; the worst {found.worst:.3f}, expected <= "
        f"{found.worst_limit:.2f}; errors, ours and the original's: {errors}"
    )
