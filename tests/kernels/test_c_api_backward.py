"""Gradients and losses through the C interface on the CPU: numbers against fp64, memory, bad input.

The truth is autograd of the op's reference formula in fp64.
"""

# ruff: noqa: F811  (fixtures of test_c_api)

from __future__ import annotations

import itertools
import math

import c_api
import pytest
import torch
import torch.nn.functional as F
from c_api import Library
from test_c_api import (  # noqa: F401  (fixtures)
    BF16,
    CONSTANTS,
    DTYPES,
    F16,
    F32,
    INPUT,
    INVALID,
    NONE,
    SILU,
    WEIGHT,
    Canary,
    built,
    lib,
    rms_result,
    same_bits,
    seed,
)
from tolerances import ROUNDING, SUBNORMAL, assert_close, tolerance

from hfpatch.ops.activation import ACTIVATIONS, activate
from hfpatch.ops.layer_norm import layer_norm
from hfpatch.ops.rms_norm import rms_norm

CAST_NAMES = {NONE: "none", INPUT: "input", WEIGHT: "weight"}


def canaries(*shapes_and_dtypes):
    return [Canary(shape, dtype) for shape, dtype in shapes_and_dtypes]


def norm_backward(lib, op, grad, x, weight, bias, *codes, needs=3):
    """(dx, dweight, dbias), through canaries; None where `needs` does not ask."""
    cols = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    wide = cols * ((needs & 1) + (needs >> 1))
    (dx,) = canaries((x.shape, x.dtype))
    dw = Canary((cols,), weight.dtype) if needs & 1 else None
    db = Canary((cols,), bias.dtype) if needs & 2 else None
    parts = Canary((lib.dll.hfp_partial_rows(rows, cols), wide), F32) if needs else None
    outs = [dx, dw, db, parts]
    lib.call(op, *(o and o.out for o in outs), grad, x, weight, bias, *codes, needs)
    return [o and o.check() for o in outs][:3]


def truth(function, grad, *inputs):
    leaves = [None if i is None else i.double().requires_grad_() for i in inputs]
    y = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(y, wanted, grad.double()))
    return [None if leaf is None else next(found) for leaf in leaves]


def check_norm(lib, op, x, weight, bias, grad, codes, formula, offset=0.0, hat_rounding=0.0):
    needs = (1 if weight is not None else 0) | (2 if bias is not None else 0)
    dx, dw, db = norm_backward(lib, op, grad, x, weight, bias, *codes, needs=needs)
    edx, edw, edb = truth(formula, grad, x, weight, bias)
    if x.shape[-1] == 0:
        return
    # The terms of dx: r |h|, and r |xhat| mean|h xhat| (bounded by |xhat| rms(h), rms(xhat) <= 1).
    x64 = x.double()
    eps = codes[0]
    centred = op == "layer_norm_backward"
    d = x64 - x64.mean(-1, keepdim=True) if centred else x64
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    h = grad.double().abs() * (1 if weight is None else (weight.double() + offset).abs())
    hat = (d * r).abs()
    if centred:  # the error of the mean is relative to what it is the mean of
        hat = hat + r * x64.abs().mean(-1, keepdim=True)
    mean_h, rms_h = h.mean(-1, keepdim=True), h.square().mean(-1, keepdim=True).sqrt()
    size = r * (h + mean_h + hat * rms_h * (1 + hat.square().mean(-1, keepdim=True).sqrt()))
    what = (
        f"{op} {tuple(x.shape)} {x.dtype} {grad.dtype} {None if weight is None else weight.dtype}"
    )
    bound = tolerance("norm gradient") * size
    assert_close(
        dx, edx, bound + ROUNDING[x.dtype] * (edx.abs() + bound) + SUBNORMAL[x.dtype], what
    )
    flat = (-1, x.shape[-1])
    for actual, expected, terms in (
        (dw, edw, grad.double().abs() * hat),
        (db, edb, grad.double().abs()),
    ):
        if expected is None:
            continue
        assert actual.dtype in DTYPES
        bound = (tolerance("sum over rows") + hat_rounding) * terms.reshape(flat).sum(0)
        rounding = ROUNDING[actual.dtype] * (expected.abs() + bound) + SUBNORMAL[actual.dtype]
        assert_close(actual, expected, bound + rounding, what)


