"""`add_gelu`, `add_silu`, `mul_add` on the CPU: fp64, rounding, gradients, layouts, errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import CONSTANTS, KernelError, going_down
from test_c_api import (
    DTYPES,
    F32,
    built,  # noqa: F401  (fixtures, as are `lib` and `seed`)
    call,
    lib,  # noqa: F401
    same_bits,
    seed,  # noqa: F401
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance
from torch import Tensor

from hfpatch.ops import OPS

HALVES = [t for t in DTYPES if t != F32]
NAMES = ["gelu", "gelu_tanh", "gelu_sigmoid", "silu"]
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh", "gelu_sigmoid": "sigmoid"}
SHAPES = [(1, 1), (7, 17), (3, 5, 128), (2, 3, 1000), (2, 700, 24), (0, 8), (3, 0)]


def formula(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return torch.nn.functional.gelu(x, approximate=APPROXIMATE[name])


def run(lib: Any, op: str, name: str, *args: Any) -> Tensor:
    """The operator of that activation: silu has no code."""
    code = () if name == "silu" else (NAMES.index(name),)
    return call(lib, op + ("silu" if name == "silu" else "gelu"), *args, *code)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_activation_against_fp64(lib, dtype, name):
    for shape in SHAPES:
        x, bias = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1], dtype=dtype)
        total = (x + bias).double()  # rounded, as eager PyTorch does
        y = formula(total, name)
        bound = (
            ROUNDING[dtype] * y.abs()
            + tolerance("activation", dtype) * total.abs()
            + SUBNORMAL[dtype]
        )
        assert_close(run(lib, "add_", name, x, bias), y, bound, f"{name} {shape}")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_is_rounded_first(lib, dtype):
    x, bias = torch.randn(64, 512, dtype=dtype) * 3, torch.randn(512, dtype=dtype)
    once = formula(x.double() + bias.double(), "silu").to(dtype)
    out = run(lib, "add_", "silu", x, bias)
    assert (out != formula((x + bias).double(), "silu").to(dtype)).float().mean() < 0.01
    assert (out != once).float().mean() > 0.05  # the test can tell them apart


def modulations(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every layout of b and c next to a of 3 dimensions."""
    b, s, d = shape
    chunks = torch.randn(b, 1, 3 * d, dtype=dtype).chunk(3, -1)
    return {
        "[D]": torch.randn(d, dtype=dtype),
        "[B, D]": chunks[1][:, 0],
        "[B, 1, D]": chunks[2],
        "[1, S, D]": torch.randn(1, s, d, dtype=dtype),
        "[B, S, D]": torch.randn(b, s, 2 * d, dtype=dtype)[..., :d],
    }


def wide(t: Tensor) -> Tensor:
    t = t.double()
    return t[:, None] if t.dim() == 2 else t


@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mul_add_against_fp64(lib, dtype, param):
    for shape in [(2, 3, 17), (3, 5, 128), (1, 1, 1), (2, 0, 8)]:
        a = torch.randn(shape, dtype=dtype)
        for kind, b in modulations(shape, param).items():
            for other, c in modulations(shape, param).items():
                product, what = a.double() * wide(b), f"{shape} {kind} {other}"
                y = product + wide(c)
                for cast, out in ((0, dtype), (1, torch.promote_types(dtype, param))):
                    steps = (product.abs() if cast else 0) + y.abs()
                    bound = ROUNDING[out] * steps * (1 + 2**-7) + 2 * SUBNORMAL[out]
                    bound = bound + ROUNDING[F32] * (2 * product.abs() + y.abs())
                    result = call(lib, "mul_add", a, b, c, cast, dtype=out)
                    assert_close(result, y, bound, f"{what} cast {cast}")


@pytest.mark.parametrize("dtype", HALVES)
def test_mul_add_rounds_where_eager_does(lib, dtype):
    a, b, c = torch.randn(64, 512, dtype=dtype), *torch.randn(2, 512, dtype=dtype)
    expected = a * b + c
    assert same_bits(call(lib, "mul_add", a, b, c, 1), expected)
    assert (call(lib, "mul_add", a, b, c, 0) != expected).float().mean() > 0.05


# --- gradients --------------------------------------------------------------------------------


