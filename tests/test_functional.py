"""`hfpatch.functional` and `hfpatch.layers`: the kernels by name, and what stands in for them."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import hfpatch
from hfpatch import functional, layers
from hfpatch.errors import KernelLoadError
from hfpatch.kernels import sources
from hfpatch.ops import OPS

X, W = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), torch.full((64,), 1.5)


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing was compiled."""

    def refuse(*_: Any) -> None:
        raise KernelLoadError("no compiled kernels in this installation")

    monkeypatch.setattr(sources, "_load_local", refuse)
    monkeypatch.setattr(functional, "_warned", set())
    monkeypatch.delenv("HFPATCH_FALLBACK", raising=False)


def test_every_op_has_its_signature(kernels_module: object) -> None:
    assert dir(hfpatch.functional) == sorted(OPS)
    for name, op in OPS.items():
        own = sources.local_package().kernel(name).fn
        assert list(inspect.signature(own).parameters) == list(
            inspect.signature(getattr(functional, name)).parameters
        ), name
        assert getattr(functional, name).__doc__ == op.reference.__doc__
    with pytest.raises(AttributeError, match=r"no op 'rms_nrm': expected one of .*rms_norm"):
        _ = functional.rms_nrm


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("rms_norm", (X, W), {"cast": "input"}),
    ("layer_norm", (X, W), {"eps": 1e-6}),
    ("gelu", (X,), {"approximate": "tanh"}),
    ("gated", (X, X), {"activation": "gelu"}),
    ("gated_packed", (X,), {}),
    ("gated_clamped", (X, X), {"gate_max": 0.5, "up_min": -0.5, "up_offset": 1.0}),
    ("add_rms_norm", (X, X, W), {}),
    ("add_gelu", (X, W), {}),
    ("mul_add", (X, X, X), {}),
    ("softmax", (X,), {}),
    ("argmax", (X,), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS, ids=[c[0] for c in CALLS])
