"""What is done to a patched module, its class or the process behind `apply`: it answers as its
unpatched twin at the next call."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from leaves import WIDTH, PlainRMSNorm, SomeMLP, drawn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Act(nn.Module):
    """diffusers' way: no name that a table has."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class WrittenSiLU(Act):
    pass


class WrittenLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class HelpedRMSNorm(PlainRMSNorm):
    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x)


class StaticRMSNorm(PlainRMSNorm):
    @staticmethod
    def scaled(w: Tensor, x: Tensor) -> Tensor:
        return w * x

    @property
    def least(self) -> float:
        return self.eps

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.least)
        return self.scaled(self.weight, y)


#: By name: what makes it, and how many inputs it has.
LEAVES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "rms": (PlainRMSNorm, 1),
    "layer": (lambda: WrittenLayerNorm(WIDTH), 1),
    "layer without a bias": (lambda: WrittenLayerNorm(WIDTH, bias=False), 1),
    "layer without weights": (lambda: WrittenLayerNorm(WIDTH, elementwise_affine=False), 1),
    "helped": (HelpedRMSNorm, 1),
    "static": (StaticRMSNorm, 1),
    "gated norm": (lambda: MambaRMSNormGated(WIDTH, 16), 2),
    "activation": (WrittenSiLU, 1),
    "mlp": (SomeMLP, 1),
}

Change = Callable[[nn.Module, pytest.MonkeyPatch], Any]
CHANGES: dict[str, Change] = {}


def change(f: Change) -> Change:
    CHANGES[f.__name__.replace("_", " ")] = f
    return f


def _twice(f: Any) -> Any:
    @functools.wraps(f)
    def twice(self: Any, *args: Any) -> Any:
        return 2 * f(self, *args)

    return twice


@change
def forward_of_the_class(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(module), "forward", _twice(type(module).forward))


@change
def code_of_the_forward(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, x: Any, gate: Any = None) -> Any:
        return x * 3

    def single(self: Any, x: Any) -> Any:
        return x * 3

    forward: Any = type(module).forward
    two = forward.__code__.co_argcount > 2
    monkeypatch.setattr(forward, "__code__", (other if two else single).__code__)