COLS = [1, 3, 17, 128, 1000, 4097]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_backward_shapes(lib, dtype):
    for rows, cols in itertools.product((1, 7, 64, 300), COLS):
        x, grad = torch.randn(2, rows, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=dtype)
        for w, b, offset in (
            (weight, None, 0.0),
            (None, None, 0.0),
            (weight, bias, 1.0),
            (None, bias, 0.0),
        ):
            check_norm(
                lib,
                "rms_norm_backward",
                x,
                w,
                b,
                grad,
                (1e-6, offset, NONE),
                lambda x, w, b, o=offset: rms_norm(x, w, b, 1e-6, o),
                offset,
            )


@pytest.mark.parametrize("weight_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_backward_mixed_dtypes(lib, dtype, weight_type):
    for cols, cast in itertools.product((5, 64, 200), (NONE, INPUT, WEIGHT)):
        x = torch.randn(9, cols, dtype=dtype)
        weight = torch.randn(cols, dtype=weight_type)
        grad = torch.randn(9, cols, dtype=rms_result(x, weight, cast))
        hat = 0.0 if cast == NONE else ROUNDING[dtype if cast == INPUT else weight_type]
        check_norm(
            lib,
            "rms_norm_backward",
            x,
            weight,
            None,
            grad,
            (1e-6, 0.0, cast),
            lambda x, w, b: rms_norm(x, w, b, 1e-6),
            hat_rounding=hat,
        )


def test_rms_norm_backward_rounds_xhat_as_the_forward(lib):
    """One row and grad 1: dweight is xhat itself, which INPUT has rounded to the dtype."""
    x, weight = torch.randn(1, 512, dtype=BF16), torch.ones(512)
    grad = torch.ones(1, 512)
    _, dw, _ = norm_backward(
        lib, "rms_norm_backward", grad, x, weight, None, 1e-6, 0.0, INPUT, needs=1
    )
    assert torch.equal(dw, dw.to(BF16).float())
    _, dw, _ = norm_backward(
        lib, "rms_norm_backward", grad, x, weight, None, 1e-6, 0.0, WEIGHT, needs=1
    )
    assert not torch.equal(dw, dw.to(BF16).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_backward(lib, dtype):
    for rows, cols in itertools.product((1, 7, 300), (2, *COLS[1:])):
        x, grad = torch.randn(2, rows, cols, dtype=dtype)
        weight, bias = torch.randn(2, cols, dtype=dtype)
        for w, b in ((weight, bias), (None, None), (weight.float(), bias.half()), (weight, None)):
            check_norm(
                lib,
                "layer_norm_backward",
                x + 1,
                w,
                b,
                grad,
                (1e-3,),
                lambda x, w, b: layer_norm(x, w, b, 1e-3),
            )


def test_norm_backward_needs(lib):
    """What is not asked for is not touched, and the rest is the same."""
    x, grad = torch.randn(2, 40, 96)
    weight, bias = torch.randn(2, 96)
    for op, codes in (("rms_norm_backward", (1e-6, 0.0, NONE)), ("layer_norm_backward", (1e-5,))):
        full = norm_backward(lib, op, grad, x, weight, bias, *codes, needs=3)
        for needs in (0, 1, 2):
            some = norm_backward(lib, op, grad, x, weight, bias, *codes, needs=needs)
            for i, (a, b) in enumerate(zip(full, some, strict=True)):
                assert b is None if i and not needs >> (i - 1) & 1 else same_bits(a, b)


def test_norm_backward_of_no_rows(lib):
    x, (weight, bias) = torch.randn(0, 96), torch.randn(2, 96, dtype=BF16)
    for op, codes in (("rms_norm_backward", (1e-6, 0.0, NONE)), ("layer_norm_backward", (1e-5,))):
        _, dw, db = norm_backward(lib, op, x, x, weight, bias, *codes)
        assert (dw == 0).all()
        assert (db == 0).all()


def test_norm_backward_in_place_and_strided(lib):
    x, grad = torch.randn(2, 6, 5, 80)
    weight, bias = torch.randn(2, 80)
    for op, codes in (("rms_norm_backward", (1e-6, 0.0, NONE)), ("layer_norm_backward", (1e-5,))):
        expected = norm_backward(lib, op, grad, x, weight, bias, *codes)
        wide = torch.randn(6, 9, 120)
        wide[:, 2:7, 20:100] = x
        turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
        actual = norm_backward(lib, op, turned, wide[:, 2:7, 20:100], weight, bias, *codes)
        assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))
        for target in (0, 1):
            args = [grad.clone(), x.clone()]
            lib.call(op, args[target], None, None, None, *args, weight, bias, *codes, 0)
            assert same_bits(args[target], expected[0])


