"""Which modules share a proof: those that compute the same, and no others."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import hfpatch
from hfpatch.proof import keys, probe, proofs
from hfpatch.reading import surroundings
from hfpatch.reading.surroundings import Unexplained

SIZE = 32
SCALE = 1.0


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about what they stand in for."""
    proofs.forget_proofs()


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Class names of the modules that were proven."""
    found: list[str] = []
    prove = probe.prove

    def spied(subject: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(subject.module).__name__)
        return prove(subject, *args, **kwargs)

    monkeypatch.setattr(probe, "prove", spied)
    return found


class RMSNorm(nn.Module):
    """Its forward multiplies by what `gain` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE), requires_grad=False)
        self.eps = 1e-6

    def gain(self) -> Any:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.gain() * self.weight * normed


class ConfigRMSNorm(RMSNorm):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def gain(self) -> Any:
        return self.config.gain


class ClassRMSNorm(RMSNorm):
    scale = 1.0

    def gain(self) -> Any:
        return self.scale


class GlobalRMSNorm(RMSNorm):
    def gain(self) -> Any:
        return SCALE


def _scale() -> float:
    return SCALE


class CallingRMSNorm(RMSNorm):
    def gain(self) -> Any:
        return _scale()


class DefaultRMSNorm(RMSNorm):
    def gain(self, scale: float = 1.0) -> Any:
        return scale


class PropertyRMSNorm(RMSNorm):
    @property
    def scale(self) -> float:
        return 1.0

    def gain(self) -> Any:
        return self.scale


class BufferRMSNorm(RMSNorm):
    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def gain(self) -> Any:
        return self.scale


class TensorRMSNorm(RMSNorm):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = torch.tensor(scale)

    def gain(self) -> Any:
        return self.scale


def _times(scale: float, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        return scale * original(self, x)

    return forward


class WrappedRMSNorm(RMSNorm):
    forward = _times(1.0, RMSNorm.forward)


class Opaque:
    """Equal to every other one, and its hash is too."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def _set_global(module: nn.Module) -> None:
    globals()["SCALE"] = 3.0


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "class attribute": (ClassRMSNorm, lambda m: setattr(ClassRMSNorm, "scale", 3.0)),
    "global": (GlobalRMSNorm, _set_global),
    "global of a function": (CallingRMSNorm, _set_global),
    "default": (
        DefaultRMSNorm,
        lambda m: setattr(DefaultRMSNorm.gain, "__defaults__", (3.0,)),
    ),
    "property": (
        PropertyRMSNorm,
        lambda m: setattr(PropertyRMSNorm, "scale", property(lambda self: 3.0)),
    ),
    "closure": (
        WrappedRMSNorm,
        lambda m: setattr(WrappedRMSNorm, "forward", _times(3.0, RMSNorm.forward)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_between_two_applies(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, alter = CHANGES[change]
    module = make()
    monkeypatch.setitem(globals(), "SCALE", SCALE)  # put back, as the classes are
    for name in ("scale", "forward"):
        if name in vars(type(module)):
            monkeypatch.setattr(type(module), name, vars(type(module))[name])
    monkeypatch.setattr(DefaultRMSNorm.gain, "__defaults__", (1.0,))
    assert len(hfpatch.apply(module).swaps) == 1
    hfpatch.restore(module)
    alter(module)
    x = torch.randn(3, SIZE)
    expected = module(x)
    assert not hfpatch.apply(module).swaps  # no formula has a gain
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BufferRMSNorm(1),
        lambda: TensorRMSNorm(1),
        lambda: ConfigRMSNorm(SimpleNamespace(gain=1.0)),
        lambda: ConfigRMSNorm(Opaque()),
    ],
    ids=["buffer", "tensor", "config", "object that equals others"],
)
def test_what_others_may_write_to_is_not_read(make: Callable[[], nn.Module]) -> None:
    """No call could notice that a buffer or an object of the module's has other values."""
    (skip,) = hfpatch.apply(make()).skips
    assert skip.kind == "unexplained" and "which may change" in skip.reason


def test_models_with_equal_configs_share_their_proofs(proven: list[str]) -> None:
    for _ in range(2):
        hfpatch.apply(zoo.ENTRIES["llama"].build())  # its MLPs hold its config
    assert sorted(proven) == ["LlamaMLP", "LlamaRMSNorm"]


@pytest.mark.parametrize("name", ["llama", "t5-v1.1", "ltx"])
def test_a_second_apply_proves_nothing_and_keeps_nothing(name: str, proven: list[str]) -> None:
    hfpatch.apply(zoo.ENTRIES[name].build())
    proven.clear()
    model = zoo.ENTRIES[name].build()
    for exclude in (None, None, "*.0.*", None):
        hfpatch.apply(model, exclude=exclude)
    assert not proven
    parameters = {path: weakref.ref(p) for path, p in model.named_parameters()}
    modules = {path: weakref.ref(m) for path, m in model.named_modules()}
    hfpatch.restore(model)
    del model
    gc.collect()
    assert not [path for path, ref in (parameters | modules).items() if ref() is not None]


class OwnMethodRMSNorm(RMSNorm):
    """Holds a method of its own, as transformers' activations do."""

    def __init__(self) -> None:
        super().__init__()
        self.how = self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how() * super().forward(x)


def test_a_module_that_holds_its_own_method_is_not_kept() -> None:
    module = OwnMethodRMSNorm()
    assert len(hfpatch.apply(module).swaps) == 1
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_an_activation_that_was_patched_alone_is_probed_as_it_was(proven: list[str]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    def build() -> nn.Module:
        return LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=40)).requires_grad_(False)

    model = build()
    hfpatch.apply(model, include="SiLU*", kernels="local")
    hfpatch.apply(model, kernels="local")
    assert [s.op for s in hfpatch.status(model).swaps] == ["gated"]
    act = weakref.ref(model.act_fn)
    del model
    gc.collect()
    assert act() is None
    proven.clear()
    hfpatch.apply(build(), kernels="local")
    assert not proven


