"""Gated MLPs that clamp: transformers' are served; what clamps otherwise is as it was."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hfpatch
from hfpatch.leaves import glu


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def _mlp(model: str, name: str, **settings: Any) -> nn.Module:
    cls = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    extra = settings.pop("args", ())
    torch.manual_seed(0)
    return cls(types.SimpleNamespace(**settings), *extra).eval()


SIZES = {"hidden_size": 48, "intermediate_size": 64, "hidden_act": "silu", "mlp_bias": False}
#: Of transformers' classes, each with the attribute that is its limit.
SERVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DeepseekV4MLP": (
        lambda: _mlp("deepseek_v4", "DeepseekV4MLP", **SIZES, swiglu_limit=1.5),
        "limit",
    ),
    "Glm5NextTextMLP": (
        lambda: _mlp("glm5_next", "Glm5NextTextMLP", **SIZES, swiglu_limit=1.5),
        "swiglu_limit",
    ),
    "Glm5NextVisionMLP": (
        lambda: _mlp("glm5_next", "Glm5NextVisionMLP", **SIZES, swiglu_limit=1.5),
        "swiglu_limit",
    ),
    "MiniMaxM3VLDenseMLP": (
        lambda: _mlp(
            "minimax_m3_vl", "MiniMaxM3VLDenseMLP", hidden_size=48, dense_intermediate_size=64,
            swiglu_alpha=1.702, swiglu_limit=1.5,
        ),
        "swiglu_limit",
    ),
    "another alpha": (
        lambda: _mlp(
            "minimax_m3_vl", "MiniMaxM3VLDenseMLP", hidden_size=48, dense_intermediate_size=64,
            swiglu_alpha=1.25, swiglu_limit=1.5,
        ),
        "swiglu_limit",
    ),
    "Step3p7MLP": (
        lambda: _mlp(
            "step3p7", "Step3p7MLP", **SIZES, swiglu_limits_shared=[None, 1.5], args=(1,)
        ),
        "limit",
    ),
}  # fmt: skip


def far(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs with which most values are beyond the limits."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 8).to(dtype)


def near(y: Tensor, z: Tensor) -> None:
    """Within some roundings of the largest value of the row."""
    eps = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[y.dtype]
    assert y.dtype == z.dtype
    assert ((y - z).abs() <= eps * z.abs().amax(-1, keepdim=True)).all(), (y - z).abs().max()


def swapped(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, hfpatch.Report]:
    """The module after `apply`, a copy from before, and the report."""
    original = copy.deepcopy(module)
    report = hfpatch.apply(nn.Sequential(module), **options)
    return module, original, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, dtype: torch.dtype) -> None:
    make, limit = SERVED[name]
    patched, original, report = swapped(make().to(dtype))
    assert [(s.path, s.op) for s in report.swaps] == [("0", "gated_clamped")], report
    unlimited = copy.deepcopy(original)
    setattr(unlimited, limit, float("inf"))
    with torch.no_grad():
        for shape in ((48,), (7, 48), (2, 5, 48), (1, 1, 48), (0, 48)):
            near(patched(x := far(*shape, dtype=dtype)), original(x))
        x = far(7, 48, dtype=dtype)
        assert not torch.allclose(original(x), unlimited(x), rtol=0.1)  # the limits bite
        x[0, 0], x[1, 0], x[2, 0] = float("nan"), float("inf"), float("-inf")
        y, z = patched(x), original(x)
        assert torch.equal(y.isnan(), z.isnan()) and torch.equal(y.isinf(), z.isinf())


@pytest.mark.parametrize("name", SERVED)
def test_a_limit_that_changes_is_honoured(name: str) -> None:
    make, limit = SERVED[name]
    patched, original, report = swapped(make())
    assert len(report.swaps) == 1, report
    x = far(7, 48)
    with torch.no_grad():
        before = patched(x)
        for value in (0.25, 40.0):
            setattr(patched, limit, value)
            setattr(original, limit, value)
            assert torch.equal(patched(x), original(x)) and not torch.equal(before, patched(x))
        setattr(patched, limit, torch.tensor(0.5))
        setattr(original, limit, 0.5)
        assert torch.equal(patched(x), original(x))
        setattr(patched, limit, 1.5)
        torch.testing.assert_close(patched(x), before)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", SERVED)
def test_gradients(name: str, mode: str) -> None:
    """0 outside of the limits, as PyTorch's."""
    patched, original, report = swapped(SERVED[name][0](), mode=mode)
    assert [s.op for s in report.swaps] == ["gated_clamped"], report
    ours, theirs = (far(2, 5, 48).requires_grad_() for _ in range(2))
    y, z = patched(ours), original(theirs)
    near(y, z)
    g = torch.randn_like(z)
    y.backward(g)
    z.backward(g)
    near(ours.grad, theirs.grad)
    for p, q in zip(patched.parameters(), original.parameters(), strict=True):
        near(p.grad, q.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_gradients_in_half(name: str, dtype: torch.dtype) -> None:
    """On which side of a limit a value lies is a rounding's matter, and no reason not to swap."""
    _, _, report = swapped(SERVED[name][0]().to(dtype), mode="training")
    assert [s.op for s in report.swaps] == ["gated_clamped"], report


def test_no_limit_at_all() -> None:
    """A bound that is infinite is none."""
    make = SERVED["Step3p7MLP"][0]
    module = make()
    module.limit = float("inf")
    patched, original, report = swapped(module)
    assert [s.op for s in report.swaps] == ["gated"], report
    x = far(7, 48)
    with torch.no_grad():
        near(patched(x), original(x))
        patched.limit = original.limit = 1.0
        assert torch.equal(patched(x), original(x))


class Llama(nn.Module):
    def __init__(self, limit: Any = 1.5) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 64), nn.Linear(48, 64)
        self.down_proj = nn.Linear(64, 48)
        self.act_fn = nn.SiLU()
        self.limit = limit


