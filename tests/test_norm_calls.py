"""A patched norm's second call takes a shorter way: wherever the first is not its like, it is not
taken."""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch


def _pair(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, torch.Tensor]:
    """A patched norm that has been called, and one that is as it was."""
    norm = LlamaRMSNorm(48).to(dtype)
    nn.init.normal_(norm.weight)
    plain = copy.deepcopy(norm)
    model = nn.Sequential(norm)
    assert len(hfpatch.apply(model).swaps) == 1
    x = torch.randn(5, 48, dtype=dtype)
    with torch.no_grad():
        for _ in range(3):
            norm(x)
    return norm, plain, x


def _no_grad(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return norm(x)


def _dtype(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return norm(x.bfloat16())


def _weight(norm: Any, x: torch.Tensor) -> Any:
    norm.weight = nn.Parameter(norm.weight.detach().bfloat16())
    with torch.no_grad():
        return norm(x)


def _values(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        norm.weight.mul_(2)
        return norm(x)


def _data(norm: Any, x: torch.Tensor) -> Any:
    norm.weight.data = norm.weight.data[:16].clone()
    with torch.no_grad():
        return norm(x[:, :16])


def _gradient(norm: Any, x: torch.Tensor) -> Any:
    y = norm(x)
    y.sum().backward()
    return norm.weight.grad


def _input_gradient(norm: Any, x: torch.Tensor) -> Any:
    norm.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    norm(leaf).pow(2).sum().backward()
    return leaf.grad


def _jvp(norm: Any, x: torch.Tensor) -> Any:
    norm.requires_grad_(False)
    return torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]


def _dual(norm: Any, x: torch.Tensor) -> Any:
    ad = torch.autograd.forward_ad
    with torch.no_grad(), ad.dual_level():
        return ad.unpack_dual(norm(ad.make_dual(x, torch.ones_like(x)))).tangent


def _vmap(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.func.vmap(norm)(x)


def _autocast(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return norm(x)


def _compiled(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.compile(norm, backend="eager", fullgraph=True)(x)


def _exported(norm: Any, x: torch.Tensor) -> Any:
    return torch.export.export(norm, (x,)).module()(x).detach()


def _traced(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.jit.trace(norm, (x,), check_trace=False)(2 * x)


def _keyword(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return norm(hidden_states=x)


def _strided(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return norm(x.t().contiguous().t())


def _empty(norm: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return norm(x[:0])


def _hook(norm: Any, x: torch.Tensor) -> Any:
    norm.register_forward_hook(lambda module, args, y: y + 1)
    with torch.no_grad():
        return norm(x)


def _moved(norm: Any, x: torch.Tensor) -> Any:
    return norm.to("meta")(x.to("meta")).shape


CALLS = [f for name, f in list(globals().items()) if name[0] == "_" and name not in ("_pair",)
         and callable(f) and getattr(f, "__module__", "") == __name__]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__.lstrip("_"))
def test_as_the_original(call: Callable[[Any, torch.Tensor], Any]) -> None:
    norm, plain, x = _pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the adapter says once what it does not take
        expected, got = call(plain, x), call(norm, x)
    torch.testing.assert_close(got, expected)
    if isinstance(got, torch.Tensor):
        assert (got.dtype, got.requires_grad) == (expected.dtype, expected.requires_grad)
    if call in (_hook, _moved):
        return
    again = x[:, : plain.weight.numel()]  # and the short way is there still
    torch.testing.assert_close(_no_grad(norm, again), _no_grad(plain, again))


@pytest.mark.parametrize("bad", [(), (None,), ("x",), (1, 2)], ids=str)
def test_the_originals_error(bad: tuple[Any, ...]) -> None:
    norm, plain, _ = _pair()
    for module in (plain, norm):
        with pytest.raises((TypeError, AttributeError)):
            module(*bad)


def test_other_dtypes_in_turn() -> None:
    """Each change of dtype makes another guard, up to a limit; the numbers stay."""
    norm, plain, x = _pair()
    with torch.no_grad():
        for _ in range(100):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                torch.testing.assert_close(norm(x.to(dtype)), plain(x.to(dtype)))


class Kernels(TorchDispatchMode):
    """Names of the operators, outside PyTorch's own namespaces, that a call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim"):
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def weightless() -> nn.Module:
    from diffusers.models.normalization import RMSNorm

    return RMSNorm(48, eps=1e-8, elementwise_affine=False)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


APART: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "channels of a video": lambda t: draw(2, 48, 3, 4, 5, dtype=t).movedim(1, -1),
    "transposed": lambda t: draw(48, 7, dtype=t).t(),
    "every second": lambda t: draw(3, 96, dtype=t)[:, ::2],
    "one value": lambda t: draw(3, 1, dtype=t).expand(3, 48),
}
TOGETHER: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda t: draw(2, 5, 48, dtype=t),
    "part of a row": lambda t: draw(5, 96, dtype=t)[:, 48:],
    "tokens transposed": lambda t: draw(2, 3, 5, 48, dtype=t).transpose(1, 2),
    "dimensions in another order": lambda t: draw(2, 3, 4, 5, 48, dtype=t).permute(3, 0, 2, 1, 4),
    "heads of a part, transposed": (
        lambda t: draw(2, 5, 4 * 96, dtype=t).view(2, 5, 4, 96)[..., :48].transpose(1, 2)
    ),
    "one head, transposed": lambda t: draw(2, 5, 1, 48, dtype=t).transpose(1, 2),
    "heads of a part": lambda t: draw(2, 5, 4 * 96, dtype=t).view(2, 5, 4, 96)[..., :48],
}


def steps(x: torch.Tensor) -> list[int]:
    """Strides of the dimensions that are not of size 1, where they mean nothing."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: LlamaRMSNorm(48), weightless], ids=["weight", "none"])
def test_rows_whose_elements_are_apart_are_the_originals(
    make: Callable[[], nn.Module], dtype: torch.dtype, kernels_module: object
) -> None:
    """A copy would cost more than the kernel saves, and give what follows another layout."""
    norm = make().to(dtype)
    plain = copy.deepcopy(norm)
    assert len(hfpatch.apply(nn.Sequential(norm)).swaps) == 1
    with torch.no_grad():
        for _ in range(2):  # the kernel is there still
            for name, view in TOGETHER.items():
                x = view(dtype)
                with Kernels() as seen:
                    got = norm(x)
                expected = plain(x)
                assert seen.names == ["rms_norm"], name
                torch.testing.assert_close(got, expected)
                assert steps(got) == steps(expected), name
            for name, view in APART.items():
                x = view(dtype)
                with Kernels() as seen:
                    got = norm(x)
                expected = plain(x)
                assert seen.names == [], name
                assert torch.equal(got, expected) and got.stride() == expected.stride(), name


class DividesByItsOwnRMSNorm(nn.Module):
    """Another formula as soon as the width is not `dim`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.eps = dim, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.dim + self.eps)


def test_a_width_that_no_weight_needs(kernels_module: object) -> None:
    """diffusers builds LTX-Video's last norm for 3 channels and calls it with 128."""
    for norm, kernels in ((weightless(), ["rms_norm"]), (DividesByItsOwnRMSNorm(48), [])):
        plain, x = copy.deepcopy(norm), draw(3, 128, dtype=torch.float32)
        with torch.device("meta"):  # as any default device: the probe is on the CPU
            assert len(hfpatch.apply(nn.Sequential(norm)).swaps) == 1
        with torch.no_grad(), Kernels() as seen:
            got = norm(x)
        assert seen.names == kernels
        torch.testing.assert_close(got, plain(x))
        with torch.no_grad(), Kernels() as seen:
            torch.testing.assert_close(norm(x[:, :48].clone()), plain(x[:, :48]))
        assert seen.names == ["rms_norm"]


def test_layer_norms_and_training_take_rows_whose_elements_are_apart(
    kernels_module: object,
) -> None:
    """There the original copies too, or keeps more for the gradient than a copy."""
    x = APART["channels of a video"](torch.float32)
    for norm, kernels, mode in (
        (nn.LayerNorm(48), "local", "inference"),
        (LlamaRMSNorm(48), None, "training"),
    ):
        plain = copy.deepcopy(norm)
        assert len(hfpatch.apply(nn.Sequential(norm), kernels=kernels, mode=mode).swaps) == 1
        with torch.set_grad_enabled(mode == "training"), Kernels() as seen:
            got = norm(x)
        assert len(seen.names) == 1 and "norm" in seen.names[0]
        torch.testing.assert_close(got, plain(x))


class Heads(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 5, 4, 48).transpose(1, 2)
        return self.norm(heads).transpose(1, 2).view(2, 5, 192)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("make", [lambda: LlamaRMSNorm(48), weightless], ids=["weight", "none"])
def test_a_view_of_a_transposed_result(
    make: Callable[[], nn.Module], mode: str, kernels_module: object
) -> None:
    model = Heads(make())
    x = draw(2, 5, 192, dtype=torch.float32).requires_grad_(mode == "training")
    with torch.set_grad_enabled(mode == "training"):
        expected = model(x)
        gradient = torch.autograd.grad(expected.pow(3).sum(), x)[0] if x.requires_grad else None
        assert len(hfpatch.apply(model, mode=mode).swaps) == 1
        for _ in range(3):
            with Kernels() as seen:
                got = model(x)
            assert seen.names and "rms_norm" in seen.names[0]
            torch.testing.assert_close(got, expected)
            model.norm(x.view(2, 5, 4, 48).contiguous())
        if gradient is not None:
            torch.testing.assert_close(torch.autograd.grad(got.pow(3).sum(), x)[0], gradient)


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm])
def test_the_layout_of_torchs_norms(cls: Any, kernels_module: object) -> None:
    model = nn.Sequential(cls(48))
    x = draw(2, 5, 4, 48, dtype=torch.float32).transpose(1, 2)
    with torch.no_grad():
        expected = model(x)
        assert len(hfpatch.apply(model, kernels="local").swaps) == 1
        for _ in range(2):
            assert model(x).stride() == expected.stride()


class ShapedLayerNorm(nn.Module):
    """nanoGPT's, with its optional bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.bias = nn.Parameter(torch.rand(64)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class SizedRMSNorm(ShapedLayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.weight.size(0),), self.weight, 1e-5)


class AskingLayerNorm(ShapedLayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        return 2 * y if x.shape == self.weight.shape else y


class CoveringLayerNorm(ShapedLayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[x.dim() - 1 :], self.weight, self.bias, 1e-5)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("cls", "bias", "served"),
    [
        (ShapedLayerNorm, True, True),
        (ShapedLayerNorm, False, True),
        (SizedRMSNorm, False, True),
        (AskingLayerNorm, True, False),
        (CoveringLayerNorm, True, False),
    ],
)
def test_a_shape_that_is_the_weights(cls: Any, bias: bool, served: bool, mode: str) -> None:
    """Of a norm's own weight, unlike of its input, it is one size in every call."""
    model = nn.Sequential(cls(bias))
    expected = {n: model(torch.ones(n)) for n in ((64,), (2, 64), (1, 2, 3, 64))}
    assert bool(hfpatch.apply(model, mode=mode).swaps) == served
    with torch.no_grad():
        for shape, value in expected.items():
            torch.testing.assert_close(model(torch.ones(shape)), value)
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(2, 65))


#: Further ones: of an encoder behind convolutions, of images.
APART_TOO: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    **APART,
    "text": lambda t: draw(1, 48, 20, dtype=t).transpose(1, 2),
    "image": lambda t: draw(2, 48, 3, 4, dtype=t).permute(0, 2, 3, 1),
    "channels last": lambda t: (
        draw(2, 3, 48, 4, dtype=t).to(memory_format=torch.channels_last).transpose(2, 3)
    ),
}


@pytest.mark.parametrize("kind", APART_TOO)
@pytest.mark.parametrize("cls", [nn.LayerNorm, LlamaRMSNorm])
def test_apart_as_the_original_whatever_came_before(
    cls: Any, kind: str, kernels_module: object
) -> None:
    """The second call of rows whose elements are apart takes a way of its own too."""
    norm = cls(48)
    nn.init.normal_(norm.weight)
    plain = copy.deepcopy(norm)
    assert len(hfpatch.apply(nn.Sequential(norm)).swaps) == 1
    x = APART_TOO[kind](torch.float32)

    def compare(x: torch.Tensor) -> None:
        ours, theirs = norm(x), plain(x)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert ours.stride() == theirs.stride() and ours.requires_grad == theirs.requires_grad

    with torch.no_grad():
        for _ in range(3):
            compare(x)
        compare(x.contiguous())
        compare(x)
        compare(x.bfloat16().float())
        compare(x * float("nan"))
        with torch.inference_mode():
            compare(APART_TOO[kind](torch.float32))
        compare(torch._neg_view(x))
        for wrong in (x[..., :16], x[..., :16].contiguous()):
            for each in (norm, plain):
                with pytest.raises(RuntimeError):
                    each(wrong)
        norm.weight.mul_(2)
        plain.weight.mul_(2)
        compare(x)
        seen: list[Any] = []
        for each in (norm, plain):
            handle = each.register_forward_hook(lambda m, a, y: seen.append(a[0].stride()))
            each(x)
            handle.remove()
        assert seen == [x.stride()] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for leaf in (x, x.clone().requires_grad_()):
            with torch.enable_grad():
                compare(leaf)
        with torch.no_grad():
            eps = "variance_epsilon" if cls is LlamaRMSNorm else "eps"
            for each in (norm, plain):
                setattr(each, eps, 0.5)
            compare(x)
            for each in (norm, plain):
                each.__class__ = type("Doubled", (cls,), {"forward": lambda m, x: x * 2})
            compare(x)


def test_apart_takes_no_longer_than_the_original(kernels_module: object) -> None:
    """Small ones, by one thread: 1.1 to 1.2 of the original's time, where 1.3 to 1.7 were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for cls in (nn.LayerNorm, LlamaRMSNorm):
            norm = cls(48)
            plain = copy.deepcopy(norm)
            assert hfpatch.apply(nn.Sequential(norm)).swaps
            x, least = APART_TOO["text"](torch.float32), [float("inf")] * 2
            with torch.no_grad():
                for _ in range(60):
                    for i, each in enumerate((norm, plain)):
                        start = time.process_time_ns()
                        for _ in range(100):
                            each(x)
                        least[i] = min(least[i], time.process_time_ns() - start)
            assert least[0] <= 1.3 * least[1], (cls, least)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("module", "name", "given"),
    [
        ("falcon_mamba", "FalconMambaWeightlessRMSNorm", (48,)),
        ("deepseek_v4", "DeepseekV4UnweightedRMSNorm", ()),
    ],
)
def test_norms_whose_names_say_that_they_have_no_weight(
    kernels_module: object, module: str, name: str, given: tuple[int, ...]
) -> None:
    """`weight_norm` is another thing, and no norm of rows."""
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    model = nn.Sequential(cls(*given, eps=1e-6))
    plain = copy.deepcopy(model)
    (swap,) = hfpatch.apply(model).swaps
    assert (swap.class_name, swap.op) == (name, "rms_norm")
    for x in (draw(3, 48, dtype=torch.float32), draw(2, 5, 17, dtype=torch.bfloat16)):
        torch.testing.assert_close(model(x), plain(x))
    hfpatch.restore(model)
    assert not hfpatch.plan(nn.Sequential(type("WeightNorm", (nn.Identity,), {})())).swaps
