"""The CUDA gradients and losses against autograd of the reference formulas in fp64."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import c_api
import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS
from hfpatch.ops.activation import ACTIVATIONS, activate

pytestmark = pytest.mark.gpu
F = torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Every shape of kernel: parts of a warp, a warp, a CTA of one or four vectors, the loop, odd sizes.
COLS = [1, 17, 64, 128, 512, 1000, 2048, 3072, 4097, 8192, 12288, 16384, 20000]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def gradients(function: Any, inputs: list[Tensor], seed: Tensor | None = None) -> tuple[Any, ...]:
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    y = function(*leaves)
    seed = torch.ones_like(y) if seed is None else seed.to(y.dtype)
    return y.detach(), torch.autograd.grad(y, leaves, seed)


def check(
    actual: Tensor,
    truth: Tensor,
    dtype: torch.dtype,
    roundings: float = 1.0,
    fp32: Tensor | None = None,
    half: Tensor | None = None,
) -> None:
    """Relative to the largest of a row: fp32 sums over a row or over the rows, then a rounding.

    fp32, half: what errors of the fp32 arithmetic, and roundings to a half type, are relative to
    where the result may be much smaller, because what it is made of cancels.
    """
    assert actual.shape == truth.shape
    if not truth.numel():
        return

    def largest(t: Tensor | None) -> Tensor:
        t = truth if t is None else torch.maximum(truth.abs(), t)
        return t.abs().amax(-1, keepdim=True).clamp_min(1e-3)

    eps = 0.0 if dtype == torch.float32 else roundings * torch.finfo(dtype).eps
    bound = tolerance("cuda gradient") * largest(fp32) + eps * largest(half)
    part = ((actual.double() - truth).abs() / bound).max().item()
    assert part <= 1, part  # false for NaN too


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("rows", [1, 7, 16, 600])
def test_norms(kernels_module: ModuleType, rows: int, cols: int, dtype: torch.dtype) -> None:
    for w_dtype in {dtype, torch.float32}:
        x, seed = randn(rows, cols, dtype=dtype) * 3, randn(rows, cols, dtype=dtype)
        w, b = randn(2, cols, dtype=w_dtype)
        for op, inputs, codes in (
            ("rms_norm", [x, w], {"cast": "none", "weight_offset": 1.0}),
            ("rms_norm", [x, w], {"cast": "input"}),
            ("rms_norm", [x, w, b], {"cast": "weight"}),
            ("rms_norm", [x], {}),
            ("layer_norm", [x, w, b], {"eps": 1e-2}),
            ("layer_norm", [x], {"eps": 1e-2}),
        ):
            if cols == 1:  # the gradient of a norm of one number is what rounding left
                inputs = [i.abs() + 1 for i in inputs]
            ours = getattr(kernels_module, op)
            _, actual = gradients(lambda *a, f=ours, c=codes: f(*a, **c), inputs, seed)
            formula = OPS[op].reference
            wide = {k: v for k, v in codes.items() if k != "cast"}
            _, truth = gradients(
                lambda *a, f=formula, c=wide: f(*a, **c),
                [i.double() for i in inputs],
                seed.double(),
            )
            # Sums over the rows, of terms of both signs. An addition rounds what there is by then,
            # about the 2-norm of the terms, however small the sum is in the end: a chain of n comes
            # to sqrt(n) 2^-24 of that norm. For one column 600 rows make chains of 38 and then 16.
            x_hat = formula(x=inputs[0].double(), eps=codes.get("eps", 1e-6))
            terms = [None, *((seed.double() * f).norm(dim=0) for f in (x_hat, 1.0))]
            for a, t, i, of in zip(actual, truth, inputs, terms, strict=False):
                assert a.dtype == i.dtype
                # xhat is rounded before the sum over rows where the forward rounds it.
                if cols > 1 or i is not inputs[0]:
                    narrow = min(dtype, a.dtype, key=lambda d: -torch.finfo(d).eps)
                    check(a, t, narrow, 2.0, of, of)
                else:
                    assert not a.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 520, 1000, 2048, 3072, 4096, 8192, 12288])
@pytest.mark.parametrize("rows", [1, 7, 600, 1300])
def test_layer_norm_far_from_zero(
    kernels_module: ModuleType, rows: int, cols: int, dtype: torch.dtype
) -> None:
    """E[x^2] - mean^2 would cancel in some of the rows, or overflow."""
    x, seed = randn(rows, cols), randn(rows, cols, dtype=dtype)
    x[::4] += 30
    x[1::4] += 3
    if dtype == torch.bfloat16:
        x[2::8] = 3e18 * (1 + 1e-2 * x[2::8])
    x = x.to(dtype)
    w, b = randn(2, cols, dtype=dtype)
    _, actual = gradients(lambda *a: kernels_module.layer_norm(*a, eps=1e-5), [x, w, b], seed)
    formula = OPS["layer_norm"].reference
    wide = [t.double() for t in (x, w, b)]
    _, truth = gradients(lambda *a: formula(*a, eps=1e-5), wide, seed.double())
    x_hat = formula(wide[0], eps=1e-5)
    for a, t, f in zip(actual[1:], truth[1:], (x_hat, 1.0), strict=True):
        of = (seed.double() * f).norm(dim=0)
        check(a, t, dtype, 2.0, of, of)
    scale = truth[0].abs().amax(-1, keepdim=True)
    check(actual[0].double() / scale, truth[0] / scale, dtype, 2.0)


def test_norms_are_deterministic(kernels_module: ModuleType) -> None:
    for cols in (128, 3072, 12288, 20000):
        x, seed = randn(2, 3000, cols, dtype=torch.bfloat16)
        w = randn(cols, dtype=torch.bfloat16)
        operator = kernels_module.ops.layer_norm_backward.default
        first = operator(seed, x, w, w, 1e-5, 3)[:3]  # the fourth is scratch: see hfpatch.h
        for _ in range(5):
            assert all(map(torch.equal, operator(seed, x, w, w, 1e-5, 3), first))


@pytest.mark.parametrize("shape", [(3, 5, 16), (3, 600, 2048), (2, 2688, 2048), (1, 4608, 3072)])
def test_a_parameter_that_goes_down(kernels_module: ModuleType, shape: tuple[int, ...]) -> None:
    """Its first row is the last in memory, by the C interface."""
    n, _, cols = shape
    a, grad, memory = randn(*shape), randn(*shape), randn(n, 1, cols)
    backward = kernels_module.ops.mul_add_backward.default
    *expected, partials = backward(grad, a, memory.flip(0), 1, 3)
    outs = [torch.full_like(t, float("nan")) for t in expected]
    (binary,) = Path(str(kernels_module.__file__)).parent.glob("*.so")
    b = c_api.going_down(memory)
    c_api.Library(binary).call(
        "mul_add_backward", *outs, torch.empty_like(partials), grad, a, b, 1, 3
    )
    assert torch.equal(outs[0], expected[0])
    # Sums of up to 4608 in fp32, of about 100, in another order.
    torch.testing.assert_close(outs[1:], expected[1:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1024, 1544, 4096, 8192])
def test_a_row_of_dx_does_not_depend_on_how_many_there_are(
    kernels_module: ModuleType, cols: int, dtype: torch.dtype
) -> None:
    """Up to 16 rows are one launch of a cluster, on sm_90; many are blocks of several rows each."""
    x, seed = randn(2, 1201, cols, dtype=dtype)
    x[::5] += 30  # sums of layer_norm that are made again
    ops = kernels_module.ops
    for w in (randn(cols, dtype=dtype), randn(cols)):
        for backward in (
            lambda g, t, w=w: ops.layer_norm_backward.default(g, t, w, w, 1e-5, 3),
            lambda g, t, w=w: ops.rms_norm_backward.default(g, t, w, None, 1e-6, 0.0, 0, 1),
        ):
            many = backward(seed, x)[0]
            for rows in (1, 2, 9, 16, 17, 270, 1200):
                few, again = (backward(seed[:rows], x[:rows])[:3] for _ in range(2))
                assert torch.equal(few[0], many[:rows])
                assert all(map(torch.equal, few, again))


def test_norms_strided_in_place_and_empty(kernels_module: ModuleType) -> None:
    ops = kernels_module.ops
    w = randn(128, dtype=torch.bfloat16)
    for cut in (slice(8, 136), slice(3, 131)):  # aligned, and not
        x, grad = randn(2, 6, 50, 160, dtype=torch.bfloat16)[..., cut].transpose(1, 2)
        args = (1e-6, 0.0, 1, 1)
        strided = ops.rms_norm_backward.default(grad, x, w, None, *args)
        plain = ops.rms_norm_backward.default(grad.contiguous(), x.contiguous(), w, None, *args)
        torch.testing.assert_close(strided[0], plain[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(strided[1], plain[1], rtol=1e-2, atol=1e-2)
    for target in (0, 1):
        pair = [grad.contiguous(), x.contiguous()]
        outs = [pair[target], torch.empty_like(w), w[:0], torch.empty_like(plain[3])]
        ops.rms_norm_backward_out.default(*outs, *pair, w, None, *args)
        assert torch.equal(outs[0], plain[0]) and torch.equal(outs[1], plain[1])
    none = randn(0, 128, dtype=torch.bfloat16)
    assert (ops.rms_norm_backward.default(none, none, w, None, *args)[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 17), (5, 1000), (64, 4096), (3, 7, 4099)], ids=str)
def test_activations(
    kernels_module: ModuleType, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A derivative of an activation is a sum of terms up to 1.2, which cancel around its zero: in
    fp32 its error is 2.5e-7 at most, not that part of itself. A value's is 1.5e-7 of x."""
    k = kernels_module
    x, up, seed = (randn(*shape, dtype=dtype) * s for s in (4, 1, 1))
    wide_x, wide_up, wide_seed = (t.double() for t in (x, up, seed))
    of_each = [(wide_seed * wide_up).abs(), (wide_seed * wide_x).abs()]
    approximations = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}
    cases = [(lambda x, a=a: k.gelu(x, a), n) for a, n in approximations.items()]
    for ours, name in [*cases, (k.silu, "silu")]:
        _, (actual,) = gradients(ours, [x], seed)
        _, (truth,) = gradients(lambda x, n=name: activate(x, n), [x.double()], seed.double())
        check(actual, truth, dtype, fp32=wide_seed.abs())
    for name in ACTIVATIONS:
        _, actual = gradients(lambda g, u, n=name: k.gated(g, u, n), [x, up], seed)
        _, truth = gradients(
            lambda g, u, n=name: activate(g, n) * u, [x.double(), up.double()], seed.double()
        )
        for a, t, of in zip(actual, truth, of_each, strict=True):
            check(a, t, dtype, 2.0, fp32=of)
        for first in (True, False):
            both = torch.cat([x, up] if first else [up, x], -1)
            _, (packed,) = gradients(
                lambda x, n=name, f=first: k.gated_packed(x, n, f), [both], seed
            )
            assert torch.equal(packed, torch.cat(actual if first else actual[::-1], -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [2, 31, 1000, 50257, 128256, 262144])
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 0.0), (0.0, 30.0)])
@pytest.mark.parametrize("at_once", [False, True], ids=["gradient apart", "gradient with loss"])
def test_cross_entropy(
    kernels_module: ModuleType,
    classes: int,
    smoothing: float,
    cap: float,
    at_once: bool,
    dtype: torch.dtype,
) -> None:
    logits = randn(9, classes, dtype=dtype) * 6
    target = torch.randint(classes, (9,), device="cuda")
    target[4] = -100

    def formula(x: Tensor) -> Tensor:
        z = cap * torch.tanh(x / cap) if cap else x
        return F.cross_entropy(z, target, label_smoothing=smoothing)

    y, (actual,) = gradients(
        lambda x: kernels_module.cross_entropy(
            x, target, label_smoothing=smoothing, softcap=cap, gradient_with_loss=at_once
        ),
        [logits],
    )
    wide, (truth,) = gradients(formula, [logits.double()])
    assert abs(y.item() - wide.item()) <= 4e-6 * abs(wide.item()) + 1e-6
    scale = torch.finfo(dtype)
    bound = scale.eps * truth.abs() + 2e-5 * truth.abs().amax(-1, keepdim=True)
    # p - 1 of a near-certain class keeps the error of p, whose exponent, z - lse, is a difference
    # of two rounded numbers; eight rows share the mean's gradient
    largest = min(logits.abs().max().item(), cap or float("inf"))
    bound = bound + scale.smallest_normal * scale.eps + (4e-7 + 2**-23 * largest) / 8
    assert ((actual.double() - truth).abs() <= bound).all()
    assert (actual[4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [8191, 8192, 16384, 32768, 50257, 128256])
def test_cross_entropy_of_a_row_is_its_own(
    kernels_module: ModuleType, classes: int, dtype: torch.dtype
) -> None:
    """Few wide rows are shared out over clusters, many are not: the bits are the same."""
    logits = randn(40, classes, dtype=dtype) * 6
    logits[3, 5], logits[7], logits[8, 100:] = float("nan"), -float("inf"), -float("inf")
    target = torch.randint(classes, (40,), device="cuda")
    target[4], target[5] = -100, classes

    def loss(rows: slice) -> Tensor:
        loss: Tensor = kernels_module.cross_entropy(
            logits[rows], target[rows], "none", label_smoothing=0.1
        )
        return loss

    many = loss(slice(None))
    few = torch.cat([loss(slice(0, 1)), loss(slice(1, 9)), loss(slice(9, 40))])
    assert torch.equal(many.view(torch.int32), few.view(torch.int32))
    usual = torch.tensor([i for i in range(40) if i not in (3, 4, 5, 7, 8)], device="cuda")
    truth = F.cross_entropy(
        logits[usual].double(), target[usual], reduction="none", label_smoothing=0.1
    )
    torch.testing.assert_close(many[usual].double(), truth, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(
    "classes", [1000, 2048, 16384, 32000, 50257, 50264, 128256, 151936, 262144, 262152]
)
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 30.0)])
def test_cross_entropy_with_gradient(
    kernels_module: ModuleType,
    classes: int,
    rows: int,
    smoothing: float,
    cap: float,
    dtype: torch.dtype,
) -> None:
    """However many CTAs hold a row, and over the logits too."""
    ops = kernels_module.ops
    logits = randn(rows, classes, dtype=dtype) * 6
    target = torch.randint(classes, (rows,), device="cuda")
    target[0], target[2], logits[1, 7] = -100, classes, float("nan")
    codes = (-100, smoothing, cap)
    operator = ops.cross_entropy_with_gradient.default
    total, loss, lse, dlogits = operator(logits, target, None, 7.0, *codes)
    assert total.isnan() and loss[1:3].isnan().all()
    assert (loss[0], lse[0]) == (0, 0) and (dlogits[0] == 0).all() and dlogits[1:3].isnan().all()
    expected, expected_lse = ops.cross_entropy.default(logits, target, *codes)
    if classes * dtype.itemsize <= 64 * 4096:  # of wider rows a strand has two waves
        assert_same(loss, expected)
        assert_same(lse, expected_lse)
    grad = torch.full_like(loss, 1 / 7)
    apart = ops.cross_entropy_backward.default(grad, logits, target, expected_lse, *codes)
    usual = [i for i in range(rows) if i > 2]
    bound = 2 * torch.finfo(dtype).eps * apart.float().abs() + 1e-6
    assert ((dlogits.float() - apart.float()).abs() <= bound)[usual].all()
    few = operator(logits[:5], target[:5], None, 7.0, *codes)
    for all_rows, of_few in zip((loss, lse, dlogits), few[1:], strict=True):
        assert_same(of_few, all_rows[:5])
    if usual:
        counted, *_ = operator(logits[3:], target[3:], None, 0.0, *codes)
        mean = loss[3:].double().mean()
        torch.testing.assert_close(counted.double(), mean, rtol=3e-7, atol=0)
    ops.cross_entropy_with_gradient_out.default(
        total, loss, lse, logits, logits, target, None, 7.0, *codes
    )
    assert_same(logits, dlogits)