def test_the_kernel_and_the_fallback_agree(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kernels_module: object,
    request: pytest.FixtureRequest,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_kernel = getattr(functional, name)(*args, **kwargs)
    request.getfixturevalue("no_build")
    with pytest.warns(RuntimeWarning, match=f"`{name}` is computed by PyTorch's operators"):
        by_torch = getattr(functional, name)(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        getattr(functional, name)(*args, **kwargs)
    torch.testing.assert_close(by_kernel, by_torch, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_build")
def test_a_fallback_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFPATCH_FALLBACK", "error")
    with pytest.raises(KernelLoadError, match=r"`silu`: no compiled kernels.*HFPATCH_FALLBACK"):
        functional.silu(X)
    monkeypatch.setenv("HFPATCH_FALLBACK", "maybe")
    with pytest.raises(ValueError, match="must be `warn` or `error`, got 'maybe'"):
        functional.silu(X)


def test_another_dtype_is_computed_by_torch(
    kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"computes float32, .*got torch.float64"):
        y = functional.silu(X.double())
    torch.testing.assert_close(y, torch.nn.functional.silu(X.double()))


def test_layers_take_the_weights_of_transformers(kernels_module: object) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
    theirs_and_ours: list[tuple[Any, Any]] = [
        (LlamaMLP(LlamaConfig(**sizes)), layers.GatedMLP(64, 96)),
        (Phi3MLP(Phi3Config(**sizes)), layers.PackedGatedMLP(64, 96, "silu")),
        (LlamaRMSNorm(64, 1e-5), layers.RMSNorm(64, 1e-5)),
        (torch.nn.LayerNorm(64), layers.LayerNorm(64)),
    ]
    for theirs, ours in theirs_and_ours:
        ours.load_state_dict(theirs.state_dict(), strict=True)
        x, z = (X.clone().requires_grad_() for _ in range(2))
        expected, got = theirs(x), ours(z)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        expected.square().sum().backward()
        got.square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(z.grad, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("offset", "cast"), [(0.0, "input"), (1.0, "none")])
def test_a_new_norm_scales_by_one(offset: float, cast: str, kernels_module: object) -> None:
    norm = layers.RMSNorm(X.shape[-1], 1e-6, offset, cast)
    expected = torch.nn.functional.rms_norm(X, X.shape[-1:], eps=1e-6)
    torch.testing.assert_close(norm(X), expected)


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: layers.GatedMLP(0, 4), ValueError, "`hidden_size` must be at least 1, got 0"),
    (lambda: layers.GatedMLP(4, "8"), TypeError, "`intermediate_size` must be an int, got str"),
    (lambda: layers.GatedMLP(4, 4, "silou"), ValueError, "Did you mean `silu`"),
    (lambda: layers.RMSNorm(4, cast="all"), ValueError, "`cast` must be one of none, input"),
    (lambda: layers.RMSNorm(4, weight_offset=1.0), ValueError, "needs `cast='none'`"),
    (lambda: layers.LayerNorm(2.5), TypeError, "`hidden_size` must be an int, got float"),
]


@pytest.mark.parametrize(("make", "error", "said"), BAD, ids=[b[2] for b in BAD])
def test_what_cannot_be(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_a_weight_on_the_meta_device() -> None:
    """The result was memory that nobody had written."""
    with pytest.raises(RuntimeError, match=r"expected all tensors on one device, got .*meta"):
        functional.rms_norm(torch.ones(2, 64), torch.ones(64, device="meta"))


def test_any_tensor_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the first alone: PyTorch's operators compute the same then, as the docs say."""
    monkeypatch.setattr(functional, "_warned", set())
    x, weight = torch.randn(2, 64), torch.rand(64, dtype=torch.float64)
    with pytest.warns(
        RuntimeWarning, match="computed by PyTorch's operators: .* got torch.float64"
    ):
        y = functional.rms_norm(x, weight)
    torch.testing.assert_close(y, OPS["rms_norm"].reference(x, weight))


D = X.double()
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("silu", (None,), {}, TypeError, "`silu`: `x` must be a tensor, got NoneType"),
    ("gated", (X, [1.0]), {}, TypeError, "`gated`: `up` must be a tensor, got list"),
    ("rms_norm", (X,), {"weight": 1.0}, TypeError, "`weight` must be a tensor or None, got float"),
    ("silu", (X.long(),), {}, TypeError, "`x` must have a floating dtype, got torch.int64"),
    ("softmax", (X[0, 0],), {}, ValueError, "`x` must have at least 1 dimension, got 0"),
    ("topk", (X, 0), {}, ValueError, "`k` must be from 1 to the size .*, 64, got 0"),
    ("topk", (D, -1), {}, ValueError, "`k` must be from 1 to the size .*, 64, got -1"),
    ("topk", (D, 65), {}, ValueError, "`k` must be from 1 to the size .*, 64, got 65"),
    ("topk", (D, None), {}, TypeError, "`k` must be an int, got NoneType"),
    ("rms_norm", (D, W), {"cast": "inptu"}, ValueError, "`cast` must be one of 'none', 'input'"),
    ("mul_add", (D, D, D), {"cast": "weight"}, ValueError, "`cast` must be one of 'none', 'input'"),
    ("gelu", (D,), {"approximate": "erf"}, ValueError, "`approximate` must be one of 'none'"),
    ("rms_norm", (D,), {"eps": -1.0}, ValueError, "`eps` must be finite and at least 0, got -1"),
    ("rms_norm", (D,), {"eps": None}, TypeError, "`eps` must be a number, got NoneType"),
    ("rms_norm", (D, W, None, 0.0, 1.0, "input"), {}, ValueError, "needs `cast='none'`"),
    ("sample", (D, torch.arange(3)), {"top_p": 1.5}, ValueError, "`top_p` must be from 0 to 1"),
    (
        "sample",
        (D, torch.arange(3)),
        {"top_k": 1.5},
        TypeError,
        "`top_k` must be an int, got float",
    ),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error", "said"), WRONG, ids=[f"{w[0]} {w[4]}" for w in WRONG]
)
def test_what_no_formula_may_take(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    """Some were an AttributeError; others were computed by PyTorch's operators, as something."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=said):
            getattr(functional, name)(*args, **kwargs)


def test_sizes_that_the_kernels_do_not_take(
    kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "_warned", set())
    with pytest.warns(RuntimeWarning, match="`silu` .*at least 1 dimensions, got 0"):
        torch.testing.assert_close(functional.silu(X[0, 0]), torch.nn.functional.silu(X[0, 0]))
    many = torch.randn(2, 2100, generator=torch.Generator().manual_seed(0))
    with pytest.warns(RuntimeWarning, match="`topk` .*it finds at most 2048 values"):
        values, _ = functional.topk(many, 2050)
    assert torch.equal(values, many.topk(2050).values)
    with pytest.warns(RuntimeWarning, match="`sample` .*at least 2 dimensions, got 1"):
        token = functional.sample(X[0], torch.tensor(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first parameter, wherever it stands in the call
        rows = functional.sample(seeds=torch.tensor([5]), logits=X[:1])
    assert token.shape == () and token == rows[0]


def test_no_samples_of_a_group_norm() -> None:
    """Its formula, which `OPS` has for everybody to compare with."""
    formula = OPS["group_norm"].reference
    for shape in ((0, 8, 5), (2, 8, 0)):
        assert formula(torch.zeros(shape), groups=4).shape == shape
    with pytest.raises(RuntimeError):
        formula(torch.zeros(2, 6, 2), groups=4)  # 4 does not divide 6, but 12
