"""Code that was read as another one: each hid what a call may vary from the reader once.

Every class here is refused, or computed as its class does, in each mode.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import OwnSwish
from torch import nn

import hfpatch

WIDTH = 48


def drawn(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data = torch.rand(p.shape, generator=generator) + 0.5
    return module.eval().requires_grad_(False)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 64, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(64, WIDTH, bias=bias)


# How many dimensions there are ------------------------------------------------------------------


class ListRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + 1 if len([*x.shape]) > 5 else x)


class TupleRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (1 + max(len((*x.shape,)) - 5, 0))


class SliceRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (2.0 if (*x.shape,)[5:] else 1.0)


class SplatRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.gain(*x.shape[5:])

    def gain(self, size: int | None = None, *more: int) -> float:
        return 1.0 if size is None else 2.0


class CountRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.gain(*x.shape)

    @staticmethod
    def gain(*sizes: int) -> float:
        return 1.0 if len(sizes) < 6 else 2.0


class SplatSiLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) * (1 + max(len([*x.shape]) - 5, 0))


class SplatMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if len([*x.shape]) > 5 else x
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# Names that the compiler writes otherwise -------------------------------------------------------


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x


def _MangledRMSNorm__scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 6 else x


globals()["__scaled"] = _scaled


class MangledRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(__scaled(x))  # type: ignore[name-defined]  # noqa: F821


# Polynomials beyond the samples -----------------------------------------------------------------


class FarGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))) + 1e-26 * x * x


class FarRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-33 * variance * variance + self.eps))


class FarWeightRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1e-16 * self.weight * self.weight * self.weight
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def large(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1e7)


RANKS = [torch.randn(2, 5, WIDTH), torch.randn(6, WIDTH), torch.randn(1, 2, 1, 3, 2, WIDTH)]
FAR = [torch.randn(3, WIDTH) * 10.0**power for power in (0, 6, 12, 16, 17, 26, 30)]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("make", "calls", "change"),
    [
        *((c, RANKS, None) for c in (ListRMSNorm, TupleRMSNorm, SliceRMSNorm, SplatRMSNorm)),
        *((c, RANKS, None) for c in (CountRMSNorm, SplatSiLU, SplatMLP, MangledRMSNorm)),
        *((c, FAR, None) for c in (FarGELU, FarRMSNorm)),
        (FarWeightRMSNorm, RANKS, large),
    ],
)
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_values(
    make: Callable[[], nn.Module],
    calls: list[torch.Tensor],
    change: Callable[[nn.Module], None] | None,
    mode: Any,
) -> None:
    model = nn.Sequential(drawn(make()))
    original = copy.deepcopy(model)
    hfpatch.apply(model, mode=mode)
    for m in (model, original):
        if change is not None:
            change(m)
    for x in calls:
        torch.testing.assert_close(model(x), original(x), equal_nan=True)


# What a layer that is called has ----------------------------------------------------------------


class BiasMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h if self.down_proj.bias is None else h * 2)


class GateBiasMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        gate = gate if self.gate_proj.bias is None else gate * 2
        return self.down_proj(F.silu(gate) * self.up_proj(x))


class RankMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h if self.down_proj.weight.ndim == 2 else h * 2)


class DtypeMLP(MLP):
    """As T5's, which does not cast to the dtype of a layer of whole numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if self.down_proj.weight.dtype != torch.int8:
            h = h.to(self.down_proj.weight.dtype)
        else:
            h = h * 2
        return self.down_proj(h)


