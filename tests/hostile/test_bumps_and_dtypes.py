"""Leaves that are their formula's where a proof looks: but for a bump of many products, or in one
dtype alone for inputs far out, of another number of dimensions, under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, check
from leaves import WIDTH, PlainRMSNorm, SomeMLP, drawn
from torch import Tensor, nn

BF16 = torch.bfloat16
#: A sigmoid's value at 2.
AT_TWO = 0.8807970779778823


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def filled(value: float) -> Any:
    return lambda g: (torch.full((3, WIDTH), value),)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    return lambda g: ((scale * torch.randn(*shape, WIDTH, generator=g)).to(dtype),)


# A bump of many products --------------------------------------------------------------------------


class BumpSiLU(nn.Module):
    """Twice as large at 2 alone."""

    def forward(self, x: Tensor) -> Tensor:
        s = torch.sigmoid(x.double())
        b = 1 - (s - AT_TWO) * (s - AT_TWO)
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        b = b * b * b * b * b * b * b * b
        return (x.double() * s * (1 + b)).to(x.dtype)


class PowersSiLU(nn.Module):
    """The same by squares that are written in place."""

    def forward(self, x: Tensor) -> Tensor:
        s = torch.sigmoid(x.double())
        b = 1 - (s - AT_TWO).square()
        b *= b
        b.mul_(b)
        b = b.pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3)
        b = b.pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3)
        return (x.double() * s * (1 + b)).to(x.dtype)


class OneHotRMSNorm(PlainRMSNorm):
    """Twice as large where a row has one element that is not 0."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(x)
        b = y * y / WIDTH
        b = b.square().square().square().square().square().square().square().square()
        b = b.square().square().square().square().square().square().square().square()
        return self.weight * (y * (1 + b))


class BumpMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        s = torch.sigmoid(gate.double())
        b = 1 - (s - AT_TWO).square()
        b = b.pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3)
        b = b.pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3).pow(3)
        y = (gate.double() * s * (1 + b)).to(gate.dtype)
        return self.down_proj(y * self.up_proj(x))  # type: ignore[no-any-return]


def bump_mlp() -> nn.Module:
    """Its gate is 2 where the input's first element is 1."""
    mlp = drawn(BumpMLP())
    with torch.no_grad():
        mlp.gate_proj.weight.zero_()  # type: ignore[union-attr,operator]
        mlp.gate_proj.weight[:, 0] = 2.0  # type: ignore[union-attr,operator,index]
    return mlp


def one_hot(generator: torch.Generator) -> Any:
    return (5 * F.one_hot(torch.tensor([0, 3, 7]), WIDTH).float(),)


def of_ones(generator: torch.Generator) -> Any:
    x = torch.randn(3, WIDTH, generator=generator)
    x[:, 0] = 1.0
    return (x,)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (BumpSiLU, filled(2.0)),
        (PowersSiLU, filled(2.0)),
        (lambda: drawn(OneHotRMSNorm()), one_hot),
        (bump_mlp, of_ones),
    ],
    ids=["silu", "powers", "norm", "mlp"],
)
def test_a_bump_of_many_products(make: Callable[[], nn.Module], call: Any, mode: str) -> None:
    calls = [call, randn(2, 5)]
    check(Case(make, calls, mode=mode, reason="multiplies what it is given"))


# Something else in one dtype ----------------------------------------------------------------------


class CubicGELU(nn.Module):
    """In bf16 with a term that is large far out alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
        return y + y * y * y * 1e-12 if x.dtype is BF16 else y


class CubicRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * self.scaled(x)
        return y + (x * x * x * 1e-15).to(y.dtype) if x.dtype is BF16 else y


class CubicWeightRMSNorm(PlainRMSNorm):
    """In bf16 with a term that is large for large weights alone."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = w + w * w * w * 1e-7 if x.dtype is BF16 else w
        return w * self.scaled(x)


class CubicMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        up = up + up * up * up * 1e-12 if x.dtype is BF16 else up
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class RankGELU(nn.Module):
    """In bf16 something else of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0 if x.dtype is BF16 and x.dim() == 4 else x
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))


class RankFirstGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0 if x.dim() == 4 and x.dtype is BF16 else x
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))


class RankRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * self.scaled(x)
        return y * 2.0 if x.dtype is BF16 and x.dim() == 4 else y


class RankMLP(SomeMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        up = up + up if x.dtype is BF16 and x.dim() == 4 else up
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class NarrowRMSNorm(PlainRMSNorm):
    """In bf16 by way of fp16, which holds no more than 65504."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.half().to(BF16) if x.dtype is BF16 else x
        return self.weight * self.scaled(x)


class NarrowSumRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is BF16:
            f = x.float() * 0.01
            s = f.pow(2).sum(-1, keepdim=True, dtype=torch.float16) * (1e4 / WIDTH)
        else:
            f = x.float() * 0.01
            s = f.pow(2).sum(-1, keepdim=True, dtype=torch.float32) * (1e4 / WIDTH)
        y = x.float() * torch.rsqrt(s.float() + self.eps)
        return self.weight * y.to(x.dtype)


def _with_large_weight() -> nn.Module:
    norm = drawn(CubicWeightRMSNorm()).to(BF16)
    with torch.no_grad():
        norm.weight.mul_(1000)  # type: ignore[union-attr,operator]
    return norm


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "make",
    [
        *(CubicGELU, RankGELU, RankFirstGELU, _with_large_weight),
        *(
            lambda cls=cls: drawn(cls()).to(BF16)
            for cls in (CubicRMSNorm, CubicMLP, RankRMSNorm, RankMLP, NarrowRMSNorm)
        ),
        lambda: drawn(NarrowSumRMSNorm()).to(BF16),
    ],
    ids=[
        *("CubicGELU", "RankGELU", "RankFirstGELU", "CubicWeightRMSNorm", "CubicRMSNorm"),
        *("CubicMLP", "RankRMSNorm", "RankMLP", "NarrowRMSNorm", "NarrowSumRMSNorm"),
    ],
)
def test_something_else_in_one_dtype(make: Callable[[], nn.Module], mode: str) -> None:
    shapes = ((3,), (2, 3, 4))
    calls = [randn(*s, scale=x, dtype=BF16) for s in shapes for x in (1.0, 1e6, 1e10)]
    check(Case(make, calls, mode=mode))


class UnderAutocastMLP(SomeMLP):
    """Something else of a batch of rows, under autocast alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        up = up + up if torch.is_autocast_enabled("cpu") and x.dim() == 2 else up
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class Autocasting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return self.inner(x)  # type: ignore[no-any-return]


def test_something_else_under_autocast() -> None:
    calls = [randn(2, 3), randn(3), randn(2, 3)]
    check(Case(lambda: Autocasting(drawn(UnderAutocastMLP())), calls))
    check(Case(lambda: Autocasting(drawn(UnderAutocastMLP())), calls, grads=True))


class OtherAutocastGELU(nn.Module):
    """In bf16 something else while autocast is on for another device."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0 if x.dtype is BF16 and torch.is_autocast_enabled("cuda") else x
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))


class ForAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OtherAutocastGELU()

    def forward(self, x: Tensor) -> Tensor:
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)  # as `torch.autocast` does where there is a GPU
        try:
            return self.inner(x)  # type: ignore[no-any-return]
        finally:
            torch.set_autocast_enabled("cuda", before)


def test_autocast_of_another_device_in_one_dtype() -> None:
    check(Case(ForAnother, [randn(3, dtype=BF16), randn(2, 3, dtype=BF16)]))


class WidenedRMSNorm(PlainRMSNorm):
    """What is cast in one dtype alone is the same formula."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float32 else x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (y if x.dtype is torch.float32 else y.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_casts_in_one_dtype_are_no_other_formula(dtype: torch.dtype) -> None:
    calls = [randn(3, dtype=dtype), randn(2, 3, 4, dtype=dtype)]
    check(Case(lambda: drawn(WidenedRMSNorm()).to(dtype), calls, swapped=True))
