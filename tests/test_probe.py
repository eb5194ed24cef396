"""The name proposes, the probe disposes: lookalikes, misleading names, every rounding rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Norm(nn.Module):
    def __init__(self, dim: int = 64, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps


class EpsOutsideRMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class CentredRMSNorm(_Norm):  # the name says RMS, the code subtracts the mean
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class UnbiasedLayerNorm(_Norm):  # divides by D - 1
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1))


class PartialRMSNorm(_Norm):  # normalizes over the first half only
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x[..., : x.shape[-1] // 2].float()
        return self.weight * (x * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.eps))


class ClampedRMSNorm(_Norm):  # equal to RMSNorm unless a value is large
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.clamp(-4, 4)


class ScaledRMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y * 1.0005


class TupleRMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class TwoInputRMSNorm(_Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (EpsOutsideRMSNorm, "mismatch"),
        (UnbiasedLayerNorm, "mismatch"),
        (PartialRMSNorm, "unexplained"),
        (ClampedRMSNorm, "unexplained"),
        (ScaledRMSNorm, "mismatch"),
        (TupleRMSNorm, "unexplained"),
        (TwoInputRMSNorm, "unexplained"),
    ],
)
def test_misleading_name_is_left_alone_with_the_reason(cls: type[nn.Module], kind: str) -> None:
    model = Root(cls())
    x = torch.randn(3, 64)
    report = hfpatch.apply(model)
    assert not report.swaps
    (skip,) = report.skips
    assert skip.kind == kind and cls.__name__ in skip.reason
    assert skip.class_name == cls.__name__ and skip.path == "inner"
    assert "forward" not in model.inner.__dict__
    assert cls.__name__ in str(report)
    del x


def test_misleading_name_with_a_known_formula_gets_that_formula() -> None:
    model = Root(CentredRMSNorm())
    with torch.no_grad():
        model.inner.weight.copy_(torch.rand(64) + 0.5)
    x = torch.randn(5, 64) + 2
    with torch.no_grad():
        before = model(x)
        (swap,) = hfpatch.apply(model).swaps
        assert swap.op == "layer_norm"
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)


class GluLookalike(nn.Module):
    """Named and built like a gated MLP, but bends what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj, self.act_fn = nn.Linear(48, 32), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(torch.nn.functional.hardtanh(self.gate_proj(x), -7.0, 7.0))
        return self.down_proj(gate * self.up_proj(x))


class SwappedOrderMLP(GluLookalike):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class PlusOneMLP(GluLookalike):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


@pytest.mark.parametrize("cls", [SwappedOrderMLP, PlusOneMLP, GluLookalike])
def test_gated_lookalikes_are_left_alone(cls: type[nn.Module]) -> None:
    cls = type(cls.__name__ if "MLP" in cls.__name__ else "BentMLP", (cls,), {})
    model = Root(cls())
    report = hfpatch.apply(model)
    assert not [s for s in report.swaps if s.op == "gated"]
    kind = "unexplained" if "Bent" in cls.__name__ else "mismatch"
    assert [s.kind for s in report.skips if s.path == "inner"] == [kind]


class FarClampedMLP(GluLookalike):  # Step-3.7's, with other limits
    limit = 50.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=self.limit)
        return self.down_proj(gate * self.up_proj(x).clamp(-self.limit, self.limit))


@pytest.mark.parametrize("limit", [10.0, 50.0, 500.0])
def test_a_clamp_far_out_is_seen(limit: float) -> None:
    from transformers.activations import ClippedGELUActivation

    mlp = FarClampedMLP()
    mlp.limit = limit
    report = hfpatch.apply(Root(mlp), kernels="local")
    (swap,) = [s for s in report.swaps if s.path == "inner"]
    bounds = f"gate_min=None, gate_max={limit:g}, up_min={-limit:g}, up_max={limit:g}"
    assert swap.op == "gated_clamped" and bounds in swap.formula
    report = hfpatch.apply(Root(ClippedGELUActivation(-limit, limit)), kernels="local")
    assert not [s for s in report.swaps if s.path == "inner"]
    (reason,) = (s.reason for s in report.skips if s.path == "inner" and s.kind == "unexplained")
    assert "clamps a tensor, which no formula of its kind does" in reason


