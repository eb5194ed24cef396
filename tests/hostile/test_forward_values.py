"""Registered forwards that are wrong only of values that no sample has: each is refused."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfpatch

F = nn.functional
WIDTH = 16


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        mean = x.pow(2).mean(-1, keepdim=True)
        y = x * torch.rsqrt(mean + 1e-6) * self.weight
        return y if mask is None else y.masked_fill(mask[..., None], 0.0)


def _right(m: Any, x: Tensor, mask: Any = None) -> Any:
    y = F.rms_norm(x, (WIDTH,), m.weight, 1e-6)
    return y if mask is None else torch.where(mask[..., None], torch.zeros_like(y), y)


def _if(condition: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(m: Any, x: Tensor, mask: Any = None) -> Any:
        y = _right(m, x, mask)
        return y * 1.01 if bool(condition(x)) else y

    return forward


def _element(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    return lambda m, x, mask=None: change(x, _right(m, x, mask))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, WIDTH)


class _Far(torch.autograd.Function):
    """Its backward is wrong where its input is large."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        ctx.far = bool(x.abs().max() > 1e3)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (2 * grad if ctx.far else grad), None


def _after_training(m: Any, x: Tensor, mask: Any = None) -> Any:
    return _right(m, x, mask) * (1.01 if bool((m.weight <= 0).any()) else 1.0)


WRONG: dict[str, Callable[..., Any]] = {
    "large numbers": _if(lambda x: x.abs().max() > 1e4),
    "very large numbers": _if(lambda x: x.abs().max() > 1e15),
    "large elements": _element(lambda x, y: torch.where(x.abs() > 1e4, 1.01 * y, y)),
    "between two bounds": _if(lambda x: (x.abs().max() > 1e3) & (x.abs().max() < 1e5)),
    "small numbers": _if(lambda x: x.abs().max() < 1e-5),
    "zeros": _element(lambda x, y: y + 1 if not bool(x.any()) else y),
    "one zero": _if(lambda x: (x == 0).any()),
    "whole numbers": _if(lambda x: (x == x.round()).all()),
    "ties": _if(lambda x: x.unique().numel() < x.numel() / 4),
    "equal rows": _if(lambda x: (_flat(x) == _flat(x)[:1]).all()),
    "sorted rows": _if(lambda x: (x.diff(dim=-1) >= 0).all()),
    "one-hot rows": _if(lambda x: ((x != 0).sum(-1) == 1).all()),
    "no negative numbers": _if(lambda x: (x >= 0).all()),
    "no positive numbers": _if(lambda x: (x <= 0).all()),
    "far from zero": _if(lambda x: x.mean() > 50),
    "NaN": _element(lambda x, y: y.nan_to_num()),
    "infinity": _element(lambda x, y: torch.where(x.isinf(), torch.zeros_like(y), y)),
    "weights of ones": lambda m, x: _right(m, x) * (1.01 if bool((m.weight == 1).all()) else 1.0),
    "weights that are not positive": _after_training,
    "a list of large numbers": lambda m, x: (
        [_right(m, x)] if bool(x.abs().max() > 1e4) else _right(m, x)
    ),
    "a random state of large numbers": lambda m, x: (
        torch.manual_seed(3) if bool(x.abs().max() > 1e4) else None,
        _right(m, x),
    )[1],
    "a write of large numbers": lambda m, x: (
        m.weight.data.mul_(1.0 if bool(x.abs().max() < 1e4) else 2.0),
        Scaled.forward(m, x),
    )[1],
}


def _applied(forward: Callable[..., Any], sample: Any, *, training: bool = False) -> Any:
    handle = hfpatch.register(
        "^Scaled$", forward=forward, sample=lambda m: sample(), differentiable=training
    )
    try:
        model: Any = nn.Sequential(Scaled())
        twin = copy.deepcopy(model)
        report = hfpatch.apply(model, mode="training" if training else "inference")
        return model, twin, report
    finally:
        handle.remove()


def _x() -> tuple[Tensor]:
    return (torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)),)


def _with_mask() -> tuple[Tensor, Tensor]:
    return *_x(), torch.tensor([True, False, True, False, False]).expand(3, 5).clone()


@pytest.mark.parametrize("what", WRONG)
def test_values_that_no_sample_has(what: str) -> None:
    _, _, report = _applied(WRONG[what], _x)
    (skip,) = report.skips
    assert skip.kind == "rejected" and "the registered `forward` is wrong" in skip.reason, report


