"""The torch operators: fakes, autograd, compilation, layouts and errors.

What the kernels compute is checked in the tests of the C interface; a formula in fp64 does here.
opcheck, out forms and in-place calls of every operator: `test_proofs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

F = torch.nn.functional
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu"]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def act(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    if name == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def rms_formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight + offset)
    return y if bias is None else y + bias


@pytest.mark.parametrize("cast", ["none", "input", "weight"])
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_matches_real(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, cast: str, kernels_module: ModuleType
) -> None:
    weight = None if weight_dtype is None else tensor(8, dtype=weight_dtype)
    x = tensor(4, 8, dtype=dtype)
    real = kernels_module.rms_norm(x, weight, cast=cast)
    mode = torch._subclasses.FakeTensorMode()
    convert = mode.fake_tensor_converter.from_real_tensor
    with mode:
        fake_weight = None if weight is None else convert(mode, weight)
        fake = kernels_module.rms_norm(convert(mode, x), fake_weight, cast=cast)
    assert (fake.dtype, fake.shape, fake.stride()) == (real.dtype, real.shape, real.stride())
    if weight_dtype is not None:
        assert (
            real.dtype
            == {
                "none": dtype,
                "input": torch.promote_types(dtype, weight_dtype),
                "weight": weight_dtype,
            }[cast]
        )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "sliced rows": lambda x: x[::2, 1:],
    "sliced columns": lambda x: x[..., 4:12],
    "transposed outer": lambda x: x.transpose(0, 1),
    "transposed inner": lambda x: x.transpose(-1, -2),
    "strided columns": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "empty": lambda x: x[:0],
    "one column": lambda x: x[..., 1:2],
    "misaligned": lambda x: x.reshape(-1)[3:259].reshape(2, 8, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu", "gelu", "gated"])
def test_layouts(name: str, layout: str, kernels_module: ModuleType) -> None:
    x = LAYOUTS[layout](tensor(4, 5, 6, 16))
    args = (x, x.flip(0)) if name == "gated" else (x,)
    function = getattr(kernels_module, name)
    actual = function(*args)
    expected = function(*(a.contiguous().clone() for a in args))
    assert actual.shape == x.shape
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected)


def test_more_outer_dimensions_than_the_kernels_walk(kernels_module: ModuleType) -> None:
    x = tensor(4, 4, 4, 4, 4, 8)[::2, ::2, ::2, ::2, ::2]
    torch.testing.assert_close(kernels_module.silu(x), F.silu(x))


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_packed_layouts(gate_first: bool, kernels_module: ModuleType) -> None:
    x = tensor(4, 6, 32).transpose(0, 1)
    first, second = x.chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    actual = kernels_module.gated_packed(x, "silu", gate_first)
    torch.testing.assert_close(actual, F.silu(gate) * up)


# -------------------------------------------------------------------------------------------------
# Autograd


def differentiable(kernels: ModuleType) -> dict[str, tuple[Any, Any, list[Tensor]]]:
    """name -> (ours, the formula, inputs)."""
    x, w, b, y = tensor(3, 5, 16), tensor(16, seed=1), tensor(16, seed=2), tensor(3, 5, 16, seed=3)
    cases: dict[str, tuple[Any, Any, list[Tensor]]] = {
        "rms_norm": (
            lambda x, w, b: kernels.rms_norm(x, w, b, 1e-6, 1.0),
            lambda x, w, b: rms_formula(x, w, b, 1e-6, 1.0),
            [x, w, b],
        ),
        "rms_norm weightless": (
            lambda x: kernels.rms_norm(x),
            lambda x: rms_formula(x, None, None, 1e-6, 0.0),
            [x],
        ),
        "layer_norm": (
            kernels.layer_norm,
            lambda x, w, b: F.layer_norm(x, (16,), w, b),
            [x, w, b],
        ),
        "layer_norm without affine": (
            kernels.layer_norm,
            lambda x: F.layer_norm(x, (16,)),
            [x],
        ),
        "silu": (kernels.silu, F.silu, [x]),
    }
    for cast in ("input", "weight"):
        cases[f"rms_norm {cast}"] = (
            lambda x, w, cast=cast: kernels.rms_norm(x, w, cast=cast),
            lambda x, w: rms_formula(x, w, None, 1e-6, 0.0),
            [x, w],
        )
    for approximate in ("none", "tanh", "sigmoid"):
        name = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}[approximate]
        cases[name] = (
            lambda x, a=approximate: kernels.gelu(x, a),
            lambda x, n=name: act(x, n),
            [x],
        )
    for name in ACTIVATIONS:
        cases[f"gated {name}"] = (
            lambda g, u, n=name: kernels.gated(g, u, n),
            lambda g, u, n=name: act(g, n) * u,
            [x, y],
        )
        cases[f"packed {name}"] = (
            lambda x, n=name: kernels.gated_packed(x, n, False),
            lambda x, n=name: act(x[..., 8:], n) * x[..., :8],
            [x],
        )
    return cases


DIFFERENTIABLE = list(differentiable(torch.nn.functional))  # the names only


def gradients(function: Any, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    y = function(*leaves)
    grad = tensor(*y.shape, seed=9).to(y.dtype)
    return y, list(torch.autograd.grad(y, leaves, grad))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, kernels_module: ModuleType) -> None:
    ours, formula, inputs = differentiable(kernels_module)[name]
    y, actual = gradients(ours, inputs)
    y64, expected = gradients(formula, [i.double() for i in inputs])
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_half_gradients(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """Dtypes are the inputs'; the error against fp64 is the rounding of the values and result."""
    ours, formula, inputs = differentiable(kernels_module)[name]
    half = [i.to(dtype) for i in inputs]
    _, actual = gradients(ours, half)
    _, expected = gradients(formula, [i.double() for i in half])
    eps = torch.finfo(dtype).eps
    for a, e, i in zip(actual, expected, half, strict=True):
        assert a.dtype == i.dtype
        # The incoming gradient is rounded once, the result once, an activation once.
        assert (a.double() - e).abs().max() <= 4 * eps * e.abs().max()