class OtherBounds(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = torch.clamp(self.gate_proj(x), -2.0, 1.0)
        up = self.up_proj(x).clamp_min(-0.5)
        return self.down_proj(self.act_fn(gate) * up)


class GateAlone(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp_max(self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class OtherUp(Llama):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class ClampedAct(nn.Module):
    """An activation with a clamp of its own, on either side."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.limit = inside, 1.5

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return F.silu(x.clamp(max=self.limit))
        return F.silu(x).clamp(max=self.limit)


class ActInside(Llama):
    inside = True

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = ClampedAct(self.inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ActOutside(ActInside):
    inside = False


class Named(nn.Module):
    """Names that say nothing, and GPT-OSS's formula."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 64), nn.Linear(48, 64), nn.Linear(64, 48)
        self.limit, self.alpha = 1.5, 1.702

    def forward(self, x: Tensor) -> Tensor:
        up = self.a(x).clamp(min=-self.limit, max=self.limit)
        gate = self.b(x).clamp(min=None, max=self.limit)
        return self.c((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


class ByProperty(Llama):
    _limit = 1.5

    def __init__(self) -> None:
        super().__init__(1.5)

    @property
    def limit(self) -> float:
        return self._limit

    @limit.setter
    def limit(self, value: float) -> None:
        self._limit = value

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


@pytest.mark.parametrize("make", [OtherBounds, GateAlone, OtherUp, ActInside, ActOutside, Named])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_others_that_are_served(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    patched, original, report = swapped(make().eval().to(dtype))
    assert [s.op for s in report.swaps] == ["gated_clamped"], report
    with torch.no_grad():
        near(patched(x := far(7, 48, dtype=dtype)), original(x))
        near(patched(x := 1e-3 * x), original(x))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("make", [SERVED["DeepseekV4MLP"][0], ActInside, ActOutside])
def test_limits_in_a_model(make: Callable[[], nn.Module], blocks: bool) -> None:
    """An activation's own limit is watched as the MLP's is; captured blocks have them too, and
    notice another one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    for layer in model.layers:
        layer.mlp = make().eval()
    original = copy.deepcopy(model)
    report = hfpatch.apply(model, blocks=blocks, decoding=False)
    assert "gated_clamped" in {s.op for s in report.swaps}, report

    x = far(2, 7, 48)
    with torch.no_grad():
        for limit in (1.5, 0.25, 3.0, 1.5):
            if make in (ActInside, ActOutside):
                model.layers[1].mlp.act_fn.limit = limit
                original.layers[1].mlp.act_fn.limit = limit
            else:
                model.layers[1].mlp.limit = original.layers[1].mlp.limit = limit
            y = model(inputs_embeds=x).last_hidden_state
            near(y, original(inputs_embeds=x).last_hidden_state)
    candidates = hfpatch.status(model).plan.candidates if blocks else ()
    assert all(c.state == "fused" for c in candidates), candidates
    if make not in (ActInside, ActOutside):  # an activation of one's own is called
        assert all("gated_clamped silu" in c.found for c in candidates), candidates
    assert len(candidates) == 2 * blocks


class Product(Llama):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y.clamp(max=self.limit))


class FarProduct(Llama):
    """No sample of a proof's is there."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        y = self.act_fn(gate) * self.up_proj(x)
        return self.down_proj(y.clamp(-6e4, 6e4))


class FarGate(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=6e4)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Input(Llama):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Result(Llama):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y.clamp(-self.limit, self.limit)


class OfSum(Llama):
    """The offset comes before the clamp."""

    def forward(self, x: Tensor) -> Tensor:
        up = (self.up_proj(x) + 1.0).clamp(max=self.limit)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class InsideTheSigmoid(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = gate * torch.sigmoid(gate.clamp(max=self.limit))
        return self.down_proj(gate * self.up_proj(x))


class Twice(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit).clamp(min=-self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class BothSides(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x).clamp(max=self.limit)).clamp(max=1.0)
        return self.down_proj(gate * self.up_proj(x))


class Unused(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate.clamp(max=self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class InPlace(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp_(max=self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class OfATensor(Llama):
    def __init__(self) -> None:
        super().__init__(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class OfTheInput(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=x.shape[0] / 4)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class ByDtype(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if x.dtype == torch.float16:
            gate = gate.clamp(max=60000.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Straight(torch.autograd.Function):
    """A clamp whose gradient passes everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(max=1.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class StraightThrough(Llama):
    def forward(self, x: Tensor) -> Tensor:
        gate = Straight.apply(self.gate_proj(x))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class ClampedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(-6e4, 6e4)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


TWINS = [
    Product, FarProduct, FarGate, Input, Result, OfSum, InsideTheSigmoid, Twice, BothSides, Unused,
    InPlace, OfATensor, OfTheInput, StraightThrough, ByProperty, ByDtype, ClampedNorm,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("make", TWINS)
def test_twins_are_computed_as_they_were(make: Callable[[], nn.Module], mode: str) -> None:
    """Each is left to its own code, or computed rightly, in every dtype and after every change."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        patched, original, report = swapped(make().eval().to(dtype), mode=mode)
        for scale in (0.01, 0.25) if dtype == torch.float16 else (0.01, 1.0, 30.0):
            ours, theirs = ((scale * far(3, 5, 48, dtype=dtype)).requires_grad_() for _ in range(2))
            y, z = patched(ours), original(theirs)
            near(y, z)
            g = torch.ones_like(z)
            y.backward(g)
            z.backward(g)
            near(ours.grad, theirs.grad)
            with torch.no_grad():
                near(patched(ours), original(theirs))
        if dtype == torch.float32:
            served = [s.class_name for s in report.swaps if s.path == "0"]
            allowed = {"ByProperty", "ByDtype", "FarGate"}
            assert set(served) <= allowed, report
        if hasattr(original, "limit") and not isinstance(original.limit, Tensor):
            patched.limit = original.limit = 0.25
            with torch.no_grad():
                near(patched(ours), original(theirs))


def test_gradients_are_compared_where_values_are_free_and_near_no_bound() -> None:
    eps = torch.finfo(torch.float32).eps
    values = torch.tensor([-3.0, -2.0 * (1 + eps), -1.0, 0.5, 1.0 - eps, 4.0, float("nan")])
    near, free = glu._at_bounds(values, -2.0, 1.0, eps)
    assert near.tolist() == [False, True, False, False, True, False, False]
    assert free.tolist() == [False, False, True, True, True, False, False]
    near, free = glu._at_bounds(values[:-1], None, None, eps)
    assert not near.any() and free.all()


def test_why_not() -> None:
    """The report names what stands in the way."""
    torch.manual_seed(0)
    for module, why in (
        (Product(), "no known formula reproduces `Product`; nearest: gated"),
        (FarProduct(), "clamps what it computes from below"),
        (Twice(), "clamps what it computes from below"),
        (BothSides(), "clamps the gate and what is computed of it"),
        (InPlace(), "'clamp_' of a tensor is called"),
        (OfATensor(), "`self.limit` is read, a Tensor"),
        (OfTheInput(), "`clamp` has a bound that is no plain number"),
        (GateAlone(1e7), "at a bound beyond 1e+06, where no sample is"),
        (GateAlone(float("nan")), "`clamp` has a bound that is no plain number"),
        (OtherUp(-1.0), "clamps `up_proj` to one value"),
        (ByDtype().half(), "clamps in one dtype or number of dimensions otherwise than in another"),
        (ClampedNorm(), "clamps a tensor, which no formula of its kind does"),
    ):
        _, _, report = swapped(module.eval())
        said = " ".join(s.reason for s in report.skips).replace("`clamp_`", "'clamp_'")
        assert why in said, (type(module).__name__, said)