def assert_same(a: Tensor, b: Tensor) -> None:
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    number = ~(a.isnan() & b.isnan())
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.view(integers)[number], b.view(integers)[number])


def test_total_cross_entropy_in_a_graph(kernels_module: ModuleType) -> None:
    """What the loss is divided by, and the upstream gradient, are read where they are."""
    x = randn(64, 32000, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(32000, (64,), device="cuda")
    items = torch.tensor(64.0, device="cuda")
    upstream = torch.tensor(1.0, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        loss = kernels_module.cross_entropy(x, target, num_items=items)
        return loss, torch.autograd.grad(loss, x, upstream)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for count, factor in ((64.0, 1.0), (10.0, 1.0), (10.0, 0.25)):
        items.fill_(count), upstream.fill_(factor)
        graph.replay()
        for actual, expected in zip(captured, step(), strict=True):
            assert torch.equal(actual, expected)
        truth = F.cross_entropy(x.double(), target, reduction="sum") / count
        torch.testing.assert_close(captured[0].double(), truth, rtol=1e-6, atol=0)


def test_cross_entropy_odd_values(kernels_module: ModuleType) -> None:
    inf = float("inf")
    logits = torch.tensor(
        [
            [0.0, -inf, 1.0],
            [0.0, 1.0, 2.0],
            [1e4, -1e4, 0.0],
            [float("nan"), 0.0, 0.0],
            [-inf, 0.0, 0.0],
        ],
        device="cuda",
    )
    target = torch.tensor([2, 7, 0, 1, 0], device="cuda")
    loss = kernels_module.cross_entropy(logits, target, "none")
    assert loss[[1, 3]].isnan().all() and loss[2] == 0 and loss[4] == inf
    torch.testing.assert_close(loss[0], logits[0].logsumexp(0) - 1)


def test_graph_and_second_launch(kernels_module: ModuleType) -> None:
    """Both launches of a norm's gradient are in a CUDA graph, on the capturing stream."""
    x, seed = randn(2, 512, 2048, dtype=torch.bfloat16)
    w = randn(2048, dtype=torch.bfloat16)
    operator = kernels_module.ops.rms_norm_backward.default
    operator(seed, x, w, None, 1e-6, 0.0, 1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(seed, x, w, None, 1e-6, 0.0, 1, 1)
    for _ in range(5):
        x.normal_()
        graph.replay()
        expected = operator(seed, x, w, None, 1e-6, 0.0, 1, 1)
        assert torch.equal(captured[0], expected[0]) and torch.equal(captured[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_near_the_largest_number(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """1.702 x is infinite there, and the gradient is 0 or 1."""
    x = torch.tensor([-2.5e38, -2.1e38, -3.0, 0.5, 4.0, 2.1e38, 2.5e38] * 64, device="cuda")
    x = x.to(dtype).reshape(7, 64)
    gradients = []
    for act in (lambda t: kernels_module.gelu(t, "sigmoid"), lambda t: t * (1.702 * t).sigmoid()):
        t = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(act(t).float().nan_to_num().sum(), t)[0])
    torch.testing.assert_close(*gradients)