def test_what_was_changed_before_a_late_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype or device is proven at its first call on a stand-in, whose code is the same."""
    module = GlobalRMSNorm()
    hfpatch.apply(module)
    (contract, known), *rest = proofs._contracts.values()
    assert not rest
    x = torch.randn(3, SIZE)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    known.clear()  # as if it had been proven on another device alone
    contract.cpu.clear()
    contract._proven.clear()
    with pytest.warns(RuntimeWarning, match=r"changed since; call `hfpatch\.apply` again"):
        got = module(x)
    assert torch.equal(got, GlobalRMSNorm.forward(module, x))
    assert not hfpatch.apply(module).swaps


def test_the_cache_of_proofs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs._Recent, "MOST", 2)
    modules = [RMSNorm() for _ in range(5)]
    for i, module in enumerate(modules):
        module.eps = 10.0 ** -(i + 4)
    model = nn.Sequential(*modules)
    assert len(hfpatch.apply(model).swaps) == 5
    assert len(proofs._contracts) == 2
    x = torch.randn(3, SIZE)
    for module in modules:
        torch.testing.assert_close(module(x), RMSNorm.forward(module, x))


def test_equal_small_tensors_share_a_key() -> None:
    """So that a proof serves every module whose buffers have the same values."""

    def key(*values: float, kind: type = torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        return keys.value_key(torch.tensor(values, dtype=dtype).as_subclass(kind))

    class Own(torch.Tensor):
        pass

    assert key(1.0, 2.0) == key(1.0, 2.0)
    assert key(float("nan")) == key(float("nan"))
    others = (key(1.0, 3.0), key(1.0), key(1.0, 2.0, dtype=torch.float64), key(1.0, 2.0, kind=Own))
    assert all(other != key(1.0, 2.0) for other in others)
    assert key(1.0, kind=Own) != key(1.0, kind=Own)  # its values may be what it likes
    whole = [torch.zeros(1 << 16) for _ in range(2)]
    assert keys.value_key(whole[0]) != keys.value_key(whole[1])  # too large to be read


def test_a_large_inference_tensor_is_a_key_by_identity() -> None:
    """It counts no writes."""
    with torch.inference_mode():
        one, other = torch.zeros(1 << 16), torch.zeros(1 << 16)
    assert keys.value_key(one) == keys.value_key(one) != keys.value_key(other)


def test_what_an_instance_holds_is_in_its_key() -> None:
    def made(**attributes: object) -> nn.Module:
        module = nn.SiLU()
        module.__dict__.update(attributes)
        return module

    key = keys.attributes_of
    assert key(made(beta=1.0)) == key(made(beta=1.0)) != key(made(beta=2.0))
    assert key(made(beta=1.0), {"beta"}) == key(made(beta=2.0), {"beta"}) == key(made())
    assert key(made(beta=1.0), {"alpha"}) != key(made(beta=2.0), {"alpha"})
    assert key(made().eval()) == key(made().train()) == key(made(_hf_hook=object()))


def test_a_module_object_may_answer_for_other_names() -> None:
    class Answers(ModuleType):
        @property
        def answered(self) -> float:
            return 1.0

    class AnswersAll(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    surroundings.check_library(ModuleType("plain"), "eps")
    surroundings.check_library(Answers("some"), "eps")
    for library, name in ((Answers("some"), "answered"), (AnswersAll("all"), "eps")):
        with pytest.raises(Unexplained, match="which may change"):
            surroundings.check_library(library, name)


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As people write it, without `functools.wraps`."""
    return lambda self, x: function(self, x)