class DropoutMLP(GluLookalike):
    p = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(h, self.p, self.training))


class DropoutRMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return nn.functional.dropout(self.weight * y, 0.1, self.training)


class ScaledInTrainingRMSNorm(_Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return y * 0.9 if self.training else y


class CountingRMSNorm(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (DropoutMLP, "draws random numbers in `train()`"),
        (DropoutRMSNorm, "draws random numbers in `train()`"),
        (ScaledInTrainingRMSNorm, "branches on `self.training`"),
        (CountingRMSNorm, "branches on `self.training`"),
    ],
)
def test_what_is_another_in_training_is_left_alone(
    cls: type[nn.Module], reason: str, mode: str
) -> None:
    model = Root(cls())
    before = torch.get_rng_state()
    report = hfpatch.apply(model, mode=mode)
    assert torch.equal(torch.get_rng_state(), before)
    (skip,) = (s for s in report.skips if s.path == "inner")
    assert skip.kind == "unexplained" and reason in skip.reason and cls.__name__ in skip.reason
    assert "forward" not in model.inner.__dict__


def test_dropout_of_nothing_is_no_dropout() -> None:
    mlp = DropoutMLP()
    mlp.p = 0.0
    assert [s.op for s in hfpatch.apply(Root(mlp)).swaps] == ["gated"]


class CustomGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)  # not 1.702


