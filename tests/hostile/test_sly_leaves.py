"""Leaves that deceive by what Python lets a class do: each answers as an unpatched twin does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sly_leaves
import torch
from cases import Case, check
from leaves import WIDTH, PlainRMSNorm, drawn
from sly_leaves import SLY
from torch import Tensor, nn

import hfpatch

#: What counts calls is another one after some; it is not made to deceive its own twin.
_COUNTERS = (
    *(sly_leaves.Growing, sly_leaves.Doubtful, sly_leaves.Shifting, sly_leaves.Agreeable),
    *(sly_leaves.Moody, sly_leaves._Library),
)
#: Those that count how often they are asked cannot be compared with a twin: they are not swapped.
COUNTING = {
    *("GrowingRMSNorm", "DoubtfulRMSNorm", "ShiftingRMSNorm", "AgreeableRMSNorm", "MoodyRMSNorm"),
    *("LibraryRMSNorm", "own_builtins"),
}
#: Those that may well be swapped, for they are right as they are.
RIGHT = {
    *("gate_first_mlp", "tied_mlp", "shared_weight_norm", "aliased_mlp"),
    "up_first_mlp",
}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    yield
    for cls in _COUNTERS:
        for name in ("asked", "uses"):
            if hasattr(cls, name):
                setattr(cls, name, 0)
    sly_leaves.GAIN.fill_(1.0)
    sly_leaves.HELD.clear()


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    return lambda g: (scale * torch.randn(shape, generator=g).to(dtype),)


def filled(value: float) -> Any:
    return lambda g: (torch.full((3, WIDTH), value),)


CALLS = (
    *(randn(2, 5, WIDTH), randn(6, WIDTH), randn(WIDTH), randn(1, WIDTH), randn(0, WIDTH)),
    *(randn(2, 1, 1, 1, 1, 2, WIDTH), randn(1, 1, 2, 1, 1, WIDTH), randn(2, 3, 4, WIDTH)),
    *(randn(2, WIDTH, scale=s) for s in (5.0, 3e3, 3.16e4, 1e5, 1e9, 1e-7)),
    *(filled(v) for v in (7.25, 3.0, 5.0, 0.5, 3e4, 1.0, -1.0, 0.0)),
    lambda g: (torch.randn(2, WIDTH, 5, generator=g).transpose(1, 2),),
)


def change(model: nn.Module) -> None:
    """What somebody may write to after `apply`, in both models."""
    for module in model.modules():
        if isinstance(getattr(module, "gain", None), Tensor):
            module.gain.fill_(3.0)  # type: ignore[union-attr,operator]
        extra = getattr(module, "extra", None)
        if extra is not None:
            extra.args[0].fill_(3.0)
    sly_leaves.GAIN.fill_(3.0)
    sly_leaves.HELD.append(1)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", SLY)
def test_a_sly_leaf_answers_as_the_original(name: str, mode: str) -> None:
    swapped = False if name in COUNTING else None
    calls = () if name in COUNTING else CALLS
    check(Case(lambda: drawn(SLY[name]()), calls, mode=mode, after=change, swapped=swapped))
    if name not in COUNTING:
        sly_leaves.GAIN.fill_(1.0)
        sly_leaves.HELD.clear()
        check(Case(lambda: drawn(SLY[name]()), CALLS[:3], mode=mode, grads=True))


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_what_is_right_stays_swapped(name: str) -> None:
    check(Case(lambda: drawn(SLY[name]()), CALLS[:3], swapped=True))


def test_there_are_enough() -> None:
    assert len(SLY) >= 40


# Replaced after `apply` ---------------------------------------------------------------------------


class Above(nn.LayerNorm):
    def normed(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)


class BelowLayerNorm(Above):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("cls", "name"), [(nn.LayerNorm, "forward"), (Above, "forward"), (Above, "normed")]
)
def test_a_method_above_that_is_replaced_later(
    cls: type[nn.Module], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(BelowLayerNorm(WIDTH)).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    assert hfpatch.apply(model, kernels="local").swaps
    before, theirs = model(x), getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, x: 2 * theirs(self, x))
    torch.testing.assert_close(model(x), 2 * before)
    hfpatch.restore(model)


class Between(Above):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_class_that_is_put_between_later() -> None:
    class ReachingLayerNorm(Above):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = nn.Sequential(ReachingLayerNorm(WIDTH)).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    assert hfpatch.apply(model, kernels="local").swaps
    for _ in range(2):  # by the second call the first one's kind is known
        before = model(x)
    ReachingLayerNorm.__bases__ = (Between,)
    torch.testing.assert_close(model(x), 2 * before)
    hfpatch.restore(model)


class Lender(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class BorrowingRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Lender.forward(self, x)  # type: ignore[arg-type]


class HeirRMSNorm(PlainRMSNorm, Lender):
    def forward(self, x: Tensor) -> Tensor:
        return Lender.forward(self, x)


def test_a_method_of_another_class() -> None:
    """No call looks at what it reads of a module that is not of its class."""
    (skip,) = hfpatch.apply(nn.Sequential(drawn(BorrowingRMSNorm()))).skips
    assert "`Lender.forward` is called with a module" in skip.reason


def test_a_method_of_a_base_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen at the call."""
    model = nn.Sequential(drawn(HeirRMSNorm())).requires_grad_(False)
    x, theirs = torch.randn(2, WIDTH), Lender.forward
    assert hfpatch.apply(model).swaps
    before = model(x)
    monkeypatch.setattr(Lender, "forward", lambda self, x: 2 * theirs(self, x))
    torch.testing.assert_close(model(x), 2 * before)
    hfpatch.restore(model)


@pytest.mark.parametrize("name", ["rsqrt", "mean", "__mul__"])
def test_a_method_of_tensors_that_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `apply`, and after it: then the next `apply` sees it."""

    class MethodRMSNorm(PlainRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt())

    model = nn.Sequential(drawn(MethodRMSNorm())).requires_grad_(False)
    assert hfpatch.apply(model).swaps
    theirs = getattr(Tensor, name)
    count = [0]

    def other(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return theirs(*args, **kwargs)

    monkeypatch.setattr(Tensor, name, other)
    report = hfpatch.apply(model)
    assert not report.swaps and f"`torch.Tensor.{name}` was replaced" in report.skips[0].reason
    monkeypatch.undo()
    assert hfpatch.apply(model).swaps
    hfpatch.restore(model)


def test_defaults_that_are_exchanged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is the same one: the next `apply` sees it (docs/registry-and-probe.md)."""

    class DefaultRMSNorm(PlainRMSNorm):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return super().forward(x) * gain

    model = nn.Sequential(drawn(DefaultRMSNorm())).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    assert hfpatch.apply(model).swaps
    before = model(x)
    monkeypatch.setattr(DefaultRMSNorm.forward, "__defaults__", (2.0,))
    torch.testing.assert_close(model(x), before)
    hfpatch.apply(model)
    torch.testing.assert_close(model(x), 2 * before)
    hfpatch.restore(model)