class Int8(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.ones(WIDTH, 64, dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Flat(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.ones(WIDTH * 64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.view(WIDTH, 64))


def with_bias(name: str) -> Callable[[Any], None]:
    def change(mlp: Any) -> None:
        layer = getattr(mlp, name)
        layer.bias = nn.Parameter(torch.zeros(layer.out_features), requires_grad=False)

    return change


def with_layer(make: type[nn.Module]) -> Callable[[Any], None]:
    return lambda mlp: setattr(mlp, "down_proj", make())


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (BiasMLP, with_bias("down_proj")), (GateBiasMLP, with_bias("gate_proj")),
        (RankMLP, with_layer(Flat)), (DtypeMLP, with_layer(Int8)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_layer_that_is_changed(cls: type[MLP], change: Callable[[Any], None]) -> None:
    model = nn.Sequential(drawn(cls()))
    original = copy.deepcopy(model)
    hfpatch.apply(model)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        change(m[0])
    torch.testing.assert_close(model(x), original(x))
    hfpatch.apply(model)
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("order", [(False, True), (True, False)])
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_two_instances_with_and_without_a_bias(order: tuple[bool, bool]) -> None:
    """Projections of one class: neither is the other's proof."""
    model = nn.ModuleList(drawn(BiasMLP(bias)) for bias in order)
    original = copy.deepcopy(model)
    hfpatch.apply(model)
    x = torch.randn(3, WIDTH)
    for ours, theirs in zip(model, original, strict=True):
        torch.testing.assert_close(ours(x), theirs(x))


# Settings that are equal, and others ------------------------------------------------------------


class ClassRMSNorm(RMSNorm):
    gain: Any = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return (y * 2 if isinstance(self.gain, float) else y) * self.gain


class SameRMSNorm(RMSNorm):
    gain: Any = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return y * 2 if self.gain is True else y


class NamedRMSNorm(RMSNorm):
    which = "_gain"
    _gain: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * getattr(self, self.which)


def gain_of(module: Any) -> Any:
    return module._gain


class HelpedRMSNorm(RMSNorm):
    _gain: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * gain_of(self)


class SettingOfAllRMSNorm(RMSNorm):
    """What every module has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2 if self.call_super_init else self.norm(x)


class MethodOfAllRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2 if self.extra_repr() else self.norm(x)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (ClassRMSNorm, "gain", 1.0), (SameRMSNorm, "gain", True),
        (NamedRMSNorm, "_gain", 3.0), (HelpedRMSNorm, "_gain", 3.0),
        (SettingOfAllRMSNorm, "call_super_init", True),
        (MethodOfAllRMSNorm, "extra_repr", lambda: "of its own"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_setting_that_is_changed(cls: type[RMSNorm], name: str, value: Any) -> None:
    model = nn.Sequential(drawn(cls()))
    original = copy.deepcopy(model)
    hfpatch.apply(model)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        setattr(m[0], name, value)
    torch.testing.assert_close(model(x), original(x))


# Gradients of their own -------------------------------------------------------------------------


class Clipped(OwnSwish):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad = grad - torch.relu(grad - 1e4)
        y = x * torch.rsqrt(x * x + 1e-12) * 0.5 + 0.5
        return grad * (y * (1 + x * (1 - y)))


class ClippedOnce(OwnSwish):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad, y = grad - torch.relu(grad - 1e4) + torch.relu(-grad - 1e4), torch.sigmoid(x)
        return grad * (y * (1 + x * (1 - y)))


class Cubed(OwnSwish):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad, y = grad + 1e-12 * grad * grad * grad, torch.sigmoid(x)
        return grad * (y * (1 + x * (1 - y)))


class Bumped(OwnSwish):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        y = torch.sigmoid(x)
        bump = torch.sigmoid(1e6 * (x - 7.24)) * torch.sigmoid(1e6 * (7.26 - x))
        return grad * (y * (1 + x * (1 - y))) * (1 + bump)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("function", [OwnSwish, Clipped, ClippedOnce, Cubed, Bumped])
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_gradients(function: Any, mode: Any) -> None:
    class OwnSiLU(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function.apply(x)

    model = nn.Sequential(OwnSiLU())
    original = copy.deepcopy(model)
    report = hfpatch.apply(model, mode=mode)
    assert len(report.swaps) == (function is OwnSwish), report
    for x in (torch.full((3, WIDTH), 7.25), torch.randn(3, WIDTH)):
        for scale in (1.0, 1e5):
            grads = []
            for m in (model, original):
                leaf = x.clone().requires_grad_()
                m(leaf).backward(torch.full_like(x, scale))
                grads.append(leaf.grad)
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-2)


# What a layer holds of another one ---------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu}


class TableMLP(MLP):
    """Of a table of somebody's own, beside which transformers has one of the same words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ACTIVATIONS["silu"](self.gate_proj(x)) * self.up_proj(x))


class Other(RMSNorm):
    pass


class BorrowingRMSNorm(RMSNorm):
    """Normed by the method of a layer that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.function = Other().norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_table_of_functions_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(drawn(TableMLP()))
    original = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    for function in (F.silu, F.relu):
        monkeypatch.setitem(ACTIVATIONS, "silu", function)
        torch.testing.assert_close(model(x), original(x))
        hfpatch.apply(model)
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_method_of_another_layer() -> None:
    norm: Any = BorrowingRMSNorm()
    original: Any = BorrowingRMSNorm()
    model = nn.Sequential(norm.eval())
    hfpatch.apply(model)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(model(x), original(x))
    for m in (norm, original):
        m.function.__self__.eps = 0.5
        m.function.__self__.weight.data.mul_(2)
    torch.testing.assert_close(model(x), original(x))


# Objects that answer for themselves -------------------------------------------------------------

MOOD = [0]


class Moody:
    """Equal to whatever it stands for, and true by mood; called, it does what it likes."""

    def __init__(self, of: Any = None, call: Any = None) -> None:
        self.of, self.call = of, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return MOOD[0] if self.call is None else self.call(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.of)

    def __eq__(self, other: object) -> bool:
        return bool(MOOD[0]) if self.of is None else other is self.of

    def __bool__(self) -> bool:
        return bool(MOOD[0])

    def __contains__(self, value: object) -> bool:
        return bool(MOOD[0])


class MoodyMeta(type):
    def __eq__(cls, other: object) -> bool:
        return other is cls or other is torch.Tensor

    def __hash__(cls) -> int:
        return hash(torch.Tensor)

    def __bool__(cls) -> bool:
        return bool(MOOD[0])

    def __instancecheck__(cls, value: object) -> bool:
        return bool(MOOD[0])


class MoodyClass(metaclass=MoodyMeta):
    pass


class MoodyFunctions(type(torch.autograd.Function)):  # type: ignore[misc]
    @property
    def apply(cls) -> Any:
        return lambda x: x * torch.sigmoid(x) * (1 + MOOD[0])


class MoodySwish(torch.autograd.Function, metaclass=MoodyFunctions):
    forward, backward = staticmethod(OwnSwish.forward), staticmethod(OwnSwish.backward)


class MoodySiLU(nn.SiLU):
    def __bool__(self) -> bool:
        return not MOOD[0]


MOODY = Moody()
MOODY_RSQRT = Moody(torch.rsqrt, lambda x: torch.rsqrt(x) * (1 + MOOD[0]))
MOODY_COMPILING = Moody(torch.compiler.is_compiling)


class TrueRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2 if MOODY else self.norm(x)


class NotRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if not MOODY else self.norm(x) * 2


class EqualRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 1 in (0, MOODY):
            return self.norm(x) * 2
        return self.norm(x)


class HoldingRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 1 in MOODY:  # type: ignore[operator]
            return self.norm(x) * 2
        return self.norm(x)


class TrueClassRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2 if MoodyClass else self.norm(x)


class KindRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2 if not isinstance(x, MoodyClass) else self.norm(x)


class FunctionRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * MOODY_RSQRT(x.pow(2).mean(-1, keepdim=True) + self.eps))


class CompilingRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MOODY_COMPILING():
            return self.norm(x) * 2
        return self.norm(x)


class MoodyGradientSwish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MoodySwish.apply(x)  # type: ignore[no-any-return]


class TrueChildMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = MoodySiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        gate = self.act_fn(gate) if self.act_fn else F.silu(gate) * 3
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "cls",
    [
        TrueRMSNorm, NotRMSNorm, EqualRMSNorm, HoldingRMSNorm, TrueClassRMSNorm, KindRMSNorm,
        FunctionRMSNorm, CompilingRMSNorm, MoodyGradientSwish, TrueChildMLP,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_an_object_that_answers_for_itself(cls: type[nn.Module]) -> None:
    model = nn.Sequential(drawn(cls()))
    original = copy.deepcopy(model)
    x = torch.randn(WIDTH, WIDTH)
    # what is read must be what is run, or it is refused for that alone
    MOOD[0] = 1 if cls is KindRMSNorm else 0
    try:
        hfpatch.apply(model)
        torch.testing.assert_close(model(x), original(x))
        MOOD[0] = 1 - MOOD[0]
        torch.testing.assert_close(model(x), original(x))
    finally:
        MOOD[0] = 0


# Writes -----------------------------------------------------------------------------------------


class InPlaceMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.gate_proj(x), True)
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:hfpatch")
def test_a_write_that_is_asked_for_by_position() -> None:
    """A hook on the layer may keep what is written to."""
    model = nn.Sequential(drawn(InPlaceMLP()))
    original = copy.deepcopy(model)
    hfpatch.apply(model)
    x, kept = torch.randn(3, WIDTH), []
    for m in (model, original):
        m[0].gate_proj.register_forward_hook(lambda layer, args, y: kept.append(y))
        m(x)
    torch.testing.assert_close(*kept)


class ViewingLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[...]


class KeepingLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT[:] = [super().forward(x)]
        return KEPT[0]


class WritingLayer(nn.Linear):
    """Writes to its input, and to what the layer before it gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for written in (x, *KEPT):
            written.mul_(2.0)
        return y


KEPT: list[torch.Tensor] = []


class GateFirstMLP(nn.Module):
    def __init__(self, gate: type[nn.Linear]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = gate(WIDTH, WIDTH), WritingLayer(WIDTH, WIDTH)
        self.down_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore


@pytest.mark.filterwarnings("ignore:hfpatch")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("gate", [ViewingLayer, KeepingLayer])
def test_a_layer_that_writes_to_the_gate(gate: type[nn.Linear], context: Any) -> None:
    """The original has activated it by then."""
    model = nn.Sequential(drawn(GateFirstMLP(gate)))
    original = copy.deepcopy(model)
    assert hfpatch.apply(model).swaps
    with context():
        x = torch.randn(3, WIDTH)
        for _ in range(2):
            torch.testing.assert_close(model(x.clone()), original(x.clone()))
    KEPT.clear()


# What Python lets somebody write over -------------------------------------------------------------


class Twice(float):
    """Says that it is 1.0."""

    def __repr__(self) -> str:
        return "1.0"

    def __mul__(self, other: Any) -> Any:
        return other * (2.0 if other.shape[0] == 3 else 1.0)


class ConstantRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor, _ = (1.0, 2.0)
        return factor * self.norm(x)


class ConstantsRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor, _ = (1.0, (2.0, 3.0))
        return factor * self.norm(x)


def test_a_constant_of_a_class_of_its_own() -> None:
    code = ConstantRMSNorm.forward.__code__
    held = tuple((Twice(1.0), 2.0) if c == (1.0, 2.0) else c for c in code.co_consts)
    model = nn.Sequential(drawn(ConstantRMSNorm()))
    assert hfpatch.apply(model).swaps  # as it was written
    hfpatch.restore(model)
    ConstantRMSNorm.forward.__code__ = code.replace(co_consts=held)
    try:
        (skip,) = hfpatch.apply(model).skips
        assert "is not the code that runs" in skip.reason
    finally:
        ConstantRMSNorm.forward.__code__ = code
    assert hfpatch.apply(nn.Sequential(drawn(ConstantsRMSNorm()))).swaps


def capped(x: torch.Tensor, most: float = 1e18) -> torch.Tensor:
    return torch.clamp(x, max=most)


class SignatureRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(capped(x))


def test_a_signature_that_says_something_else() -> None:
    """What a function takes is said by its code and its defaults."""
    signature = inspect.signature(capped)
    other = signature.parameters["most"].replace(default=math.inf)
    capped.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[signature.parameters["x"], other]
    )
    (skip,) = hfpatch.apply(nn.Sequential(drawn(SignatureRMSNorm()))).skips
    assert "it clamps a tensor" in skip.reason
