"""Fused norms on CUDA: against fp64 and eager, layouts, bits of a batch's parts, graphs."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import assert_like
from torch import Tensor

from hfpatch.ops import OPS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLS = [1, 17, 64, 127, 512, 1000, 1536, 2048, 3072, 4096, 5120, 16384, 20000]
ARGUMENTS = {
    "norm_modulate": ("x", "scale", "shift", "weight", "bias"),
    "gate_residual": ("residual", "gate", "x"),
    "gate_residual_norm_modulate": ("residual", "gate", "x", "scale", "shift", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight", "bias"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("norm_modulate", {"norm": n, "cast": c})
        for n in ("rms", "layer")
        for c in ("none", "input")
    ),
    *(("gate_residual", {"cast": c}) for c in ("none", "input")),
    ("gate_residual_norm_modulate", {"norm": "layer", "cast": "none"}),
    ("gate_residual_norm_modulate", {"norm": "rms", "cast": "input"}),
    ("add_rms_norm", {"cast": "none", "weight_offset": 1.0}),
    ("add_rms_norm", {"cast": "input"}),
    ("add_rms_norm", {"cast": "weight"}),
    ("add_layer_norm", {}),
]


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, modulation: torch.dtype, affine: bool = True
) -> dict[str, Tensor | None]:
    """gate, scale and shift are chunks of one modulation tensor, as models make them."""
    batch, _, cols = shape
    chunks = torch.randn(batch, 6 * cols, device="cuda").to(modulation).chunk(6, -1)
    weight, bias = torch.randn(2, cols, device="cuda").to(modulation)
    return {
        "x": torch.randn(shape, device="cuda").to(dtype) + 1,
        "residual": torch.randn(shape, device="cuda").to(dtype),
        "scale": chunks[0],
        "shift": chunks[3],
        "gate": chunks[5],
        "weight": weight if affine else None,
        "bias": bias if affine else None,
    }


def results(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.mark.parametrize("modulation", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_against_the_reference(
    kernels_module: ModuleType,
    name: str,
    params: dict[str, Any],
    dtype: torch.dtype,
    modulation: torch.dtype,
) -> None:
    for cols in COLS:
        if cols == 1 and (params.get("norm") == "layer" or name == "add_layer_norm"):
            continue  # 0 * rsqrt(eps): rounding noise only
        for batch, tokens in ((1, 1), (3, 37)):
            for affine in (True, False):
                given = inputs((batch, tokens, cols), dtype, modulation, affine)
                args = [given[a] for a in ARGUMENTS[name]]
                actual = getattr(kernels_module, name)(*args, **params)
                expected = OPS[name].reference(*args, **params)
                assert_like(actual, expected, dtype, modulation, deviations=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_modulation_rounds_where_eager_does(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    given = inputs((2, 500, 2048), dtype, dtype, affine=False)
    for name in ("norm_modulate", "gate_residual", "gate_residual_norm_modulate"):
        args = [given[a] for a in ARGUMENTS[name]]
        outs = {c: results(getattr(kernels_module, name)(*args, cast=c)) for c in ("none", "input")}
        for cast, actual in outs.items():
            expected = results(OPS[name].reference(*args, cast=cast))
            for a, e in zip(actual, expected, strict=True):
                assert (a != e).double().mean() < 0.01, (name, cast)
        assert (outs["none"][-1] != outs["input"][-1]).double().mean() > 0.05


def layouts(batch: int, tokens: int, cols: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Modulation tensors for x [batch, tokens, cols]."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    return {
        "[D]": randn(cols),
        "[D], misaligned": randn(cols + 1)[1:],
        "[B, D]": randn(batch, cols),
        "[B, 1, D] of [B, 6, D]": randn(batch, 6, cols)[:, 4:5],
        "[B, D] of [B, 6 D]": randn(batch, 6 * cols).chunk(6, -1)[1],
        "[B, D], misaligned rows": randn(batch, cols + 3)[:, 3:],
        "[B, S, D] of [B, S, 6 D]": randn(batch, tokens, 6 * cols).chunk(6, -1)[2],
        "[1, S, D]": randn(1, tokens, cols),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 1000, 1001, 2048])
def test_layouts(kernels_module: ModuleType, cols: int, dtype: torch.dtype) -> None:
    """Like the tensor written out in full; the same bits where the alignment is the same."""
    k, batch, tokens = kernels_module, 3, 7
    x = torch.randn(batch, tokens, cols, device="cuda").to(dtype)
    padded = torch.randn(batch, tokens, cols + 8, device="cuda").to(dtype)[..., :cols]
    odd = torch.randn(batch, tokens, cols + 1, device="cuda").to(dtype)[..., 1:]
    for source in (x, padded, odd):
        for what, t in layouts(batch, tokens, cols, dtype).items():
            full = (t[:, None] if t.dim() == 2 else t).expand(x.shape).contiguous()
            assert torch.equal(
                k.gate_residual(x, t, source), k.gate_residual(x, full, source.contiguous())
            ), what
            pairs = zip(
                k.gate_residual_norm_modulate(x, t, source, t, t),
                k.gate_residual_norm_modulate(x, full, source.contiguous(), full, full),
                strict=True,
            )
            aligned = "misaligned" not in what and source is not odd and cols % 8 == 0
            for a, b in pairs:
                if aligned:
                    assert torch.equal(a, b), what
                assert_like(a, b, dtype, deviations=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 512, 520, 1000, 2048, 3072, 4096, 8192, 9000])
def test_bits_do_not_depend_on_the_batch(
    kernels_module: ModuleType, cols: int, dtype: torch.dtype
) -> None:
    """Row counts on both sides of every change of layout: the first rows are the same bits alone,
    in a small batch and in a large one."""
    k = kernels_module
    rows = 6000
    x, r, m = torch.randn(3, rows, cols, device="cuda").to(dtype)
    w, b = torch.randn(2, cols, device="cuda").to(dtype)
    for call in (
        lambda n: k.rms_norm(x[:n], w, cast="input"),
        lambda n: k.rms_norm(x[:n], w.float(), cast="none"),
        lambda n: k.layer_norm(x[:n], w, b),
        lambda n: k.layer_norm(x[:n], w.float(), b.float()),
        lambda n: k.norm_modulate(x[:n], m[:n], r[:n]),
        lambda n: k.gate_residual_norm_modulate(r[:n], m[:n], x[:n], m[:n], m[:n])[1],
        lambda n: k.add_rms_norm(x[:n], r[:n], w)[0],
    ):
        whole = call(rows)
        for n in (1, 2, 7, 130, 257, 600, 1025, 2100, 4099):
            assert torch.equal(call(n), whole[:n]), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_is_one_after_the_other(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    k = kernels_module
    for cols in (64, 1000, 2048, 4096):
        given = inputs((2, 300, cols), dtype, dtype, affine=False)
        args = [given[a] for a in ARGUMENTS["gate_residual_norm_modulate"]]
        total, y = k.gate_residual_norm_modulate(*args)
        assert torch.equal(total, k.gate_residual(*args[:3]))
        assert torch.equal(y, k.norm_modulate(total, *args[3:]))
        x, residual = given["x"], given["residual"]
        y, total = k.add_rms_norm(x, residual)
        assert torch.equal(total, x + residual)
        assert_like(y, k.rms_norm(total), dtype, deviations=4)


def test_in_place_and_nothing_else_is_written(kernels_module: ModuleType) -> None:
    op = kernels_module.ops.gate_residual_norm_modulate_out.default
    for dtype in DTYPES:
        for cols in (1, 17, 1000, 2048, 20000):
            given = inputs((1, 33, cols), dtype, dtype, affine=False)
            args = [given[a] for a in ARGUMENTS["gate_residual_norm_modulate"]]
            total, y = kernels_module.gate_residual_norm_modulate(*args)
            guards = [
                torch.full((33 * cols + 256,), 7.0, dtype=dtype, device="cuda") for _ in range(2)
            ]
            into, out = (g[128:-128].view(1, 33, cols) for g in guards)
            into.copy_(args[0])
            out.fill_(float("nan"))
            op(into, out, into, *args[1:], 1e-6, 1, 1)
            assert torch.equal(into, total)
            assert torch.equal(out, y)
            for g in guards:
                assert (g[:128] == 7).all()
                assert (g[-128:] == 7).all()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm(kernels_module: ModuleType, dtype: torch.dtype, norm_first: bool) -> None:
    k = kernels_module
    for cols, group in [(1, 0), (17, 0), (96, 32), (128, 0), (1024, 128), (60, 12), (8192, 0),
                        (8192, 1024), (3072, 0), (40000, 20000)]:  # fmt: skip
        packed = torch.randn(2, 301, 2 * cols, device="cuda").to(dtype)
        x, gate = packed.chunk(2, -1)
        weights = (None, torch.randn(cols, device="cuda").to(dtype))
        for weight, g in itertools.product(weights, (gate, None)):
            tail = (weight, 1e-6, group, norm_first)
            y = k.gated_rms_norm(x, g, *tail)
            expected = OPS["gated_rms_norm"].reference(x, g, *tail)
            assert_like(y, expected, dtype, deviations=4)
            x2, g2 = x.contiguous(), None if g is None else g.contiguous()
            if cols % 8 == 0:
                assert torch.equal(k.gated_rms_norm(x2, g2, *tail), y)
                part = None if g2 is None else g2[:1, :3]
                assert torch.equal(k.gated_rms_norm(x2[:1, :3], part, *tail), y[:1, :3])


@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 64), (2, 4, 0)], ids=str)
def test_zero_size(kernels_module: ModuleType, shape: tuple[int, int, int]) -> None:
    given = inputs(shape, torch.bfloat16, torch.bfloat16)
    for name, names in ARGUMENTS.items():
        for y in results(getattr(kernels_module, name)(*(given[a] for a in names))):
            assert y.shape == shape


def test_cuda_graph_replays_follow_their_input(kernels_module: ModuleType) -> None:
    given = inputs((2, 300, 2048), torch.bfloat16, torch.bfloat16, affine=False)
    args = [given[a] for a in ARGUMENTS["gate_residual_norm_modulate"]]
    kernels_module.gate_residual_norm_modulate(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, y = kernels_module.gate_residual_norm_modulate(*args)
    for _ in range(3):
        args[0].normal_()
        graph.replay()
        expected = kernels_module.gate_residual_norm_modulate(*args)
        assert torch.equal(total, expected[0])
        assert torch.equal(y, expected[1])