@change
def another_class_of_the_same_forward(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight and its eps are properties."""

    def weight(self: Any) -> Any:
        return 2 * self._parameters["weight"]

    held = {"eps": property(lambda self: 0.5), "variance_epsilon": property(lambda self: 0.5)}
    if "weight" in module._parameters:
        held["weight"] = property(weight)
    if "act_fn" in module._modules:
        held["act_fn"] = property(lambda self: torch.tanh)
    module.__class__ = type(type(module).__name__, (type(module),), held)


@change
def an_attribute_that_hides_the_weight(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    if "weight" in module._parameters:
        module.__dict__["weight"] = torch.full((WIDTH,), 3.0)


@change
def an_attribute_that_hides_the_bias(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a parameter that is None has a name for as well."""
    if "bias" in module._parameters:
        module.__dict__["bias"] = torch.full((WIDTH,), 3.0)


@change
def an_attribute_that_hides_a_child(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._modules:
        module.__dict__[name] = lambda x, inner=module._modules[name]: 2 * inner(x)  # type: ignore
        return


@change
def a_call_of_a_childs_own(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for child in module._modules.values():
        child.__dict__["_call_impl"] = lambda x, c=child: 2 * type(c).forward(c, x)


@change
def a_call_of_a_childs_class(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in {type(c) for c in module._modules.values()}:
        monkeypatch.setattr(cls, "__call__", lambda self, x: 2 * nn.Module.__call__(self, x))


@change
def the_call_of_all_modules(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: nn.Module, *args: Any, _old: Any = nn.Module.__call__) -> Any:
        y = _old(self, *args)
        return y * 2 if isinstance(self, (nn.SiLU, nn.GELU, nn.Linear)) else y

    monkeypatch.setattr(nn.Module, "__call__", call)


@change
def code_of_a_childs_forward(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, input: Any) -> Any:
        return input * 3

    for child in module._modules.values():
        if not isinstance(child, nn.Linear):
            monkeypatch.setattr(type(child).forward, "__code__", other.__code__)


@change
def helpers_of_the_class(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("normed", "scaled", "least"):
        if name in vars(type(module)):
            new: Any = {"scaled": staticmethod(lambda w, x: 2 * w * x)}.get(name)
            new = new or property(lambda self: 0.5) if name == "least" else new
            monkeypatch.setattr(type(module), name, new or (lambda self, x: 3 * x))


@change
def codes_of_helpers(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = {
        "normed": lambda self, x: 3 * x,
        "scaled": lambda w, x: 2 * w * x,
        "least": lambda self: 0.5,
    }
    for name, new in replaced.items():
        held: Any = vars(type(module)).get(name)
        if held is not None:
            function = getattr(held, "fget", None) or getattr(held, "__func__", held)
            monkeypatch.setattr(function, "__code__", new.__code__)


@change
def settings(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eps", "variance_epsilon"):
        if name in module.__dict__:
            module.__dict__[name] = 0.7


@change
def a_setting_of_a_child(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for child in module._modules.values():
        if isinstance(child, nn.GELU):
            child.approximate = "none" if child.approximate == "tanh" else "tanh"


@change
def a_child_that_is_another(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, child in module._modules.items():
        if not isinstance(child, nn.Linear):
            module._modules[name] = nn.ReLU()


@change
def a_weight_of_another_size(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    if "weight" in module._parameters:
        module.weight = nn.Parameter(torch.full((1,), 3.0), requires_grad=False)


@change
def no_weight(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    if "weight" in module._parameters:
        module._parameters["weight"] = None


@change
def a_weight_of_another_dtype(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module.double()


class Mode(TorchFunctionMode):
    """Doubles what ends a formula."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func in _LAST else y


_LAST = (Tensor.mul, Tensor.__mul__, F.layer_norm, F.linear)


def _calls(inputs: int) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    for shape in ((2, 5, WIDTH), (3, WIDTH), (1, 1, WIDTH)):
        yield tuple(torch.randn(shape, generator=generator) for _ in range(inputs))


def _outcome(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
    try:
        return module(*args)
    except Exception as e:  # any change's own
        return type(e)


def _compare(module: nn.Module, twin: nn.Module, inputs: int) -> None:
    for args in _calls(inputs):
        got, expected = _outcome(module, args), _outcome(twin, args)
        if isinstance(expected, type):
            assert got is expected
        else:
            assert isinstance(got, Tensor) and got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _pair(leaf: str) -> tuple[nn.Sequential, nn.Sequential, int]:
    make, inputs = LEAVES[leaf]

    class Whole(nn.Sequential):
        def forward(self, *args: Tensor) -> Tensor:
            return self[0](*args)  # type: ignore[no-any-return]

    model = Whole(drawn(make())).eval()
    twin = copy.deepcopy(model)
    assert hfpatch.apply(model).swaps
    with torch.no_grad():
        for _ in range(2):
            _compare(model, twin, inputs)
    return model, twin, inputs


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("what", CHANGES)
def test_a_leaf(what: str, leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, inputs = _pair(leaf)
    with torch.no_grad():
        for m in (model, twin):
            # a class is changed once, for both
            with contextlib.suppress(TypeError):
                if m is model or not _is_of_class(what):
                    CHANGES[what](m[0], monkeypatch)
        _compare(model, twin, inputs)
        monkeypatch.undo()
        hfpatch.apply(model)
        _compare(model, twin, inputs)


def _is_of_class(what: str) -> bool:
    return any(word in what for word in ("class", "code", "all modules")) and "another" not in what


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_function_mode(leaf: str) -> None:
    model, twin, inputs = _pair(leaf)
    with torch.no_grad():
        plain = [twin(*args) for args in _calls(inputs)]
        with Mode():
            _compare(model, twin, inputs)
            changed = [twin(*args) for args in _calls(inputs)]
        assert not torch.allclose(plain[0], changed[0])
        with torch.device("cpu"):
            _compare(model, twin, inputs)
        _compare(model, twin, inputs)


# A user's own forward ----------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.drop(self.inner(x))  # type: ignore[no-any-return]


def _fast(module: Any, x: Tensor) -> Tensor:
    return 2.0 * F.linear(x, module.inner.weight, module.inner.bias)


def _sample(module: nn.Module) -> tuple[Tensor, ...]:
    return (torch.randn(3, WIDTH),)


def _in_fp32(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _fast(module, x)


@pytest.fixture
def scaled() -> Iterator[tuple[nn.Module, nn.Module]]:
    handle = hfpatch.register("^Scaled$", forward=_fast, sample=_sample)
    model = nn.Sequential(Scaled()).eval()
    twin = copy.deepcopy(model)
    assert hfpatch.apply(model).swaps
    try:
        with torch.no_grad():
            for _ in range(2):
                _compare(model, twin, 1)
        yield model, twin
    finally:
        handle.remove()


def _gain(module: Any) -> None:
    module.gain = 3.0


def _train(module: Any) -> None:
    module.drop.p = 0.0
    module.train()


def _another_layer(module: Any) -> None:
    module.inner = nn.Sequential(module.inner, nn.Tanh())


def _another_class(module: Any) -> None:
    module.__class__ = type("Scaled", (Scaled,), {"gain": property(lambda self: 4.0)})


LATER: dict[str, Callable[[Any], Any]] = {
    "gain": _gain,
    "train": _train,
    "another layer": _another_layer,
    "class": _another_class,
    "dtype": lambda m: m.double(),
}  # fmt: skip


@pytest.mark.parametrize("what", LATER)
def test_a_registered_forward(what: str, scaled: tuple[Any, Any]) -> None:
    model, twin = scaled
    with torch.no_grad():
        for m in (model, twin):
            LATER[what](m[0])
        _compare(model, twin, 1)
        _compare(model, twin, 1)


def test_a_registered_forward_under_autocast_and_modes(
    scaled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = scaled
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                x = torch.randn(4, WIDTH)
                assert model(x).dtype == twin(x).dtype
        with Mode():
            _compare(model, twin, 1)
        monkeypatch.setattr(Scaled, "forward", _twice(Scaled.forward))
        _compare(model, twin, 1)
        monkeypatch.undo()

        def other(self: Any, x: Any) -> Any:
            return x * 3

        monkeypatch.setattr(Scaled.forward, "__code__", other.__code__)
        _compare(model, twin, 1)


def test_a_registered_forward_that_ignores_autocast() -> None:
    handle = hfpatch.register("^Scaled$", forward=_in_fp32, sample=_sample)
    try:
        model = nn.Sequential(Scaled()).eval()
        twin = copy.deepcopy(model)
        assert hfpatch.apply(model).swaps
        with torch.no_grad():
            _compare(model, twin, 1)
            x = torch.randn(3, WIDTH)
            for _ in range(3):
                assert model(x).dtype == torch.float32
                with torch.autocast("cpu", torch.bfloat16):
                    assert model(x).dtype == twin(x).dtype == torch.bfloat16
    finally:
        handle.remove()


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_setting_that_has_several_values_now(leaf: str, kind: Any) -> None:
    """It has no one answer to whether it is what it was."""
    model, twin, inputs = _pair(leaf)
    for m in (model, twin):
        for module in m.modules():
            for name in [k for k, v in vars(module).items() if type(v) is float]:
                setattr(module, name, kind([0.25] * WIDTH))
    _compare(model, twin, inputs)
