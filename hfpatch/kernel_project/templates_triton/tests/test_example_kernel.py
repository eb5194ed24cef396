"""The kernels against PyTorch in fp64, and as hfpatch uses them: on a GPU, or, where there is none,
under Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton is not installed")
hfpatch = pytest.importorskip("hfpatch")
sys.path.insert(0, str(Path(__file__).parents[1]))
import example_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(0, 8), (1, 1), (3, 17), (2, 5, 100), (1025, 3), (2, 4099)]


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(shape, dtype, weighted):
    reference = hfpatch.ops.OPS["rms_norm"].reference
    x, w = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1) if weighted else None
    for cast in ("none", "input", "weight"):
        expected = reference(x.double(), None if w is None else w.double(), cast=cast).to(dtype)
        y = example_kernel.rms_norm(x, w, cast=cast)
        tolerance = 3 * TOLERANCE[dtype]
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_two_dtypes():
    x, w = draw(3, 40, dtype=torch.bfloat16), draw(40, seed=1)
    reference = hfpatch.ops.OPS["rms_norm"].reference
    for cast in ("none", "input", "weight"):
        expected = reference(x, w, cast=cast)
        y = example_kernel.rms_norm(x, w, cast=cast)
        assert y.dtype == expected.dtype
        # Triton's interpreter does not round to bf16 as a GPU does
        tolerance = {"rtol": 8e-3, "atol": 1e-5} if DEVICE == "cpu" else {}
        torch.testing.assert_close(y, expected, **tolerance)


@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 1), lambda x: x[..., 3:20]])
def test_strides(change):
    x = change(draw(6, 5, 32))
    expected = hfpatch.ops.OPS["rms_norm"].reference(x)
    torch.testing.assert_close(example_kernel.rms_norm(x), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_mish_gate(shape, dtype):
    gate, up = 5 * draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    expected = (nn.functional.mish(gate.double()) * up.double()).to(dtype)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(
        example_kernel.mish_gate(gate, up), expected, rtol=tolerance, atol=10 * tolerance
    )


def test_special_values():
    special = [float("nan"), float("inf"), -float("inf"), 0.0, 25.0, -90.0, 90.0]
    gate = torch.tensor(special, device=DEVICE)
    expected = nn.functional.mish(gate)
    torch.testing.assert_close(
        example_kernel.mish_gate(gate, torch.ones_like(gate)), expected, equal_nan=True
    )


class SomeRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class MishMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down_proj(nn.functional.mish(self.gate_proj(x)) * self.up_proj(x))


def test_in_a_model():
    model = nn.Sequential(SomeRMSNorm(48), MishMLP(48)).to(DEVICE).requires_grad_(False)
    x = draw(2, 7, 48)
    with torch.no_grad():
        expected = model(x)
    handles = example_kernel.install()
    try:
        report = hfpatch.apply(model, kernels={"rms_norm": "example-kernel"})
        assert {s.source for s in report.swaps} == {"example-kernel", "registered"}, report
        with torch.no_grad():
            for _ in range(2):  # the first is compared with the formula as it runs
                torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    finally:
        for handle in handles:
            handle.remove()