def test_mixed_dtype_gradients(kernels_module: ModuleType) -> None:
    x, w = tensor(4, 8, dtype=torch.bfloat16), tensor(8)
    y, (gx, gw) = gradients(lambda x, w: kernels_module.rms_norm(x, w, cast="input"), [x, w])
    assert (y.dtype, gx.dtype, gw.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_only_wanted_gradients(kernels_module: ModuleType) -> None:
    x, w = tensor(4, 8), tensor(8).requires_grad_()
    kernels_module.rms_norm(x, w).sum().backward()
    assert x.grad is None
    assert w.grad is not None


def test_no_graph_without_need(kernels_module: ModuleType) -> None:
    x = tensor(4, 8)
    assert kernels_module.silu(x).grad_fn is None
    with torch.no_grad():
        assert kernels_module.silu(x.requires_grad_()).grad_fn is None


def test_second_derivative_through_two_functions(kernels_module: ModuleType) -> None:
    """One that a backward kernel cannot give must not be left out of a sum of several."""
    k = kernels_module

    def ours(x: torch.Tensor) -> torch.Tensor:
        return (x + k.gated(k.rms_norm(x), k.silu(x))).pow(3).sum()

    def formula(x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-6)
        return (x + torch.nn.functional.silu(normed) * torch.nn.functional.silu(x)).pow(3).sum()

    x, v = tensor(4, 8), tensor(4, 8)
    _, got = torch.autograd.functional.vhp(ours, x, v)
    _, expected = torch.autograd.functional.vhp(formula, x.double(), v.double())
    assert expected.norm() > 1
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_second_derivative_of_cross_entropy(softcap: float, kernels_module: ModuleType) -> None:
    x, target = tensor(4, 8), torch.tensor([1, 7, -100, 0])

    def ours(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = kernels_module.cross_entropy(
            x, target, label_smoothing=0.1, softcap=softcap
        )
        return loss

    def formula(x: torch.Tensor) -> torch.Tensor:
        z = softcap * torch.tanh(x / softcap) if softcap else x
        return torch.nn.functional.cross_entropy(z, target, label_smoothing=0.1)

    _, got = torch.autograd.functional.vhp(ours, x, tensor(4, 8))
    _, expected = torch.autograd.functional.vhp(formula, x.double(), tensor(4, 8).double())
    assert expected.norm() > 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_second_derivative_where_one_tensor_is_both_inputs(kernels_module: ModuleType) -> None:
    x = tensor(4, 8).requires_grad_()
    (g,) = torch.autograd.grad(kernels_module.gated(x, x).sum(), x, create_graph=True)
    y = x.detach().double().requires_grad_()
    product = (torch.nn.functional.silu(y) * y).sum()
    (expected,) = torch.autograd.grad(product, y, create_graph=True)
    torch.testing.assert_close(g.double(), expected, rtol=1e-5, atol=1e-5)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    (truth,) = torch.autograd.grad(expected.square().sum(), y)
    torch.testing.assert_close(second.double(), truth, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.parametrize("grad", [False, True])
def test_compile_without_graph_breaks(grad: bool, kernels_module: ModuleType) -> None:
    k = kernels_module

    def block(x: Tensor, w: Tensor) -> Tensor:
        h = k.rms_norm(x, w, cast="input")
        h = k.gated(h, k.layer_norm(x, w, None), "gelu_tanh")
        return k.gated_packed(k.silu(h) + k.gelu(h), "silu", False)

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=False)
    x, w = tensor(4, 16).requires_grad_(grad), tensor(16).requires_grad_(grad)
    expected, actual = block(x, w), compiled(x, w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    if grad:
        seed = torch.ones_like(actual)
        for a, e in zip(
            torch.autograd.grad(actual, [x, w], seed),
            torch.autograd.grad(expected, [x, w], seed),
            strict=True,
        ):
            torch.testing.assert_close(a, e)
    compiled(x, w)
    assert counter.frame_count == 1


def test_compile_with_symbolic_shapes(kernels_module: ModuleType) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: kernels_module.gated_packed(kernels_module.rms_norm(x), "gelu"),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    assert compiled(tensor(3, 8)).shape == (3, 4)
    frames = counter.frame_count
    for rows, cols in ((5, 16), (7, 32)):
        assert compiled(tensor(rows, cols)).shape == (rows, cols // 2)
    assert counter.frame_count == frames


# -------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k, x: k.rms_norm(x, cast="half"), r"`cast`: expected one of 'none'.*got 'half'"),
        (lambda k, x: k.gelu(x, "erf"), r"`approximate`: expected one of.*got 'erf'"),
        (lambda k, x: k.gated(x, x, "swish"), r"`activation`: expected one of 'gelu'.*'swish'"),
        (lambda k, x: k.gated_packed(x, "glu"), r"`activation`.*got 'glu'"),
    ],
)
def test_bad_names(call: Any, message: str, kernels_module: ModuleType) -> None:
    with pytest.raises(ValueError, match=message):
        call(kernels_module, tensor(2, 4))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda k, x: k.silu(x.double()), "float64"),
        (lambda k, x: k.silu(x.int()), "int32"),
        (lambda k, x: k.rms_norm(x, torch.ones(5)), "weight"),
        (lambda k, x: k.rms_norm(x, eps=-1.0), "eps"),
        (lambda k, x: k.rms_norm(x, torch.ones(4), weight_offset=1.0, cast="input"), "offset"),
        (lambda k, x: k.gated(x, x[:1]), "up"),
        (lambda k, x: k.gated_packed(x[..., :3]), "x"),
        (lambda k, x: k.ops.gelu.default(x, 7), "approximate"),
        (lambda k, x: k.ops.silu_out.default(x.t(), x.t()), "out"),
        (lambda k, x: k.ops.silu_out.default(x[:1], x), "out"),
        (lambda k, x: k.ops.silu_out.default(x.half(), x), "out"),
    ],
)
def test_kernel_errors_become_runtime_errors(
    call: Any, word: str, kernels_module: ModuleType
) -> None:
    with pytest.raises(RuntimeError, match=word):
        call(kernels_module, tensor(2, 4))