def test_sums_do_not_depend_on_the_threads(built):
    """The same bits with 1 and with 4 threads."""
    code = (
        "import sys, hashlib, torch; sys.path.insert(0, sys.argv[2]); import c_api\n"
        "lib = c_api.Library(sys.argv[1]); torch.manual_seed(0)\n"
        "x, g = torch.randn(2, 3000, 256); w, dw = torch.randn(2, 256)\n"
        "p = torch.empty(lib.dll.hfp_partial_rows(3000, 256), 256); dx = torch.empty_like(x)\n"
        "lib.call('rms_norm_backward', dx, dw, None, p, g, x, w, None, 1e-6, 0.0, 0, 1)\n"
        "print(hashlib.sha256(dw.numpy().tobytes() + dx.numpy().tobytes()).hexdigest())\n"
    )
    assert len({c_api.printed(code, built, threads=t) for t in (1, 4)}) == 1


def test_partial_rows(built):
    library = Library(built)
    for rows, cols in itertools.product((0, 1, 5, 4096, 2**40), (1, 3, 512, 513, 3072, 10**6)):
        parts = library.dll.hfp_partial_rows(rows, cols)
        assert (parts == 0) == (rows == 0)
        assert parts <= min(rows, 132 * 8)


# --- activations ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "gelu_sigmoid", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_backward(lib, dtype, name):
    ramp = torch.linspace(-30, 30, 4003)
    for x in (torch.randn(7, 129) * 3, ramp, torch.randn(1), torch.randn(0, 4)):
        x = x.to(dtype)
        grad = torch.randn(x.shape).to(dtype)
        (expected,) = truth(lambda x: activate(x, name), grad, x)
        canary = Canary(x.shape, dtype)
        if name == "silu":
            lib.call("silu_backward", canary.out, grad, x)
        else:
            lib.call("gelu_backward", canary.out, grad, x, ACTIVATIONS[name])
        bound = (
            tolerance("activation gradient", dtype)
            * grad.double().abs()
            * (1 + x.double().abs().clamp_max(4))
        )
        bound = bound + ROUNDING[dtype] * expected.abs() + SUBNORMAL[dtype]
        assert_close(canary.check(), expected, bound, f"{name} {dtype}")
        again = grad.clone()
        arguments = () if name == "silu" else (ACTIVATIONS[name],)
        lib.call(
            "silu_backward" if name == "silu" else "gelu_backward", again, again, x, *arguments
        )
        assert same_bits(again, canary.out)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_slopes_far_out(lib, dtype):
    """0 or 1 exactly, and no NaN, where x^3 overflows."""
    x = torch.tensor([-1e38, -1e20, -300.0, 300.0, 1e20, 1e38], dtype=dtype)
    expected = torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=dtype)
    for code in (0, 1, 2):
        out = torch.empty_like(x)
        lib.call("gelu_backward", out, torch.ones_like(x), x, code)
        assert torch.equal(out, expected), (code, out)
    out = torch.empty_like(x)
    lib.call("silu_backward", out, torch.ones_like(x), x)
    assert torch.equal(out, expected), out


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_backward(lib, dtype, name):
    for shape in ((5, 257), (3, 4, 64), (1, 1), (0, 8)):
        gate, up, grad = (torch.randn(shape).to(dtype) for _ in range(3))
        dgate, dup = canaries((shape, dtype), (shape, dtype))
        lib.call("gated_backward", dgate.out, dup.out, grad, gate, up, ACTIVATIONS[name])
        egate, eup = truth(lambda g, u: activate(g, name) * u, grad, gate, up)
        g = grad.double().abs()
        bound = (
            tolerance("activation gradient", dtype)
            * (g * up.double().abs())
            * (1 + gate.double().abs().clamp_max(4))
        )
        assert_close(
            dgate.check(),
            egate,
            bound + ROUNDING[dtype] * egate.abs() + SUBNORMAL[dtype],
            f"dgate {name} {dtype}",
        )
        # act(gate) is rounded, then the product.
        bound = (
            tolerance("activation gradient", dtype) * g * gate.double().abs() + g * SUBNORMAL[dtype]
        )
        bound = bound + 2.01 * ROUNDING[dtype] * eup.abs() + SUBNORMAL[dtype]
        assert_close(dup.check(), eup, bound, f"dup {name} {dtype}")
        for gate_first in (0, 1):
            halves = (gate, up) if gate_first else (up, gate)
            x = torch.cat(halves, -1)
            (dx,) = canaries((x.shape, dtype))
            lib.call("gated_packed_backward", dx.out, grad, x, ACTIVATIONS[name], gate_first)
            both = (dgate.out, dup.out) if gate_first else (dup.out, dgate.out)
            assert same_bits(dx.check(), torch.cat(both, -1))
        a, b = gate.clone(), up.clone()
        lib.call("gated_backward", a, b, grad, a, b, ACTIVATIONS[name])
        assert same_bits(a, dgate.out)
        assert same_bits(b, dup.out)


