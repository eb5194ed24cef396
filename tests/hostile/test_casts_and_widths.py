"""Casts that are none until a layer gives another dtype, widths that code names by itself, branches
on what a call alone can say, and modules that code reaches by a global name: each call ends as in
an unpatched twin, in its values, its dtype or its error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfpatch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    pass


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as e:
        return type(e)


def assert_as_its_twin(
    module: nn.Module,
    x: Tensor,
    *,
    mode: str = "inference",
    after: Callable[[Any], object] = lambda module: None,
    swapped: bool | None = None,
    name: str = "",
) -> None:
    """`after` is done to both once one is patched; `swapped`: whether it should be; `name`: of the
    argument, where it is given by name."""
    torch.manual_seed(0)
    model = Root(module).eval()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = hfpatch.apply(model, mode=mode, kernels="local")
        if swapped is not None:
            assert bool(report.swaps) is swapped, report
        after(model.inner)
        after(twin.inner)
        kwargs = {name: x} if name else {}
        args = () if name else (x,)
        for _ in range(2):  # also by what the first call has noted
            ours, theirs = (outcome(lambda m=m: m(*args, **kwargs)) for m in (model, twin))
            if not isinstance(theirs, Tensor):
                assert ours is theirs
                continue
            assert isinstance(ours, Tensor), ours
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, equal_nan=True)


class WideLinear(nn.Linear):
    """Computes and returns fp32, as layers of some quantizers and adapters do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class Float64Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).double()


class PlainMLP(nn.Module):
    def __init__(
        self, layer: type[nn.Linear] = nn.Linear, last: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        self.gate_proj = layer(48, 64, bias=False)
        self.up_proj = layer(48, 64, bias=False)
        self.down_proj = last(64, 48, bias=False)
        self.act_fn = nn.SiLU()

    def product(self, x: Tensor) -> Tensor:
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(x))


class CastInputMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(x.to(self.gate_proj.weight.dtype)))


class CastResultMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(x)).to(x.dtype)


class CastProductMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(x).to(x.dtype))


class CastForLastMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.product(x)
        if h.dtype != self.down_proj.weight.dtype:
            h = h.to(self.down_proj.weight.dtype)
        return self.down_proj(h)


class CastGEGLU(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.proj = nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.proj(x.to(self.proj.weight.dtype)).chunk(2, dim=-1)
        return h * F.gelu(gate)


class PlainGEGLU(CastGEGLU):
    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * F.gelu(gate)


class CastGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = WideLinear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh").to(x.dtype)


def t5_mlp(wide: bool) -> nn.Module:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(
        d_model=48, d_ff=64, dropout_rate=0.0, feed_forward_proj="gated-gelu"
    )
    module: nn.Module = t5.T5DenseGatedActDense(config)
    if wide:
        widen(module)
    return module


def widen(module: Any) -> None:
    module.wi_0.__class__ = module.wi_1.__class__ = WideLinear


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("make", "dtype", "of_input"),
    [
        (CastInputMLP, BF16, FP32),
        (CastInputMLP, FP32, BF16),
        (CastGEGLU, BF16, FP32),
        (CastGEGLU, FP32, FP16),
        (lambda: CastResultMLP(last=WideLinear), BF16, BF16),
        (lambda: CastProductMLP(layer=WideLinear), BF16, BF16),
        (lambda: CastForLastMLP(layer=WideLinear), BF16, BF16),
        (CastGELU, BF16, BF16),
        (lambda: t5_mlp(True), BF16, BF16),
        (lambda: PlainMLP(layer=Float64Linear, last=Float64Linear), FP32, FP32),
        (lambda: PlainGEGLU(3), FP32, FP32),  # parts of 2 and 1, which broadcast
        (lambda: PlainGEGLU(1), FP32, FP32),  # one part
    ],
)
def test_layers_of_another_dtype_or_width(
    make: Callable[[], nn.Module], dtype: torch.dtype, of_input: torch.dtype, mode: str
) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        assert_as_its_twin(make().to(dtype), torch.randn(3, 48).to(of_input), mode=mode)


def test_layers_that_get_another_dtype_later() -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        x = torch.randn(3, 48).to(BF16)
        assert_as_its_twin(t5_mlp(False).to(BF16), x, after=widen, swapped=True)