def backward(lib, name, like, needs, *args):
    """(dx, and what is wanted) of a backward function whose parameter has the shape of `like`."""
    x = args[1]
    wanted = [bit for bit in (1, 2) if needs & bit]
    rows, cols = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    parts = lib.dll.hfp_sum_partial_rows(rows, cols, like.numel() // max(cols, 1))
    partials = torch.full((parts, len(wanted) * cols), float("nan"))
    sums = [torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)
            for _ in wanted]  # fmt: skip
    outs: list[Any] = [torch.full_like(x, float("nan"))]
    if name == "mul_add_backward":
        given = dict(zip(wanted, sums, strict=True))
        outs += [given.get(1), given.get(2)]
    else:
        outs += sums or [None]
    lib.call(name, *outs, partials if needs else None, *args, needs)
    return [outs[0], *sums]


def assert_gradient(actual: Tensor, expected: Tensor, terms: Tensor, dtype: torch.dtype) -> None:
    """One rounding to the dtype and, of the sums, of fp32 for each of up to 2000 terms."""
    bound = ROUNDING[dtype] * expected.abs() + 64 * ROUNDING[F32] * terms + 2 * SUBNORMAL[dtype]
    assert_close(actual, expected, bound + 2.0**-17 * terms * (dtype != F32), "gradient")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_activation_gradients(lib, dtype, name):
    for shape in SHAPES:
        x, bias = torch.randn(shape, dtype=dtype) * 2, torch.randn(shape[-1], dtype=dtype)
        grad = torch.randn(shape, dtype=dtype)
        total = (x + bias).double().requires_grad_()
        (expected,) = torch.autograd.grad(formula(total, name).sum(), total)
        expected = expected * grad.double()
        code = () if name == "silu" else (NAMES.index(name),)
        op = f"add_{'silu' if name == 'silu' else 'gelu'}_backward"
        dx, dbias = backward(lib, op, bias, 2, grad, x, bias, *code)
        terms = 2 * grad.double().abs()  # the slopes are below 1.2
        assert_gradient(dx, expected, terms, dtype)
        over = list(range(len(shape) - 1))
        assert_gradient(dbias, expected.sum(over), terms.sum(over), dtype)
        (again,) = backward(lib, op, bias, 0, grad, x, bias, *code)
        assert same_bits(again, dx)


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 1024, 64)])
def test_mul_add_gradients_of_a_parameter_that_goes_down(lib, shape):
    """Its first row is the last in memory: no tensor of PyTorch's, but one of DLPack's."""
    n, _, cols = shape
    a, grad = torch.randn(shape), torch.randn(shape)
    memory = torch.randn(n, 1, cols)
    b = going_down(memory)
    outs = [torch.full_like(t, float("nan")) for t in (a, memory, memory)]
    parts = lib.dll.hfp_sum_partial_rows(n * shape[1], cols, n)
    lib.call("mul_add_backward", *outs, torch.empty(parts, 2 * cols), grad, a, b, 1, 3)
    upwards = backward(lib, "mul_add_backward", memory, 3, grad, a, memory.flip(0), 1)
    assert all(map(same_bits, outs, upwards))


@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mul_add_gradients(lib, dtype, param):
    for shape in [(2, 3, 17), (2, 700, 24), (3, 40, 600), (1, 1, 1), (2, 0, 8)]:
        a = torch.randn(shape, dtype=dtype)
        for b in modulations(shape, param).values():
            for cast, out in ((0, dtype), (1, torch.promote_types(dtype, param))):
                grad = torch.randn(shape, dtype=out)
                leaf = b.double().requires_grad_()
                spread = (leaf[:, None] if leaf.dim() == 2 else leaf).expand(shape)
                product = grad.double() * a.double()
                da, db, dc = backward(lib, "mul_add_backward", b, 3, grad, a, b, cast)
                full = grad.double() * spread.detach()
                assert_gradient(da, full, full.abs(), dtype)
                for got, terms in ((db, product), (dc, grad.double())):
                    (e,) = torch.autograd.grad(spread, leaf, terms, retain_graph=True)
                    (size,) = torch.autograd.grad(spread, leaf, terms.abs(), retain_graph=True)
                    assert_gradient(got, e, size, param)
                for needs, same in ((1, db), (2, dc)):
                    one = backward(lib, "mul_add_backward", b, needs, grad, a, b, cast)
                    assert same_bits(one[0], da) and same_bits(one[1], same)