# --- cross entropy ----------------------------------------------------------------------------


def loss_formula(logits, target, smoothing, cap):
    z = cap * torch.tanh(logits / cap) if cap else logits
    return F.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 0.0), (0.0, 30.0), (0.2, 5.0)])
def test_cross_entropy(lib, dtype, smoothing, cap):
    for rows, classes in itertools.product((1, 9), (1, 2, 31, 1000, 50257)):
        logits = (torch.randn(rows, classes) * 6).to(dtype)
        target = torch.randint(classes, (rows,))
        target[rows // 2] = -100
        grad = torch.randn(rows)
        loss, lse, dx = canaries(((rows,), F32), ((rows,), F32), ((rows, classes), dtype))
        codes = (-100, smoothing, cap)
        lib.call("cross_entropy", loss.out, lse.out, logits, target, *codes)
        expected = loss_formula(logits.double(), target, smoothing, cap)
        size = 1 + logits.double().abs().amax(-1) + expected.abs()
        assert_close(loss.check(), expected, tolerance("loss") * size, f"loss {classes}")
        lib.call("cross_entropy_backward", dx.out, grad, logits, target, lse.check(), *codes)
        (edx,) = truth(lambda x, t=target: loss_formula(x, t, smoothing, cap), grad, logits)
        # A softmax has the error of its exponent, up to about twice that of lse.
        bound = grad.double().abs()[:, None] * 2 * tolerance("loss") * size[:, None]
        assert_close(
            dx.check(),
            edx,
            bound + ROUNDING[dtype] * edx.abs() + SUBNORMAL[dtype],
            f"dlogits {classes}",
        )
        lib.call("cross_entropy_backward", logits, grad, logits, target, lse.out, *codes)
        assert same_bits(logits, dx.out)


def test_cross_entropy_odd_values(lib):
    inf = math.inf
    logits = torch.tensor(
        [[0.0, -inf, 1.0], [0.0, 1.0, 2.0], [1e4, -1e4, 0.0], [math.nan, 0, 0], [-inf, 0.0, 0.0]]
    )
    target = torch.tensor([2, 7, 0, 1, 0])
    loss, lse = torch.empty(5), torch.empty(5)
    lib.call("cross_entropy", loss, lse, logits, target, -100, 0.0, 0.0)
    assert loss[0] == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    assert loss[1].isnan()  # no such class
    assert loss[2] == 0
    assert loss[3].isnan()
    assert loss[4] == inf
    dx = torch.empty_like(logits)
    lib.call("cross_entropy_backward", dx, torch.ones(5), logits, target, lse, -100, 0.0, 0.0)
    assert dx[1].isnan().all()
    assert dx[0, 1] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 0.0), (0.2, 5.0)])
