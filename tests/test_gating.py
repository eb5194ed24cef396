"""Gated MLPs that no layout names: served where the code says what their children are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Gated(nn.Module):
    """Names that say nothing; `b` is the gate's."""

    def __init__(self, width: int = 48, hidden: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden)
        self.b = nn.Linear(width, hidden)
        self.c = nn.Linear(hidden, width)
        self.d = nn.Dropout(dropout)


class Plain(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.d(self.a(x) * F.silu(self.b(x))))


class Square(nn.Module):
    """All layers of one shape: only the code tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(48, 48) for _ in range(3))
        self.nonlinear = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.nonlinear(self.third(x)) * self.first(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(48, 128), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, dim=-1)
        return self.outer(value * F.gelu(gate))


class Open(nn.Module):
    """Without a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, 64), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * F.silu(self.two(x))


SERVED = (Plain, Square, Packed, Open)


def near(y: Tensor, z: Tensor) -> None:
    """Within some roundings in fp32 of the largest value."""
    torch.testing.assert_close(y, z, rtol=0.0, atol=2e-6 * float(z.abs().max()))


def compared(module: nn.Module, *samples: Tensor) -> None:
    """Outputs and gradients are the original's, and so is the module after `restore`."""
    original = copy.deepcopy(module)
    model = nn.Sequential(module)
    before = [{**m.__dict__} for m in model.modules()]
    report = hfpatch.apply(model, mode="training")
    assert [s.path for s in report.swaps] == ["0"], report
    for x in samples:
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, z = model(ours), original(theirs)
        near(y, z)
        g = torch.randn_like(z)
        y.backward(g)
        z.backward(g)
        near(ours.grad, theirs.grad)
    for p, q in zip(module.parameters(), original.parameters(), strict=True):
        near(p.grad, q.grad)
    hfpatch.restore(model)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert [d.keys() for d in before] == [m.__dict__.keys() for m in model.modules()]
    assert torch.equal(model(samples[0]), original(samples[0]))


@pytest.mark.parametrize("make", SERVED)
def test_served_by_code(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    compared(make().eval(), torch.randn(3, 5, 48), torch.randn(7, 48), torch.randn(1, 1, 48))


def test_a_dropout_is_where_it_was() -> None:
    """The same random numbers fall on the same values in `train()`."""
    torch.manual_seed(0)
    module = Plain(dropout=0.5).train()
    original = copy.deepcopy(module)
    hfpatch.apply(nn.Sequential(module), mode="training")
    x = torch.randn(4, 48)
    torch.manual_seed(1)
    y = module(x)
    torch.manual_seed(1)
    torch.testing.assert_close(y, original(x))


#: Classes whose children's names no layout lists, by the model that holds them.
OF_LIBRARIES = {
    "AceStepMLP": "diffusers AceStepTransformer1DModel",
    "AuraFlowFeedForward": "diffusers AuraFlowTransformer2DModel",
    "CpmAntDenseGatedACT": "transformers CpmAntModel (cpmant)",
    "ErnieImageFeedForward": "diffusers ErnieImageTransformer2DModel",
    "GraniteMoeHybridMLP": "transformers GraniteMoeHybridModel (granitemoehybrid)",
    "GteMLP": "transformers GteModel (gte)",
    "Ideogram4MLP": "diffusers Ideogram4Transformer2DModel",
    "Lfm2MLP": "transformers Lfm2Model (lfm2)",
    "Lfm3MLP": "transformers Lfm3Model (lfm3)",
    "Lfm3VlVisionMLP": "transformers Lfm3VlModel (lfm3_vl)",
    "Llama4TextL2Norm": "transformers Llama4ForConditionalGeneration (llama4)",
    "QwenImage21SwiGLUFeedForward": "diffusers QwenImage21Transformer2DModel",
    "T5Gemma2MLP": "transformers T5Gemma2Model (t5gemma2)",
    "T5GemmaMLP": "transformers T5GemmaModel (t5gemma)",
}


@pytest.mark.parametrize("class_name", OF_LIBRARIES)
def test_served_in_the_libraries(class_name: str) -> None:
    from hfpatch.coverage.small_diffusers import of_diffusers
    from hfpatch.coverage.small_transformers import of_transformers

    wanted = OF_LIBRARIES[class_name]
    models = of_transformers() if wanted.startswith("transformers") else of_diffusers()
    torch.manual_seed(0)
    model = next(make for name, make in models if name == wanted)()
    module = next(m for m in model.modules() if type(m).__name__ == class_name).eval().float()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    width = layers[0].in_features if layers else 32  # a norm without a weight takes any
    compared(module, torch.randn(2, 5, width), torch.randn(3, width))


class Squared(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up = self.a(x)
        return self.c(F.silu(self.b(x)) * up * up)


class Offset(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(x)) * self.a(x) + 1e-7)


class Clamped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(x)) * self.a(x).clamp(-1e6, 1e6))


class ByRows(Gated):
    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.b(x)) * self.a(x)
        return self.c(h if x.shape[0] < 1000 else h * 2)


class Twice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(self.d(x))) * self.a(x))


class After(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(F.silu(self.b(x)) * self.a(x)))


class Counting(Gated):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return self.c(F.silu(self.b(x)) * self.a(x))


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(F.silu(self.b(x)) * self.a(x))


class Detached(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(x)).detach() * self.a(x))


class NoLayer(Gated):
    """Uses the layer's weight, so that a hook on it would not run."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(x)) * F.linear(x, self.a.weight, self.a.bias))


HOSTILE = (
    Squared, Offset, Clamped, ByRows, Twice, After, Counting, Residual, Detached, NoLayer
)  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_look_alikes_stay_and_are_reported(make: type[Gated], mode: str) -> None:
    model = nn.Sequential(make().eval())
    with pytest.warns(RuntimeWarning):
        report = hfpatch.apply(model, mode=mode)
    assert not report.swaps
    (skip,) = [s for s in report.skips if s.path == "0"]
    assert skip.reason
