"""Bias with activation, a * b + c, gated norms, complex tables and in-place operators on CUDA."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from op_samples import SAMPLES, Sample
from tolerances import assert_like
from torch import Tensor

from hfpatch.ops import OPS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLS = [1, 17, 64, 127, 512, 1536, 2048, 3072, 12288, 20000]
OF_EXAMPLES = [s for s in SAMPLES if s.op in OPS and OPS[s.op].example is not None]
APPROXIMATIONS = ("none", "tanh", "sigmoid")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_activation(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    for cols in COLS:
        for x in (randn(3, 37, cols, dtype=dtype), randn(3, 9, 2 * cols + 1, dtype=dtype)):
            x, bias = x[..., -cols:], randn(cols, dtype=dtype)
            expected = OPS["add_silu"].reference(x, bias)
            assert_like(kernels_module.add_silu(x, bias), expected, dtype, spare=3)
            for a in APPROXIMATIONS:
                expected = OPS["add_gelu"].reference(x, bias, a)
                assert_like(kernels_module.add_gelu(x, bias, a), expected, dtype, spare=3)


def layouts(batch: int, tokens: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        randn(cols, dtype=dtype),
        randn(cols + 1, dtype=dtype)[1:],
        randn(batch, 3 * cols, dtype=dtype)[:, cols : 2 * cols],
        randn(batch, 1, cols, dtype=dtype),
        randn(1, tokens, cols, dtype=dtype),
        randn(batch, tokens, 2 * cols, dtype=dtype)[..., cols:],
    ]


@pytest.mark.parametrize("cast", ["none", "input"])
@pytest.mark.parametrize("param", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mul_add(
    kernels_module: ModuleType, dtype: torch.dtype, param: torch.dtype, cast: str
) -> None:
    for cols in (1, 17, 64, 3072):
        a = randn(3, 37, cols, dtype=dtype)
        for b in layouts(3, 37, cols, param):
            for c in layouts(3, 37, cols, param):
                expected = OPS["mul_add"].reference(a, b, c, cast)
                assert_like(kernels_module.mul_add(a, b, c, cast), expected, dtype, param, spare=3)


def test_rounding_points(kernels_module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        a, b, c = randn(500, 2048, dtype=dtype), *randn(2, 2048, dtype=dtype)
        assert torch.equal(kernels_module.mul_add(a, b, c), a * b + c)
        assert (kernels_module.mul_add(a, b, c, "none") != a * b + c).double().mean() > 0.05
        ours = kernels_module.add_silu(a, b)
        assert (ours != torch.nn.functional.silu(a + b)).double().mean() < 0.01
        once = torch.nn.functional.silu(a.float() + b.float()).to(dtype)
        assert (ours != once).double().mean() > 0.05


def gradients(function: Any, inputs: list[Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, seed.to(function(*leaves).dtype))


def assert_gradients(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int) -> None:
    """fp32 sums over up to `rows` rows of both signs, one rounding to the dtype."""
    for a, e in zip(actual, expected, strict=True):
        eps = max(torch.finfo(a.dtype).eps, 1e-6)
        assert (a.double() - e).abs().max() <= (4 * eps + 2e-6 * rows**0.5) * e.abs().max()


SHAPES = [
    (1, 1, 8),
    (3, 37, 17),
    (2, 700, 64),
    (1, 700, 1032),
    (2, 3, 4096),
    (4, 1024, 3072),
    (2, 50, 20000),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(
    kernels_module: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    batch, tokens, cols = shape
    rows, seed = batch * tokens, randn(*shape)
    x, bias = randn(*shape, dtype=dtype), randn(cols, dtype=dtype)
    cases: list[tuple[str, list[Tensor], dict[str, Any]]] = [
        ("add_silu", [x, bias], {}),
        *(("add_gelu", [x, bias], {"approximate": a}) for a in APPROXIMATIONS),
        *(("mul_add", [x, b, b * 2], {}) for b in layouts(batch, tokens, cols, dtype)),
        ("mul_add", [x, bias.float(), bias.float()], {"cast": "none"}),
        ("mul_add", [x, randn(batch, 1, cols, dtype=dtype), bias], {}),
    ]
    for name, given, params in cases:
        rounded = [t.double() for t in given]
        if name != "mul_add":  # the sum is rounded first: its derivative is taken there
            given_sum = (given[0] + given[1]).double()
            rounded = [given_sum, torch.zeros_like(rounded[1])]
        seed = randn(*shape).to(dtype)
        ours = gradients(lambda *t, n=name, p=params: getattr(kernels_module, n)(*t, **p),
                         given, seed)  # fmt: skip
        again = gradients(lambda *t, n=name, p=params: getattr(kernels_module, n)(*t, **p),
                          given, seed)  # fmt: skip
        assert all(map(torch.equal, ours, again)), name
        truth = gradients(lambda *t, n=name, p=params: OPS[n].reference(*t, **p), rounded,
                          seed.double())  # fmt: skip
        assert_gradients(ours, truth, rows)


def test_no_rows(kernels_module: ModuleType) -> None:
    x, bias = randn(0, 64).requires_grad_(), randn(64).requires_grad_()
    for y in (kernels_module.add_silu(x, bias), kernels_module.mul_add(x, bias, bias)):
        dx, dbias = torch.autograd.grad(y, [x, bias], torch.zeros_like(y))
        assert dx.shape == (0, 64) and torch.equal(dbias, torch.zeros_like(bias))


@pytest.mark.parametrize("cast", ["none", "input"])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(
    kernels_module: ModuleType, dtype: torch.dtype, first: bool, act: str, cast: str
) -> None:
    for cols, group in [(17, 0), (128, 0), (128, 32), (4096, 512), (8192, 0), (20000, 0)]:
        x, gate = randn(2, 33, cols, dtype=dtype), randn(2, 33, cols + 8, dtype=dtype)[..., 8:]
        for w in (None, randn(cols, dtype=dtype), randn(cols)):
            if w is not None and w.dtype != dtype and cast == "input":
                continue
            for g in (gate, None):
                args = (x, g, w, 1e-6, group, first, cast, act)
                expected = OPS["gated_rms_norm"].reference(*args)
                assert_like(kernels_module.gated_rms_norm(*args), expected, dtype, spare=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", OF_EXAMPLES, ids=lambda s: s.id)
def test_ops_with_examples(kernels_module: ModuleType, sample: Sample, dtype: torch.dtype) -> None:
    """Rows whole and cut out of wider ones, the first tensor's otherwise than the next ones'."""
    for cols in (1, 17, 96, 128, 256, 512, 4096, 9000):
        for lead, wider in ((3, 37), cols), ((3, 9), 2 * cols + 1):
            tensors, width = [], wider
            for spec in sample.tensors.values():
                if spec.per_row:
                    tensors.append(randn(*lead, width, dtype=dtype)[..., -cols:])
                    width = cols + 8
                else:
                    tensors.append(randn(cols, dtype=dtype))
            expected = OPS[sample.op].reference(*tensors)
            got = getattr(kernels_module, sample.op)(*tensors)
            assert_like(got, expected, dtype, spare=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_between_convolutions(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    k = kernels_module
    for cols in (1, 17, 96, 128, 256, 512, 4096, 9000):
        for x in (randn(3, 37, cols, dtype=dtype), randn(3, 9, 2 * cols + 1, dtype=dtype)):
            x, bias = x[..., -cols:], randn(cols, dtype=dtype)
            modulations = [(s, s.flip(-1)) for s in layouts(3, x.shape[1], cols, dtype)]
            for scale, shift in ((None, None), *modulations):
                for parameters in ((bias, randn(cols)), (None, None)):
                    args = (x, *parameters, scale, shift, 1e-6)
                    expected = OPS["rms_norm_silu"].reference(*args)
                    assert_like(k.rms_norm_silu(*args), expected, dtype, spare=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(24, 128), (3, 64), (2, 24), (1, 6), (2, 4096)])
def test_complex_tables(
    kernels_module: ModuleType, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Bit for bit the result of cos and sin apart: the same arithmetic."""
    q, k = randn(2, 33, heads, dim, dtype=dtype), randn(2, 33, 1, dim, dtype=dtype)
    weight = randn(dim, dtype=dtype)
    for lead in ((33,), (1, 33), (2, 33), (2, 33, 1)):
        for rotary in (dim, dim - 2 if dim > 2 else dim, 2):
            angle = randn(*lead, rotary // 2) * 30
            freqs = torch.polar(torch.ones_like(angle), angle)
            tables = (freqs.real.contiguous(), freqs.imag.contiguous())
            options = {"interleaved": True, "rotary_dim": rotary}
            for name, head in (("rope_qk", (q, k)), ("qk_norm_rope", (q, k, weight, weight))):
                function = getattr(kernels_module, name)
                ours, theirs = (
                    function(*head, freqs, **options),
                    function(*head, *tables, **options),
                )
                for a, e in zip(ours, theirs, strict=True):
                    # A table of another alignment may take narrower vectors; a norm's sum follows.
                    eps = torch.finfo(dtype).eps if name == "qk_norm_rope" else 0.0
                    scale = e.float().abs().amax(-1, keepdim=True)
                    assert ((a.float() - e.float()).abs() <= 2.1 * max(eps, 0) * scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    k = kernels_module
    for cols in (17, 3072, 20000):
        w = randn(cols, dtype=dtype)
        calls: dict[str, Any] = {
            "rms_norm": lambda f, x, w=w: f(x, w, cast="input"),
            "layer_norm": lambda f, x, w=w: f(x, w, w),
            "gelu": lambda f, x: f(x, "tanh"),
            "silu": lambda f, x: f(x),
            "add_gelu": lambda f, x, w=w: f(x, w),
            "add_silu": lambda f, x, w=w: f(x, w),
            "mul_add": lambda f, x, w=w: f(x, w, w),
            "gate_residual": lambda f, x, w=w: f(x, w, x * 2),
            "add_rms_norm": lambda f, x, w=w: f(x, x * 2, w)[0],
        }
        for name, call in calls.items():
            x = randn(3, 200, cols, dtype=dtype)
            expected = call(getattr(k, name), x.clone())
            assert call(getattr(k, name + "_"), x) is x
            assert torch.equal(x, expected), name


def test_in_a_graph(kernels_module: ModuleType) -> None:
    x, bias = randn(64, 3072, dtype=torch.bfloat16), randn(3072, dtype=torch.bfloat16)
    kernels_module.add_gelu(x, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels_module.mul_add(kernels_module.add_gelu(x, bias), bias, bias)
    x.copy_(randn(64, 3072, dtype=torch.bfloat16))
    graph.replay()
    expected = kernels_module.mul_add(kernels_module.add_gelu(x, bias), bias, bias)
    assert torch.equal(y, expected)