class OwnWidthNorm(nn.Module):
    """Of no weight, with a width of its own: that of the proof's rows."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.hidden_size, self.eps = width, 1e-6


class SumRMSNorm(OwnWidthNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / self.hidden_size + self.eps)


class FixedLayerNorm(OwnWidthNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.hidden_size,), eps=self.eps)


class StrictRMSNorm(OwnWidthNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.hidden_size:
            raise ValueError("another width")
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class BoundedRMSNorm(OwnWidthNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] <= 150
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class EvenGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 != 0:
            raise ValueError("an odd width")
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("width", [64, 96, 151, 192])
@pytest.mark.parametrize(
    "cls", [SumRMSNorm, FixedLayerNorm, StrictRMSNorm, BoundedRMSNorm, EvenGELUActivation]
)
def test_a_width_that_only_the_code_names(cls: Any, width: int) -> None:
    assert_as_its_twin(cls(), torch.randn(3, width))


class SumOfSquaresRMSNorm(OwnWidthNorm):
    def __init__(self, width: int = 48) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / self.hidden_size + self.eps)
        return self.weight * (x * scale)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_weight_of_another_width(mode: str) -> None:
    def wider(module: Any) -> None:
        module.weight = nn.Parameter(torch.linspace(0.5, 1.5, 96))

    x = torch.randn(3, 96)
    assert_as_its_twin(SumOfSquaresRMSNorm(), x, after=wider, mode=mode, swapped=True)
    assert_as_its_twin(nn.LayerNorm(48), x, after=lambda m: wider(m), mode=mode)


class CastOfBatchMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=x.shape[0] > 64):
            return self.down_proj(self.product(x))


class CastOfRankMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=x.dim() == 4):
            return self.down_proj(self.product(x))


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("cls", "shape"), [(CastOfBatchMLP, (100, 48)), (CastOfRankMLP, (2, 3, 4, 48))]
)
def test_autocast_by_what_the_input_is(cls: Any, shape: tuple[int, ...], mode: str) -> None:
    assert_as_its_twin(cls(), torch.randn(shape), mode=mode)


class InPlaceWhereItLiesSo(PlainMLP):
    def product(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return F.silu(gate, inplace=gate.is_contiguous()) * self.up_proj(x)


def test_in_place_by_what_the_input_is() -> None:
    assert_as_its_twin(InPlaceWhereItLiesSo(), torch.randn(3, 48))


class AskingMLP(PlainMLP):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.product(x)
        if self.dropout is not None:
            h = self.dropout(h)
        return self.down_proj(h) if self.down_proj is not None else h


@pytest.mark.parametrize("child", ["dropout", "down_proj"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_child_that_goes(child: str, mode: str) -> None:
    gone = lambda m: setattr(m, child, None)  # noqa: E731
    assert_as_its_twin(AskingMLP(), torch.randn(3, 48), after=gone, mode=mode)


_ACT = nn.SiLU()


class GlobalGEGLU(PlainGEGLU):
    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * _ACT(gate)


def test_a_hook_on_a_global_module() -> None:
    x = torch.randn(100, 48)
    hook = _ACT.register_forward_hook(lambda m, a, y: 2 * y if y.shape[0] > 64 else None)
    try:
        assert_as_its_twin(GlobalGEGLU(), x, swapped=False)
    finally:
        hook.remove()
    assert_as_its_twin(GlobalGEGLU(), x, swapped=True)
    hook = _ACT.register_forward_hook(lambda m, a, y: 0 * y + 1)  # seen by the next apply
    try:
        assert_as_its_twin(GlobalGEGLU(), x, swapped=False)
    finally:
        hook.remove()


def test_a_forward_of_a_global_module(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 48)
    assert_as_its_twin(GlobalGEGLU(), x, swapped=True)
    with monkeypatch.context() as patched:
        patched.setitem(_ACT.__dict__, "forward", lambda t: 0 * t + 1)
        assert_as_its_twin(GlobalGEGLU(), x, swapped=False)
    with monkeypatch.context() as patched:
        patched.setattr(nn.SiLU, "forward", lambda self, t: 0 * t + 1)
        assert_as_its_twin(GlobalGEGLU(), x, swapped=False)
    assert_as_its_twin(GlobalGEGLU(), x, swapped=True)


class TableGEGLU(PlainGEGLU):
    def forward(self, x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * ACT2FN["gelu_new"](gate)


class WrittenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(48) + 0.5), 1e-6

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class WideResultRMSNorm(WrittenNorm):
    """Gives fp32 whatever it is given, and rounds nothing on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.float())


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_result_that_is_not_rounded(dtype: torch.dtype, mode: str) -> None:
    module, x = WideResultRMSNorm(), torch.randn(64, 48).to(dtype)
    assert_as_its_twin(module, x, mode=mode)  # fp32 tolerances