def test_sums_over_many_rows_and_wide_ones(lib):
    """Rows in parts, columns in blocks; rows of a sum that do not follow each other."""
    for shape, param in (
        ((1, 200, 4500), (4500,)),
        ((37, 4097), (4097,)),
        ((300, 3, 40), (1, 3, 40)),
        ((6, 70, 33), (1, 70, 33)),
    ):
        a, grad = torch.randn(2, *shape)
        b = torch.randn(param)
        da, db, dc = backward(lib, "mul_add_backward", b, 3, grad, a, b, 1)
        assert_gradient(da, grad.double() * b, (grad.double() * b).abs(), torch.float32)
        for got, terms in ((db, grad.double() * a), (dc, grad.double())):
            size = terms.abs().sum_to_size(param)
            assert_gradient(got, terms.sum_to_size(param), size, torch.float32)


def test_gradients_repeat_and_may_replace_grad(lib):
    grad, a = torch.randn(2, 500, 96), torch.randn(2, 500, 96)
    b = torch.randn(2, 1, 96)
    first = backward(lib, "mul_add_backward", b, 3, grad, a, b, 1)
    again = backward(lib, "mul_add_backward", b, 3, grad, a, b, 1)
    assert all(map(same_bits, first, again))
    for where in (0, 1):
        kept = [grad.clone(), a.clone()]
        lib.call("mul_add_backward", kept[where], None, None, None, *kept, b, 1, 0)
        assert same_bits(kept[where], first[0])


def test_layouts_and_bits_of_a_split(lib):
    base = torch.randn(4, 6, 40)
    for view in (base[..., 3:27], base[1::2, 2:5, 8:32], base.transpose(0, 1)[..., :24]):
        bias, c = torch.randn(2, 24)
        for name, args in (("add_gelu", (bias, 1)), ("mul_add", (bias, c, 1))):
            out = call(lib, name, view, *args)
            assert same_bits(out, call(lib, name, view.contiguous(), *args))
            assert same_bits(call(lib, name, view[:1].contiguous(), *args), out[:1])


def test_partial_rows(lib):
    f = lib.dll.hfp_sum_partial_rows
    assert f(4096, 2048, 1) == lib.dll.hfp_partial_rows(4096, 2048)
    assert f(8192, 2048, 2) == lib.dll.hfp_partial_rows(8192, 2048)  # as many in all
    assert f(8192, 2048, 8192) == f(0, 8, 1) == f(5, 8, 0) == f(1, 8, 1) == 0
    for rows, cols, sums in ((6, 8, 2), (1000, 17, 10), (12, 5000, 3)):
        parts = f(rows, cols, sums)
        assert parts % sums == 0 and parts <= rows


X, B = torch.ones(2, 3, 8), torch.ones(8)
OUT = torch.full((2, 3, 8), 7.0)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("add_gelu", (X, B, 3), r"`approximate` must be 0 \(erf\), 1 \(tanh\) or 2 .*got 3"),
        ("add_gelu", (X, B[:5], 0), r"`bias` must have shape \[8\].*got \[5\]"),
        ("add_gelu", (X, None, 0), r"`bias` must be a tensor, got NULL"),
        ("add_silu", (X, B.half()), r"`bias` must have the dtype of `x` \(float32\), got float16"),
        ("mul_add", (X, B, B, 2), r"`cast` must be 0 \(none\) or 1 \(input\), got 2"),
        ("mul_add", (X, B, B.half(), 1), r"`c` must have the dtype of `b`"),
        ("mul_add", (X, torch.ones(3, 8), B, 1), r"`b` must have shape \[8\], \[B, 8\], or that"),
        ("mul_add", (X.half(), B, B, 0), r"`out` must be float16, got float32"),
    ],
)
def test_bad_calls(lib, name, args, message):
    with pytest.raises(KernelError, match=message) as caught:
        lib.call(name, OUT, *args)
    assert caught.value.status == CONSTANTS["HFP_INVALID_ARGUMENT"]
    assert (OUT == 7).all()


