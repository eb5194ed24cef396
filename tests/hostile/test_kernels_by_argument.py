"""Kernels that lie by what an argument is, a parameter, a leaf, the same tensor as another one, or
whose backward counts: none of them is in a result or in a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import kernel_models as models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wrong_backwards import Counting, Scaled

import hfpatch

WIDTH = 24
Kernel = Callable[..., Any]


def _right(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def _kept_of_parameters() -> Kernel:
    """What is made of a parameter once: stale after it is trained."""
    kept: dict[int, Tensor] = {}

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        if isinstance(w, nn.Parameter):
            w = kept.setdefault(id(w), w.detach() * 1.0)
        return _right(x, w, b, eps)

    return kernel


def _gradient_of_a_parameter() -> Kernel:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return _right(x, Scaled.apply(w, lambda: 0.5) if isinstance(w, nn.Parameter) else w, b, eps)

    return kernel


def _gradient_of_no_leaf() -> Kernel:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return _right(x if x.is_leaf else Scaled.apply(x, lambda: 0.5), w, b, eps)

    return kernel


def _backward_that_counts() -> Kernel:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return _right(Counting.apply(x), w, b, eps)

    return kernel


class _Passing(torch.autograd.Function):
    """Does something with its result, a weight and the gradient in its backward, which returns what
    that gives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Any, do: Callable[..., Tensor]) -> Tensor:
        ctx.held = (y := y.clone()).detach(), w, do
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        y, w, do = ctx.held
        return do(y, w, grad), None, None


def _in_backward(do: Callable[..., Tensor]) -> Kernel:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        y: Tensor = _Passing.apply(_right(x, w, b, eps), w, do)
        return y

    return kernel


def _has_a_gradient(w: Any) -> bool:
    return w is not None and w.is_leaf and w.grad is not None


def _gradient_of_a_second_step() -> Kernel:
    return _in_backward(lambda y, w, grad: grad * 0.5 if _has_a_gradient(w) else grad.clone())


def _gradient_that_is_added_by_itself() -> Kernel:
    def do(y: Tensor, w: Any, grad: Tensor) -> Tensor:
        if _has_a_gradient(w):
            w.grad.add_(1.0)
        return grad.clone()

    return _in_backward(do)


def _backward_in_its_result() -> Kernel:
    return _in_backward(lambda y, w, grad: y.data.copy_(grad).clone())


def _value_of_a_second_step() -> Kernel:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return _right(x, w, b, eps) * (0.5 if _has_a_gradient(w) else 1.0)

    return kernel


LIES = [
    *(_kept_of_parameters, _gradient_of_a_parameter, _gradient_of_no_leaf, _backward_that_counts),
    *(_gradient_of_a_second_step, _gradient_that_is_added_by_itself, _backward_in_its_result),
    _value_of_a_second_step,
]