class _Scaled(nn.Module):
    config: Any

    @_decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.hidden_scale


def test_the_names_behind_a_decorator_are_read() -> None:
    assert {"config", "hidden_scale"} <= keys.names_read(_Scaled())


def test_of_a_configuration_what_the_code_names_counts() -> None:
    from transformers import LlamaConfig

    module = _Scaled()
    module.config = LlamaConfig(hidden_scale=2.0)
    held, everything = keys.held_by([module]), keys.contents_of([module.config])
    was, all_was = held(), everything()
    module.config.use_cache = False
    assert held() == was and everything() != all_was
    module.config.hidden_scale = 3.0
    assert held() != was


class NumberedRMSNorm(nn.Module):
    """Has its layer's number and name, as every layer of a model may have its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(SIZE)), 1e-6
        self.layer_idx, self.path, self.first = number, f"layers.{number}", number == 0

    def scale(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y * self.scale()


class ReadRMSNorm(NumberedRMSNorm):
    def scale(self) -> float:
        return 1.0 + self.layer_idx


class GetattrRMSNorm(NumberedRMSNorm):
    @property
    def factor(self) -> float:
        return 1.0 + getattr(self, "layer_idx", 0)

    def scale(self) -> float:
        return self.factor


class HeldRMSNorm(NumberedRMSNorm):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.held = lambda x: x * (1.0 + self.layer_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held(super().forward(x))


class NumberedMLP(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.layer_id = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore


class NumberedSwish(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_id = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.parametrize("cls", [NumberedRMSNorm, NumberedMLP, NumberedSwish])
def test_numbers_that_no_forward_reads(proven: list[str], cls: Any) -> None:
    """A model of eighty layers is not proven eighty times."""
    report = hfpatch.apply(nn.Sequential(*(cls(i) for i in range(6))))
    assert len(report.swaps) == 6
    assert proven == [cls.__name__]


@pytest.mark.parametrize("cls", [ReadRMSNorm, GetattrRMSNorm, HeldRMSNorm])
def test_numbers_that_a_forward_reads(cls: Any) -> None:
    model = nn.ModuleList(cls(i) for i in range(3)).requires_grad_(False)
    x = torch.randn(3, SIZE)
    expected = [m(x) for m in model]
    hfpatch.apply(model)
    for m, y in zip(model, expected, strict=True):
        torch.testing.assert_close(m(x), y)
    hfpatch.restore(model)