def test_bad_backward_calls(lib):
    b4, x4 = torch.ones(1, 3, 1, 8), torch.ones(2, 3, 4, 8)
    tall, wide_bias = torch.ones(64, 1024), torch.ones(1024)  # enough rows for partial sums
    for name, args, message in (
        ("add_silu_backward", (X.clone(), B.clone(), None, X, X, B, 3), r"`needs` must be 2"),
        (
            "add_silu_backward",
            (tall * 1, wide_bias * 1, None, tall, tall, wide_bias, 2),
            r"`partials` must be a tensor, got NULL",
        ),
        ("mul_add_backward", (X.clone(), None, None, None, X.half(), X, B, 1, 0), r"`grad` must"),
        ("mul_add_backward", (X.clone(), None, None, None, X, X, B, 1, 4), r"`needs` must be a s"),
        (
            "mul_add_backward",
            (x4.clone(), None, None, None, x4, x4, b4, 1, 0),
            r"`b` must be broadcast over adjacent dimensions of `a`.*expand",
        ),
    ):
        with pytest.raises(KernelError, match=message):
            lib.call(name, *args)


# --- the torch functions ----------------------------------------------------------------------


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES: list[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]] = [
    *(("add_gelu", ((2, 5, 16), (16,)), {"approximate": a}) for a in APPROXIMATE.values()),
    ("add_silu", ((2, 5, 16), (16,)), {}),
    ("mul_add", ((2, 5, 16), (16,), (16,)), {}),
    ("mul_add", ((2, 5, 16), (2, 16), (2, 16)), {"cast": "none"}),
    ("mul_add", ((2, 5, 16), (2, 1, 16), (16,)), {}),
    ("mul_add", ((2, 5, 16), (1, 5, 16), (2, 16)), {}),
    ("mul_add", ((2, 5, 16), (2, 5, 16), (2, 1, 16)), {}),
    ("mul_add", ((2, 3, 4, 16), (2, 1, 4, 16), (2, 1, 4, 16)), {}),
    ("mul_add", ((2, 3, 4, 16), (1, 3, 1, 16), (1, 3, 1, 16)), {}),  # two sums of its own
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "shapes", "params"), CASES, ids=str)
def test_torch_function_and_gradients(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    params: dict[str, Any],
    dtype: torch.dtype,
    kernels_module: ModuleType,
) -> None:
    plain = [draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    leaves = [t.clone().requires_grad_() for t in plain]
    y = getattr(kernels_module, name)(*leaves, **params)
    assert torch.equal(y.detach(), getattr(kernels_module, name)(*plain, **params))
    eps = max(torch.finfo(dtype).eps, 1e-6)
    expected = OPS[name].reference(*plain, **params)
    aten = OPS[name].aten(*plain, **params)
    torch.testing.assert_close(y.detach(), expected, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(aten, expected, rtol=2 * eps, atol=2 * eps)
    wide = [t.double().requires_grad_() for t in plain]
    truth = OPS[name].reference(*wide, **params)
    seed = draw(*y.shape, dtype=y.dtype, seed=8)
    actual = torch.autograd.grad(y, leaves, seed)
    for a, e, leaf in zip(
        actual, torch.autograd.grad(truth, wide, seed.double()), leaves, strict=True
    ):
        assert (a.dtype, a.shape) == (leaf.dtype, leaf.shape)
        assert (a.double() - e).abs().max() <= 4 * eps * e.abs().max()
    for i, leaf in enumerate(leaves):  # one at a time
        only = [t.detach().requires_grad_(j == i) for j, t in enumerate(leaves)]
        (one,) = torch.autograd.grad(getattr(kernels_module, name)(*only, **params), only[i], seed)
        assert torch.equal(one, actual[i]) and one.shape == leaf.shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_gradients(dynamic: bool, kernels_module: ModuleType) -> None:
    def block(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        y = kernels_module.add_gelu(x, bias, "tanh")
        return kernels_module.mul_add(y, scale, scale + 1)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        given = [draw(2, rows, 16), draw(16, seed=1), draw(2, 1, 16, seed=2)]
        leaves = [t.requires_grad_() for t in given]
        y = block(*leaves)
        torch.testing.assert_close(compiled(*leaves), y)
        for a, e in zip(
            torch.autograd.grad(compiled(*leaves).sum(), leaves),
            torch.autograd.grad(y.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, e)
