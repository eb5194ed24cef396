"""The torch functions of AdaLN and residual norms: against the references, gradients, compilation.

What the kernels compute is checked in the tests of the C interface.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
B, S, D = 2, 5, 32


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs(dtype: torch.dtype, modulation: torch.dtype) -> dict[str, Tensor]:
    """gate, scale and shift are chunks of one modulation tensor, as models make them."""
    chunks = tensor(B, 6 * D, dtype=modulation, seed=2).chunk(6, -1)
    return {
        "x": tensor(B, S, D, dtype=dtype),
        "residual": tensor(B, S, D, dtype=dtype, seed=1),
        "scale": chunks[0],
        "shift": chunks[3],
        "gate": chunks[5],
        "weight": tensor(D, dtype=dtype, seed=3),
        "bias": tensor(D, dtype=dtype, seed=4),
    }


ARGUMENTS = {
    "norm_modulate": ("x", "scale", "shift", "weight", "bias"),
    "gate_residual": ("residual", "gate", "x"),
    "gate_residual_norm_modulate": ("residual", "gate", "x", "scale", "shift", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight", "bias"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
}
CASES = [
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


def results(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def assert_like(actual: Any, expected: Any, *dtypes: torch.dtype) -> None:
    """Same dtypes, and fp32 accuracy but where a value on its way was rounded to a half type among
    ``dtypes``: there a few results start from its neighbour."""
    for a, e in zip(results(actual), results(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert a.is_contiguous()
        error = (a.double() - e.double()).abs() / (1 + e.double().abs())
        assert error.max() <= tolerance("torch chain", *dtypes)
        assert (error > tolerance("torch chain")).double().mean() < 0.02


@pytest.mark.parametrize("modulation", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_against_the_reference(
    name: str,
    params: dict[str, Any],
    dtype: torch.dtype,
    modulation: torch.dtype,
    kernels_module: ModuleType,
) -> None:
    given = inputs(dtype, modulation)
    args = [given[a] for a in ARGUMENTS[name]]
    expected = OPS[name].reference(*args, **params)
    assert_like(getattr(kernels_module, name)(*args, **params), expected, dtype, modulation)
    assert_like(OPS[name].aten(*args, **params), expected, dtype, modulation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_under_autograd(
    name: str, params: dict[str, Any], dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """The formula that carries gradients returns what the kernel returns, and its gradients are
    those of the reference in fp64."""
    given = inputs(dtype, dtype)
    function = getattr(kernels_module, name)
    plain = [given[a] for a in ARGUMENTS[name]]
    leaves = [t.detach().clone().requires_grad_() for t in plain]
    outs = results(function(*leaves, **params))
    assert all(out.grad_fn is not None for out in outs)
    assert_like([out.detach() for out in outs], function(*plain, **params), dtype)
    with torch.no_grad():
        assert all(out.grad_fn is None for out in results(function(*leaves, **params)))
    wide = [t.detach().double().requires_grad_() for t in plain]
    truth = results(OPS[name].reference(*wide, **params))
    seeds = [tensor(*o.shape, seed=8 + i).to(o.dtype) for i, o in enumerate(outs)]
    actual = torch.autograd.grad(outs, leaves, seeds)
    expected = torch.autograd.grad(truth, wide, [s.double() for s in seeds])
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for a, e in zip(actual, expected, strict=True):
        # Half types: products, sums over rows and norms are rounded on the way.
        assert (a.double() - e).abs().max() <= 16 * eps * e.abs().max()


def test_gradient_of_one_parameter_only(kernels_module: ModuleType) -> None:
    given = inputs(torch.float32, torch.float32)
    given["shift"].requires_grad_()
    _, y = kernels_module.gate_residual_norm_modulate(
        *(given[a] for a in ARGUMENTS["gate_residual_norm_modulate"])
    )
    y.sum().backward()
    torch.testing.assert_close(given["shift"].grad, torch.full((B, D), float(S)))


@pytest.mark.parametrize("layout", ["per sample", "vector", "per token", "[B, 1, D]", "strided"])
def test_modulation_layouts(layout: str, kernels_module: ModuleType) -> None:
    x = tensor(B, S, D)
    t = {
        "per sample": tensor(B, D, seed=1),
        "vector": tensor(D, seed=1),
        "per token": tensor(B, S, D, seed=1),
        "[B, 1, D]": tensor(B, 6, D, seed=1)[:, 4:5],
        "strided": tensor(B, D, 2, seed=1)[..., 1],  # copied: its last stride is 2
    }[layout]
    full = (t[:, None] if t.dim() == 2 else t).expand(B, S, D)
    y = kernels_module.norm_modulate(x, t, t * 2)
    hat = torch.nn.functional.layer_norm(x, (D,), eps=1e-6)
    torch.testing.assert_close(y, hat * (1 + full) + full * 2)
    torch.testing.assert_close(kernels_module.gate_residual(x, t, hat), x + full * hat)


def test_compile_without_graph_breaks(kernels_module: ModuleType) -> None:
    k = kernels_module

    def block(x: Tensor, r: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        total, y = k.gate_residual_norm_modulate(r, scale, x, scale, scale)
        y = k.gate_residual(total, scale, k.norm_modulate(y, scale, scale, w, norm="rms"))
        y, total = k.add_rms_norm(y, total, w, cast="input")
        return k.add_layer_norm(y, total)[0]

    given = inputs(torch.bfloat16, torch.bfloat16)
    args = [given[a] for a in ("x", "residual", "scale", "weight")]
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(*args), block(*args))


def test_bad_names(kernels_module: ModuleType) -> None:
    x, v = tensor(B, S, D), tensor(D)
    for call, message in (
        (lambda: kernels_module.norm_modulate(x, v, v, norm="batch"), r"`norm`: expected one of"),
        (lambda: kernels_module.norm_modulate(x, v, v, cast="weight"), r"`cast`: expected one of"),
        (lambda: kernels_module.gate_residual(x, v, x, "weight"), r"`cast`: expected one of"),
        (lambda: kernels_module.add_rms_norm(x, x, cast="no"), r"`cast`: expected one of 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