def test_errors_leak_nothing(kernels_module: ModuleType) -> None:
    import resource

    x = torch.zeros(256, 1024)
    bad = torch.ones(5)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(RuntimeError):
                kernels_module.rms_norm(x, bad)

    fail(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fail(500)  # 500 MiB, were the result of each kept
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_inputs_are_released(kernels_module: ModuleType) -> None:
    import weakref

    x, w = tensor(4, 8), tensor(8)
    refs = [weakref.ref(x.untyped_storage()), weakref.ref(w.untyped_storage())]
    kernels_module.ops.rms_norm.default(x, w, None, 1e-6, 0.0, 0)
    kernels_module.ops.silu.default(x.t())
    del x, w
    assert [r() for r in refs] == [None, None]


# -------------------------------------------------------------------------------------------------
# Layers


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("LayerNorm", torch.nn.LayerNorm(16)),
        ("GELU", torch.nn.GELU(approximate="tanh")),
        ("SiLU", torch.nn.SiLU()),
    ],
)
def test_layers_replace_torchs(
    layer: str, module: torch.nn.Module, kernels_module: ModuleType
) -> None:
    x = tensor(4, 16)
    forward = getattr(kernels_module.layers, layer).forward
    torch.testing.assert_close(forward(module, x), module(x))


def test_layers_are_pure(kernels_module: ModuleType) -> None:
    """What `kernels` demands of a layer before it lends its forward."""
    from kernels.layer.layer import _validate_layer

    for name in kernels_module.layers.__all__:
        cls = getattr(kernels_module.layers, name)
        _validate_layer(check_cls=cls, cls=cls, repo=name)