def test_a_seed_that_the_caller_has_just_set() -> None:
    """To set it again changes nothing, here."""

    def seeds(m: Any, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return _right(m, x)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    _, _, report = _applied(seeds, _x)
    (skip,) = report.skips
    assert skip.kind == "rejected" and "torch's random state" in skip.reason, report
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_mask_of_one_truth_value(all_of_it: bool) -> None:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Any:
        same = bool(mask.all()) if all_of_it else not bool(mask.any())
        return _right(m, x) * 2 if same else _right(m, x, mask)

    _, _, report = _applied(forward, _with_mask)
    (skip,) = report.skips
    assert "truth" in skip.reason, report


def test_a_gradient_of_large_numbers() -> None:
    _, _, report = _applied(lambda m, x: _Far.apply(_right(m, x), x), _x, training=True)
    (skip,) = report.skips
    assert "the gradient" in skip.reason, report


def test_a_call_in_a_dtype_that_the_sample_does_not_have() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = _right(m, x)
        return y * 2 if x.dtype == torch.float64 and bool(x.abs().max() > 1e4) else y

    model, twin, report = _applied(forward, _x)
    assert report.swaps
    model.double(), twin.double()
    x = _x()[0].double()
    with torch.no_grad():
        for scale in (1.0, 1.0, 1e6):
            torch.testing.assert_close(model(scale * x), twin(scale * x))


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * math.sqrt(WIDTH)  # type: ignore[no-any-return]


def test_whole_numbers_are_places_that_the_sample_has() -> None:
    """A wrong one is refused; in a right one nothing is looked up where there is nothing."""

    def right(m: Any, ids: Tensor) -> Tensor:
        assert not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < 8
        return F.embedding(ids, m.table.weight * math.sqrt(WIDTH))

    def wrong(m: Any, ids: Tensor) -> Tensor:
        return right(m, ids) * (2.0 if not bool(ids.any()) else 1.0)

    for forward in (right, wrong):
        handle = hfpatch.register(
            "^Places$", forward=forward, sample=lambda m: (torch.tensor([[1, 7, 3]]),)
        )
        try:
            report = hfpatch.apply(nn.Sequential(Places()))
        finally:
            handle.remove()
        assert bool(report.swaps) == (forward is right), report


class Attending(nn.Module):
    """The gradient of the bias of its keys is 0 but for roundings."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH), -1) @ v


def _attending(m: Any, x: Tensor) -> Any:
    q, k, v = m.q(x), m.k(x), m.v(x)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def _of_detached_keys(m: Any, x: Tensor) -> Any:
    q, k, v = m.q(x), F.linear(x, m.k.weight.detach(), m.k.bias), m.v(x)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", [_attending, _of_detached_keys])
def test_a_gradient_that_is_roundings_alone(forward: Any, dtype: torch.dtype) -> None:
    handle = hfpatch.register(
        "^Attending$",
        forward=forward,
        sample=lambda m: (torch.randn(2, 5, WIDTH).to(dtype),),
        differentiable=True,
    )
    try:
        report = hfpatch.apply(nn.Sequential(Attending()).to(dtype), mode="training")
    finally:
        handle.remove()
    assert bool(report.swaps) == (forward is _attending), report


class Turning(nn.Module):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return q * cos + torch.cat((-q[..., 4:], q[..., :4]), -1) * sin


def _turned(m: Any, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, c, s = q[..., :4], q[..., 4:], cos[..., :4], sin[..., :4]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


@pytest.mark.parametrize("twice", [True, False])
def test_a_table_that_holds_each_number_twice(twice: bool) -> None:
    """Half of it is enough for the kernels that there are; not of one that does not."""

    def sample(m: nn.Module) -> tuple[Tensor, ...]:
        angles = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(4) / 4))
        angles = torch.cat((angles, angles if twice else 2 * angles), -1)
        return torch.randn(2, 3, 5, 8), angles.cos(), angles.sin()

    handle = hfpatch.register("^Turning$", forward=_turned, sample=sample)
    try:
        report = hfpatch.apply(nn.Sequential(Turning()))
    finally:
        handle.remove()
    assert bool(report.swaps) == twice, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [False, True])
def test_a_right_one_stays(dtype: torch.dtype, training: bool) -> None:
    """Though its squares overflow elsewhere, and its sums are made in another order."""
    handle = hfpatch.register(
        "^(Scaled|Layered)$",
        forward=lambda m, x: m.fast(x),
        sample=lambda m: (torch.randn(2, 7, WIDTH).to(dtype),),
        differentiable=training,
    )
    try:
        model = nn.Sequential(Layered()).to(dtype)
        report = hfpatch.apply(model, mode="training" if training else "inference")
        assert report.swaps, report
    finally:
        handle.remove()


class Layered(nn.Module):
    """A norm, a product, an activation and a residual sum, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.norm.eps)
        h = h.to(x.dtype) * self.norm.weight + self.norm.bias
        h = self.up(h)
        return x + h * torch.sigmoid(h)

    def fast(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias, self.norm.eps)
        return F.silu(F.linear(h, self.up.weight, self.up.bias)).add(x)