@pytest.mark.parametrize("by", ["count", "number", "tensor"])
def test_cross_entropy_with_gradient(lib, dtype, smoothing, cap, by):
    for rows, classes in itertools.product((1, 9), (1, 2, 31, 1000, 50257)):
        logits = (torch.randn(rows, classes) * 6).to(dtype)
        target = torch.randint(classes, (rows,))
        if rows > 1:
            target[rows // 2] = -100
        codes = (-100, smoothing, cap)
        loss, lse, apart = torch.empty(rows), torch.empty(rows), torch.empty_like(logits)
        lib.call("cross_entropy", loss, lse, logits, target, *codes)
        n = {"count": (target != -100).sum().item(), "number": 2.5, "tensor": 7.0}[by]
        one = torch.full((rows,), 1 / torch.tensor(float(n)))
        lib.call("cross_entropy_backward", apart, one, logits, target, lse, *codes)
        kept = [((), F32), ((rows,), F32), ((rows,), F32), ((rows, classes), dtype)]
        total, losses, lses, dx = canaries(*kept)
        divisor = (torch.tensor([n]) if by == "tensor" else None, n if by == "number" else 0.0)
        outs = (total.out, losses.out, lses.out)
        name = "cross_entropy_with_gradient"
        lib.call(name, *outs, dx.out, logits, target, *divisor, *codes)
        assert same_bits(losses.check(), loss)
        assert same_bits(lses.check(), lse)
        assert same_bits(dx.check(), apart)
        assert total.check().item() == pytest.approx(loss.double().sum().item() / n, rel=3e-7)
        lib.call(name, *outs, logits, logits, target, *divisor, *codes)
        assert same_bits(logits, apart)


def test_cross_entropy_divided_by_zero(lib):
    """A tensor that holds 0 is no count: the loss is infinite, as that of PyTorch's division."""
    total, loss, lse, dx = torch.empty(()), torch.empty(2), torch.empty(2), torch.empty(2, 3)
    outs, target = (total, loss, lse, dx), torch.tensor([1, -100])
    codes = (torch.zeros(()), 0.0, -100, 0.0, 0.0)
    lib.call("cross_entropy_with_gradient", *outs, torch.zeros(2, 3), target, *codes)
    assert total == math.inf
    assert (dx[1] == 0).all()
    target[0] = -100
    lib.call("cross_entropy_with_gradient", *outs, torch.zeros(2, 3), target, *codes)
    assert total.isnan()
    assert (dx == 0).all()


def test_ignored_rows_are_not_read(lib):
    logits = torch.full((2, 40), math.nan)
    target = torch.tensor([5, 5])
    loss, lse, dx = torch.ones(2), torch.ones(2), torch.ones(2, 40)
    lib.call("cross_entropy", loss, lse, logits, target, 5, 0.0, 0.0)
    lib.call("cross_entropy_backward", dx, torch.ones(2), logits, target, lse, 5, 0.0, 0.0)
    assert (loss == 0).all()
    assert (dx == 0).all()


# --- bad input --------------------------------------------------------------------------------

X = torch.zeros(4, 8)
W = torch.ones(8)
P = torch.zeros(4, 8)
L, I64 = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
ONE, TOTAL = torch.zeros(()), (X, I64, None, 0.0, -100, 0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("silu_backward", X, X[:2], X), ["`grad`", "`x`", "[4, 8]", "[2, 8]"]),
        (("silu_backward", X, X.half(), X), ["`grad`", "float32", "float16"]),
        (("silu_backward", X[:2], X, X), ["`dx`", "[4, 8]", "[2, 8]"]),
        (("gelu_backward", X, X, X, 3), ["`approximate`", "got 3"]),
        (("gated_backward", X, X[:, :4], X, X, X, SILU), ["`dup`"]),
        (("gated_packed_backward", X, X, X, SILU, 1), ["`grad`", "[4, 4]", "[4, 8]"]),
        (
            ("rms_norm_backward", X, W, None, P, X.half(), X, W, None, 1e-6, 0.0, 0, 1),
            ["`grad`", "float32", "float16"],
        ),
        (
            ("rms_norm_backward", X, W, None, P, X, X, None, None, 1e-6, 0.0, 0, 1),
            ["`needs`", "`dweight`", "`weight`"],
        ),
        (
            ("rms_norm_backward", X, W, None, P, X, X, W, None, 1e-6, 0.0, 0, 4),
            ["`needs`", "got 4"],
        ),
        (("rms_norm_backward", X, W, None, P[:3], X, X, W, None, 1e-6, 0.0, 0, 1), ["`partials`"]),
        (("rms_norm_backward", X, W, None, None, X, X, W, None, 1e-6, 0.0, 0, 1), ["`partials`"]),
        (("layer_norm_backward", X, W.half(), None, P, X, X, W, None, 1e-6, 1), ["`dweight`"]),
        (("cross_entropy", L, L, X, I64.int(), -100, 0.0, 0.0), ["`target`", "int64", "int32"]),
        (("cross_entropy", L, L, X, I64[:3], -100, 0.0, 0.0), ["`target`", "[4]", "[3]"]),
        (("cross_entropy", L, L, X, I64, -100, 1.5, 0.0), ["`label_smoothing`", "1.5"]),
        (("cross_entropy", L, L, X, I64, -100, 0.0, -1.0), ["`softcap`", "-1"]),
        (("cross_entropy", L, L.half(), X, I64, -100, 0.0, 0.0), ["`lse`", "float32"]),
        (("cross_entropy", L, L, L, I64, -100, 0.0, 0.0), ["`logits`", "2 dimensions"]),
        (("cross_entropy_backward", X, L.half(), X, I64, L, -100, 0.0, 0.0), ["`grad`"]),
        (("cross_entropy_with_gradient", L, L, L, X, *TOTAL), ["`total`", "one element", "[4]"]),
        (("cross_entropy_with_gradient", ONE, L, L, L, *TOTAL), ["`dlogits`", "[4]"]),
        (("cross_entropy_with_gradient", ONE, L, L[:3], X, *TOTAL), ["`lse`", "[4]", "[3]"]),
        (
            ("cross_entropy_with_gradient", ONE, L, L, X, X, I64, None, -1.0, -100, 0.0, 0.0),
            ["`divisor`", "-1"],
        ),
        (
            ("cross_entropy_with_gradient", ONE, L, L, X, X, I64, L, 0.0, -100, 0.0, 0.0),
            ["`divisor_tensor`", "one element", "[4]"],
        ),
        (
            ("cross_entropy_with_gradient", ONE, L, L, X, X, I64, None, 0.0, -100, 2.0, 0.0),
            ["`label_smoothing`", "2"],
        ),
    ],
)
def test_bad_input(built, call, words):
    library = Library(built)
    name, *arguments = call
    if name == "rms_norm_backward":  # P depends on the shape: 8 columns, so 128 rows at once
        arguments = [a[:1] if a is P else a for a in arguments]
    if "dweight" in " ".join(words) and name == "layer_norm_backward":
        arguments[3] = P[:1]
    assert library.status(name, *arguments) == INVALID
    message = library.last_error()
    assert message.startswith(f"hfp_{name}: `"), message
    assert all(word in message for word in words), message


def test_no_new_tolerances():
    assert CONSTANTS["HFP_NEED_COUNT"] == 4
    assert c_api.OPS["rms_norm_backward"].result.split(", ")[0] == "=x"