class Composed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_activation_constant_matters() -> None:
    assert [s.kind for s in hfpatch.apply(Root(CustomGELU())).skips] == ["mismatch"]
    named = type("MyQuickGELU", (Composed,), {})
    (swap,) = hfpatch.apply(Root(named())).swaps
    assert swap.formula == "gelu(approximate=sigmoid)"


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.05])
def test_any_eps(eps: float) -> None:
    class PlainRMSNorm(_Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y.to(x.dtype)

    (swap,) = hfpatch.apply(Root(PlainRMSNorm(eps=eps))).swaps
    assert f"eps={eps:g}" in swap.formula


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["llama", "olmo2", "gemma", "t5", "mochi"])
def test_mixed_dtypes_behave_as_the_original(
    rule: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    from diffusers.models.normalization import MochiRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    cls = {
        "llama": LlamaRMSNorm,
        "olmo2": Olmo2RMSNorm,
        "gemma": Gemma2RMSNorm,
        "t5": T5LayerNorm,
        "mochi": MochiRMSNorm,
    }[rule]
    norm = cls(128, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(128))
    model = Root(norm.to(w_dtype))
    x = torch.randn(4, 7, 128).to(x_dtype)
    with torch.no_grad():
        expected = model(x)
        report = hfpatch.apply(model)
        assert len(report.swaps) == 1
        got = model(x)
    assert got.dtype == expected.dtype
    eps = torch.finfo(min((x_dtype, w_dtype), key=lambda t: -torch.finfo(t).eps)).eps
    scale = expected.abs().amax(-1, keepdim=True)
    # fp32: the reduction's order differs, by a few roundings on each side
    limit = 4 * eps if eps == torch.finfo(torch.float32).eps else eps
    assert ((got.double() - expected.double()).abs() / scale).max() <= limit
    if got.dtype != torch.float32:  # bit for bit: the rounding points are the original's
        assert (got == expected).float().mean() > 0.99


def test_probe_leaves_random_state_and_model_alone() -> None:
    model = Root(nn.LayerNorm(64))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    hfpatch.apply(model)
    assert torch.equal(torch.rand(3), expected)


def test_classes_changed_after_a_probe_are_probed_again() -> None:
    class TrickyRMSNorm(_Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * y.to(x.dtype)

    assert len(hfpatch.plan(Root(TrickyRMSNorm())).swaps) == 1
    TrickyRMSNorm.forward = ScaledRMSNorm.forward  # type: ignore[method-assign]
    assert not hfpatch.plan(Root(TrickyRMSNorm())).swaps


class Attribute(_Norm):
    """What it computes hangs on an attribute that is no number."""

    def __init__(self, how: object) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * self.how(y).to(x.dtype)


AttributeRMSNorm = type("AttributeRMSNorm", (Attribute,), {})


def test_modules_of_one_class_that_differ_in_an_attribute_are_probed_apart() -> None:
    factor = 2.0
    for good, bad in (
        (torch.clone, torch.neg),
        (lambda y: y, lambda y: y * factor),
        (nn.Identity(), nn.Tanh()),
        (nn.Sequential(nn.Identity()), nn.Sequential(nn.Tanh())),
    ):
        model = nn.Sequential(AttributeRMSNorm(good), AttributeRMSNorm(bad))
        found = {s.path for s in hfpatch.plan(model).swaps}
        # children of a norm are a reason to leave it alone altogether
        assert found == (set() if isinstance(good, nn.Module) else {"0"}), (good, bad)


def test_an_activation_replaced_after_apply_is_noticed() -> None:
    model = Root(type("SomeMLP", (GluLookalike,), {"forward": _swiglu})())
    x = torch.randn(2, 32)
    with torch.no_grad():
        assert len(hfpatch.apply(model).swaps) == 1
        model.inner.act_fn = nn.GELU()
        got = model(x)
        hfpatch.restore(model)
        torch.testing.assert_close(got, model(x))


def _swiglu(self: GluLookalike, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_probing_a_mlp_leaves_the_random_state_alone() -> None:
    from hfpatch.proof.proofs import forget_proofs

    forget_proofs()
    model = Root(type("SomeMLP", (GluLookalike,), {"forward": _swiglu})())
    before = torch.get_rng_state()
    assert len(hfpatch.apply(model).swaps) == 1
    assert torch.equal(torch.get_rng_state(), before)


class LearnedMLP(GluLookalike):
    """Its activation has a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.PReLU()
        self.act_fn.register_buffer("floor", torch.zeros(1))


def test_an_activation_with_tensors_of_its_own_is_left_as_it_is() -> None:
    """The probe computes in fp64, and not with the model's own."""
    model = nn.Sequential(LearnedMLP())
    act = model[0].act_fn
    weight, floor = act.weight, act.floor
    assert hfpatch.apply(model).skips
    assert act.weight is weight and weight.dtype == torch.float32 and weight.requires_grad
    assert act.floor is floor


def test_apply_under_a_default_device() -> None:
    from hfpatch.proof.proofs import forget_proofs

    forget_proofs()
    model = Root(nn.LayerNorm(64))
    with torch.device("meta"):
        assert len(hfpatch.apply(model).swaps) == 1


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["ltx", "flux", "cogvideox"])
def test_apply_under_a_default_dtype(name: str, default: torch.dtype) -> None:
    """Blocks are fused as ever, and nothing of it is remembered for the next `apply`."""
    import zoo
    from expect import relative_error
    from support.captured import paths

    from hfpatch.proof.proofs import forget_proofs
    from hfpatch.regions.offer import forget

    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    expected = entry.run(model, inputs)
    forget_proofs()
    forget()
    torch.set_default_dtype(default)
    try:
        under = hfpatch.apply(model)
        assert torch.get_default_dtype() == default
        for _ in range(2):  # a captured block decides there
            assert relative_error(entry.run(model, inputs), expected) < 1e-5
    finally:
        torch.set_default_dtype(torch.float32)
    hfpatch.restore(model)
    usual = hfpatch.apply(model)
    forget_proofs()
    hfpatch.restore(model)
    fresh = hfpatch.apply(model)
    formulas = [[(s.path, s.formula) for s in r.swaps] for r in (under, usual, fresh)]
    assert formulas[0] == formulas[1] == formulas[2]
    for _ in range(2):
        assert relative_error(entry.run(model, inputs), expected) < 1e-5
    assert paths(model)
