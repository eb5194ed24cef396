"""Kernels that lie: each is refused, or never changes a result. And right ones, which stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import kernel_models as models
import pytest
import torch
import wrong_kernels
from torch import Tensor, nn

import hfpatch
from hfpatch.foreign.process import Process
from hfpatch.proof.proofs import forget_proofs

OPS = ("rms_norm", "layer_norm", "silu", "gelu", "gated")
#: One op for each fault, in turn, and all of them in `make test-all`.
_CASES = [
    pytest.param(
        name,
        op,
        id=f"{case.category}-{name}-{op}",
        marks=() if i % len(case.ops or OPS) == j else pytest.mark.exhaustive,
    )
    for i, (name, case) in enumerate(wrong_kernels.FAULTS.items())
    for j, op in enumerate(case.ops or OPS)
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """What libraries do to the process when they are first used is none of the kernels' doing."""
    hfpatch.apply(models.Model("gated", 64))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """No kernel of one test may reach the next one."""
    forget_proofs()
    before = Process.now()
    yield
    before.changed()


def test_there_are_enough() -> None:
    assert len(wrong_kernels.FAULTS) >= 100
    assert len(_CASES) >= 300


@pytest.mark.parametrize(("name", "op"), _CASES)
def test_a_wrong_kernel_changes_nothing(name: str, op: str) -> None:
    case = wrong_kernels.FAULTS[name]
    model = models.Model(op, case.width).requires_grad_(case.training).to(case.dtype)
    inputs = [
        models.draw((*case.shape, case.width), case.dtype, case.layout, seed=i) for i in (1, 2)
    ]
    if op == "rms_norm" and name == "mixed_dtypes":
        model.float()
    if case.category == "values":
        for x in inputs:
            _reach_far(x)
    expected = [_run(model, x, case.training) for x in inputs]

    wrong = case.make(models.right_kernel(op))
    handle = hfpatch.register(op=op, kernel=wrong, name="wrong", differentiable=case.training)
    before = Process.now()
    try:
        mode = "training" if case.training else "inference"
        report = hfpatch.apply(model, kernels={op: "wrong"}, mode=mode)
        assert not before.changed(), "apply changed the process"
        kept: list[tuple[list[Tensor], list[Tensor]]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            before = Process.now()  # with this filter
            for i in range(case.calls):
                x = inputs[i % 2]
                given = x.detach()
                results = _run(model, given, case.training)
                assert not before.changed(), "a call changed the process"
                # results are looked at when others came after them
                kept = [*kept[-2:], (results, expected[i % 2])]
                for results, right in kept:
                    _agree(results, right)
                assert not given.requires_grad
                _same_bits(x, models.draw(x.shape, x.dtype, case.layout, i % 2 + 1), case.category)
    finally:
        handle.remove()
    if report.swaps:  # it was right when it was asked: then it was seen at the calls
        assert {s.source for s in report.swaps} == {"wrong"}
    else:
        refused = [s for s in report.skips if s.kind != "no gain"]
        assert refused and {s.kind for s in refused} == {"rejected"}, report.skips
        assert "kernel `wrong`" in refused[0].reason


def _reach_far(x: Tensor) -> None:
    flat = x.view(-1, x.shape[-1])
    for i, scale in enumerate((1e10, 1e-12, 1e4, 3e5)):
        flat[i] *= scale
    flat[4, 3], flat[5, 7], flat[6, 0] = float("nan"), float("inf"), -float("inf")


def _run(model: nn.Module, x: Tensor, training: bool) -> list[Tensor]:
    """Results; and gradients, of two backwards, one of them by repeated and strided gradients."""
    if not training:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]
    x = x.detach().clone().requires_grad_()
    results = model(x)
    wanted = [x, *model.parameters()]
    total = sum((y.sum(0) * _weights(y.transpose(-1, -2))[0]).sum() for y in results)
    grads = torch.autograd.grad(total, wanted, retain_graph=True)
    weighted = sum((y.transpose(-1, -2) * _weights(y)).sum() for y in results)
    again = torch.autograd.grad(weighted, wanted)
    return [*(y.detach() for y in results), *grads, *again]