class _Scaled:
    """A data descriptor, which answers though the instance has a value."""

    factor = 1.0

    def __set__(self, module: nn.Module, value: float) -> None:
        module.__dict__["eps"] = value

    def __get__(self, module: nn.Module, cls: type) -> float:
        return float(module.__dict__["eps"]) * _Scaled.factor


class DescribedRMSNorm(WrittenNorm):
    eps = _Scaled()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x)


def test_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 48)
    assert_as_its_twin(DescribedRMSNorm(), x, swapped=False)
    monkeypatch.setattr(_Scaled, "factor", 1e6)
    assert_as_its_twin(DescribedRMSNorm(), x, swapped=False)


class ByPositionRMSNorm(WrittenNorm):
    def forward(self, x: Tensor, /) -> Tensor:
        return self.weight * self.normed(x)


class StarRMSNorm(WrittenNorm):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.weight * self.normed(xs[0])


@pytest.mark.parametrize("cls", [ByPositionRMSNorm, StarRMSNorm])
@pytest.mark.parametrize("name", ["", "x"])
def test_an_input_without_a_name(cls: Any, name: str) -> None:
    assert_as_its_twin(cls(), torch.randn(3, 48), name=name)


class KindRMSNorm(WrittenNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if isinstance(self.weight, nn.Parameter) else 2 * self.weight
        return weight * self.normed(x)


def test_a_weight_that_is_no_parameter_any_more() -> None:
    def bare(module: Any) -> None:
        weight = module.weight.detach().clone()
        del module.weight
        module.weight = weight

    assert_as_its_twin(KindRMSNorm(), torch.randn(3, 48), after=bare)


class NearlyRMSNorm(WrittenNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight + 1e-7) * self.normed(x)


class CubicRMSNorm(WrittenNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (1 + 1e-8 * self.weight.pow(2)) * self.normed(x)


@pytest.mark.parametrize(("cls", "scale"), [(NearlyRMSNorm, 1e-7), (CubicRMSNorm, 1e3)])
def test_weights_far_from_one(cls: Any, scale: float) -> None:
    module = cls()
    module.weight.data.mul_(scale)
    assert_as_its_twin(module, torch.randn(3, 48), swapped=False)


class SizedByRankRMSNorm(WrittenNorm):
    """Sizes by way of the number of dimensions: explained or not, and said so in words."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[x.ndim - 1]
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / n + self.eps))


class CountedRMSNorm(WrittenNorm):
    def forward(self, x: Tensor) -> Tensor:
        n = x.numel() // x[..., 0].numel()
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / n + self.eps))


@pytest.mark.parametrize("cls", [SizedByRankRMSNorm, CountedRMSNorm])
def test_what_is_not_read_is_unexplained(cls: Any) -> None:
    assert_as_its_twin(cls(), torch.randn(3, 48))
    report = hfpatch.plan(Root(cls()))
    assert [s.kind for s in report.skips] == ["unexplained"]


class FarGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_gradient_near_the_largest_number(dtype: torch.dtype) -> None:
    far = [-2.5e38, -2.1e38, -3.0, 0.5, 4.0, 2.1e38, 2.5e38]
    module = Root(FarGELUActivation())
    twin = copy.deepcopy(module)
    assert hfpatch.apply(module, mode="training", kernels="local").swaps
    gradients = []
    for each in (module, twin):
        x = torch.tensor([far], dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(each(x).sum(), x)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
