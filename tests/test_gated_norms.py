"""Gated norms of real classes: which formula is found, when the kernel takes a call."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

import pytest
import torch
import zoo
from torch import Tensor, nn

import hfpatch
from hfpatch.ops import OPS
from hfpatch.proof.trial import LIMITS

WIDTH = 64
#: module of transformers.models, class, keyword arguments, (norm_before_gate, cast, activation).
CLASSES = [
    ("mamba2", "MambaRMSNormGated", {"group_size": 16}, (False, "input", "silu")),
    ("bamba", "BambaRMSNormGated", {"group_size": WIDTH}, (False, "input", "silu")),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 32}, (False, "input", "silu")),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 8}, (False, "input", "silu")),
    (
        "granitemoehybrid",
        "GraniteMoeHybridRMSNormGated",
        {"group_size": 32},
        (False, "input", "silu"),
    ),
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, (True, "input", "silu")),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}, (True, "input", "silu")),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {}, (True, "input", "silu")),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, (True, "none", "sigmoid")),
    ("bailing_hybrid", "BailingHybridRMSNormGated", {}, (True, "none", "sigmoid")),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4}, (True, "none", "silu")),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 2, "norm_before_gate": False},
        (False, "none", "silu"),
    ),
]
IDS = [f"{name}-{i}" for i, (_, name, *_) in enumerate(CLASSES)]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: ModuleType) -> None:
    """The compiled kernels must be there: these tests are about them."""


def norm(module: str, name: str, settings: dict[str, object]) -> nn.Sequential:
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    model = nn.Sequential(cls(WIDTH, eps=1e-5, **settings))
    return zoo.randomize_(model).eval()


def pair(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """hidden states, and a gate that is a part of a wider projection."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, WIDTH, generator=g).to(dtype)
    return x, torch.randn(*shape, 2 * WIDTH, generator=g).to(dtype)[..., WIDTH:]