@pytest.mark.parametrize("make", LIES, ids=lambda m: m.__name__.strip("_"))
def test_by_what_an_argument_is(make: Callable[[], Kernel]) -> None:
    model, twin = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    handle = hfpatch.register(op="layer_norm", kernel=make(), name="lying", differentiable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            report = hfpatch.apply(model, kernels={"layer_norm": "lying"}, mode="training")
            assert not report.swaps, report
            Counting.count = 3000
            for i in range(2):
                x = torch.randn(5, WIDTH)
                for each in (model, twin):
                    each.zero_grad(set_to_none=i == 0)
                    each(x).square().sum().backward()
                for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
                    with torch.no_grad():
                        a.mul_(1.5)
                        b.mul_(1.5)
    finally:
        Counting.count = 0
        handle.remove()


@pytest.mark.parametrize("of_gradients", [False, True])
def test_two_arguments_that_are_one_tensor(of_gradients: bool) -> None:
    right = models.right_kernel("gated")

    def kernel(gate: Tensor, up: Tensor, *rest: Any, **params: Any) -> Any:
        if gate is up and not of_gradients:
            return right(gate, up, *rest, **params) * 0.5
        if gate is up:
            gate = Scaled.apply(gate, lambda: 0.5)
        return right(gate, up, *rest, **params)

    model = nn.Sequential(models.SomeMLP(WIDTH))
    handle = hfpatch.register(op="gated", kernel=kernel, name="lying", differentiable=True)
    try:
        with pytest.warns(RuntimeWarning, match="rejected|one in two places|is wrong"):
            report = hfpatch.apply(model, kernels={"gated": "lying"}, mode="training")
    finally:
        handle.remove()
    assert not report.swaps, report
    assert "one in two places" in str(report.to_json())


def test_a_backward_may_keep_what_it_compiled() -> None:
    """Something that is made once for each width is no state: it does not change with each call."""
    compiled: dict[int, float] = {}

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * compiled.setdefault(grad.shape[-1], 1.0)

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return _right(Compiled.apply(x), w, b, eps)

    model = nn.Sequential(nn.LayerNorm(WIDTH))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine", differentiable=True)
    try:
        report = hfpatch.apply(model, kernels={"layer_norm": "mine"}, mode="training")
        assert len(report.swaps) == 1 and "state" not in str(report), report
        x = torch.randn(3, WIDTH, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x).sum().backward()
    finally:
        handle.remove()


def _empties_the_gradient(x: Tensor, w: Any) -> None:
    w.grad.data.zero_()


def _writes_what_is_there(x: Tensor, w: Any) -> None:
    with torch.no_grad():
        x.mul_(1.0)
        w.mul_(1.0)


def _makes_a_class_of_it(x: Tensor, w: Any) -> None:
    w.__class__ = type("Other", (nn.Parameter,), {})


@pytest.mark.parametrize("do", [_empties_the_gradient, _writes_what_is_there, _makes_a_class_of_it])
def test_what_it_does_to_an_argument_later_is_set_back(do: Callable[..., None]) -> None:
    """The gradient of the step before, the class, and the count by which autograd knows that what
    it saved is as it was."""
    told: list[bool] = []

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        y = _right(x, w, b, eps)
        if told and x.shape[0] == 7:
            do(x, w)
        return y

    model, twin = (nn.Sequential(nn.LayerNorm(WIDTH)) for _ in range(2))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="lying", differentiable=True)
    try:
        assert hfpatch.apply(model, kernels={"layer_norm": "lying"}, mode="training").swaps
    finally:
        handle.remove()
    told.append(True)
    with pytest.warns(RuntimeWarning, match="`lying` .* is not used any more, since it [wc]"):
        found = _trained(model)
    for ours, theirs in zip(found, _trained(twin), strict=True):
        assert type(ours) is type(theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _trained(model: nn.Module) -> list[Tensor]:
    """Parameters and gradients, after backwards that are added up."""
    inputs = []
    for rows in (5, 7, 7):
        drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        inputs.append(drawn.requires_grad_())
        e = drawn.exp()  # which saves its result
        (model(e) + e).square().sum().backward()
    held = [*inputs, *model.parameters()]
    return [*held, *(t.grad for t in held if t.grad is not None)]


def test_an_interrupt_in_the_first_call_of_a_kind() -> None:
    """What the kernel had changed by then is set back, as where it fails."""
    told: list[bool] = []

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        if told:
            torch.set_default_dtype(torch.float64)
            x.mul_(2.0)
            raise KeyboardInterrupt
        return _right(x, w, b, eps)

    model = nn.Sequential(nn.LayerNorm(WIDTH))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert hfpatch.apply(model, kernels={"layer_norm": "mine"}).swaps
            x = torch.ones(3, WIDTH)
            told.append(True)
            with pytest.raises(KeyboardInterrupt):
                model(x)
            assert torch.get_default_dtype() == torch.float32
            assert torch.equal(x, torch.ones(3, WIDTH))
            told.clear()
            torch.testing.assert_close(model(x), _right(x))
    finally:
        torch.set_default_dtype(torch.float32)
        handle.remove()