def _weights(y: Tensor) -> Tensor:
    shape = (*y.shape[:-2], y.shape[-1], y.shape[-2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)


def _agree(results: list[Tensor], expected: list[Tensor]) -> None:
    for y, right in zip(results, expected, strict=True):
        assert type(y) is Tensor and not y.requires_grad
        assert y.shape == right.shape and y.dtype == right.dtype
        eps = torch.finfo(y.dtype).eps
        scale = right.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True) if y.dim() else 1.0
        far = (y - right).abs() > 16 * eps * scale
        same = (y == right) | (y.isnan() & right.isnan())
        assert not bool((far & ~same).any() | (y.isnan() != right.isnan()).any())
        assert torch.equal(y.isinf(), right.isinf())


def _same_bits(x: Tensor, drawn: Tensor, category: str) -> None:
    if category != "values":  # those were changed by the test
        assert torch.equal(x, drawn), "a kernel wrote to its input"


# ------------------------------------------------------------------------------ right ones


def _layer_norm_by_hand(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


class _LigerLike(torch.autograd.Function):
    """Rows, one after the other, with a backward by hand, as a Triton launcher has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        wide = rows.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(rows, weight, inverse)
        y = (wide * inverse).to(x.dtype) * weight
        return y.view(x.shape) if y.shape != x.shape else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, inverse = ctx.saved_tensors
        g = grad.reshape(rows.shape).float()
        normed = rows.float() * inverse
        scaled = g * weight.float()
        dx = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        dw = (g * normed.to(rows.dtype).float()).sum(0)
        return dx.to(rows.dtype).view(grad.shape), dw.to(weight.dtype), None


def _liger_like(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Any:
    if weight is None or bias is not None or weight_offset or cast != "input":
        raise NotImplementedError("expected a weight, no bias and cast='input'")
    return _LigerLike.apply(x, weight, eps)


def _torch_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "none",
) -> Tensor:
    y = nn.functional.rms_norm(x, x.shape[-1:], None, eps)
    return y if weight is None else y.to(torch.promote_types(x.dtype, weight.dtype)) * weight


def _gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    if activation != "silu":
        raise NotImplementedError(activation)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def _silu_into_new_memory(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.mul(x, torch.sigmoid(x.float()).to(x.dtype) if x.dtype == torch.float32 else 1, out=out)
    return out if x.dtype == torch.float32 else nn.functional.silu(x)


def _compiled_once(x: Tensor, approximate: str = "none") -> Tensor:
    """It keeps what it made of a size, as launchers do."""
    _PLANS.setdefault((x.shape, x.dtype), len(_PLANS))
    return nn.functional.gelu(x, approximate=approximate)


_PLANS: dict[Any, int] = {}

_RIGHT: list[tuple[str, Any, bool]] = [
    *((op, models.right_kernel(op), True) for op in OPS),
    ("rms_norm", _liger_like, True),
    ("rms_norm", _torch_rms_norm, True),
    ("layer_norm", _layer_norm_by_hand, True),
    (
        "layer_norm",
        lambda x, w=None, b=None, eps=1e-5: nn.functional.layer_norm(x, x.shape[-1:], w, b, eps),
        True,
    ),
    ("gated", _gated, True),
    ("silu", _silu_into_new_memory, False),
    ("silu", nn.functional.silu, True),
    ("gelu", _compiled_once, True),
    ("gelu", nn.functional.gelu, True),
]


@pytest.mark.parametrize(
    ("op", "kernel", "differentiable"),
    _RIGHT,
    ids=[f"{op}-{getattr(k, '__name__', k)}-{i}" for i, (op, k, _) in enumerate(_RIGHT)],
)
def test_a_right_kernel_stays(op: str, kernel: Any, differentiable: bool) -> None:
    handle = hfpatch.register(op=op, kernel=kernel, name="mine", differentiable=differentiable)
    try:
        for mode in ("inference", "training") if differentiable else ("inference",):
            dtype = torch.float32 if mode == "inference" else torch.bfloat16
            model = models.Model(op, 128).to(dtype).requires_grad_(mode == "training")
            x = models.draw((2, 9, 128), dtype)
            expected = _run(model, x, mode == "training")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                report = hfpatch.apply(model, kernels={op: "mine"}, mode=mode)
                assert {s.source for s in report.swaps} == {"mine"}, report.skips
                assert not report.notes
                for _ in range(3):
                    _close(_run(model, x, mode == "training"), expected)
    finally:
        handle.remove()


def _close(results: list[Tensor], expected: list[Tensor]) -> None:
    for y, right in zip(results, expected, strict=True):
        limit = 16 * torch.finfo(y.dtype).eps
        scale = right.abs().max().item()
        torch.testing.assert_close(y, right, rtol=limit, atol=limit * scale)