@pytest.mark.parametrize(("module", "name", "settings", "found"), CLASSES, ids=IDS)
def test_formula_and_numbers(
    module: str,
    name: str,
    settings: dict[str, object],
    found: tuple[bool, str, str],
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = norm(module, name, settings).to(dtype)
        x, gate = pair(dtype, 2, 5)
        with torch.no_grad():
            original = model[0](x, gate)
        (swap,) = hfpatch.apply(model).swaps
        first, cast, act = found
        groups = settings.get("group_size") or WIDTH // settings.get("n_groups", 1)
        truth = OPS["gated_rms_norm"].reference(  # these classes compute in fp32 whatever comes
            x.double(), gate.double(), model[0].weight.detach().double(), 1e-5, groups, *found
        )
        for part in (
            "gated_rms_norm(eps=1e-05",
            f"norm_before_gate={first}",
            f"cast={cast}",
            f"gate_activation={act}",
        ):
            assert part in swap.formula
        if groups != WIDTH:
            assert f"group_size={groups}," in swap.formula
        with torch.no_grad():
            patched = model[0](x, gate)
            by_name = model[0](x, gate=gate)
        assert (patched.dtype, patched.shape) == (original.dtype, original.shape)
        assert torch.equal(patched, by_name)
        scale = truth.abs().amax(-1, keepdim=True)
        error, limit = ((t.double() - truth).abs() / scale for t in (patched, original))
        slack = LIMITS.kernel_fp32 if dtype == torch.float32 else LIMITS.kernel_half
        assert error.max() <= limit.max() + slack * torch.finfo(dtype).eps
        hfpatch.restore(model)
        with torch.no_grad():
            assert torch.equal(model[0](x, gate), original)


@contextmanager
def counting(model: nn.Sequential) -> Iterator[list[int]]:
    """Counts the calls of the class's own forward, which stays as it is: its code is read."""
    calls: list[int] = []
    code = type(model[0]).forward.__code__

    def seen(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(1)

    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(None)


BAMBA = CLASSES[1][:3]


def test_what_goes_to_the_original() -> None:
    model = norm(*BAMBA)
    hfpatch.apply(model)
    x, gate = pair(torch.float32, 2, 5)
    with torch.no_grad(), counting(model) as calls:
        model[0](x, gate)
        assert not calls
        for args, kwargs in (
            ((x,), {}),  # no gate
            ((x, None), {}),
            ((x[0, 0], gate[0, 0]), {}),
        ):
            try:
                model[0](*args, **kwargs)
            finally:
                assert calls.pop() == 1 and not calls
        with pytest.warns(RuntimeWarning, match="float64"):
            model[0](x.double(), gate.double())
        assert calls.pop() == 1


@pytest.mark.parametrize("of", ["torch", "user"])
def test_no_rows_by_the_formula(of: str) -> None:
    """It is PyTorch's kernel of this op, and what a kernel of the user's is compared with."""
    kernel = "torch" if of == "torch" else lambda *a, **k: OPS["gated_rms_norm"].reference(*a, **k)
    model, twin = (norm("mamba2", "MambaRMSNormGated", {"group_size": 16}) for _ in range(2))
    (swap,) = hfpatch.apply(model, kernels={"gated_rms_norm": kernel}).swaps
    assert swap.source == ("torch" if of == "torch" else "<lambda>")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((0,), (2, 0), (3,)):
            torch.testing.assert_close(
                model[0](*pair(torch.float32, *shape)), twin[0](*pair(torch.float32, *shape))
            )


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_under_autograd_the_original_runs(mode: str) -> None:
    model = norm(*BAMBA)
    x, gate = pair(torch.float32, 2, 5)
    leaves = [x.requires_grad_(), gate.detach().clone().requires_grad_(), model[0].weight]
    expected = torch.autograd.grad(model[0](*leaves[:2]).square().sum(), leaves)
    (swap,) = hfpatch.apply(model, mode=mode).swaps
    assert swap.op == "gated_rms_norm"
    with counting(model) as calls, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = model[0](*leaves[:2])
        assert calls == [1]
        with torch.no_grad():
            model[0](*leaves[:2])
        assert calls == [1]  # the kernel, also in training mode
    assert any("mode='training'" in str(w.message) for w in said) is (mode == "inference")
    actual = torch.autograd.grad(y.square().sum(), leaves)
    assert all(map(torch.equal, actual, expected))


def test_compiled_is_the_original() -> None:
    model = norm(*BAMBA)
    x, gate = pair(torch.float32, 2, 5)
    with torch.no_grad():
        expected = model[0](x, gate)
        hfpatch.apply(model)
        torch._dynamo.reset()
        compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, gate), expected)


def test_a_model_in_training() -> None:
    """A step of the patched model gives the gradients of the original."""
    entry = zoo.ENTRIES["bamba"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model)
    gated = [n for n, _ in model.named_parameters() if n.endswith("mamba.norm.weight")]

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        model(**inputs).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = step()
    report = hfpatch.apply(model, mode="training")
    assert any(s.op == "gated_rms_norm" for s in report.swaps)
    actual = step()
    assert set(actual) == set(expected) and set(gated) <= set(actual)
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-4 * (grad.norm() + 1e-6), name


def test_axk2s_own_structure_is_left_to_its_parts() -> None:
    from transformers.models.axk2 import modeling_axk2

    from hfpatch.leaves.gated_norms import GatedNorms

    module = modeling_axk2.AXK2GatedRMSNorm.__new__(modeling_axk2.AXK2GatedRMSNorm)
    nn.Module.__init__(module)
    module.norm = nn.LayerNorm(8)
    assert GatedNorms().nominates(module)
    assert GatedNorms().examine(module) is None


def test_a_wrong_name_is_no_gated_norm() -> None:
    class FakeRMSNormGated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return hidden_states * self.weight + gate.tanh()

    model = nn.Sequential(FakeRMSNormGated())
    report = hfpatch.apply(model)
    assert not report.swaps
    assert [s.kind for s in report.skips] == ["mismatch"]
