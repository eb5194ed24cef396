"""LayerNorms whose weight is an offset from one: Nemotron's and VideoPrism's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.videoprism.modeling_videoprism import VideoPrismLayerNorm

import hfpatch

CLASSES = (NemotronLayerNorm1P, VideoPrismLayerNorm)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDTH = 72


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def norm_of(cls: type[nn.Module], dtype: torch.dtype = torch.float32, **how: object) -> nn.Module:
    torch.manual_seed(3)
    norm = cls(_WIDTH, eps=1e-5, **how)
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_(0.0, 0.3)
    return nn.Sequential(norm).to(dtype)


def truth(model: nn.Module, x: Tensor) -> Tensor:
    wide = copy.deepcopy(model[0]).double()  # type: ignore[index]
    return F.layer_norm(x.double(), (_WIDTH,), wide.weight + 1, wide.bias, wide.eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_as_near_to_fp64_as_the_original(cls: type[nn.Module], dtype: torch.dtype) -> None:
    model = norm_of(cls, dtype)
    made = torch.randn(5, 7, _WIDTH).to(dtype)
    inputs = (made, made[:1, :1], made[0, 0], made.transpose(0, 1), made[:, ::2], made[:0])
    with torch.no_grad():
        theirs = [model(x) for x in inputs]
        report = hfpatch.apply(model)
        assert [s.op for s in report.swaps] == ["norm_modulate"], report
        for _ in range(3):  # the first call makes the quick way, others take it
            ours = [model(x) for x in inputs]
        for x, y, their in zip(inputs, ours, theirs, strict=True):
            assert (y.shape, y.dtype, y.stride()) == (their.shape, their.dtype, their.stride())
            if x.numel():
                exact = truth(model, x)
                ulp = torch.finfo(dtype).eps * exact.abs().clamp(min=1.0)  # the sums cancel
                error, eager = ((t - exact).abs() / ulp for t in (y, their))
                assert error.max() <= eager.max() + 1
        hfpatch.restore(model)
        assert all(torch.equal(model(x), y) for x, y in zip(inputs, theirs, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_what_changes_afterwards(cls: type[nn.Module]) -> None:
    model = norm_of(cls)
    x = torch.randn(4, _WIDTH)
    hfpatch.apply(model)
    with torch.no_grad():
        model(x)
        model[0].weight.add_(0.5)
        torch.testing.assert_close(model(x).double(), truth(model, x), rtol=1e-5, atol=1e-5)
        model[0].weight = nn.Parameter(torch.randn(_WIDTH))
        model[0].bias = nn.Parameter(torch.randn(_WIDTH))
        torch.testing.assert_close(model(x).double(), truth(model, x), rtol=1e-5, atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model[0].bias = None
            expected = F.layer_norm(x, (_WIDTH,), model[0].weight + 1, None, model[0].eps)
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
            model[0].eps = 0.5
            expected = F.layer_norm(x, (_WIDTH,), model[0].weight + 1, None, 0.5)
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("cls", CLASSES)
def test_gradients_are_the_originals(cls: type[nn.Module], mode: str) -> None:
    model = norm_of(cls)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, mode=mode)
        x = torch.randn(4, _WIDTH)
        results = []
        for m in (model, twin):
            given = x.clone().requires_grad_()
            m(given).square().sum().backward()
            results.append([given.grad, *(p.grad for p in m.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_without_a_bias_it_is_left_alone() -> None:
    with pytest.warns(RuntimeWarning, match="nothing was swapped"):
        report = hfpatch.apply(norm_of(VideoPrismLayerNorm, bias=False))
    assert not report.swaps


def test_autocast_of_another_device() -> None:
    """Nemotron's asks whether it is on for CUDA, wherever its input is, and casts if it is."""
    model = norm_of(NemotronLayerNorm1P)
    twin = copy.deepcopy(model)
    assert hfpatch.apply(model).swaps
    x = torch.randn(4, _WIDTH)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), twin(x))
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)  # `torch.autocast` refuses without a GPU
        try:
            assert twin(x).dtype is torch.bfloat16
            assert torch.equal(model(x), twin(x))
        finally:
            torch.set_autocast_enabled("cuda", before)
        torch.testing.assert_close(model(x), twin(x))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast("cpu"):
                assert torch.equal(model(x), twin(x))


class CastsForCudaLayerNorm(nn.LayerNorm):
    """A LayerNorm while autocast is on for CUDA, and something else while it is not."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x * 2.0


def test_applied_under_autocast_of_another_device() -> None:
    model = norm_of(CastsForCudaLayerNorm)
    twin = copy.deepcopy(model)
    x = torch.randn(4, _WIDTH)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hfpatch.apply(model)
        with torch.no_grad():
            torch.testing.assert_close(model(x), twin(x))
    finally:
        torch.set_autocast_enabled("cuda", before)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))


def lookalike(formula: Callable[[nn.LayerNorm, Tensor], Tensor]) -> type[nn.LayerNorm]:
    return type("OddLayerNorm", (nn.LayerNorm,), {"forward": formula})


def _rms(m: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, m.normalized_shape, m.weight + 1.0, m.eps) + m.bias


def _nearly_one(m: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight + 0.999, m.bias, m.eps)


def _bias_too(m: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight + 1.0, m.bias + 1.0, m.eps)


def _minus(m: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, 1.0 - m.weight, m.bias, m.eps)


def _without_bias(m: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.normalized_shape, m.weight + 1.0, None, m.eps)


def _scaled_bias(m: nn.LayerNorm, x: Tensor) -> Tensor:
    weight = m.weight + 1.0
    return F.layer_norm(x, m.normalized_shape, weight, m.bias * weight, m.eps)


@pytest.mark.parametrize(
    "formula", [_rms, _nearly_one, _bias_too, _minus, _without_bias, _scaled_bias]
)
def test_lookalikes(formula: Callable[[nn.LayerNorm, Tensor], Tensor]) -> None:
    model = norm_of(lookalike(formula))
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model)
    x = torch.randn(9, _WIDTH) * 3 + 1
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x), rtol=1e-5, atol=1e-5)