def test_kernelize_uses_a_layer(kernels_module: ModuleType, kernels_dir: Any) -> None:
    import kernels

    class SiluAndMul(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the original ran")

    kernels.replace_kernel_forward_from_hub(SiluAndMul, "HfpatchSiluAndMul")
    layer = kernels.LocalLayerRepository(kernels_dir, layer_name="SiluAndMul")
    model = torch.nn.Sequential(SiluAndMul())
    with kernels.use_kernel_mapping({"HfpatchSiluAndMul": {"cpu": layer}}):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    x = tensor(4, 16)
    torch.testing.assert_close(model(x), F.silu(x[:, :8]) * x[:, 8:])


@pytest.mark.parametrize("form", ["functional", "out", "in place", "lists"])
def test_data_beside_the_meta_device_is_an_error(form: str, kernels_module: ModuleType) -> None:
    """PyTorch dispatches it to the function of shapes, whose memory nobody writes."""
    ops, x, w = kernels_module.ops, torch.ones(2, 8), torch.ones(8, device="meta")
    call = {
        "functional": lambda: kernels_module.rms_norm(x, w),
        "out": lambda: ops.rms_norm_out.default(x.clone(), x, w, None, 1e-6, 0.0, 0),
        "in place": lambda: ops.rms_norm_.default(x, w, None, 1e-6, 0.0, 0),
        "lists": lambda: ops.scale_grads.default([x, w], torch.ones(1)),
    }[form]
    with pytest.raises(RuntimeError, match="expected all tensors on one device, got"):
        call()
    assert kernels_module.rms_norm(x.to("meta"), w).is_meta
