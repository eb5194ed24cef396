"""The CUDA kernels against fp64, through the torch operators: values, layouts, streams, graphs."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS
from hfpatch.ops.activation import ACTIVATIONS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLS = [1, 3, 17, 64, 127, 128, 576, 1000, 2048, 3072, 4097, 5120, 7168, 8192, 16384, 50000]
ROWS = [1, 7, 130]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def wide(*args: Any) -> tuple[Any, ...]:
    return tuple(a.double() if isinstance(a, Tensor) else a for a in args)


def run(module: ModuleType, op: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(kernel's result, fp64 truth)."""
    y = getattr(module, op)(*args, **kwargs)
    truth = OPS[op].reference(
        *wide(*args), **{k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    )
    return y, truth


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("rows", ROWS)
def test_norms(kernels_module: ModuleType, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = randn(rows, cols, dtype=dtype) * 3
    usual = tolerance("cuda norm", dtype)
    for w_dtype in (None, *DTYPES):
        w = None if w_dtype is None else randn(cols, dtype=w_dtype)
        b = None if w_dtype is None else randn(cols, dtype=w_dtype)
        for bias in (None, b):
            for cast in ("none", "input", "weight"):
                y, truth = run(kernels_module, "rms_norm", x, w, bias, 1e-6, 0.0, cast)
                narrow = min((dtype, w_dtype or dtype), key=lambda t: -torch.finfo(t).eps)
                scale = truth.abs().amax(-1, keepdim=True).clamp_min(1e-30)
                if bias is not None and w is not None:  # rounded before a sum that may cancel
                    scale = scale + (truth - bias.double()).abs().amax(-1, keepdim=True)
                error = ((y.double() - truth).abs() / scale).max().item()
                eager = OPS["rms_norm"].reference(x, w, bias, 1e-6, 0.0, cast)
                assert y.dtype == eager.dtype
                assert error <= 1.51 * tolerance("cuda norm", narrow), (w_dtype, cast, error)
            if w is not None:
                y, truth = run(kernels_module, "rms_norm", x, w, bias, 1e-5, 1.0, "none")
                scale = truth.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # a weight may be -1
                if bias is not None:  # the sum may cancel
                    scale = scale + bias.double().abs().max()
                assert ((y.double() - truth).abs() / scale).max() <= usual
            if cols > 1:
                y, truth = run(kernels_module, "layer_norm", x + 1, w, bias, 1e-5)
                bound = 4 * usual * (truth.abs().amax(-1, keepdim=True) + 1e-3)
                # Three numbers may lie close together, far from 0: their mean is rounded to 2^-22
                # of the largest, by two additions and a product, and moves all of them.
                z = (x + 1).double()
                moved = 2**-22 * z.abs().amax(-1, keepdim=True)
                moved *= (z.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
                bound += moved if w is None else moved * w.double().abs().max()
                assert ((y.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 128, 1000, 2048, 4099, 8192, 16384, 50000])
def test_layer_norm_far_from_zero(
    kernels_module: ModuleType, cols: int, dtype: torch.dtype
) -> None:
    """E[x^2] - mean^2 would cancel: means of many deviations, rows of one value, one outlier. Rows
    of both kinds side by side, since those that share a warp go through one sum."""
    x = randn(40, cols)
    x[::5] += 1000
    x[1::5] += 3
    x[2::5] = 3.3
    x[3::5, cols // 2] = 3000
    x = x.to(dtype)
    y, truth = run(kernels_module, "layer_norm", x, None, None, 1e-5)
    bound = 4 * tolerance("cuda norm", dtype) * (truth.abs().amax(-1, keepdim=True) + 1e-3)
    assert ((y.double() - truth).abs() <= bound).all()
    assert torch.equal(kernels_module.layer_norm(x[::5].contiguous()), y[::5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [64, 128, 1000, 2048, 4099, 8192, 16384, 50000])
def test_layer_norm_squares_beyond_fp32(
    kernels_module: ModuleType, cols: int, dtype: torch.dtype
) -> None:
    """Their sum overflows, that of the squared deviations does not."""
    x = 3e18 * (1 + 1e-2 * randn(20, cols))
    x[::4] = randn(5, cols)
    x = x.to(dtype)
    w, b = randn(cols, dtype=dtype), randn(cols, dtype=dtype)
    for args in ((x, None, None), (x, w, b)):
        y, truth = run(kernels_module, "layer_norm", *args, 1e-5)
        bound = 8 * tolerance("cuda norm", dtype) * (truth.abs().amax(-1, keepdim=True) + 1e-3)
        assert ((y.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1,), (3,), (2, 17), (5, 1000), (64, 4096), (3, 7, 4099)], ids=str
)
def test_activations(
    kernels_module: ModuleType, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = randn(*shape, dtype=dtype) * 4
    up = randn(*shape, dtype=dtype)
    packed = randn(*shape[:-1], 2 * shape[-1], dtype=dtype) * 4

    def close(y: Tensor, truth: Tensor, roundings: float) -> None:
        eps = tolerance("cuda activation", dtype)
        bound = roundings * eps * truth.abs() + tolerance("cuda activation") * x.abs().max()
        if dtype == torch.float16:
            bound = bound + 6.2e-8  # its smallest step
        assert ((y.double() - truth).abs() <= bound).all()

    for approximate in ("none", "tanh", "sigmoid"):
        close(*run(kernels_module, "gelu", x, approximate), 1.0)
    close(*run(kernels_module, "silu", x), 1.0)
    for activation in ACTIVATIONS:
        y, truth = run(kernels_module, "gated", x, up, activation)
        eps = tolerance("cuda activation", dtype)
        inside = tolerance("cuda activation") * 16 + 6.2e-8
        bound = 2 * eps * truth.abs() + inside * up.abs().max()
        assert ((y.double() - truth).abs() <= bound).all()
        for gate_first in (True, False):
            y, _ = run(kernels_module, "gated_packed", packed, activation, gate_first)
            first, second = packed.chunk(2, -1)
            gate, other = (first, second) if gate_first else (second, first)
            expected = kernels_module.gated(gate.contiguous(), other.contiguous(), activation)
            assert torch.equal(y, expected)


@pytest.mark.parametrize("cols", [1, 17, 64, 127, 1000, 4096, 11008])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_clamped(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    """Bit for bit the clamps of PyTorch around our activation, its sum and its product."""
    k = kernels_module
    packed = randn(3, 37, 2 * cols, dtype=dtype) * 4
    packed[0, 0, 0], packed[0, 0, -1], packed[0, 1, 0] = float("nan"), float("nan"), float("inf")
    packed[0, 1, -1] = float("-inf")
    gate, up = packed.chunk(2, -1)
    for activation, after, offset in itertools.product(ACTIVATIONS, (False, True), (0.0, 1.0)):
        for low, high in ((None, 2.3), (-1.1, 2.3), (None, None), (2.0, -2.0)):
            y = k.gated_clamped(
                gate, up, activation, low, high, -1.7, 1.3, offset, clamp_activated=after
            )
            bounded = low is not None or high is not None
            g = gate.clamp(low, high) if bounded and not after else gate
            act = k.gated(g.contiguous(), torch.ones_like(g), activation)
            act = act.clamp(low, high) if bounded and after else act
            expected = act * (up.clamp(-1.7, 1.3) + offset)
            assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(y.isnan(), expected.isnan())
    y, truth = run(k, "gated_clamped", gate, up, "silu", None, 2.3, -1.7, 1.3, 1.0, 1.702)
    finite = truth.isfinite()
    bound = 4 * tolerance("cuda activation", dtype) * (1 + truth[finite].abs())
    assert ((y.double()[finite] - truth[finite]).abs() <= bound).all()
    assert torch.equal(y.isnan(), truth.isnan())


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Views with the values of x [A, B, C, D] in other places of memory."""
    a, b, c, d = x.shape
    padded = torch.empty(a, b, c, d + 24, dtype=x.dtype, device=x.device)
    padded[..., 3 : 3 + d] = x
    aligned = torch.empty(a, b, c, d + 16, dtype=x.dtype, device=x.device)
    aligned[..., 8 : 8 + d] = x
    head_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    return {
        "misaligned rows": padded[..., 3 : 3 + d],
        "row stride": aligned[..., 8 : 8 + d],
        "transposed": head_first,
        "misaligned": shifted,
        "columns": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "expanded": x[:, :1].expand(a, b, c, d),
        "reversed dims": x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 127, 1024])
def test_layouts(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    def same(a: Tensor, b: Tensor) -> bool:
        """Equal except for the reduction's order, which may follow the alignment."""
        scale = b.float().abs().amax(-1, keepdim=True)
        return bool(((a.float() - b.float()).abs() <= tolerance("cuda norm", dtype) * scale).all())

    base = randn(2, 5, 3, cols, dtype=dtype)
    weight = torch.empty(cols + 1, dtype=dtype, device="cuda")[1:].copy_(randn(cols))
    k = kernels_module
    for name, x in layouts(base).items():
        plain = x.contiguous().clone()
        assert same(k.rms_norm(x, weight), k.rms_norm(plain, weight.clone())), name
        assert same(k.layer_norm(x, weight), k.layer_norm(plain, weight.clone())), name
        assert torch.equal(k.silu(x), k.silu(plain)), name
        assert torch.equal(k.gated(x, plain), k.gated(plain, plain)), name
        clamps = ("silu", None, 0.7, -0.3, 0.9, 1.0)
        expected = k.gated_clamped(plain, plain, *clamps)
        assert torch.equal(k.gated_clamped(x, plain, *clamps), expected), name
        if cols % 2 == 0:
            assert torch.equal(k.gated_packed(x), k.gated_packed(plain)), name


def test_output_is_written_wholly_and_nothing_else(kernels_module: ModuleType) -> None:
    ops = kernels_module.ops
    for dtype in DTYPES:
        for cols in (1, 17, 127, 1000, 2048, 9000):
            x, w = randn(33, cols, dtype=dtype), randn(cols, dtype=dtype)
            guarded = torch.full((33 * cols + 256,), 7.0, dtype=dtype, device="cuda")
            out = guarded[128:-128].view(33, cols)
            out.fill_(float("nan"))
            calls = {
                "rms_norm": lambda x=x, w=w, out=out: ops.rms_norm_out.default(
                    out, x, w, None, 1e-6, 0.0, 1
                ),
                "layer_norm": lambda x=x, w=w, out=out: ops.layer_norm_out.default(
                    out, x, w, w, 1e-5
                ),
                "gelu": lambda x=x, out=out: ops.gelu_out.default(out, x, 0),
                "gated": lambda x=x, out=out: ops.gated_out.default(out, x, x, 3),
            }
            for name, call in calls.items():
                call()
                assert not out.isnan().any(), (name, dtype, cols)
                assert (guarded[:128] == 7).all() and (guarded[-128:] == 7).all(), name


def test_bitwise_repeatable_and_independent_of_the_batch(kernels_module: ModuleType) -> None:
    for cols in (64, 1000, 4096, 20000):
        x, w = randn(301, cols, dtype=torch.bfloat16), randn(cols, dtype=torch.bfloat16)
        y = kernels_module.rms_norm(x, w, cast="input")
        assert all(torch.equal(kernels_module.rms_norm(x, w, cast="input"), y) for _ in range(20))
        assert torch.equal(kernels_module.rms_norm(x[:7], w, cast="input"), y[:7])
        order = torch.randperm(301, device="cuda")
        assert torch.equal(kernels_module.rms_norm(x[order], w, cast="input"), y[order])
        z = kernels_module.layer_norm(x, w)
        assert torch.equal(kernels_module.layer_norm(x[5:6], w), z[5:6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (1024, 4096),  # all threads on the GPU at once
        (4096, 2048),
        (17000, 4096),
        (3000, 1536),
        (1100, 16384),
        (300, 16384),
    ],
)
def test_norms_of_many_rows_are_those_of_one(
    kernels_module: ModuleType, rows: int, cols: int, dtype: torch.dtype
) -> None:
    """Many rows of whole CTAs go through kernels of their own, which add up in the same order."""
    k = kernels_module
    wide_rows = torch.randn(rows, cols + 64, device="cuda", dtype=dtype)
    wide_rows[::3] += 9  # far from zero
    wide_rows[1::7] = 3.3
    x, residual = wide_rows[:, 8 : 8 + cols], torch.randn(rows, cols, device="cuda", dtype=dtype)
    w, b = randn(cols, dtype=dtype), randn(cols, dtype=dtype)
    norms = {
        "layer_norm": lambda x, r: (k.layer_norm(x, w, b),),
        "layer_norm without a bias": lambda x, r: (k.layer_norm(x, w),),
        "add_layer_norm": lambda x, r: k.add_layer_norm(x, r, w, b),
        "add_rms_norm": lambda x, r: k.add_rms_norm(x, r, w),
        "add_rms_norm cast": lambda x, r: k.add_rms_norm(x, r, w, cast="input"),
    }
    for name, norm in norms.items():
        many = norm(x, residual)
        contiguous = norm(x.contiguous(), residual)
        for place in (0, 1, 3, rows // 2, rows - 1):
            one = norm(x[place : place + 1], residual[place : place + 1])
            for of_many, of_plain, of_one in zip(many, contiguous, one, strict=True):
                assert torch.equal(of_many[place], of_one[0]), (name, place)
                assert torch.equal(of_plain[place], of_one[0]), (name, place)


def test_nan_and_inf_propagate_as_in_eager(kernels_module: ModuleType) -> None:
    x = randn(6, 512)
    x[0, 3], x[1, 7], x[2, 9] = float("nan"), float("inf"), float("-inf")
    for dtype in DTYPES:
        t = x.to(dtype)
        for op in ("rms_norm", "layer_norm", "silu", "gelu"):
            y = getattr(kernels_module, op)(t)
            eager = OPS[op].reference(t)
            assert torch.equal(y.isnan(), eager.isnan()), (op, dtype)
            assert torch.equal(y.isinf(), eager.isinf()), (op, dtype)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,), (2, 0, 8)], ids=str)
def test_zero_size(kernels_module: ModuleType, shape: tuple[int, ...]) -> None:
    x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
    for op in ("rms_norm", "layer_norm", "gelu", "silu", "gated_packed"):
        y = getattr(kernels_module, op)(x)
        assert y.numel() == 0
    assert kernels_module.gated(x, x).shape == x.shape


@pytest.mark.alone
def test_more_than_two_to_the_31_elements(kernels_module: ModuleType) -> None:
    rows, cols = 2**31 // 8192 + 5, 8192
    if torch.cuda.mem_get_info()[0] < 5 * rows * cols * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_()
    w = randn(cols, dtype=torch.bfloat16)
    for call in (
        lambda t: kernels_module.rms_norm(t, w, cast="input"),
        lambda t: kernels_module.layer_norm(t, w, w),
        kernels_module.silu,
        lambda t: kernels_module.gated(t, t),
        kernels_module.gated_packed,
    ):
        y = call(x)
        assert torch.equal(y[-3:], call(x[-3:])) and torch.equal(y[:3], call(x[:3]))
        del y


def test_cuda_graph_replays_follow_their_input(kernels_module: ModuleType) -> None:
    x, w = randn(64, 2048, dtype=torch.bfloat16), randn(2048, dtype=torch.bfloat16)
    kernels_module.rms_norm(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels_module.gated(kernels_module.rms_norm(x, w), kernels_module.layer_norm(x, w))
    for i in range(1000):
        x.normal_()
        graph.replay()
        if i % 100 == 0:
            expected = kernels_module.gated(
                kernels_module.rms_norm(x, w), kernels_module.layer_norm(x, w)
            )
            assert torch.equal(y, expected)


def test_runs_on_the_current_stream(kernels_module: ModuleType) -> None:
    x = torch.zeros(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)  # after the sleep: on another stream the kernel would still read zeros
        y = kernels_module.silu(x)
    stream.synchronize()
    assert torch.equal(y, torch.nn.functional.silu(torch.full_like(x, 2.0)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device(kernels_module: ModuleType) -> None:
    x = torch.randn(8, 512, device="cuda:1")
    w = torch.randn(512, device="cuda:1")
    y = kernels_module.rms_norm(x, w)
    assert y.device == x.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(y, OPS["rms_norm"].reference(x, w))
    with pytest.raises(RuntimeError, match="`weight`"):
        kernels_module.rms_norm(x, w.to("cuda:0"))


def test_mixed_devices_are_refused(kernels_module: ModuleType) -> None:
    x, w = randn(4, 64), torch.randn(64)
    for a, b in ((x, w), (x.cpu(), w.cuda())):
        with pytest.raises(RuntimeError, match="weight"):
            kernels_module.rms_norm(a, b)
    assert torch.equal(kernels_module.silu(x), kernels_module.silu(x))  # still usable


def test_no_growth_in_memory(kernels_module: ModuleType) -> None:
    x, w = randn(8, 256, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16)
    kernels_module.rms_norm(x, w)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100_000):
        kernels_module.rms_norm(x, w)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    ops = kernels_module.ops
    x, w = randn(4, 64, dtype=dtype), randn(64, dtype=dtype)
    for op, args in (
        (ops.rms_norm, (x, w, None, 1e-6, 0.0, 1)),
        (ops.layer_norm, (x, w, w, 1e-5)),
        (ops.gelu, (x, 1)),
        (ops.silu, (x,)),
        (ops.gated, (x, x, 3)),
        (ops.gated_packed, (x, 3, 1)),
        (ops.gated_clamped, (x, x, 3, 1.0, float("-inf"), 0.7, -0.3, 0.9, 1.0, 0)),
    ):
        torch.library.opcheck(op.default, args)
